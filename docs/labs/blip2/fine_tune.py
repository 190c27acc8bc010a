"""BLIP-2 captions images: a full fine-tune, its memory printed at four points of a step.

fine_tune.py [KEY=VALUE ...]        the keys are those of `cfg`
"""

import ast
import random
import sys
from pathlib import Path

import bitsandbytes
import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from PIL import Image
from torch.utils.data import DataLoader
from transformers import Blip2ForConditionalGeneration, Blip2Processor
from transformers.models.blip_2.modeling_blip_2 import Blip2EncoderLayer, Blip2QFormerLayer
from transformers.models.opt.modeling_opt import OPTDecoderLayer

cfg = {
    "model_name": "Salesforce/blip2-opt-2.7b",  # or -opt-6.7b, -flan-t5-xl, -flan-t5-xxl
    "batch_size": 16,
    "accumulate_grad_batches": 1,
    "precision": "32-true",  # or bf16-true, bf16-mixed
    "optim": "adamw",  # or sgd, adam_8bit, deepspeed_cpu
    "act_ckpt": False,
    "lr": 5e-6,
    "max_epochs": 2,
    "max_steps": -1,
    "devices": 1,
    "strategy": "auto",  # or ddp, fsdp, deepspeed_stage_2_offload
    "num_workers": 0,
    "num_train_samples": 512,
    "images": None,  # a folder of images with a text file beside each; None: random ones
    "caption_words": 24,  # of the longest random caption; with a token before or after them, 25
}
WORDS = "rice soup bread plate salad cheese bowl green sauce fresh tomato grill spoon".split()


def samples():
    """Pairs of an image and its caption."""
    if cfg["images"] is not None:
        paths = sorted(Path(cfg["images"]).glob("*.jpg"))[: cfg["num_train_samples"]]
        return [(Image.open(path), path.with_suffix(".txt").read_text()) for path in paths]
    draw = random.Random(0)
    found = []
    for index in range(cfg["num_train_samples"]):
        side = draw.randint(240, 480)
        image = Image.new("RGB", (side, 360), tuple(draw.randrange(256) for _ in range(3)))
        longest = cfg["caption_words"]
        length = longest if index % 4 == 0 else draw.randint(longest // 2, longest)
        found.append((image, " ".join(draw.choice(WORDS) for _ in range(length))))
    return found


def collate(batch):
    """Images and captions as they are; the processor pads them to the longest."""
    images, captions = zip(*batch, strict=True)
    return {"images": list(images), "captions": list(captions)}


class Captioner(L.LightningModule):
    """The model, its processor, and what a step does."""

    def __init__(self):
        super().__init__()
        self.processor = Blip2Processor.from_pretrained(cfg["model_name"])
        self.model = self.load()
        if cfg["act_ckpt"]:
            self.model.gradient_checkpointing_enable()
        self.model.train()

    def load(self):
        """All weights are trained; `precision` casts them when the training begins."""
        return Blip2ForConditionalGeneration.from_pretrained(cfg["model_name"], dtype=torch.float32)

    def training_step(self, batch, index):
        pixels = self.processor.image_processor(batch["images"], return_tensors="pt")
        texts = self.processor.tokenizer(
            batch["captions"], padding=True, truncation=True, max_length=50, return_tensors="pt"
        )
        pixels, texts = pixels.to(self.device), texts.to(self.device)
        return self.model(
            input_ids=texts["input_ids"],
            attention_mask=texts["attention_mask"],
            pixel_values=pixels["pixel_values"],
            labels=texts["input_ids"],
        ).loss

    def configure_optimizers(self):
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if cfg["optim"] == "adamw":
            return torch.optim.AdamW(parameters, lr=cfg["lr"])
        if cfg["optim"] == "sgd":
            return torch.optim.SGD(parameters, lr=cfg["lr"])
        if cfg["optim"] == "adam_8bit":
            return bitsandbytes.optim.Adam8bit(parameters, lr=cfg["lr"])
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(parameters, lr=cfg["lr"])

    def on_train_batch_start(self, batch, index):
        self.print_memory("before forward")

    def on_before_backward(self, loss):
        self.print_memory("after forward")

    def on_after_backward(self):
        self.print_memory("after backward")

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.print_memory("after optimizer step")

    def print_memory(self, phase):
        """Parameters, gradients and the optimizer's states; the rest counts as activations."""
        if self.global_step > 2:
            return
        parameters = [p for p in self.model.parameters() if p.is_cuda]
        states = self.trainer.optimizers[0].state.values()
        gib = {
            "params": sum(p.nbytes for p in parameters),
            "grads": sum(p.grad.nbytes for p in parameters if p.grad is not None),
            "optimizer": sum(
                v.nbytes for s in states for v in s.values() if torch.is_tensor(v) and v.is_cuda
            ),
        }
        allocated = torch.cuda.memory_allocated()
        gib["activations"] = allocated - sum(gib.values())
        gib |= {
            "allocated": allocated,
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
        said = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in gib.items())
        print(f"step {self.global_step}, {phase}: {said} GiB")


def strategy():
    """DDP with gradients in its buckets, FSDP by layers; others are Lightning's own by name."""
    if cfg["strategy"] == "ddp":
        return DDPStrategy(gradient_as_bucket_view=True)
    if cfg["strategy"] == "fsdp":
        return FSDPStrategy(
            auto_wrap_policy={Blip2EncoderLayer, Blip2QFormerLayer, OPTDecoderLayer}
        )
    return cfg["strategy"]


def read_cfg():
    """Take `KEY=VALUE` of the command line into `cfg`."""
    for given in sys.argv[1:]:
        key, _, value = given.partition("=")
        if key not in cfg:
            sys.exit(f"no such key: {key}; there are {', '.join(cfg)}")
        try:
            cfg[key] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            cfg[key] = value
    print(cfg)


def main(captioner=Captioner):
    """Train as `cfg` says."""
    read_cfg()
    trainer = L.Trainer(
        accelerator="gpu",
        devices=cfg["devices"],
        strategy=strategy(),
        precision=cfg["precision"],
        accumulate_grad_batches=cfg["accumulate_grad_batches"],
        max_epochs=cfg["max_epochs"],
        max_steps=cfg["max_steps"],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    loader = DataLoader(
        samples(),
        batch_size=cfg["batch_size"],
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        num_workers=cfg["num_workers"],
    )
    trainer.fit(captioner(), loader)
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
