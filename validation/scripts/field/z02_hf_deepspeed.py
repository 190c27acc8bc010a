"""The Trainer of transformers with a DeepSpeed config, as its documentation has it: z02_hf_deepspeed.py STAGE [--offload]"""
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

stage, offload = int(sys.argv[1]), "--offload" in sys.argv
zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
if stage == 3:
    zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "sub_group_size": 1e9}
if offload:
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
config = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": zero,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = torch.randint(0, 16000, (512,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


args = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=3, bf16=True,
    learning_rate=1e-4, warmup_steps=2, deepspeed=config, report_to=[], save_strategy="no", logging_steps=1, gradient_checkpointing=stage == 3,
)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=16000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=10, num_attention_heads=16, num_key_value_heads=8,
))
Trainer(model=model, args=args, train_dataset=Texts()).train()
print(torch.cuda.max_memory_allocated() >> 20)
