"""Two steps of one of transformers' architectures after the other: what each asks of the allocator.

architectures.py OUT.json [--only NAME/TASK,...] [--modes f32,amp,bf16] [--part I N]

Each model has two layers of a kind and otherwise the sizes of its configuration, with a vocabulary
of 6000 words at most. OUT holds for each `NAME/TASK/MODE` the sizes of all requests of a forward
and backward pass, a second one, and between them `zero_grad`, in bytes and in order; or why it
failed, which torch or transformers say.
"""

import argparse
import gc
import inspect
import json
import warnings
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

TASKS = {
    "causal": "CAUSAL_LM", "mlm": "MASKED_LM", "s2s": "SEQ_TO_SEQ_CAUSAL_LM",
    "img": "IMAGE_CLASSIFICATION", "seqcls": "SEQUENCE_CLASSIFICATION", "ctc": "CTC",
    "speech": "SPEECH_SEQ_2_SEQ", "audiocls": "AUDIO_CLASSIFICATION",
    "semseg": "SEMANTIC_SEGMENTATION", "depth": "DEPTH_ESTIMATION", "mim": "MASKED_IMAGE_MODELING",
    "video": "VIDEO_CLASSIFICATION", "backbone": "BACKBONE",
    "zeroshot": "ZERO_SHOT_IMAGE_CLASSIFICATION", "pretrain": "PRETRAINING",
}  # fmt: skip
LAYERS = {
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "num_decoder_layers", "num_encoder_layers", "depth", "num_block_layers",
}  # fmt: skip
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
TOKENS = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
INPUTS = {
    "image_token_id", "image_token_index", "video_token_id", "audio_token_id", "audio_token_index",
}  # fmt: skip
MOST_PARAMETERS = 1_200_000_000
ENTRIES = 2_000_000


def shrink(config):
    """Two layers of a kind, eight experts, a small vocabulary; in place."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            shrink(value)
        elif isinstance(value, list | tuple) and len(value) > 2:
            if name in ("layer_types", "mlp_layer_types", "layers_block_type"):
                setattr(config, name, (list(dict.fromkeys(value)) * 2)[:2])
            elif name == "depths":
                setattr(config, name, type(value)(min(depth, 2) for depth in value))
        elif isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, shrunk(name, value))


def shrunk(name, value):
    """A number of a configuration, made small if it is one that says how large the model is."""
    if name in LAYERS:
        return min(value, 2)
    if name in EXPERTS:
        return min(value, 8)
    if name == "vocab_size" and value > 6000:
        return 6000 + value % 8
    if name in TOKENS and value >= 2000:
        return 1
    return 5 if name in INPUTS and value >= 6000 else value


def first_of(config, *names, default):
    """The first of these that the configuration has, or one of its parts."""
    parts = ("vision_config", "text_config", "backbone_config")
    for name in names:
        for part in (config, *(getattr(config, part, None) for part in parts)):
            if getattr(part, name, None) is not None:
                return getattr(part, name)
    return default


def inputs_of(task, model, config):
    """What a model is given for a task."""
    text = config.get_text_config()
    words = max(min(first_of(text, "vocab_size", default=1000), 5000) - 1, 12)
    side = first_of(config, "image_size", "input_size", default=224)
    side = tuple(side)[-2:] if isinstance(side, list | tuple) else (side, side)
    channels = first_of(config, "num_channels", "in_channels", "in_chans", default=3)
    names = inspect.signature(model.forward).parameters
    made = {**of_text(task, words), **of_images(task, config, channels, side)}
    made |= of_sounds(task, config, names, words)
    if task == "video" and "pixel_values_videos" in names:
        made["pixel_values_videos"] = made.pop("pixel_values")
    if task == "zeroshot":
        length = min(64, first_of(config, "max_position_embeddings", default=64))
        made["input_ids"] = ids(4, length, words)
    return {name: value for name, value in made.items() if name in names}


def ids(num_rows, num_tokens, words):
    """Random tokens on the card."""
    return torch.randint(10, words, (num_rows, num_tokens), device="cuda")


def zeros(*shape):
    """Labels."""
    return torch.zeros(*shape, dtype=torch.long, device="cuda")


def of_text(task, words):
    """Tokens and their labels."""
    if task in ("causal", "mlm", "pretrain"):
        tokens = ids(2, 200, words)
        return {"input_ids": tokens, "labels": tokens.clone()}
    if task == "s2s":
        return {"input_ids": ids(2, 200, words), "labels": ids(2, 60, words)}
    return {"input_ids": ids(4, 100, words), "labels": zeros(4)} if task == "seqcls" else {}


def of_images(task, config, channels, side):
    """Pictures or clips."""
    samples = {"img": 4, "backbone": 4, "depth": 4, "zeroshot": 4, "semseg": 2, "mim": 2}.get(task)
    if task == "video":
        frames = first_of(config, "num_frames", "frames_per_clip", default=16)
        clip = torch.randn(1, frames, channels, *side, device="cuda")
        return {"pixel_values": clip, "labels": zeros(1)}
    if samples is None:
        return {}
    made = {"pixel_values": torch.randn(samples, channels, *side, device="cuda")}
    if task == "img":
        made["labels"] = zeros(samples)
    elif task == "semseg":
        made["labels"] = zeros(samples, *side)
    elif task == "zeroshot":
        made["return_loss"] = True
    elif task == "mim":
        patch = first_of(config, "patch_size", default=16)
        patch = patch if isinstance(patch, int) else patch[0]
        count = (side[0] // patch) * (side[1] // patch)
        made["bool_masked_pos"] = torch.ones(samples, count, dtype=torch.bool, device="cuda")
    return made


def of_sounds(task, config, names, words):
    """Waves or spectrograms."""
    if task in ("ctc", "audiocls"):
        names_of_bins = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel")
        bins = first_of(config, *names_of_bins, default=80)
        labels = ids(2, 20, words) % 20 + 1 if task == "ctc" else zeros(2)
        if "input_values" in names:
            return {"input_values": torch.randn(2, 32000, device="cuda"), "labels": labels}
        return {"input_features": torch.randn(2, 300, bins, device="cuda"), "labels": labels}
    if task == "speech":
        bins = first_of(config, "num_mel_bins", "input_feat_per_channel", default=80)
        shape = (2, bins, 3000) if "whisper" in config.model_type else (2, 300, bins)
        labels = ids(2, 40, words)
        if "input_features" in names:
            return {"input_features": torch.randn(*shape, device="cuda"), "labels": labels}
        return {"input_values": torch.randn(2, 32000, device="cuda"), "labels": labels}
    return {}


def loss_of(outputs):
    """A model's loss, or else the mean squares of all that it returns with a gradient."""
    if getattr(outputs, "loss", None) is not None:
        return outputs.loss
    found, waiting = 0, [dict(outputs)]
    while waiting:
        value = waiting.pop(0)
        if torch.is_tensor(value):
            if value.is_floating_point() and value.requires_grad:
                found = found + value.float().pow(2).mean()
        elif isinstance(value, list | tuple | dict):
            waiting = [*(value.values() if isinstance(value, dict) else value), *waiting]
    return found


def made(name, task, mode):
    """A model on the card, and its inputs."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name]()
    shrink(config)
    if task == "seqcls" and config.pad_token_id is None:
        config.pad_token_id = 0
    classes = getattr(modeling_auto, f"MODEL_FOR_{TASKS[task]}_MAPPING_NAMES")[name]
    kind = getattr(transformers, classes if isinstance(classes, str) else classes[0])
    with torch.device("meta"):
        if sum(p.numel() for p in kind(config).parameters()) > MOST_PARAMETERS:
            raise NotImplementedError("too large")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if mode == "bf16" else torch.float32)
    try:
        with torch.device("cuda"):
            model = kind(config).to("cuda").train()
    finally:
        torch.set_default_dtype(before)
    inputs = inputs_of(task, model, config)
    if mode == "bf16":
        inputs = {
            key: value.bfloat16() if torch.is_tensor(value) and value.is_floating_point() else value
            for key, value in inputs.items()
        }
    return model, inputs


def requests_of(name, task, mode):
    """The sizes that two steps ask for."""
    model, inputs = made(name, task, mode)
    torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=ENTRIES)
    try:
        for step in range(2):
            with torch.autocast("cuda", torch.bfloat16, enabled=mode == "amp"):
                loss = loss_of(model(**inputs))
            loss.backward()
            if step == 0:
                model.zero_grad()
            del loss
        events = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(None)
    return [event["size"] for event in events if event["action"] == "alloc"]


def known():
    """All architectures that have one of the tasks."""
    found = []
    for task, key in TASKS.items():
        names = getattr(modeling_auto, f"MODEL_FOR_{key}_MAPPING_NAMES")
        found += [f"{name}/{task}" for name in names if name in CONFIG_MAPPING]
    return found


def main():
    """Run all, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--modes", default="f32,amp,bf16")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    cases = options.only.split(",") if options.only else known()
    found = {}
    for case in cases[options.part[0] :: options.part[1]]:
        for mode in options.modes.split(","):
            try:
                found[f"{case}/{mode}"] = requests_of(*case.split("/"), mode)
            except Exception as error:
                found[f"{case}/{mode}"] = f"{type(error).__name__}: {error}"[:300]
                break
            finally:
                gc.collect()
                torch.cuda.empty_cache()
        print(case, flush=True)
    options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
