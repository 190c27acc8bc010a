import math
import torch, torch.nn as nn
import torch.nn.utils.parametrize as parametrize
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM


class LoRAParam(nn.Module):
    """weight -> weight + B A"""
    def __init__(self, out_f, in_f, r=16, alpha=32, dtype=torch.bfloat16):
        super().__init__()
        self.A = nn.Parameter(torch.empty(r, in_f, dtype=dtype))
        self.B = nn.Parameter(torch.zeros(out_f, r, dtype=dtype))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.s = alpha / r

    def forward(self, W):
        return W + self.s * (self.B @ self.A)


cfg = GPTNeoXConfig(hidden_size=2048, num_hidden_layers=12, num_attention_heads=16, intermediate_size=8192, vocab_size=50304,
                    max_position_embeddings=1024, dtype="bfloat16")
model = GPTNeoXForCausalLM(cfg).to(torch.bfloat16)
model.requires_grad_(False)
for name, mod in model.named_modules():
    if isinstance(mod, nn.Linear) and name.split(".")[-1] in ("query_key_value", "dense"):
        parametrize.register_parametrization(mod, "weight", LoRAParam(mod.out_features, mod.in_features))
model.cuda()
trainable = [p for p in model.parameters() if p.requires_grad]
print("trainable", sum(p.numel() for p in trainable))
opt = torch.optim.AdamW(trainable, lr=2e-4)
model.train()
micro, accum = 4, 2
for step in range(4):
    for _ in range(accum):
        ids = torch.randint(0, 50304, (micro, 512), device=model.device)
        with parametrize.cached():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / accum
            loss.backward()
    torch.nn.utils.clip_grad_norm_(trainable, 0.3)
    opt.step()
    opt.zero_grad()
    print("step", step, loss.item() * accum)
# merge and sample
for mod in model.modules():
    if parametrize.is_parametrized(mod):
        parametrize.remove_parametrizations(mod, "weight", leave_parametrized=True)
model.eval()
out = model.generate(torch.randint(0, 50304, (4, 16), device="cuda"), max_new_tokens=12, do_sample=False, pad_token_id=0)
print(out.shape, torch.cuda.max_memory_allocated() / 1e9)
