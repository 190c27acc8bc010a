"""LoRA instruction-tuning of a (randomly initialised, reduced) LLaVA with the HF Trainer."""
import os
from dataclasses import dataclass

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import tempfile

import numpy as np
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

VOCAB = 32064
IMAGE_TOKEN_ID = 32000
PAD, BOS, EOS = 32001, 1, 2
IMAGE_SIZE, PATCH = 336, 14
NUM_PATCHES = (IMAGE_SIZE // PATCH) ** 2


def build_model() -> LlavaForConditionalGeneration:
    vision = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=12,
        num_attention_heads=16,
        image_size=IMAGE_SIZE,
        patch_size=PATCH,
        projection_dim=768,
    )
    text = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN_ID,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    prev = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlavaForConditionalGeneration(config)
    torch.set_default_dtype(prev)
    return model


class ColorQADataset(Dataset):
    """Each sample: an image of one flat colour per quadrant, a 'question' and an 'answer' about it."""

    def __init__(self, size: int, seed: int):
        rng = np.random.default_rng(seed)
        self.colors = rng.integers(0, 256, size=(size, 4, 3), dtype=np.uint8)
        self.q_len = rng.integers(12, 64, size=size)
        self.a_len = rng.integers(32, 192, size=size)
        self.seed = seed

    def __len__(self):
        return len(self.q_len)

    def __getitem__(self, i):
        rng = np.random.default_rng((self.seed, i))
        question = rng.integers(100, 5000, size=self.q_len[i])
        base = 5000 + self.colors[i].astype(np.int64).reshape(-1)
        answer = np.resize(base, self.a_len[i])
        return {"colors": self.colors[i], "question": question.tolist(), "answer": answer.tolist()}


@dataclass
class LlavaCollator:
    pad_token_id: int
    image_token_id: int
    num_image_tokens: int
    image_size: int
    ignore_index: int = -100
    pad_to_multiple_of: int = 8

    def __call__(self, features):
        ids, labels = [], []
        for f in features:
            prompt = [BOS] + [self.image_token_id] * self.num_image_tokens + f["question"]
            answer = f["answer"] + [EOS]
            ids.append(prompt + answer)
            labels.append([self.ignore_index] * len(prompt) + answer)
        longest = max(map(len, ids))
        m = self.pad_to_multiple_of
        longest = (longest + m - 1) // m * m

        input_ids = torch.full((len(ids), longest), self.pad_token_id, dtype=torch.long)
        label_t = torch.full((len(ids), longest), self.ignore_index, dtype=torch.long)
        mask = torch.zeros((len(ids), longest), dtype=torch.long)
        for k, (x, y) in enumerate(zip(ids, labels)):
            input_ids[k, : len(x)] = torch.tensor(x)
            label_t[k, : len(y)] = torch.tensor(y)
            mask[k, : len(x)] = 1

        quad = torch.from_numpy(np.stack([f["colors"] for f in features])).float().div(127.5).sub(1.0)
        quad = quad.view(-1, 2, 2, 3).permute(0, 3, 1, 2)
        pixel_values = torch.nn.functional.interpolate(quad, size=(self.image_size, self.image_size), mode="nearest")
        return {
            "input_ids": input_ids,
            "attention_mask": mask,
            "labels": label_t,
            "pixel_values": pixel_values.to(torch.bfloat16),
        }


class MemoryCallback(TrainerCallback):
    @staticmethod
    def _print(tag):
        print(
            f"  [{tag}] max_memory_allocated {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB, "
            f"max_memory_reserved {torch.cuda.max_memory_reserved() / 2**20:.1f} MiB"
        )

    def on_train_begin(self, args, state, control, **kw):
        self._print("train begin")

    def on_log(self, args, state, control, logs=None, **kw):
        self._print(f"step {state.global_step}")

    def on_evaluate(self, args, state, control, **kw):
        self._print(f"evaluate @ {state.global_step}")


def token_accuracy_logits(logits, labels):
    if isinstance(logits, (tuple, list)):
        logits = logits[0]
    return logits.argmax(dim=-1)


def compute_metrics(pred):
    guess, labels = pred.predictions[:, :-1], pred.label_ids[:, 1:]
    keep = labels != -100
    return {"token_acc": float((guess[keep] == labels[keep]).mean())}


def main():
    set_seed(7)
    model = build_model()
    model.config.text_config.use_cache = False
    model.model.vision_tower.requires_grad_(False)

    lora = LoraConfig(
        r=64,
        lora_alpha=128,
        lora_dropout=0.05,
        bias="none",
        target_modules=r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
        modules_to_save=["multi_modal_projector"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()
    assert not any("vision_tower" in n for n, p in model.named_parameters() if p.requires_grad)
    print(f"model built: {torch.cuda.memory_allocated() / 2**20:.0f} MiB allocated")

    with tempfile.TemporaryDirectory() as out_dir:
        args = TrainingArguments(
            output_dir=out_dir,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=6,
            learning_rate=2e-4,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=True,
            optim="adamw_torch_fused",
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,
            label_names=["labels"],
            dataloader_num_workers=0,
            disable_tqdm=True,
            seed=7,
        )
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=ColorQADataset(256, seed=0),
            eval_dataset=ColorQADataset(16, seed=1),
            data_collator=LlavaCollator(PAD, IMAGE_TOKEN_ID, NUM_PATCHES, IMAGE_SIZE),
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=token_accuracy_logits,
            callbacks=[MemoryCallback()],
        )
        result = trainer.train()
        print("train loss:", result.training_loss)
        best = min((h["eval_loss"] for h in trainer.state.log_history if "eval_loss" in h), default=float("nan"))
        print("best eval loss:", best)

    print(f"max_memory_allocated: {torch.cuda.max_memory_allocated()} ({torch.cuda.max_memory_allocated() / 2**30:.2f} GiB)")
    print(f"max_memory_reserved:  {torch.cuda.max_memory_reserved()} ({torch.cuda.max_memory_reserved() / 2**30:.2f} GiB)")


if __name__ == "__main__":
    main()
