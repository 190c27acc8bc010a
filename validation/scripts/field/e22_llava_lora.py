"""LoRA on a LLaVA-style model (CLIP vision tower + small Llama), HF Trainer, bf16 weights."""
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

IMAGE_TOKEN = 32000
N_PATCH = (336 // 14) ** 2


def build():
    vision = CLIPVisionConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                              num_attention_heads=16, image_size=336, patch_size=14, projection_dim=768)
    text = LlamaConfig(vocab_size=32064, hidden_size=2048, intermediate_size=5632, num_hidden_layers=16,
                       num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=2048)
    cfg = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN,
                      vision_feature_layer=-2, vision_feature_select_strategy="default")
    torch.set_default_dtype(torch.bfloat16)
    model = LlavaForConditionalGeneration(cfg)
    torch.set_default_dtype(torch.float32)
    return model


class VQADataset(Dataset):
    def __init__(self, n, seq):
        self.n, self.seq = n, seq

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        text = torch.randint(3, 31999, (self.seq,), generator=g)
        ids = torch.cat([torch.tensor([1]), torch.full((N_PATCH,), IMAGE_TOKEN), text])
        labels = ids.clone()
        labels[: 1 + N_PATCH + self.seq // 2] = -100
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels,
                "pixel_values": torch.randn(3, 336, 336, generator=g)}


class Mem(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        print("step", state.global_step, "alloc", torch.cuda.max_memory_allocated(),
              "reserved", torch.cuda.max_memory_reserved(), flush=True)


if __name__ == "__main__":
    set_seed(0)
    with torch.device("cuda"):
        model = build()
    lora = LoraConfig(r=32, lora_alpha=64, lora_dropout=0.05, task_type="CAUSAL_LM",
                      target_modules=r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)")
    model = get_peft_model(model, lora)
    for n, p in model.named_parameters():
        if "multi_modal_projector" in n:
            p.requires_grad_(True)
    model.print_trainable_parameters()

    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=3,
            learning_rate=2e-4, bf16=True, logging_steps=1, save_strategy="no", report_to=[],
            dataloader_num_workers=0, warmup_steps=1, lr_scheduler_type="cosine", seed=0,
            remove_unused_columns=False, disable_tqdm=True,
        )
        Trainer(model=model, args=args, train_dataset=VQADataset(64, 192), callbacks=[Mem()]).train()
    print("peak alloc", torch.cuda.max_memory_allocated(), "peak reserved", torch.cuda.max_memory_reserved())
