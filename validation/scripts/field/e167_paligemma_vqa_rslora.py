#!/usr/bin/env python
"""
PaliGemma VQA fine-tuning with rank-stabilised LoRA, HF Trainer.

Adapted from our internal "finetune-paligemma" notebook. Weights are random here, so
only the plumbing (and the memory!) is interesting.
"""
import tempfile
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import (
    GemmaConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    SiglipVisionConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

IMG_TOK = 256000
N_IMG = 256
PAD = 0
GIB = 1024**3


class FakeVQA(Dataset):
    """(image, question, answer) triples; question 8-24 tokens, answer 2-12 tokens"""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            q = torch.randint(5, 250000, (int(torch.randint(8, 25, (1,), generator=g)),), generator=g)
            a = torch.randint(5, 250000, (int(torch.randint(2, 13, (1,), generator=g)),), generator=g)
            img = torch.randint(0, 256, (3, 224, 224), generator=g, dtype=torch.uint8)
            self.rows.append({"image": img, "question": q, "answer": a})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


@dataclass
class VQACollator:
    dtype: torch.dtype = torch.bfloat16

    def __call__(self, rows):
        ids, types, labels = [], [], []
        for r in rows:
            prefix = torch.cat([torch.full((N_IMG,), IMG_TOK), torch.tensor([2]), r["question"], torch.tensor([108])])
            suffix = torch.cat([r["answer"], torch.tensor([1])])
            ids.append(torch.cat([prefix, suffix]))
            types.append(torch.cat([torch.zeros_like(prefix), torch.ones_like(suffix)]))
            labels.append(torch.cat([torch.full_like(prefix, -100), suffix]))
        pad = torch.nn.utils.rnn.pad_sequence
        input_ids = pad(ids, batch_first=True, padding_value=PAD)
        lengths = torch.tensor([len(x) for x in ids])
        mask = (torch.arange(input_ids.size(1))[None] < lengths[:, None]).long()
        pixels = torch.stack([r["image"] for r in rows]).to(self.dtype).div(127.5).sub(1.0)
        return {
            "input_ids": input_ids,
            "attention_mask": mask,
            "token_type_ids": pad(types, batch_first=True),
            "labels": pad(labels, batch_first=True, padding_value=-100),
            "pixel_values": pixels,
        }


class PrintMemory(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        print(f"[step {state.global_step}] alloc {torch.cuda.memory_allocated() / GIB:.2f} GiB, "
              f"peak {torch.cuda.max_memory_allocated() / GIB:.2f} GiB, "
              f"reserved {torch.cuda.memory_reserved() / GIB:.2f} GiB")


def build_model():
    vision = SiglipVisionConfig(
        hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16,
        patch_size=14, image_size=224, vision_use_head=False)
    text = GemmaConfig(
        vocab_size=257152, hidden_size=2048, intermediate_size=16384, num_hidden_layers=18,
        num_attention_heads=8, num_key_value_heads=1, head_dim=256)
    cfg = PaliGemmaConfig(vision_config=vision, text_config=text, image_token_index=IMG_TOK,
                          projection_dim=2048, hidden_size=2048)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = PaliGemmaForConditionalGeneration(cfg)
    torch.set_default_dtype(torch.float32)
    return model


if __name__ == "__main__":
    set_seed(1234)
    model = build_model()
    model.config.use_cache = False
    print(f"base model: {sum(p.numel() for p in model.parameters()) / 1e9:.2f} B params, "
          f"{torch.cuda.memory_allocated() / GIB:.2f} GiB")

    peft_cfg = LoraConfig(
        r=32, lora_alpha=32, use_rslora=True, lora_dropout=0.05, bias="none",
        target_modules=r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)")
    model.enable_input_require_grads()
    model = get_peft_model(model, peft_cfg)
    model.print_trainable_parameters()

    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out, max_steps=5, per_device_train_batch_size=6, per_device_eval_batch_size=8,
            gradient_accumulation_steps=2, learning_rate=1e-4, warmup_steps=1, lr_scheduler_type="cosine",
            bf16=True, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
            optim="adamw_torch", max_grad_norm=1.0, logging_steps=1, eval_strategy="steps", eval_steps=3,
            save_strategy="no", report_to="none", remove_unused_columns=False, seed=1234)
        trainer = Trainer(model=model, args=args, train_dataset=FakeVQA(60, 0), eval_dataset=FakeVQA(16, 1),
                          data_collator=VQACollator(), callbacks=[PrintMemory()])
        result = trainer.train()
    print(f"train loss {result.training_loss:.4f}")
    print(f"max memory: {torch.cuda.max_memory_allocated() / GIB:.2f} GiB")
