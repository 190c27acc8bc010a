"""
Sentence embeddings: RoBERTa-large-ish encoder, mean pooling, in-batch negatives plus one hard negative,
momentum (EMA) teacher providing extra targets, layer-wise lr decay.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import RobertaConfig, RobertaModel

torch.manual_seed(11)
torch.backends.cuda.matmul.allow_tf32 = True
dev = torch.device("cuda:0")


class Encoder(nn.Module):
    def __init__(self, cfg, dim=512):
        super().__init__()
        self.bert = RobertaModel(cfg, add_pooling_layer=False)
        self.proj = nn.Sequential(nn.Linear(cfg.hidden_size, cfg.hidden_size), nn.Tanh(), nn.Linear(cfg.hidden_size, dim))

    def forward(self, ids, mask):
        h = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        m = mask.unsqueeze(-1).to(h.dtype)
        pooled = (h * m).sum(1) / m.sum(1).clamp(min=1e-6)
        return F.normalize(self.proj(pooled).float(), dim=-1)


class EMA:
    def __init__(self, model, make, decay=0.995):
        self.decay = decay
        with dev:
            self.model = make().eval()
        self.model.load_state_dict(model.state_dict())
        self.model.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)


cfg = RobertaConfig(
    vocab_size=50265, hidden_size=1024, num_hidden_layers=16, num_attention_heads=16, intermediate_size=4096,
    max_position_embeddings=258, type_vocab_size=1, pad_token_id=1,
)
with dev:
    model = Encoder(cfg)
ema = EMA(model, lambda: Encoder(cfg))
model.train()

groups = []
n = cfg.num_hidden_layers
for i, layer in enumerate(model.bert.encoder.layer):
    groups.append({"params": list(layer.parameters()), "lr": 2e-5 * 0.9 ** (n - 1 - i)})
groups.append({"params": list(model.bert.embeddings.parameters()), "lr": 2e-5 * 0.9 ** n})
groups.append({"params": list(model.proj.parameters()), "lr": 1e-4})
opt = torch.optim.AdamW(groups, weight_decay=0.01)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[g["lr"] for g in groups], total_steps=20)
logit_scale = 20.0


def text(bs, lo, hi):
    lens = torch.randint(lo, hi + 1, (bs,))
    T = int(lens.max())
    mask = (torch.arange(T)[None] < lens[:, None]).long()
    ids = torch.randint(10, cfg.vocab_size, (bs, T)) * mask + (1 - mask) * cfg.pad_token_id
    return ids.to(dev, non_blocking=True), mask.to(dev, non_blocking=True)


def evaluate():
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        bank = torch.cat([model(*text(128, 20, 120)) for _ in range(3)])
        q = model(*text(128, 8, 24))
    hits = (q @ bank.T).topk(10, dim=-1).indices
    model.train()
    return hits.float().mean().item()


BS = 48
for step in range(6):
    q, p, neg = text(BS, 6, 32), text(BS, 64, 200), text(BS, 64, 200)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        eq = model(*q)
        ep = model(*p)
        en = model(*neg)
        with torch.no_grad():
            tq, tp = ema.model(*q), ema.model(*p)
    scores = logit_scale * eq @ torch.cat([ep, en]).T
    target = torch.arange(BS, device=dev)
    loss = F.cross_entropy(scores, target)
    soft = F.softmax(logit_scale * tq @ tp.T, dim=-1)
    loss = loss + 0.5 * F.cross_entropy(scores[:, :BS], soft)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    opt.zero_grad()
    ema.update(model)
    msg = f"step {step}: loss={loss.item():.4f}"
    if step == 3:
        msg += f" eval={evaluate():.2f}"
    print(msg, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
