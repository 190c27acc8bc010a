import argparse, contextlib
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--pin", action="store_true")
parser.add_argument("--opt", default="adafactor")
args = parser.parse_args()

config = Qwen2Config(vocab_size=32768, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12,
                     num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=True)
model = Qwen2ForCausalLM(config).to("cuda")
if args.opt == "adafactor":
    optim = torch.optim.Adafactor(model.parameters(), lr=1e-3)
else:
    optim = torch.optim.Adamax(model.parameters(), lr=1e-3)

for i in range(4):
    ids = torch.randint(config.vocab_size, (4, 768), device="cuda")
    optim.zero_grad()
    with torch.autograd.graph.save_on_cpu(pin_memory=args.pin):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optim.step()
    free, total = torch.cuda.mem_get_info()
    print(i, loss.item(), f"free {free / 2**30:.1f} of {total / 2**30:.1f} GiB")
