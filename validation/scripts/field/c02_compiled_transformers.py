"""Models of transformers, compiled."""
import sys
import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration, ViTConfig, ViTForImageClassification
kind, dtype, attn = sys.argv[1], sys.argv[2], (sys.argv[3] if len(sys.argv) > 3 else "sdpa")
torch.manual_seed(0)
if kind == "gpt2": model = GPT2LMHeadModel(GPT2Config(n_layer=6, attn_implementation=attn)); ids = torch.randint(50257, (8, 512), device="cuda"); batch = dict(input_ids=ids, labels=ids)
if kind == "llama": model = LlamaForCausalLM(LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8, attn_implementation=attn)); ids = torch.randint(32000, (4, 1024), device="cuda"); batch = dict(input_ids=ids, labels=ids)
if kind == "bert": model = BertForSequenceClassification(BertConfig(num_hidden_layers=6, attn_implementation=attn)); ids = torch.randint(30000, (16, 256), device="cuda"); batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.randint(2, (16,), device="cuda"))
if kind == "vit": model = ViTForImageClassification(ViTConfig(num_hidden_layers=6, num_labels=10, attn_implementation=attn)); batch = dict(pixel_values=torch.randn(32, 3, 224, 224, device="cuda"), labels=torch.randint(10, (32,), device="cuda"))
if kind == "t5": model = T5ForConditionalGeneration(T5Config(d_model=512, num_layers=4, decoder_start_token_id=0)); ids = torch.randint(32000, (8, 256), device="cuda"); batch = dict(input_ids=ids, labels=ids)
model = model.cuda()
if dtype == "bf16true": model = model.bfloat16()
if "pixel_values" in batch and dtype == "bf16true": batch["pixel_values"] = batch["pixel_values"].bfloat16()
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
model = torch.compile(model)
for step in range(4):
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype == "amp"):
        loss = model(**batch).loss
    loss.backward()
    opt.step(); opt.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated() >> 20)
