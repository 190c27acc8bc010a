"""Parameter-efficient finetuning (DoRA + rank-stabilised scaling) of a small Qwen3-style
causal LM with Lightning. Variable-length SFT batches, gradient accumulation, one validation run."""
import random

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, Qwen3Config, get_cosine_schedule_with_warmup

VOCAB = 32000
HIDDEN = 1024
LAYERS = 12
MAX_LEN = 1024
BATCH = 4
ACCUM = 2
MAX_STEPS = 5
PAD = 0


class SyntheticSFT(Dataset):
    """prompt + answer; only the answer contributes to the loss"""

    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.lens = [rng.randint(MAX_LEN // 4, MAX_LEN) for _ in range(n)]
        self.seed = seed

    def __len__(self):
        return len(self.lens)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100003 + i)
        ids = torch.randint(1, VOCAB, (self.lens[i],), generator=g)
        labels = ids.clone()
        labels[: self.lens[i] // 3] = -100
        return ids, labels


def collate(items):
    ids = pad_sequence([a for a, _ in items], batch_first=True, padding_value=PAD)
    labels = pad_sequence([b for _, b in items], batch_first=True, padding_value=-100)
    lens = torch.tensor([len(a) for a, _ in items])
    mask = (torch.arange(ids.size(1))[None] < lens[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class SFTData(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(SyntheticSFT(BATCH * ACCUM * MAX_STEPS, 1), batch_size=BATCH, shuffle=True,
                          collate_fn=collate, num_workers=0, pin_memory=True)

    def val_dataloader(self):
        return DataLoader(SyntheticSFT(BATCH * 2, 2), batch_size=BATCH, collate_fn=collate)


class LitQwen(L.LightningModule):
    def __init__(self, lr=2e-4, rank=16):
        super().__init__()
        self.save_hyperparameters()
        cfg = Qwen3Config(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=HIDDEN * 3,
            num_hidden_layers=LAYERS, num_attention_heads=16, num_key_value_heads=8,
            head_dim=HIDDEN // 16, max_position_embeddings=4096, tie_word_embeddings=True,
            pad_token_id=PAD, bos_token_id=1, eos_token_id=2,
        )
        base = AutoModelForCausalLM.from_config(cfg, dtype=torch.bfloat16)
        base.config.use_cache = False
        peft_cfg = LoraConfig(
            r=rank, lora_alpha=2 * rank, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM",
            use_dora=True, use_rslora=True,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        )
        self.model = get_peft_model(base, peft_cfg)
        self.model.print_trainable_parameters()
        self._running = []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self._running.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        out = self.model(**batch)
        acc_mask = batch["labels"][:, 1:] != -100
        pred = out.logits[:, :-1].argmax(-1)
        acc = ((pred == batch["labels"][:, 1:]) & acc_mask).sum() / acc_mask.sum()
        self.log("val_loss", out.loss, prog_bar=False)
        self.log("val_acc", acc.float())

    def on_before_zero_grad(self, optimizer):
        if self._running:
            mean = torch.stack(self._running).mean().item()
            print(f"step {self.global_step} loss {mean:.4f}")
            self._running.clear()

    def on_validation_epoch_end(self):
        m = self.trainer.callback_metrics
        if "val_loss" in m:
            print(f"validation loss {m['val_loss']:.4f} acc {m['val_acc']:.5f}")

    def configure_optimizers(self):
        decay, no_decay = [], []
        for n, p in self.model.named_parameters():
            if p.requires_grad:
                (no_decay if "magnitude" in n else decay).append(p)
        opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01},
                                 {"params": no_decay, "weight_decay": 0.0}], lr=self.hparams.lr)
        sched = get_cosine_schedule_with_warmup(opt, 1, MAX_STEPS)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    L.seed_everything(42)
    torch.set_float32_matmul_precision("high")
    module = LitQwen()
    trainer = L.Trainer(
        accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=MAX_STEPS,
        accumulate_grad_batches=ACCUM, gradient_clip_val=1.0, num_sanity_val_steps=0,
        limit_val_batches=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(module, datamodule=SFTData())
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
