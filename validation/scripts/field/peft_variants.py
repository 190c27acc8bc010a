import sys

import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, PrefixTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, ResNetConfig, ResNetForImageClassification

kind = sys.argv[1]
torch.manual_seed(42)
llama = LlamaConfig(hidden_size=1536, intermediate_size=4096, num_hidden_layers=10, num_attention_heads=12,
                    num_key_value_heads=4, vocab_size=32000, max_position_embeddings=2048)
if kind == "conv":
    base = ResNetForImageClassification(ResNetConfig(num_labels=10))
    config = LoraConfig(r=8, target_modules=r".*\.convolution", modules_to_save=["classifier"])
else:
    base = LlamaForCausalLM(llama).to(torch.bfloat16)
    config = {
        "dora": LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, use_dora=True, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"),
        "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
        "prompt": PromptTuningConfig(num_virtual_tokens=32, task_type="CAUSAL_LM"),
        "prefix": PrefixTuningConfig(num_virtual_tokens=20, task_type="CAUSAL_LM"),
    }[kind]
model = get_peft_model(base, config)
model.print_trainable_parameters()
model = model.to("cuda")
optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3)

model.train()
for step in range(5):
    if kind == "conv":
        batch = dict(pixel_values=torch.randn(32, 3, 224, 224), labels=torch.randint(0, 10, (32,)))
    else:
        ids = torch.randint(0, 32000, (6, 600))
        batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    batch = {k: v.to("cuda") for k, v in batch.items()}
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{step}: {loss.detach().float().item():.4f}  {torch.cuda.memory_allocated() / 2**20:.0f} MiB")
