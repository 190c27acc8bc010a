import numpy as np
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

SEQ_LEN = 1024


class SyntheticSFT(Dataset):
    """Prompt (masked) + answer, padded to SEQ_LEN."""

    def __init__(self, size, vocab_size, seed):
        rng = np.random.default_rng(seed)
        self.items = []
        for _ in range(size):
            total = int(rng.integers(SEQ_LEN // 2, SEQ_LEN + 1))
            prompt = total // 3
            ids = np.zeros(SEQ_LEN, dtype=np.int64)
            ids[:total] = rng.integers(3, vocab_size, total)
            mask = np.zeros(SEQ_LEN, dtype=np.int64)
            mask[:total] = 1
            labels = ids.copy()
            labels[:prompt] = -100
            labels[total:] = -100
            self.items.append(dict(input_ids=ids, attention_mask=mask, labels=labels))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return {k: torch.from_numpy(v) for k, v in self.items[i].items()}


class SFTTrainer(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Only keep the argmax so the eval loop does not gather the full logits."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            with self.compute_loss_context_manager():
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        loss = loss.mean().detach()
        if prediction_loss_only:
            return loss, None, None
        return loss, outputs.logits.argmax(dim=-1), inputs["labels"]


def compute_metrics(eval_pred):
    preds, labels = eval_pred
    preds, labels = preds[:, :-1], labels[:, 1:]
    keep = labels != -100
    return {"token_acc": float((preds[keep] == labels[keep]).mean())}


class MemoryCallback(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print(f"step {state.global_step}: allocated={torch.cuda.max_memory_allocated()} "
              f"reserved={torch.cuda.max_memory_reserved()}", flush=True)

    def on_evaluate(self, args, state, control, **kwargs):
        print(f"eval @ {state.global_step}: allocated={torch.cuda.max_memory_allocated()} "
              f"reserved={torch.cuda.max_memory_reserved()}", flush=True)


def main():
    set_seed(1234)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
        num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=2048,
        attn_implementation="sdpa", use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)

    lora = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=16, lora_alpha=32, lora_dropout=0.05, bias="none",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )
    model.enable_input_require_grads()
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()

    args = TrainingArguments(
        output_dir="/tmp/lora_out",
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=True,
        max_steps=4,
        learning_rate=2e-4,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        optim="adamw_torch",
        seed=1234,
        dataloader_num_workers=0,
    )
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=SyntheticSFT(64, config.vocab_size, 0),
        eval_dataset=SyntheticSFT(24, config.vocab_size, 1),
        compute_metrics=compute_metrics,
        callbacks=[MemoryCallback()],
    )
    trainer.train()
    print(trainer.evaluate())
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
