"""Three steps of a GPT-2 under what trains on several GPUs for its user.

torchrun --nproc-per-node 2 trainers.py hf|accelerate|lightning ddp|fsdp|fsdp2 f32|amp [MICRO]

MICRO is how many micro-batches a step has (1).
"""

import sys

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

trainer_name, strategy, precision, *rest = sys.argv[1:]
accumulation = int(rest[0]) if rest else 1
BATCH_SIZE, NUM_STEPS = 4, 3
LAYER = "GPT2Block"


class Tokens(Dataset):
    """Random tokens that are their own labels."""

    def __len__(self):
        return BATCH_SIZE * NUM_STEPS * accumulation * 2

    def __getitem__(self, index):
        ids = torch.randint(0, 50257, (384,))
        return {"input_ids": ids, "labels": ids}


def hf(model):
    """The Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    shards = {
        "fsdp": {"version": 1, "transformer_layer_cls_to_wrap": [LAYER]},
        "fsdp2": {"version": 2, "transformer_layer_cls_to_wrap": [LAYER]},
    }
    options = {}
    if strategy in shards:
        options = {"fsdp": "full_shard auto_wrap", "fsdp_config": shards[strategy]}
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=accumulation,
        max_steps=NUM_STEPS,
        bf16=precision == "amp",
        save_strategy="no",
        report_to=[],
        **options,
    )
    Trainer(model=model, args=arguments, train_dataset=Tokens()).train()


def accelerate(model):
    """A loop of its own, with clipping."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = None
    if strategy != "ddp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2 if strategy == "fsdp2" else 1,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[LAYER],
        )
    accelerator = Accelerator(
        mixed_precision="bf16" if precision == "amp" else "no",
        gradient_accumulation_steps=accumulation,
        fsdp_plugin=plugin,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loader = DataLoader(Tokens(), batch_size=BATCH_SIZE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def lightning(model):
    """Lightning's Trainer; the loss is logged over all ranks."""
    import lightning as L
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def configure_model(self):
            if strategy == "fsdp2":
                from torch.distributed.fsdp import fully_shard

                mesh = self.device_mesh["data_parallel"]
                for layer in (*self.model.transformer.h, self.model):
                    fully_shard(layer, mesh=mesh)

        def training_step(self, batch, index):
            loss = self.model(**batch).loss
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-5)

    ways = {
        "ddp": lambda: "ddp",
        "fsdp": lambda: FSDPStrategy(auto_wrap_policy={GPT2Block}),
        "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    }
    L.Trainer(
        devices=2,
        strategy=ways[strategy](),
        precision="bf16-mixed" if precision == "amp" else "32-true",
        accumulate_grad_batches=accumulation,
        max_steps=NUM_STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(Module(), DataLoader(Tokens(), batch_size=BATCH_SIZE))


torch.manual_seed(0)
{"hf": hf, "accelerate": accelerate, "lightning": lightning}[trainer_name](
    GPT2LMHeadModel(GPT2Config(loss_type="ForCausalLMLoss"))
)
