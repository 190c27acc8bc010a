"""Translation with nn.Transformer (tutorial style) and beam search decoding at the end."""
import math
import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(0)
random.seed(0)
DEVICE = torch.device("cuda")

UNK_IDX, PAD_IDX, BOS_IDX, EOS_IDX = 0, 1, 2, 3
SRC_VOCAB_SIZE = 32000
TGT_VOCAB_SIZE = 32000
EMB_SIZE = 1024
NHEAD = 16
FFN_HID_DIM = 4096
BATCH_SIZE = 96
NUM_ENCODER_LAYERS = 6
NUM_DECODER_LAYERS = 6
NUM_STEPS = 6


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size, dropout, maxlen=5000):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pos_embedding = torch.zeros((maxlen, emb_size))
        pos_embedding[:, 0::2] = torch.sin(pos * den)
        pos_embedding[:, 1::2] = torch.cos(pos * den)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", pos_embedding.unsqueeze(-2))

    def forward(self, token_embedding):
        return self.dropout(token_embedding + self.pos_embedding[:token_embedding.size(0), :])


class TokenEmbedding(nn.Module):
    def __init__(self, vocab_size, emb_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, emb_size)
        self.emb_size = emb_size

    def forward(self, tokens):
        return self.embedding(tokens.long()) * math.sqrt(self.emb_size)


class Seq2SeqTransformer(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.transformer = nn.Transformer(d_model=EMB_SIZE, nhead=NHEAD, num_encoder_layers=NUM_ENCODER_LAYERS,
                                          num_decoder_layers=NUM_DECODER_LAYERS, dim_feedforward=FFN_HID_DIM,
                                          dropout=dropout)
        self.generator = nn.Linear(EMB_SIZE, TGT_VOCAB_SIZE)
        self.src_tok_emb = TokenEmbedding(SRC_VOCAB_SIZE, EMB_SIZE)
        self.tgt_tok_emb = TokenEmbedding(TGT_VOCAB_SIZE, EMB_SIZE)
        self.positional_encoding = PositionalEncoding(EMB_SIZE, dropout=dropout)

    def forward(self, src, trg, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask, memory_key_padding_mask):
        src_emb = self.positional_encoding(self.src_tok_emb(src))
        tgt_emb = self.positional_encoding(self.tgt_tok_emb(trg))
        outs = self.transformer(src_emb, tgt_emb, src_mask, tgt_mask, None,
                                src_padding_mask, tgt_padding_mask, memory_key_padding_mask)
        return self.generator(outs)

    def encode(self, src, src_mask):
        return self.transformer.encoder(self.positional_encoding(self.src_tok_emb(src)), src_mask)

    def decode(self, tgt, memory, tgt_mask):
        return self.transformer.decoder(self.positional_encoding(self.tgt_tok_emb(tgt)), memory, tgt_mask)


def generate_square_subsequent_mask(sz):
    return torch.triu(torch.ones((sz, sz), device=DEVICE), diagonal=1).bool()


def create_mask(src, tgt):
    tgt_mask = generate_square_subsequent_mask(tgt.shape[0])
    src_mask = torch.zeros((src.shape[0], src.shape[0]), device=DEVICE).type(torch.bool)
    return src_mask, tgt_mask, (src == PAD_IDX).transpose(0, 1), (tgt == PAD_IDX).transpose(0, 1)


def make_batch():
    src_batch, tgt_batch = [], []
    for _ in range(BATCH_SIZE):
        n = random.randint(20, 90)
        m = max(5, min(96, n + random.randint(-8, 8)))
        src_batch.append(torch.tensor([BOS_IDX] + [random.randint(4, SRC_VOCAB_SIZE - 1) for _ in range(n)] + [EOS_IDX]))
        tgt_batch.append(torch.tensor([BOS_IDX] + [random.randint(4, TGT_VOCAB_SIZE - 1) for _ in range(m)] + [EOS_IDX]))
    return pad_sequence(src_batch, padding_value=PAD_IDX), pad_sequence(tgt_batch, padding_value=PAD_IDX)


model = Seq2SeqTransformer()
for p in model.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
model = model.to(DEVICE)

loss_fn = nn.CrossEntropyLoss(ignore_index=PAD_IDX, label_smoothing=0.1)
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
noam = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda s: EMB_SIZE ** -0.5 * min((s + 1) ** -0.5, (s + 1) * 4000 ** -1.5))

model.train()
for step in range(NUM_STEPS):
    src, tgt = make_batch()
    src, tgt = src.to(DEVICE), tgt.to(DEVICE)
    tgt_input = tgt[:-1, :]
    src_mask, tgt_mask, src_padding_mask, tgt_padding_mask = create_mask(src, tgt_input)
    logits = model(src, tgt_input, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask, src_padding_mask)
    optimizer.zero_grad()
    tgt_out = tgt[1:, :]
    loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
    loss.backward()
    optimizer.step()
    noam.step()
    print(f"step {step} src {tuple(src.shape)} tgt {tuple(tgt.shape)} loss {loss.item():.3f} "
          f"max_alloc {torch.cuda.max_memory_allocated()} max_reserved {torch.cuda.max_memory_reserved()}")


@torch.no_grad()
def beam_search(model, src, beam=5, max_len=40, alpha=0.6):
    model.eval()
    src = src.to(DEVICE).view(-1, 1)
    src_mask = torch.zeros((src.size(0), src.size(0)), device=DEVICE).bool()
    memory = model.encode(src, src_mask).expand(-1, beam, -1).contiguous()
    ys = torch.full((1, beam), BOS_IDX, dtype=torch.long, device=DEVICE)
    scores = torch.full((beam,), float("-inf"), device=DEVICE)
    scores[0] = 0.0
    finished = []
    for i in range(max_len):
        out = model.decode(ys, memory, generate_square_subsequent_mask(ys.size(0)))
        logp = torch.log_softmax(model.generator(out[-1]), dim=-1)
        total = (scores[:, None] + logp).view(-1)
        top, idx = total.topk(beam)
        parent, token = idx // TGT_VOCAB_SIZE, idx % TGT_VOCAB_SIZE
        ys = torch.cat([ys[:, parent], token[None]], 0)
        scores = top.clone()
        for b in (token == EOS_IDX).nonzero().flatten().tolist():
            finished.append((scores[b].item() / (i + 2) ** alpha, ys[:, b].tolist()))
            scores[b] = float("-inf")
        if len(finished) >= beam:
            break
    finished += [(s / ys.size(0) ** alpha, y) for s, y in zip(scores.tolist(), ys.t().tolist())]
    return max(finished, key=lambda f: f[0])


for k in range(2):
    s, hyp = beam_search(model, src[:, k][src[:, k] != PAD_IDX])
    print("hyp", k, round(s, 3), hyp[:10], "...")
print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
