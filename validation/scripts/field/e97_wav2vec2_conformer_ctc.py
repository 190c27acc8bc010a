"""CTC fine-tuning of a wav2vec2-conformer (base size) on synthetic variable-length speech with Lightning."""
import lightning as L
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import Wav2Vec2ConformerConfig, Wav2Vec2ConformerForCTC, get_linear_schedule_with_warmup

SR = 16_000
MIN_SEC, MAX_SEC = 3.0, 14.0
HIDDEN, LAYERS, HEADS, FFN = 768, 12, 12, 3072
VOCAB = 32
N_TRAIN, N_VAL = 96, 24
BATCH = 8
ACCUM = 2


class ToySpeech(Dataset):
    """Noise 'utterances' with ~12 characters per second of transcript."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        secs = MIN_SEC + (MAX_SEC - MIN_SEC) * torch.rand(n, generator=g)
        self.lengths = (secs * SR).long().tolist()
        self.seed = seed

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100_003 + i)
        n = self.lengths[i]
        wav = torch.randn(n, generator=g)
        wav = (wav - wav.mean()) / (wav.std() + 1e-7)
        text = torch.randint(4, VOCAB, (max(1, int(n / SR * 12)),), generator=g)
        return wav, text


def collate(batch):
    wavs, texts = zip(*batch)
    mask = pad_sequence([torch.ones(len(w), dtype=torch.long) for w in wavs], batch_first=True)
    return {
        "input_values": pad_sequence(wavs, batch_first=True),
        "attention_mask": mask,
        "labels": pad_sequence(texts, batch_first=True, padding_value=-100),
    }


class CTCModule(L.LightningModule):
    def __init__(self, lr=1e-4, warmup=2, total=12):
        super().__init__()
        self.save_hyperparameters()
        cfg = Wav2Vec2ConformerConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=FFN,
            hidden_act="swish",
            position_embeddings_type="rotary",
            feat_extract_norm="layer",
            conv_bias=True,
            do_stable_layer_norm=True,
            mask_time_prob=0.05,
            mask_time_length=10,
            layerdrop=0.0,
            ctc_loss_reduction="mean",
            ctc_zero_infinity=True,
            pad_token_id=0,
        )
        self.model = Wav2Vec2ConformerForCTC(cfg)
        self.model.freeze_feature_encoder()

    def training_step(self, batch, batch_idx):
        out = self.model(**batch)
        self.log("train_loss", out.loss, prog_bar=True)
        return out.loss

    def validation_step(self, batch, batch_idx):
        out = self.model(**batch)
        ids = out.logits.argmax(-1)
        blanks = (ids == 0).float().mean()
        self.log_dict({"val_loss": out.loss, "val_blank_rate": blanks}, batch_size=ids.shape[0])

    def configure_optimizers(self):
        decay, rest = [], []
        for n, p in self.model.named_parameters():
            if p.requires_grad:
                (rest if n.endswith("bias") or "layer_norm" in n else decay).append(p)
        opt = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 5e-3}, {"params": rest, "weight_decay": 0.0}],
            lr=self.hparams.lr, betas=(0.9, 0.98), eps=1e-8,
        )
        sched = get_linear_schedule_with_warmup(opt, self.hparams.warmup, self.hparams.total)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


class SpeechData(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(ToySpeech(N_TRAIN, 1), BATCH, shuffle=True, collate_fn=collate, num_workers=3)

    def val_dataloader(self):
        return DataLoader(ToySpeech(N_VAL, 2), BATCH, collate_fn=collate, num_workers=2)


def main():
    L.seed_everything(1234)
    torch.set_float32_matmul_precision("high")
    module = CTCModule()
    trainer = L.Trainer(
        accelerator="cuda",
        devices=1,
        precision="bf16-mixed",
        max_epochs=1,
        accumulate_grad_batches=ACCUM,
        gradient_clip_val=1.0,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, datamodule=SpeechData())
    print({k: float(v) for k, v in trainer.callback_metrics.items()})
    print("allocated peak", torch.cuda.max_memory_allocated())
    print("reserved peak", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
