"""HF Trainer under torchrun (DDP): Whisper-like speech seq2seq with a custom collator and gradient checkpointing."""
import os
import tempfile
import torch
from torch.utils.data import Dataset
from transformers import (
    WhisperConfig, WhisperForConditionalGeneration, Trainer, TrainingArguments, set_seed,
)

set_seed(0)


class FakeSpeech(Dataset):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed + i)
        n = int(torch.randint(20, 120, (1,), generator=g))
        return {"input_features": torch.randn(80, 3000, generator=g),
                "labels": torch.randint(10, 50000, (n,), generator=g)}


def collate(items):
    labels = torch.nn.utils.rnn.pad_sequence([x["labels"] for x in items], batch_first=True, padding_value=-100)
    return {"input_features": torch.stack([x["input_features"] for x in items]), "labels": labels}


def main():
    config = WhisperConfig(
        vocab_size=51865, d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536, use_cache=False,
    )
    model = WhisperForConditionalGeneration(config)
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            gradient_accumulation_steps=2,
            max_steps=6,
            learning_rate=1e-4,
            warmup_steps=1,
            bf16=True,
            optim="adamw_torch_fused",
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            ddp_find_unused_parameters=False,
            eval_strategy="steps",
            eval_steps=3,
            prediction_loss_only=True,
            logging_steps=1,
            save_strategy="no",
            remove_unused_columns=False,
            dataloader_num_workers=1,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=args, train_dataset=FakeSpeech(256, 0),
                          eval_dataset=FakeSpeech(32, 10_000), data_collator=collate)
        trainer.train()
        print("final eval", trainer.evaluate())
    print(f"rank {os.environ.get('RANK', 0)} max_memory_allocated {torch.cuda.max_memory_allocated()} "
          f"max_memory_reserved {torch.cuda.max_memory_reserved()}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
