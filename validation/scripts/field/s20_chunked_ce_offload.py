"""Gemma-like model with a large vocabulary: chunked cross entropy, optimiser state offloaded between steps."""
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GemmaConfig, GemmaModel

torch.manual_seed(0)
dev = torch.device("cuda")
VOCAB, CHUNK, ACC = 160000, 512, 2
cfg = GemmaConfig(
    vocab_size=VOCAB, hidden_size=768, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=6,
    num_key_value_heads=1, head_dim=128, use_cache=False, pad_token_id=0,
)
body = GemmaModel(cfg).to(dev).to(torch.bfloat16)
head = body.embed_tokens.weight  # tied


def chunk_loss(h, w, y):
    logits = (h @ w.t()).float()
    logits = 30.0 * torch.tanh(logits / 30.0)
    return F.cross_entropy(logits, y, reduction="sum")


def chunked_ce(h, w, y):
    h, y = h.flatten(0, 1), y.flatten()
    total = h.new_zeros((), dtype=torch.float32)
    for hc, yc in zip(h.split(CHUNK), y.split(CHUNK)):
        total = total + checkpoint(chunk_loss, hc, w, yc, use_reentrant=False)
    return total / y.numel()


def move_state(opt, where):
    for state in opt.state.values():
        for k, v in state.items():
            if torch.is_tensor(v) and v.dim() > 0:
                state[k] = v.to(where)


opt = torch.optim.AdamW(body.parameters(), lr=1e-4)
opt.zero_grad(set_to_none=False)
for step in range(5):
    torch.cuda.reset_peak_memory_stats()
    for micro in range(ACC):
        ids = torch.randint(1, VOCAB, (4, 769), device=dev)
        h = body(input_ids=ids[:, :-1]).last_hidden_state
        loss = chunked_ce(h, head, ids[:, 1:]) / ACC
        loss.backward()
        del h
    fb = torch.cuda.max_memory_allocated()
    move_state(opt, dev)
    opt.step()
    opt.zero_grad(set_to_none=False)
    move_state(opt, "cpu")
    print(f"step {step} loss {loss.item() * ACC:.3f} fwd/bwd peak {fb} step peak {torch.cuda.max_memory_allocated()} "
          f"left {torch.cuda.memory_allocated()}")

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
