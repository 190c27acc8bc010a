# # QLoRA by hand
# bitsandbytes NF4 + double quantisation substituted into a Llama, LoRA from peft, paged 8-bit AdamW

# In[1]:
import torch
import torch.nn as nn
import bitsandbytes as bnb
from transformers import LlamaConfig, LlamaForCausalLM
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
device = torch.device("cuda:0")

# In[2]:
cfg = LlamaConfig(
    vocab_size=32000,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=24,
    num_attention_heads=24,
    num_key_value_heads=8,
    max_position_embeddings=4096,
    attn_implementation="sdpa",
)
torch.set_default_dtype(torch.bfloat16)
with device:
    model = LlamaForCausalLM(cfg)
torch.set_default_dtype(torch.float32)
print("bf16 model", torch.cuda.memory_allocated() / 2**30, "GiB")


# In[3]:
def replace_with_4bit(module, skip=("lm_head",)):
    for name, child in list(module.named_children()):
        if name in skip:
            continue
        if isinstance(child, nn.Linear):
            q = bnb.nn.Linear4bit(
                child.in_features, child.out_features, bias=child.bias is not None,
                compute_dtype=torch.bfloat16, compress_statistics=True, quant_type="nf4",
                device="meta",
            )
            q.weight = bnb.nn.Params4bit(
                child.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4",
            ).to(device)
            if child.bias is not None:
                q.bias = nn.Parameter(child.bias.data, requires_grad=False)
            setattr(module, name, q)
            del child
        else:
            replace_with_4bit(child, skip)


replace_with_4bit(model)
model.is_loaded_in_4bit = True
torch.cuda.empty_cache()
print("4bit model", torch.cuda.memory_allocated() / 2**30, "GiB")

# In[4]:
model.config.use_cache = False
model = prepare_model_for_kbit_training(
    model, use_gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}
)
peft_config = LoraConfig(
    r=64, lora_alpha=16, lora_dropout=0.1, bias="none", task_type="CAUSAL_LM",
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)
model = get_peft_model(model, peft_config)
model.print_trainable_parameters()

# In[5]:
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = bnb.optim.PagedAdamW8bit(trainable, lr=2e-4, betas=(0.9, 0.999), weight_decay=0.0)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

# In[6]:
batch_size, seq_len, accum = 4, 1024, 2
model.train()
for step in range(5):
    running = 0.0
    for _ in range(accum):
        ids = torch.randint(0, cfg.vocab_size, (batch_size, seq_len), device=device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(input_ids=ids, labels=ids)
        (out.loss / accum).backward()
        running += out.loss.item() / accum
    torch.nn.utils.clip_grad_norm_(trainable, 0.3)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"step {step} loss {running:.4f} max_alloc {torch.cuda.max_memory_allocated()} "
          f"max_reserved {torch.cuda.max_memory_reserved()}")

# In[7]:
print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
