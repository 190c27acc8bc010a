# Large-vocabulary LM: AWD-LSTM style (weight drop, truncated BPTT, ASGD) with adaptive softmax.
import math
import warnings
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1111)
device = torch.device("cuda")

VOCAB = 267735          # wikitext-103
EMB = 400
NHID = 1150
NLAYERS = 3
BPTT = 140
BATCH = 60
STEPS = 6


class WeightDropLSTM(nn.Module):
    """Single layer LSTM with DropConnect on the hidden-to-hidden matrix."""

    def __init__(self, ninp, nhid, wdrop=0.5):
        super().__init__()
        self.rnn = nn.LSTM(ninp, nhid, 1)
        self.wdrop = wdrop
        w = self.rnn.weight_hh_l0
        del self.rnn._parameters["weight_hh_l0"]
        self.weight_hh_l0_raw = nn.Parameter(w.data)
        setattr(self.rnn, "weight_hh_l0", w.data.clone())
        # the dropped weight is a fresh tensor every step, so flattening makes no sense
        self.rnn.flatten_parameters = lambda *args, **kwargs: None

    def forward(self, x, hidden):
        w = F.dropout(self.weight_hh_l0_raw, p=self.wdrop, training=self.training)
        if not self.training:
            w = w.clone()
        setattr(self.rnn, "weight_hh_l0", w)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=UserWarning)
            return self.rnn(x, hidden)


class LockedDropout(nn.Module):
    def forward(self, x, p):
        if not self.training or p == 0:
            return x
        mask = x.new_empty(1, x.size(1), x.size(2)).bernoulli_(1 - p) / (1 - p)
        return x * mask


class AWDModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(VOCAB, EMB)
        sizes = [EMB] + [NHID] * (NLAYERS - 1) + [EMB]
        self.rnns = nn.ModuleList(WeightDropLSTM(sizes[i], sizes[i + 1]) for i in range(NLAYERS))
        self.lockdrop = LockedDropout()
        self.decoder = nn.AdaptiveLogSoftmaxWithLoss(EMB, VOCAB, cutoffs=[20000, 60000, 200000], div_value=4.0)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        self.sizes = sizes

    def init_hidden(self, bsz):
        p = next(self.parameters())
        return [(p.new_zeros(1, bsz, s), p.new_zeros(1, bsz, s)) for s in self.sizes[1:]]

    def forward(self, tokens, hidden):
        x = self.lockdrop(self.encoder(tokens), 0.65 if self.training else 0.0)
        new_hidden = []
        raw = None
        for i, rnn in enumerate(self.rnns):
            raw, h = rnn(x, hidden[i])
            new_hidden.append(h)
            x = self.lockdrop(raw, 0.25 if i < NLAYERS - 1 else 0.4)
        return x, raw, new_hidden


def repackage(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return type(h)(repackage(v) for v in h)


# zipf-like synthetic corpus, batchified on the GPU
n_tokens = BATCH * (BPTT * (STEPS + 2) + 1)
u = torch.rand(n_tokens)
corpus = (torch.exp(u * math.log(VOCAB)) - 1).long().clamp_(0, VOCAB - 1)
data = corpus.view(BATCH, -1).t().contiguous().to(device)

model = AWDModel().to(device)
params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.ASGD(params, lr=30, t0=0, lambd=0.0, weight_decay=1.2e-6)
print("trainable params: %.1fM" % (sum(p.numel() for p in params) / 1e6))

hidden = model.init_hidden(BATCH)
i = 0
for step in range(STEPS):
    # jitter the sequence length as in the paper, with a fixed pattern
    seq_len = [140, 133, 140, 70, 140, 138][step % 6]
    x = data[i:i + seq_len]
    y = data[i + 1:i + 1 + seq_len].reshape(-1)
    i += seq_len

    model.train()
    hidden = repackage(hidden)
    optimizer.zero_grad()
    out, raw, hidden = model(x, hidden)
    nll = model.decoder(out.reshape(-1, EMB), y).loss
    loss = nll + 2.0 * out.pow(2).mean() + 1.0 * (raw[1:] - raw[:-1]).pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(params, 0.25)
    optimizer.step()
    print(f"step {step} len {seq_len} nll {nll.item():.3f} "
          f"alloc {torch.cuda.max_memory_allocated()} reserved {torch.cuda.max_memory_reserved()}")

# evaluation with the averaged weights
backup = {p: p.data.clone() for p in params}
for p in params:
    if "ax" in optimizer.state[p]:
        p.data = optimizer.state[p]["ax"].clone()
model.eval()
with torch.no_grad():
    hid = model.init_hidden(BATCH)
    out, _, _ = model(data[:BPTT], hid)
    val = model.decoder(out.reshape(-1, EMB), data[1:BPTT + 1].reshape(-1)).loss
for p in params:
    p.data = backup[p]
print("val nll %.3f" % val.item())
print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
