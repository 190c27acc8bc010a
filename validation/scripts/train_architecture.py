"""Three training steps of one of transformers' architectures; prints both peaks in bytes.

train_architecture.py NAME/TASK/MODE     MODE is f32, amp (autocast to bfloat16) or bf16
"""

import sys

import architectures
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

MOST_PARAMETERS = 300_000_000


def made(name, task, mode):
    """Return the model, with two layers of a kind, and its configuration."""
    config = CONFIG_MAPPING[name]()
    architectures.shrink(config)
    if task == "seqcls" and config.pad_token_id is None:
        config.pad_token_id = 0
    key = f"MODEL_FOR_{architectures.TASKS[task]}_MAPPING_NAMES"
    classes = getattr(modeling_auto, key)[name]
    kind = getattr(transformers, classes if isinstance(classes, str) else classes[0])
    with torch.device("meta"):
        if sum(p.numel() for p in kind(config).parameters()) > MOST_PARAMETERS:
            sys.exit("too large")
    model = kind(config)
    return (model.bfloat16() if mode == "bf16" else model).cuda().train(), config


def inputs_of(task, mode, model, config):
    """Return random inputs in the dtype of the model."""
    inputs = architectures.inputs_of(task, model, config)
    if mode != "bf16":
        return inputs
    return {
        name: value.bfloat16() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def main():
    """Train with AdamW."""
    name, task, mode = sys.argv[1].split("/")
    torch.manual_seed(0)
    model, config = made(name, task, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(3):
        inputs = inputs_of(task, mode, model, config)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=mode == "amp"):
            loss = architectures.loss_of(model(**inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
