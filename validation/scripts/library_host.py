"""Measures the host time of libraries of parallelism: `library_host.py FILE [GROUP]`.

Each case trains a small model alone and under a library, in turns, as one of four ranks of torch's
`fake` backend, which sends nothing. With `nccl` as GROUP it is the only rank of a group, under
DistributedDataParallel. With `deepspeed` it is one of four ranks under ZeRO-3. On a GPU FILE gets
microseconds of each phase. Under `memest run --nproc-per-node 4` it gets the estimated ones without
library code, and how often each kind of it runs. `library_host.json` has both, and two measured
runs. `library_host.py fit` prints the launches that each kind takes
(`memest/estimator/hardware/work.json`).
"""

import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

SIMULATED = next((m for m in _get_current_dispatch_mode_stack() if hasattr(m, "work")), None)
NUM_WARM, NUM_STEPS = (3, 1) if SIMULATED else (6, 40)
PHASES = ("forward", "backward", "clip", "step")
WORLD, WIDTH, NUM_LAYERS = 4, 128, 6
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {
        "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 4,
    }),
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", {
        "n_embd": WIDTH, "n_layer": NUM_LAYERS, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0,
    }),
    "Bert": ("BertForMaskedLM", "BertConfig", {
        "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
    }),
}  # fmt: skip


class Counts:
    """Estimated microseconds of launches, and calls of library code, since the last reading."""

    def __init__(self):
        from memest.estimator.hardware.gpus import find_gpu
        from memest.estimator.hardware.pace import table_of
        from memest.estimator.hardware.work import IN_LAUNCHES, NUM_HOSTS

        self.table, self.kinds, self.num_hosts = table_of(find_gpu("h200")), IN_LAUNCHES, NUM_HOSTS
        self.us, self.calls, log = 0.0, Counter(), SIMULATED.work
        add = log._add

        def count(index):
            add(index)
            work = log.works[index]
            if work.kind in self.kinds and work.kind != "clip":  # clipping runs alone too
                self.calls[work.kind] += work.num_tensors
            else:
                self.us += 1e6 * self.table.host_s(work, log.events[-1] % self.num_hosts)

        log._add = count

    def read(self):
        found, self.us, self.calls = (self.us, dict(self.calls)), 0.0, Counter()
        return found


COUNTS = Counts() if SIMULATED else None


def language_model(name):
    """Return a model of transformers, and its loss."""
    torch.manual_seed(0)
    architecture, config, sizes = MODELS[name]
    config = getattr(transformers, config)(vocab_size=1000, **sizes)
    model = getattr(transformers, architecture)(config).cuda().train()
    ids = torch.randint(0, 1000, (2, 32), device="cuda")
    return model, lambda m: m(input_ids=ids, labels=ids).loss


def own_model(change=lambda model: None, convert=lambda x: x):
    """Return the model of parallel.py after `change`, and its loss."""
    import parallel

    parallel.WIDTH, parallel.HEADS, parallel.VOCABULARY = WIDTH, 4, 1024
    with torch.device("meta"):
        model = parallel.Model(layers=range(NUM_LAYERS))
    change(model)
    model.to_empty(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    ids = convert(torch.randint(0, 1000, (2, 32), device="cuda"))

    def loss(m):
        out = m(ids)
        return (out.to_local() if isinstance(out, DTensor) else out).mean(-1).mean()

    return model, loss


def tensor_parallel(model):
    import parallel

    parallel.tensor_parallel(model, init_device_mesh("cuda", (WORLD,), mesh_dim_names=("tp",)))


def replicated():
    """Return the model of parallel.py with parameters and inputs as replicated DTensors."""
    mesh = init_device_mesh("cuda", (WORLD,))

    def change(model):
        for module in model.modules():
            for name, parameter in [*module._parameters.items()]:
                if parameter is not None:
                    made = distribute_tensor(parameter.data, mesh, [Replicate()])
                    module.register_parameter(name, torch.nn.Parameter(made))

    return own_model(change, lambda x: DTensor.from_local(x, mesh, [Replicate()]))


def blocks(model):
    return [*next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))]


def fsdp2(model, **options):
    for module in (*blocks(model), model):
        fully_shard(module, **options)
    return model


def fsdp1(model, **options):
    policy = ModuleWrapPolicy({type(blocks(model)[0])})
    device = torch.cuda.current_device()
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, **options)


def zero3(model, threshold):
    """Return DeepSpeed's engine; parameters of more than `threshold` elements are gathered."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": threshold},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def cases(group):
    """Yield the name of a case, the model alone, the model under a library, and AdamW's options."""

    def under(wrap, name, **options):
        model, loss = language_model(name)
        return wrap(model, **options), loss

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wraps = {
        "fsdp2": (fsdp2, {}), "fsdp2-mixed": (fsdp2, {"mp_policy": mixed}),
        "fsdp2-keep": (fsdp2, {"reshard_after_forward": False}),
        "fsdp1": (fsdp1, {}), "fsdp1-orig": (fsdp1, {"use_orig_params": True}),
    }  # fmt: skip
    if group == "nccl":
        wraps = {"ddp": (DistributedDataParallel, {})}
    elif group == "deepspeed":
        wraps = {f"zero3-{n}": (zero3, {"threshold": n}) for n in (0, 100_000)}
    for wrap, (function, options) in wraps.items():
        for name in MODELS:
            yield f"{wrap} {name}", language_model(name), under(function, name, **options), {}
    if group == "fake":
        for options in ({"fused": True}, {"foreach": False}):
            label = f"fsdp2-{next(iter(options))} GPT2"
            yield label, language_model("GPT2"), under(fsdp2, "GPT2"), options
        yield "tensor parallel", own_model(), own_model(tensor_parallel), {}
        yield "replicated", own_model(), replicated(), {}


def stepper(model, loss, options):
    """Return a step that returns a mark before each phase and after the last."""
    is_engine = hasattr(model, "backward")  # of DeepSpeed, whose step clips
    optimizer = model if is_engine else torch.optim.AdamW(model.parameters(), **options)
    clip = getattr(model, "clip_grad_norm_", None)
    clip = clip or (lambda most: torch.nn.utils.clip_grad_norm_(model.parameters(), most))
    mark = COUNTS.read if SIMULATED else time.perf_counter

    def step():
        optimizer.zero_grad()
        torch.cuda.synchronize()
        marks = [mark()]
        made = loss(model)
        marks.append(mark())
        model.backward(made) if is_engine else made.backward()
        marks.append(mark())
        if not is_engine:
            clip(1.0)
        marks.append(mark())
        optimizer.step()
        marks.append(mark())
        return marks

    return step


def measured(marks):
    """Return the lower quartile of each phase's microseconds: other work on the core only adds."""
    rows = [[1e6 * (b - a) for a, b in itertools.pairwise(m)] for m in marks]
    each = [statistics.quantiles(column)[0] for column in zip(*rows, strict=True)]
    return dict(zip(PHASES, each, strict=True))


def run(path, group):
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    found = {}
    if SIMULATED:
        dist.init_process_group("nccl")
    elif group == "nccl":
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
        os.environ.update(place)
        dist.init_process_group("nccl", rank=0, world_size=1)
    else:
        dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    for name, *pair, options in cases(group):
        steps = [stepper(*each, options) for each in pair]
        marks = [[step() for step in steps] for _ in range(NUM_WARM + NUM_STEPS)][NUM_WARM:]
        alone, library = zip(*marks, strict=True)
        if SIMULATED:
            found[name] = [
                dict(zip(PHASES, each[-1][1:], strict=True)) for each in (alone, library)
            ]
        else:
            found[name] = [measured(alone), measured(library)]
        print(name, found[name], flush=True)
        path.write_text(json.dumps(found, indent=1), "utf-8")
    dist.destroy_process_group()


def fit(measured, simulated):
    """Print the launches of each kind: least squares of relative errors, none below zero.

    The model alone gives the speed of the host. Its measured clipping counts, as the estimate of it
    has no Python.
    """
    from memest.estimator.hardware.gpus import find_gpu
    from memest.estimator.hardware.pace import table_of
    from memest.estimator.hardware.work import IN_LAUNCHES
    from memest.validate.pace import _not_negative

    launch_us = table_of(find_gpu("h200"))._us["forward_launch"]
    rows, labels = [], []
    for name, (alone, library) in ((n, pair) for run in measured for n, pair in run.items()):
        known, counted = simulated[name]
        both = PHASES[:2]
        speed = sum(alone[p] for p in both) / sum(known[p][0] for p in both)
        for phase in PHASES:
            us, calls = counted[phase]
            more = alone[phase] / speed - known[phase][0] if phase == "clip" else 0.0
            extra = (library[phase] / speed - us - more) / launch_us
            counts = [calls.get(kind, 0) for kind in IN_LAUNCHES]
            if any(counts) and extra > 0:
                rows.append([*counts, extra])
                labels.append(f"{name} {phase}")
    counts, extra = np.array(rows)[:, :-1], np.array(rows)[:, -1:]
    factors = _not_negative(counts / extra)
    print({kind: round(float(f), 2) for kind, f in zip(IN_LAUNCHES, factors, strict=True)})
    for label, row, made in zip(labels, rows, counts @ factors, strict=True):
        print(f"{label:32} {row[-1]:8.1f} {made:8.1f} launches")


if sys.argv[1] == "fit":
    fit(**json.loads(Path(__file__).with_suffix(".json").read_text("utf-8")))
else:
    run(Path(sys.argv[1]), sys.argv[2] if sys.argv[2:] else "fake")
