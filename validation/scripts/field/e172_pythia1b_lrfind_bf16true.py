import os
import tempfile

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, Dataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

# Continued pre-training of a Pythia-1B shaped GPT-NeoX, all weights in bf16 ("bf16-true").
# 1. LR range test   2. short training with the LR found   3. perplexity


class TokenBlocks(Dataset):
    def __init__(self, n_blocks, block, vocab, seed):
        g = torch.Generator().manual_seed(seed)
        probs = 1.0 / torch.arange(1, vocab + 1, dtype=torch.float)
        self.tokens = torch.multinomial(probs, n_blocks * block, replacement=True, generator=g).view(n_blocks, block)

    def __len__(self):
        return self.tokens.shape[0]

    def __getitem__(self, i):
        return self.tokens[i]


class NeoXModule(pl.LightningModule):
    def __init__(self, lr=1e-5, weight_decay=0.1, grad_ckpt=True):
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.model = None

    def configure_model(self):
        if self.model is not None:  # is called by the tuner and again by fit
            return
        config = GPTNeoXConfig(
            vocab_size=50304, hidden_size=2048, num_hidden_layers=16, num_attention_heads=8,
            intermediate_size=8192, max_position_embeddings=2048, use_parallel_residual=True,
            tie_word_embeddings=False, use_cache=False)
        self.model = GPTNeoXForCausalLM(config)
        if self.hparams.grad_ckpt:
            self.model.gradient_checkpointing_enable()

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids).loss

    def training_step(self, ids, _):
        loss = self(ids)
        self.log("train/loss", loss, on_step=True, on_epoch=False, prog_bar=True)
        return loss

    def validation_step(self, ids, _):
        loss = self(ids)
        self.log("val/loss", loss, on_step=False, on_epoch=True)

    def test_step(self, ids, _):
        self.log("test/ppl", self(ids).float().exp())

    def configure_optimizers(self):
        decay = [p for p in self.model.parameters() if p.ndim >= 2]
        rest = [p for p in self.model.parameters() if p.ndim < 2]
        return torch.optim.AdamW(
            [{"params": decay, "weight_decay": self.hparams.weight_decay}, {"params": rest, "weight_decay": 0.0}],
            lr=self.lr, betas=(0.9, 0.95), fused=True)

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step == 0:
            n = sum(p.grad.numel() * p.grad.element_size() for p in self.parameters() if p.grad is not None)
            print(f"grads take {n / 2**30:.2f} GiB, allocated {torch.cuda.memory_allocated() / 2**30:.2f} GiB")


def loader(n, seed, bs, shuffle=False):
    return DataLoader(TokenBlocks(n, 1024, 50277, seed), batch_size=bs, shuffle=shuffle, drop_last=shuffle)


if __name__ == "__main__":
    pl.seed_everything(3407)
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as root:
        timer = Timer()
        trainer = pl.Trainer(
            accelerator="gpu", devices=1, precision="bf16-true", max_steps=6, val_check_interval=3,
            limit_val_batches=2, gradient_clip_val=1.0, gradient_clip_algorithm="norm",
            num_sanity_val_steps=0, log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False,
            logger=CSVLogger(root, name="pythia"), callbacks=[timer, DeviceStatsMonitor(cpu_stats=False)],
            default_root_dir=root)
        module = NeoXModule()
        train_dl = loader(64, 0, 8, shuffle=True)
        val_dl = loader(16, 1, 8)

        finder = Tuner(trainer).lr_find(module, train_dataloaders=train_dl, val_dataloaders=val_dl,
                                        min_lr=1e-6, max_lr=1e-3, num_training=6, early_stop_threshold=None,
                                        update_attr=False)
        suggestion = finder.suggestion(skip_begin=1, skip_end=1)
        print("lr curve:", [(f"{a:.1e}", round(b, 3)) for a, b in zip(finder.results["lr"], finder.results["loss"])])
        module.lr = suggestion if suggestion else 1e-5
        print(f"using lr {module.lr:.2e}; peak so far {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
        torch.cuda.reset_peak_memory_stats()

        trainer.fit(module, train_dl, val_dl)
        print("steps", trainer.global_step, "val loss", float(trainer.callback_metrics["val/loss"]))
        print(trainer.test(module, loader(8, 2, 4), verbose=False))
        print(f"train peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
        print("files written:", sum(len(f) for _, _, f in os.walk(root)))
