import lightning as L
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import Adafactor, T5Config, T5ForConditionalGeneration


class FakeSummaries(Dataset):
    def __init__(self, n, vocab, max_src=512, max_tgt=128, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            s = int(torch.randint(max_src // 2, max_src + 1, (1,), generator=g))
            t = int(torch.randint(max_tgt // 4, max_tgt + 1, (1,), generator=g))
            self.items.append(
                (torch.randint(10, vocab, (s,), generator=g), torch.randint(10, vocab, (t,), generator=g))
            )

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    src = pad_sequence([b[0] for b in batch], batch_first=True, padding_value=0)
    tgt = pad_sequence([b[1] for b in batch], batch_first=True, padding_value=-100)
    return {"input_ids": src, "attention_mask": (src != 0).long(), "labels": tgt}


class SummaryData(L.LightningDataModule):
    def __init__(self, vocab, bs):
        super().__init__()
        self.vocab, self.bs = vocab, bs

    def setup(self, stage=None):
        self.train_ds = FakeSummaries(256, self.vocab, seed=1)
        self.val_ds = FakeSummaries(32, self.vocab, seed=2)

    def train_dataloader(self):
        return DataLoader(self.train_ds, batch_size=self.bs, shuffle=True, collate_fn=collate, pin_memory=True)

    def val_dataloader(self):
        return DataLoader(self.val_ds, batch_size=self.bs, collate_fn=collate)


class Summarizer(L.LightningModule):
    def __init__(self, cfg, lr=1e-3):
        super().__init__()
        self.model = T5ForConditionalGeneration(cfg)
        self.lr = lr

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        out = self.model(**batch)
        self.log("val_loss", out.loss, batch_size=batch["input_ids"].size(0))
        if batch_idx == 0:
            gen = self.model.generate(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"],
                max_new_tokens=24, num_beams=2, min_new_tokens=24,
            )
            print("generated", tuple(gen.shape))

    def on_train_batch_end(self, *a):
        print("batch end", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    def configure_optimizers(self):
        return Adafactor(self.parameters(), lr=self.lr, scale_parameter=False, relative_step=False, warmup_init=False)


if __name__ == "__main__":
    L.seed_everything(123)
    # t5-v1.1-base shaped
    cfg = T5Config(
        vocab_size=32128, d_model=768, d_kv=64, d_ff=2048, num_layers=12, num_heads=12,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    )
    dm = SummaryData(cfg.vocab_size, bs=16)
    trainer = L.Trainer(
        accelerator="gpu", devices=1, precision="bf16-mixed",
        max_steps=3, accumulate_grad_batches=2, gradient_clip_val=1.0,
        val_check_interval=4, limit_val_batches=2, num_sanity_val_steps=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    with trainer.init_module():
        net = Summarizer(cfg)
    trainer.fit(net, dm)
    print("max allocated", torch.cuda.max_memory_allocated(), "max reserved", torch.cuda.max_memory_reserved())
