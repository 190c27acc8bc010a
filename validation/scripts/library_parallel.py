"""Training by the parallelisms of transformers, accelerate, PEFT and DeepSpeed on a few ranks.

torchrun --nproc-per-node 4 library_parallel.py CASE

`dconf-*` takes transformers' DistributedConfig, `acc-*` accelerate's ParallelismConfig, `hf-*` the
Trainer, and `ds-*` `deepspeed.initialize`. A dimension without a number has all ranks: `acc-shard`,
`acc-shard2-rep2`. The versions are those of measured_parallel.json.
"""

from __future__ import annotations

import os
import re
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig

CASE = sys.argv[1]
PARTS = CASE.split("-")
STEPS, BATCH, LENGTH = int(os.environ.get("STEPS", "4")), 4, 512


def dimensions():
    """`acc-shard2-tp2` -> {"shard": 2, "tp": 2}; all ranks where there is no number."""
    world, found = int(os.environ["WORLD_SIZE"]), {}
    for part in PARTS[1:]:
        match = re.fullmatch(r"(shard|rep|cp|tp|fsdp|ep)(\d*)", part)
        if match:
            found[match[1]] = int(match[2] or world)
    return found


def config(**more):
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        **more,
    )


def experts():
    return Qwen3MoeConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
        max_position_embeddings=2048,
    )


def saved(model_config):
    path = f"/tmp/ckpt-{CASE}"
    if int(os.environ["RANK"]) == 0 and not os.path.exists(path):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16).save_pretrained(path)
    dist.barrier()
    return path


def batches(device):
    torch.manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(0, 32000, (BATCH, LENGTH), device=device)
        yield {"input_ids": ids, "labels": ids}


def native():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    sizes, found = {}, dimensions()
    if "fsdp" in found:
        sizes["fsdp_size"] = found["fsdp"]
    if "tp" in found:
        sizes |= {"tp_size": found["tp"], "tp_plan": "auto"}
    if "ep" in found:
        sizes |= {"tp_size": found["ep"], "enable_expert_parallel": True}
    path = saved(experts() if "moe" in PARTS else config())
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, distributed_config=DistributedConfig(**sizes)
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    for batch in batches(torch.device("cuda", rank)):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


def accelerated():
    names = {"shard": "dp_shard_size", "cp": "cp_size", "rep": "dp_replicate_size"}
    found = dimensions()
    parallelism = ParallelismConfig(**{names[name]: size for name, size in found.items()})
    plugin = None
    if "shard" in found or "cp" in found:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            reshard_after_forward=True,
            activation_checkpointing="ckpt" in PARTS,
        )
    accelerator = Accelerator(
        mixed_precision="bf16", parallelism_config=parallelism, fsdp_plugin=plugin
    )
    model = LlamaForCausalLM(config(attn_implementation="sdpa"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    for batch in batches(accelerator.device):
        if "cp" in found:
            positions = torch.arange(LENGTH, device=accelerator.device)[None].repeat(BATCH, 1)
            labels = batch["labels"].roll(-1, 1)
            buffers = [batch["input_ids"], positions, labels]
            with accelerator.maybe_context_parallel(
                buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
            ):
                loss = model(
                    input_ids=batch["input_ids"],
                    position_ids=positions,
                    shift_labels=labels,
                    labels=labels,
                ).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            continue
        accelerator.backward(model(**batch).loss)
        if "clip" in PARTS:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


def trained():
    more = {}
    if "fsdp2" in PARTS:
        more = {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {
                "version": 2,
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "activation_checkpointing": "ckpt" in PARTS,
            },
        }
    zero = next((part[-1] for part in PARTS if part.startswith("zero")), None)
    if zero:
        more["deepspeed"] = {
            "zero_optimization": {"stage": int(zero)},
            "bf16": {"enabled": True},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
        }
    torch.manual_seed(0)
    model = LlamaForCausalLM(config())
    if "lora" in PARTS:
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    data = [{"input_ids": torch.randint(0, 32000, (LENGTH,))} for _ in range(64)]
    data = [{**each, "labels": each["input_ids"]} for each in data]
    arguments = TrainingArguments(
        "/tmp/trained",
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        bf16=True,
        gradient_accumulation_steps=2 if "acc" in PARTS else 1,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        ddp_find_unused_parameters=False,
        torch_compile="compile" in PARTS,
        **more,
    )
    Trainer(model, arguments, train_dataset=data).train()


def initialized():
    import deepspeed

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config())
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": int(PARTS[1][-1])},
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for batch in batches(torch.device("cuda", rank)):
        engine.backward(engine(**batch).loss)
        engine.step()
    torch.cuda.synchronize()


if __name__ == "__main__":
    {"dconf": native, "acc": accelerated, "hf": trained, "ds": initialized}[PARTS[0]]()
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(CASE, os.environ["RANK"], *peaks)
    if dist.is_initialized():
        dist.destroy_process_group()
