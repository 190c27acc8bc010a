"""Lightning with its DeepSpeed strategies by name: z03_lightning_deepspeed.py deepspeed_stage_2 [32-true|bf16-true|16-mixed|bf16-mixed]"""
import sys

import lightning as L
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

strategy = sys.argv[1]
precision = sys.argv[2] if len(sys.argv) > 2 else "bf16-mixed"


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.randint(0, 20000, (384,), generator=torch.Generator().manual_seed(i))


class Module(L.LightningModule):
    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = GPT2LMHeadModel(GPT2Config(vocab_size=20000, n_embd=896, n_head=14, n_layer=9, resid_pdrop=0.1))

    def training_step(self, batch, index):
        loss = self.net(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.net(input_ids=batch, labels=batch).loss, sync_dist=True)

    def configure_optimizers(self):
        if "offload" in strategy:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(self.parameters(), lr=1e-4)
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


loader = torch.utils.data.DataLoader(Data(), batch_size=4)
trainer = L.Trainer(
    accelerator="gpu", devices=2, strategy=strategy, precision=precision, max_steps=3, limit_val_batches=2, val_check_interval=2,
    gradient_clip_val=1.0, accumulate_grad_batches=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(Module(), loader, loader)
print(torch.cuda.max_memory_allocated() >> 20)
