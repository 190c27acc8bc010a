"""OpenLLaMA-7B on one GPU: LitGPT's `LLM` in a LightningModule.

one_gpu.py [CHECKPOINT] [BATCH_SIZE] [ACCUMULATE] [MAX_LENGTH]
"""

import sys

import lightning as L
import torch
from litgpt import LLM
from litgpt.data import Alpaca2k

GIB = 2**30


class FineTuned(L.LightningModule):
    """All weights are trained; what is allocated is printed after each forward."""

    def __init__(self, checkpoint):
        super().__init__()
        self.llm = LLM.load(checkpoint, distribute=None)

    def setup(self, stage):
        self.llm.trainer_setup()

    def training_step(self, batch):
        _, loss = self.llm(input_ids=batch["input_ids"], target_ids=batch["labels"])
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        print(
            f"tokens {tuple(batch['input_ids'].shape)}: "
            f"allocated {allocated / GIB:.2f} GiB, reserved {reserved / GIB:.2f} GiB"
        )
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(
            self.llm.model.parameters(), lr=2e-4, weight_decay=0.0, betas=(0.9, 0.95)
        )


given = dict(enumerate(sys.argv[1:]))
model = FineTuned(given.get(0, "checkpoints/openlm-research/open_llama_7b"))
data = Alpaca2k(val_split_fraction=0.2)
data.connect(
    model.llm.tokenizer,
    batch_size=int(given.get(1, 4)),
    max_seq_length=int(given.get(3, 512)),
)
trainer = L.Trainer(
    accelerator="gpu",
    devices=1,
    precision="bf16-true",
    max_epochs=1,
    accumulate_grad_batches=int(given.get(2, 1)),
    limit_val_batches=0,
    enable_checkpointing=False,
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(model, data)
