"""
LoRA on a bitsandbytes-quantised GPT-NeoX-ish decoder, layers swapped by hand.

python n06_qlora_byhand.py --bits 4 --optim paged_adamw8bit
"""
import argparse

import bitsandbytes as bnb
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config


def replace_linear(module, bits, skip=("lm_head",)):
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) and name not in skip:
            if bits == 4:
                new = bnb.nn.Linear4bit(
                    child.in_features, child.out_features, bias=child.bias is not None,
                    compute_dtype=torch.bfloat16, compress_statistics=True, quant_type="nf4")
                new.weight = bnb.nn.Params4bit(
                    child.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True)
            else:
                new = bnb.nn.Linear8bitLt(
                    child.in_features, child.out_features, bias=child.bias is not None,
                    has_fp16_weights=False, threshold=6.0)
                new.weight = bnb.nn.Int8Params(
                    child.weight.data, requires_grad=False, has_fp16_weights=False)
            if child.bias is not None:
                new.bias = nn.Parameter(child.bias.data, requires_grad=False)
            setattr(module, name, new)
        else:
            replace_linear(child, bits, skip)
    return module


ap = argparse.ArgumentParser()
ap.add_argument("--bits", type=int, choices=[4, 8], default=4)
ap.add_argument("--optim", default="paged_adamw8bit", choices=["paged_adamw8bit", "adamw8bit", "adamw"])
ap.add_argument("--r", type=int, default=32)
args = ap.parse_args()

torch.manual_seed(42)
cfg = Qwen2Config(
    vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12,
    num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=2048, use_cache=False)
dtype = torch.bfloat16 if args.bits == 4 else torch.float16
release = tuple(map(int, transformers.__version__.split(".")[:2]))
base = AutoModelForCausalLM.from_config(cfg, **{"dtype" if release >= (4, 56) else "torch_dtype": dtype})
for p in base.parameters():
    p.requires_grad_(False)
replace_linear(base, args.bits)
base = base.to("cuda")
print("base on gpu: %.1f MiB" % (torch.cuda.memory_allocated() / 2**20))

# what prepare_model_for_kbit_training does, more or less
for n, p in base.named_parameters():
    if "norm" in n:
        p.data = p.data.to(torch.float32)
base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
base.enable_input_require_grads()

lora = LoraConfig(r=args.r, lora_alpha=2 * args.r, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM",
                  target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
model = get_peft_model(base, lora)
model.print_trainable_parameters()

trainable = [p for p in model.parameters() if p.requires_grad]
if args.optim == "paged_adamw8bit":
    opt = bnb.optim.PagedAdamW8bit(trainable, lr=2e-4)
elif args.optim == "adamw8bit":
    opt = bnb.optim.AdamW8bit(trainable, lr=2e-4)
else:
    opt = torch.optim.AdamW(trainable, lr=2e-4)

model.train()
adt = torch.bfloat16 if args.bits == 4 else torch.float16
for step in range(6):
    total = 0.0
    for micro in range(2):
        ids = torch.randint(3, cfg.vocab_size, (4, 512)).to("cuda")
        mask = torch.ones_like(ids)
        mask[0, 400:] = 0
        with torch.autocast("cuda", dtype=adt):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(trainable, 0.3)
    opt.step()
    opt.zero_grad()
    print(f"step {step}: {total:.4f}")
