"""OpenLLaMA on four GPUs: LitGPT's `LLM` in a LightningModule, under a strategy of Lightning.

four_gpus.py CHECKPOINT BATCH_SIZE ddp|fsdp|deepspeed [MAX_LENGTH]
"""

import sys

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from litgpt import LLM
from litgpt.data import Alpaca2k

GIB = 2**30
STRATEGIES = {
    "ddp": lambda: DDPStrategy(),
    "fsdp": lambda: FSDPStrategy(sharding_strategy="FULL_SHARD"),
    "deepspeed": lambda: DeepSpeedStrategy(stage=3, offload_optimizer=True),
}


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
        if strategy == "deepspeed":
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(self.parameters())
        return torch.optim.AdamW(
            self.llm.model.parameters(), lr=2e-4, weight_decay=0.0, betas=(0.9, 0.95)
        )


checkpoint, batch_size, strategy, *rest = sys.argv[1:]
model = FineTuned(checkpoint)
data = Alpaca2k(val_split_fraction=0.2)
data.connect(
    model.llm.tokenizer,
    batch_size=int(batch_size),
    max_seq_length=int(rest[0]) if rest else 512,
)
trainer = L.Trainer(
    accelerator="gpu",
    devices=4,
    strategy=STRATEGIES[strategy](),
    precision="bf16-true",
    accumulate_grad_batches=4 if strategy == "deepspeed" else 1,
    max_epochs=1,
    limit_val_batches=0,
    enable_checkpointing=False,
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(model, data)
