"""Train a GPT-2, sampling from it with a KV cache every few steps."""
import argparse
import torch
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=9)
parser.add_argument("--gen-every", type=int, default=3)
parser.add_argument("--new-tokens", type=int, default=96)
parser.add_argument("--gen-batch", type=int, default=16)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda"

config = GPT2Config(
    vocab_size=50257, n_positions=1024, n_embd=768, n_layer=10, n_head=12,
    bos_token_id=0, eos_token_id=None, pad_token_id=0,
)
model = GPT2LMHeadModel(config).to(device)
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0
opt = torch.optim.AdamW(model.parameters(), lr=3e-4)

g = torch.Generator().manual_seed(1)
data = torch.randint(1, 50257, (args.steps * 8, 512), generator=g)


@torch.no_grad()
def sample():
    model.eval()
    prompt = data[: args.gen_batch, :64].to(device)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=args.new_tokens,
        do_sample=False,
        use_cache=True,
    )
    model.train()
    return out


def mem(tag):
    print(f"{tag}: allocated {torch.cuda.memory_allocated()} peak {torch.cuda.max_memory_allocated()} "
          f"reserved {torch.cuda.max_memory_reserved()}")


model.train()
for step in range(args.steps):
    x = data[step * 8:(step + 1) * 8].to(device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=x, labels=x).loss
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.3f}")
    if (step + 1) % args.gen_every == 0:
        mem("train")
        torch.cuda.reset_peak_memory_stats()
        tokens = sample()
        print("generated", tuple(tokens.shape), tokens[0, -5:].tolist())
        mem("generate")
        torch.cuda.reset_peak_memory_stats()

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
