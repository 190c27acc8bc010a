"""Lightning on two GPUs: 'ddp' or FSDPStrategy, chosen on the command line (started by torchrun)."""
import functools
import sys
import tempfile
import torch
import torch.nn as nn
import torch.nn.functional as F
import lightning as L
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, TensorDataset

kind = sys.argv[1] if len(sys.argv) > 1 else "ddp"
VOCAB, D, T = 16000, 1024, 512


class LitLM(L.LightningModule):
    def __init__(self, depth=12):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, D)
        self.pos = nn.Parameter(torch.zeros(T, D))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(D, 16, 4 * D, dropout=0.1, activation="gelu", batch_first=True,
                                       norm_first=True) for _ in range(depth))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, VOCAB)

    def forward(self, ids):
        t = ids.size(1)
        mask = torch.ones(t, t, dtype=torch.bool, device=ids.device).triu(1)
        x = self.emb(ids) + self.pos[:t]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))

    def loss(self, batch):
        (ids,) = batch
        return F.cross_entropy(self(ids[:, :-1]).transpose(1, 2), ids[:, 1:])

    def training_step(self, batch, idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=False)
        return loss

    def validation_step(self, batch, idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-4)


def main():
    L.seed_everything(0)
    ids = torch.randint(0, VOCAB, (176, T + 1), generator=torch.Generator().manual_seed(0))
    train = DataLoader(TensorDataset(ids[:128]), batch_size=8, shuffle=True)
    val = DataLoader(TensorDataset(ids[128:]), batch_size=8)
    if kind == "fsdp":
        policy = functools.partial(transformer_auto_wrap_policy,
                                   transformer_layer_cls={nn.TransformerEncoderLayer})
        strategy = FSDPStrategy(auto_wrap_policy=policy, activation_checkpointing_policy={nn.TransformerEncoderLayer})
    else:
        strategy = DDPStrategy(gradient_as_bucket_view=True)
    with tempfile.TemporaryDirectory() as d:
        trainer = L.Trainer(
            accelerator="gpu", devices=2, strategy=strategy, precision="bf16-mixed", max_epochs=1,
            gradient_clip_val=None if kind == "fsdp" else 1.0, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, default_root_dir=d, val_check_interval=4,
        )
        trainer.fit(LitLM(), train, val)
        print(f"rank {trainer.global_rank} {kind} steps {trainer.global_step} "
              f"max_memory_allocated {torch.cuda.max_memory_allocated()} "
              f"max_memory_reserved {torch.cuda.max_memory_reserved()}")


if __name__ == "__main__":
    main()
