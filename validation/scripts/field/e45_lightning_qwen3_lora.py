"""Instruction-tuning style LoRA on a (randomly initialised) Qwen3, with Lightning."""
import random
import tempfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from peft import LoraConfig, TaskType, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, get_cosine_schedule_with_warmup

GB = 1024 ** 3
PAD_ID = 0
VOCAB = 100_352


class InstructionDataset(Dataset):
    """prompt + response, the loss is only computed on the response part."""

    def __init__(self, n: int, min_len: int, max_len: int, seed: int):
        rng = random.Random(seed)
        self.samples = []
        for _ in range(n):
            total = int(min(max_len, max(min_len, rng.lognormvariate(6.0, 0.6))))
            n_prompt = rng.randint(total // 5, total // 2)
            start = rng.randrange(1, 2000)
            step = rng.choice([1, 3, 7])
            ids = [(start + step * i) % 4000 + 1 for i in range(total)]
            self.samples.append((ids, n_prompt))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        ids, n_prompt = self.samples[i]
        input_ids = torch.tensor(ids, dtype=torch.long)
        labels = input_ids.clone()
        labels[:n_prompt] = -100
        return {"input_ids": input_ids, "labels": labels}


def collate_longest(batch):
    input_ids = pad_sequence([b["input_ids"] for b in batch], batch_first=True, padding_value=PAD_ID)
    labels = pad_sequence([b["labels"] for b in batch], batch_first=True, padding_value=-100)
    return {"input_ids": input_ids, "attention_mask": (input_ids != PAD_ID).long(), "labels": labels}


class InstructionData(L.LightningDataModule):
    def __init__(self, train_bs=6, val_bs=8):
        super().__init__()
        self.train_bs, self.val_bs = train_bs, val_bs

    def setup(self, stage=None):
        self.train_ds = InstructionDataset(96, 64, 1280, seed=0)
        self.val_ds = InstructionDataset(24, 64, 1536, seed=1)

    def train_dataloader(self):
        return DataLoader(self.train_ds, batch_size=self.train_bs, shuffle=True,
                          collate_fn=collate_longest, pin_memory=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_ds, batch_size=self.val_bs, collate_fn=collate_longest, pin_memory=True)


class LitQwenLoRA(L.LightningModule):
    def __init__(self, lr=2e-4, rank=16, warmup_steps=2, total_steps=8):
        super().__init__()
        self.save_hyperparameters()
        self.strict_loading = False     # checkpoints only hold the adapters
        config = Qwen3Config(
            vocab_size=VOCAB, hidden_size=2048, intermediate_size=6144, num_hidden_layers=12,
            num_attention_heads=16, num_key_value_heads=8, head_dim=128,
            max_position_embeddings=4096, tie_word_embeddings=True, use_cache=False,
            pad_token_id=PAD_ID,
        )
        base = Qwen3ForCausalLM(config)
        peft_cfg = LoraConfig(
            task_type=TaskType.CAUSAL_LM, r=rank, lora_alpha=2 * rank, lora_dropout=0.05,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        )
        self.model = get_peft_model(base, peft_cfg)
        self.model.print_trainable_parameters()

    def forward(self, **batch):
        return self.model(**batch)

    def training_step(self, batch, batch_idx):
        out = self(**batch)
        if torch.isnan(out.loss):
            self.print(f"nan loss in batch {batch_idx}, skipping")
            return None
        self.log("train_loss", out.loss, prog_bar=True, on_step=True)
        self.log("seq_len", float(batch["input_ids"].shape[1]), on_step=True)
        return out.loss

    def validation_step(self, batch, batch_idx):
        out = self(**batch)
        shift_logits = out.logits[:, :-1]
        shift_labels = batch["labels"][:, 1:]
        keep = shift_labels != -100
        acc = (shift_logits.argmax(-1)[keep] == shift_labels[keep]).float().mean()
        bs = batch["input_ids"].shape[0]
        self.log("val_loss", out.loss, batch_size=bs, prog_bar=True)
        self.log("val_acc", acc, batch_size=bs)

    def configure_optimizers(self):
        params = [p for p in self.parameters() if p.requires_grad]
        opt = torch.optim.AdamW(params, lr=self.hparams.lr, weight_decay=0.01)
        sched = get_cosine_schedule_with_warmup(opt, self.hparams.warmup_steps, self.hparams.total_steps)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if "lora_" in k}


class ConsoleReport(Callback):
    def __init__(self, every=1):
        self.every = every
        self.last = -1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step = trainer.global_step
        if step == self.last or step % self.every:
            return
        self.last = step
        loss = trainer.callback_metrics.get("train_loss")
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        print(f"step {step:3d} loss {float(loss):.4f} lr {lr:.2e} T={batch['input_ids'].shape[1]} "
              f"peak_alloc {torch.cuda.max_memory_allocated() / GB:.2f}GB")

    def on_validation_end(self, trainer, pl_module):
        m = trainer.callback_metrics
        if "val_loss" in m:
            print(f"   [val] loss {float(m['val_loss']):.4f} acc {float(m['val_acc']):.4f} "
                  f"peak_alloc {torch.cuda.max_memory_allocated() / GB:.2f}GB "
                  f"peak_reserved {torch.cuda.max_memory_reserved() / GB:.2f}GB")


def main():
    L.seed_everything(42)
    torch.set_float32_matmul_precision("medium")
    total_steps = 8
    with tempfile.TemporaryDirectory(prefix="qwen_lora_") as tmp:
        ckpt = ModelCheckpoint(dirpath=Path(tmp) / "ckpt", monitor="val_loss", mode="min", save_top_k=1,
                               filename="{step}-{val_loss:.3f}")
        trainer = L.Trainer(
            accelerator="gpu", devices=1, precision="bf16-true", max_steps=total_steps, max_epochs=-1,
            accumulate_grad_batches=2, gradient_clip_val=1.0, val_check_interval=6,
            num_sanity_val_steps=1, log_every_n_steps=1, enable_progress_bar=False,
            enable_model_summary=False, logger=CSVLogger(tmp, name="logs"),
            callbacks=[EarlyStopping("val_loss", patience=2, min_delta=0.001),
                       LearningRateMonitor("step"), ckpt, ConsoleReport()],
        )
        with trainer.init_module():
            module = LitQwenLoRA(total_steps=total_steps)
        print(f"model built, allocated {torch.cuda.memory_allocated() / GB:.2f}GB")
        trainer.fit(module, datamodule=InstructionData())

        print("best:", Path(ckpt.best_model_path).name, "score", ckpt.best_model_score)
        size = sum(f.stat().st_size for f in Path(tmp).rglob("*.ckpt"))
        print(f"checkpoints on disk: {size / 1e6:.1f} MB")
        state = torch.load(ckpt.best_model_path, map_location="cpu", weights_only=False)["state_dict"]
        missing, unexpected = module.load_state_dict(state, strict=False)
        assert not unexpected, unexpected
    print("max_memory_allocated:", torch.cuda.max_memory_allocated())
    print("max_memory_reserved: ", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
