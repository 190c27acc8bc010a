"""LoRA on a Llama with the Trainer of transformers under ZeRO-3, evaluation in between, a checkpoint at the end."""
import shutil

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


class Chats(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        ids = torch.randint(0, 32000, (768,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


args = TrainingArguments(
    output_dir="lora-out", per_device_train_batch_size=2, per_device_eval_batch_size=4, max_steps=4, bf16=True,
    eval_strategy="steps", eval_steps=2, save_strategy="no", deepspeed=config, report_to=[], gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=32000, hidden_size=1536, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
))
model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "up_proj"]))
trainer = Trainer(model=model, args=args, train_dataset=Chats(64), eval_dataset=Chats(16))
trainer.train()
trainer.save_model("lora-out")
shutil.rmtree("lora-out", ignore_errors=True)
print(torch.cuda.max_memory_allocated() >> 20)
