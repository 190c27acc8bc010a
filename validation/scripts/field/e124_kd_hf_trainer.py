"""Sequence-level + logit distillation of a llama-type student from a frozen bf16 teacher using HF Trainer."""
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments, set_seed

VOCAB, SEQ = 32000, 512
TEACHER = dict(hidden_size=1536, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=12, num_key_value_heads=4)
STUDENT = dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12, num_key_value_heads=4)
T, ALPHA = 2.0, 0.7


class RandomTokens(Dataset):
    def __init__(self, n, seed):
        # zipf-like unigram distribution so that there is something to learn
        rng = np.random.default_rng(seed)
        probs = 1.0 / np.arange(1, VOCAB + 1)
        self.ids = rng.choice(VOCAB, size=(n, SEQ), p=probs / probs.sum())

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = torch.from_numpy(self.ids[i]).long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


class DistillTrainer(Trainer):
    def __init__(self, *args, teacher, **kw):
        super().__init__(*args, **kw)
        self.teacher = teacher.to(self.args.device)
        self.parts = {"ce": [], "kd": []}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs)
        with torch.no_grad():
            t_logits = self.teacher(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        s = out.logits[:, :-1] / T
        t = t_logits[:, :-1].float() / T
        kd = F.kl_div(F.log_softmax(s, -1), F.log_softmax(t, -1), log_target=True, reduction="none")
        kd = kd.sum(-1).mean() * T * T
        loss = ALPHA * kd + (1 - ALPHA) * out.loss
        if model.training:
            self.parts["ce"].append(out.loss.item())
            self.parts["kd"].append(kd.item())
            loss = loss / self.args.gradient_accumulation_steps
        return (loss, out) if return_outputs else loss


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kw):
        if "loss" in (logs or {}):
            print(f"step {state.global_step} loss {float(logs['loss']):.4f} grad_norm {float(logs['grad_norm']):.3f}")

    def on_evaluate(self, args, state, control, metrics=None, **kw):
        print(f"eval @ {state.global_step}: loss {metrics['eval_loss']:.4f} acc {metrics['eval_accuracy']:.4f}")


def metrics(pred):
    p, y = pred.predictions[:, :-1], pred.label_ids[:, 1:]
    return {"accuracy": float((p == y).mean())}


def main():
    set_seed(11)
    base = dict(vocab_size=VOCAB, max_position_embeddings=2048, use_cache=False)
    with torch.device("cuda"):
        teacher = AutoModelForCausalLM.from_config(LlamaConfig(**base, **TEACHER), dtype=torch.bfloat16)
        student = AutoModelForCausalLM.from_config(LlamaConfig(**base, **STUDENT, tie_word_embeddings=True), dtype=torch.float32)
    teacher.eval().requires_grad_(False)
    print(f"teacher {teacher.num_parameters() / 1e6:.0f}M student {student.num_parameters() / 1e6:.0f}M")

    with tempfile.TemporaryDirectory() as tmp:
        targs = TrainingArguments(
            output_dir=tmp,
            max_steps=6,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=16,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            bf16=True,
            optim="adafactor",
            learning_rate=1e-3,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=1,
            max_grad_norm=1.0,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        trainer = DistillTrainer(
            model=student,
            args=targs,
            teacher=teacher,
            train_dataset=RandomTokens(96, 0),
            eval_dataset=RandomTokens(32, 1),
            compute_metrics=metrics,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
            callbacks=[PrintLoss()],
        )
        trainer.train()
        print("mean ce", np.mean(trainer.parts["ce"]), "mean kd", np.mean(trainer.parts["kd"]))

    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
