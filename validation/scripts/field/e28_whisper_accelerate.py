"""
Fine-tune a whisper-small sized model (random init) with HF Accelerate:
bf16, gradient accumulation, gradient checkpointing on, frozen encoder front-end.
"""
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import WhisperConfig, WhisperForConditionalGeneration, get_linear_schedule_with_warmup

MAX_LABEL = 160
PAD = 50257


class SpeechSet(torch.utils.data.Dataset):
    def __init__(self, n, mel_bins, frames=3000):
        self.n, self.mel_bins, self.frames = n, mel_bins, frames

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        g = torch.Generator().manual_seed(idx)
        length = int(torch.randint(40, MAX_LABEL, (1,), generator=g))
        return {
            "input_features": torch.randn(self.mel_bins, self.frames, generator=g),
            "labels": torch.randint(0, 50000, (length,), generator=g),
        }


def collate(batch):
    feats = torch.stack([b["input_features"] for b in batch])
    labels = torch.nn.utils.rnn.pad_sequence([b["labels"] for b in batch], batch_first=True, padding_value=-100)
    return {"input_features": feats, "labels": labels}


def main():
    set_seed(11)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)

    config = WhisperConfig(
        d_model=768, encoder_layers=12, decoder_layers=12,
        encoder_attention_heads=12, decoder_attention_heads=12,
        encoder_ffn_dim=3072, decoder_ffn_dim=3072,
        vocab_size=51865, num_mel_bins=80,
        dropout=0.1, apply_spec_augment=True,
        pad_token_id=PAD, bos_token_id=PAD, eos_token_id=PAD, decoder_start_token_id=50258,
    )
    model = WhisperForConditionalGeneration(config)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for p in (*model.model.encoder.conv1.parameters(), *model.model.encoder.conv2.parameters()):
        p.requires_grad_(False)

    loader = DataLoader(SpeechSet(96, config.num_mel_bins), batch_size=12, collate_fn=collate, shuffle=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 10)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    model.train()
    running = 0.0
    for i, batch in enumerate(loader):
        with accelerator.accumulate(model):
            out = model(**batch)
            accelerator.backward(out.loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        running += out.loss.detach().float().item()
        accelerator.print(
            f"micro {i} sync={accelerator.sync_gradients} loss={running / (i + 1):.3f} "
            f"alloc={torch.cuda.max_memory_allocated()} reserved={torch.cuda.max_memory_reserved()}")


if __name__ == "__main__":
    main()
