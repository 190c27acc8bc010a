"""Fine-tune a (reduced) BLIP-2 OPT model for captioning with Lightning, bf16-true."""
import torch
import lightning as L
from torch.utils.data import DataLoader, Dataset
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    OPTConfig,
    get_linear_schedule_with_warmup,
)

NUM_QUERY = 32
IMAGE_TOKEN = 50265
PAD = 1


def make_config():
    vision = Blip2VisionConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=18,
                               num_attention_heads=16, image_size=224, patch_size=14)
    qformer = Blip2QFormerConfig(hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
                                 intermediate_size=3072, encoder_hidden_size=1024)
    text = OPTConfig(vocab_size=50304, hidden_size=2048, ffn_dim=8192, num_hidden_layers=12,
                     num_attention_heads=32, max_position_embeddings=2048, word_embed_proj_dim=2048)
    return Blip2Config(vision_config=vision.to_dict(), qformer_config=qformer.to_dict(),
                       text_config=text.to_dict(), num_query_tokens=NUM_QUERY,
                       image_token_index=IMAGE_TOKEN)


class CaptionDataset(Dataset):
    def __init__(self, n, seed, text_len=48):
        self.n, self.seed, self.text_len = n, seed, text_len

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100003 + i)
        image = torch.randn(3, 224, 224, generator=g)
        length = int(torch.randint(12, self.text_len + 1, (1,), generator=g))
        caption = torch.randint(4, 50000, (length,), generator=g)
        return image, caption


def collate(batch):
    max_len = 48
    pixel_values = torch.stack([b[0] for b in batch])
    ids = torch.full((len(batch), NUM_QUERY + max_len), PAD)
    ids[:, :NUM_QUERY] = IMAGE_TOKEN
    for row, (_, cap) in zip(ids, batch):
        row[NUM_QUERY:NUM_QUERY + len(cap)] = cap
    attention_mask = (ids != PAD).long()
    labels = ids.masked_fill((ids == PAD) | (ids == IMAGE_TOKEN), -100)
    return dict(pixel_values=pixel_values, input_ids=ids, attention_mask=attention_mask, labels=labels)


class Blip2Module(L.LightningModule):
    def __init__(self, lr=1e-5, freeze_vision=True):
        super().__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self):
        if self.model is not None:
            return
        self.model = Blip2ForConditionalGeneration(make_config())
        if self.hparams.freeze_vision:
            self.model.vision_model.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        out = self.model(**batch)
        self.log("train_loss", out.loss, prog_bar=True)
        return out.loss

    def validation_step(self, batch, batch_idx):
        out = self.model(**batch)
        self.log("val_loss", out.loss, prog_bar=True, batch_size=batch["input_ids"].size(0))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        print(f"batch {batch_idx} opt step {self.trainer.global_step} "
              f"alloc {torch.cuda.max_memory_allocated()} reserved {torch.cuda.max_memory_reserved()}", flush=True)

    def configure_optimizers(self):
        params = [p for p in self.model.parameters() if p.requires_grad]
        opt = torch.optim.AdamW(params, lr=self.hparams.lr, weight_decay=0.05, betas=(0.9, 0.98))
        sched = get_linear_schedule_with_warmup(opt, 2, 100)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


if __name__ == "__main__":
    L.seed_everything(7)
    torch.set_float32_matmul_precision("high")
    train = DataLoader(CaptionDataset(16 * 12, 1), batch_size=16, shuffle=True, collate_fn=collate,
                       pin_memory=True, drop_last=True)
    val = DataLoader(CaptionDataset(32 * 2, 2), batch_size=32, collate_fn=collate, pin_memory=True)
    trainer = L.Trainer(
        accelerator="gpu", devices=1, precision="bf16-true", max_epochs=1,
        accumulate_grad_batches=3, gradient_clip_val=1.0, val_check_interval=6,
        enable_checkpointing=False, logger=False, enable_progress_bar=False,
    )
    module = Blip2Module()
    trainer.fit(module, train, val)
    print({k: v.item() for k, v in trainer.callback_metrics.items()})
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())
