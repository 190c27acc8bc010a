"""vLLM in the process of a training script: an engine that holds memory and returns token ids.

`memest run` offers a stub of vLLM to the script and to TRL, whose GRPO and RLOO with
`vllm_mode="colocate"` make an engine in their own process.

Memory, by vLLM's source: `request_memory` (v1/worker/utils.py) empties torch's cache, and requires
`gpu_memory_utilization` of the GPU's total to be free. `determine_available_memory` (gpu_worker.py)
gives what weights and activations leave of that share to the KV cache. Both are in the caching
allocator of the script, with `enable_sleep_mode` in a pool of `CuMemAllocator`
(device_allocator/cumem.py). Its `sleep` unmaps both, copies the weights to pinned memory on level
1, and empties torch's cache; `wake_up` maps the tensors of a tag again.

The stub takes the whole share as two blocks, weights and the rest, and frees them in sleep. On a
GPU, torch's counters go on counting an engine that sleeps (vllm-project/vllm#33625).
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from memest.errors import UnsupportedError
from memest.estimator.gpu.imports import ImportHooks, StubFinder
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches, refusing
from memest.estimator.tensors.placement import CPU
from memest.estimator.tensors.storages import MemKind
from memest.estimator.versions import installed_versions
from memest.units import gib_or_mib

VERSION = "0.31.0"  # offered where vLLM is not installed: the newest that TRL 1.16 accepts
WEIGHTS, KV_CACHE = "weights", "kv_cache"  # tags of vLLM's pools (gpu_worker.py)
UTILIZATION = 0.92  # default of `gpu_memory_utilization`: vllm/config/cache.py
MAX_TOKENS = 16  # default of `SamplingParams.max_tokens`: vllm/sampling_params.py
_SERVER = 'the server has GPUs of its own: use `vllm_mode="colocate"`, or no vLLM'


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Provide the stub of vLLM; refuse TRL's client, which would wait for a server."""
    Finder(mode).install(patches)
    refusal = refusing('`vllm_mode="server"` of TRL', _SERVER)
    for name in ("trl.generation.vllm_client", "trl.extras.vllm_client"):
        hooks.after(name, lambda module: patches.set(module.VLLMClient, "__init__", refusal))


class Engine:
    """GPU memory of one vLLM engine: the model's weights and the KV cache.

    `share` is `gpu_memory_utilization`, a fraction of the GPU's memory. `weights_bytes` is 0 if
    unknown. `cache_bytes` is the KV cache's size; None: the share without the weights.
    """

    def __init__(
        self, mode: CudaSimMode, share: float, weights_bytes: int, cache_bytes: int | None
    ) -> None:
        self._mode, self._share = mode, share
        self._num_bytes = {WEIGHTS: weights_bytes, KV_CACHE: cache_bytes}
        self._held: dict[str, Tensor] = {}
        self._offloaded: Tensor | None = None

    def take(self, tags: Iterable[str]) -> None:
        """Allocate the memory of each of `tags` (`weights`, `kv_cache`) that is not allocated."""
        for tag in tags:
            if tag not in self._held and (num_bytes := self._size(tag)):
                self._held[tag] = self._allocate(tag, num_bytes)
            if tag == WEIGHTS:
                self._offloaded = None

    def _size(self, tag: str) -> int:
        size, weights = self._num_bytes[tag], self._num_bytes[WEIGHTS] or 0
        if size is not None:
            return size
        num_bytes = math.ceil(self._share * self._mode.gpu.memory_bytes) - weights
        if num_bytes <= 0:  # kv_cache_utils.py, `_check_enough_kv_cache_memory`
            raise ValueError(
                "No available memory for the cache blocks. Try increasing "
                "`gpu_memory_utilization` when initializing the engine."
            )
        return num_bytes

    def _allocate(self, tag: str, num_bytes: int) -> Tensor:
        memory, tensor = self._mode.memory, None
        try:
            tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
            return tensor
        finally:  # also where no memory was left
            index = memory.refused_id if tensor is None else memory.id_of(tensor)
            if index is not None:
                storages = memory.storages
                storages.kinds[index] = MemKind.PARAMS if tag == WEIGHTS else MemKind.BUFFERS
                storages.sites[index] = replace(storages.sites[index], module=f"vllm.LLM.{tag}")
                if self._num_bytes[tag] is None:
                    storages.shares[index] = self._share, self._num_bytes[WEIGHTS] or 0

    def sleep(self, level: int) -> None:
        """Free all GPU memory. `level` 1 copies the weights to pinned host memory, 2 drops them."""
        weights = self._held.get(WEIGHTS)
        if level == 1 and weights is not None:
            num_items = weights.numel() // torch.float16.itemsize
            self._offloaded = torch.empty(
                num_items, dtype=torch.float16, pin_memory=True, device=CPU
            )
        self._held.clear()
        del weights
        torch.cuda.empty_cache()


class SamplingParams:
    """Stub of `vllm.SamplingParams`: `n` completions of `max_tokens` tokens (None: unlimited)."""

    def __init__(self, n: int = 1, max_tokens: int | None = MAX_TOKENS, **others: Any) -> None:
        self.n, self.max_tokens = n, max_tokens
        self.logprobs: int | None = None
        vars(self).update(others)


class Options:
    """Stub of an options class without effect on memory, such as `StructuredOutputsParams`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        vars(self).update(options)


class LLM:
    """Stub of `vllm.LLM`, whose completions have the maximum length."""

    mode: CudaSimMode  # the virtual GPU, set by the finder

    def __init__(
        self, model: str, *, tokenizer: Any = None, tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = UTILIZATION, kv_cache_memory_bytes: int | None = None,
        enable_sleep_mode: bool = False, max_model_len: int | None = None, **others: Any,
    ) -> None:  # fmt: skip
        self._tokenizer, self._model, self._max_len = tokenizer, model, max_model_len
        self._can_sleep = enable_sleep_mode
        files = files_bytes(model)
        weights = (files or 0) // tensor_parallel_size
        self._engine = Engine(self.mode, gpu_memory_utilization, weights, kv_cache_memory_bytes)
        self._describe(gpu_memory_utilization, weights if files else None, kv_cache_memory_bytes)
        torch.cuda.empty_cache()
        self._engine.take((WEIGHTS, KV_CACHE))
        # vLLM copies new weights into the memory that it holds
        engine: Any = SimpleNamespace(load_weights=lambda weights: {name for name, _ in weights})
        for name in ("model", "model_runner", "driver_worker", "model_executor"):
            engine = SimpleNamespace(**{name: engine})
        engine.reset_prefix_cache = self.reset_prefix_cache
        self.llm_engine = engine

    def _describe(self, share: float, weights: int | None, cache: int | None) -> None:
        num_bytes = math.ceil(share * self.mode.gpu.memory_bytes)
        source = f"vLLM's `request_memory`, {share:g} of the GPU"
        if cache is not None:
            num_bytes, source = cache + (weights or 0), "`kv_cache_memory_bytes` and the weights"
        parts = "weights, KV cache, activations and CUDA graphs"
        if weights is not None:
            parts = f"weights of {gib_or_mib(weights)}, as their files, KV cache and all else"
        text = f"assumed: `vllm.LLM` holds {gib_or_mib(num_bytes)} ({source}): {parts}"
        if self._can_sleep:
            text += "; asleep, it holds nothing"
        self.mode.notes.add(text)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return refusing(f"`vllm.LLM.{name}`")

    def sleep(self, level: int = 1, **others: Any) -> None:
        """Free the engine's GPU memory, if sleep mode is enabled; `level` as in `Engine.sleep`."""
        if self._can_sleep:
            self._engine.sleep(level)
        else:
            self.mode.notes.add("`vllm.LLM.sleep` frees nothing without `enable_sleep_mode`")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory of `tags` again; by default `weights` and `kv_cache`."""
        self._engine.take(tags or (WEIGHTS, KV_CACHE))

    def collective_rpc(self, method: Any, *args: Any, **others: Any) -> list[None]:
        """Return [None]: a worker's `method`, such as "reload_weights", allocates no memory."""
        if not isinstance(method, str):
            raise UnsupportedError("a function for vLLM's workers cannot be simulated")
        return [None]

    def reset_prefix_cache(self, *args: Any, **others: Any) -> bool:
        return True

    def get_tokenizer(self) -> Any:
        if self._tokenizer is None or isinstance(self._tokenizer, str):
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._tokenizer or self._model)
        return self._tokenizer

    def generate(
        self, prompts: Any = None, sampling_params: Any = None, *args: Any, **others: Any
    ) -> list[Any]:
        """Return `n` completions of `max_tokens` tokens for each of `prompts` (texts or token ids).
        `sampling_params` has both numbers (None: defaults), for all prompts or one per prompt."""
        inputs = others["prompt_token_ids"] if prompts is None else prompts
        is_one = isinstance(inputs, str | Mapping) or (inputs and isinstance(inputs[0], int))
        rows = [inputs] if is_one else list(inputs)
        sampling = sampling_params or SamplingParams()
        row_params = sampling if isinstance(sampling, Sequence) else [sampling] * len(rows)
        return [self._complete(row, params) for row, params in zip(rows, row_params, strict=True)]

    def chat(self, messages: Any, sampling_params: Any = None, *args: Any, **others: Any) -> Any:
        """Return completions of a conversation (a list of messages), or of each one in a list."""
        rows = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        text = self.get_tokenizer().apply_chat_template
        prompts = [text(row, add_generation_prompt=True, tokenize=False) for row in rows]
        return self.generate(prompts, sampling_params)

    def _complete(self, prompt: Any, params: Any) -> Any:
        ids = self._ids_of(prompt)
        room = None if self._max_len is None else max(1, self._max_len - len(ids))
        lengths = [length for length in (params.max_tokens, room) if length is not None]
        if not lengths:
            raise UnsupportedError(
                "`vllm.LLM` generates without a limit",
                hint="give `max_tokens` in SamplingParams, or `max_model_len`",
            )
        self.mode.notes.add(
            f"assumed: each completion of `vllm.LLM` has all of its {min(lengths)} tokens "
            "(`max_tokens`); its time is not in the estimated time"
        )
        token = ids[len(ids) // 2] if ids else 0
        outputs = [_completion(i, token, min(lengths), params.logprobs) for i in range(params.n)]
        return SimpleNamespace(
            prompt=prompt if isinstance(prompt, str) else None, prompt_token_ids=ids,
            prompt_logprobs=None, outputs=outputs, finished=True,
        )  # fmt: skip

    def _ids_of(self, prompt: Any) -> list[int]:
        if isinstance(prompt, Mapping):
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, str):
            prompt = self.get_tokenizer()(prompt)["input_ids"]
        return [int(token) for token in prompt]


def _completion(index: int, token: int, length: int, logprobs: int | None) -> Any:
    """Return completion number `index`: `length` tokens with the id `token`, and log probabilities.
    `logprobs` is the requested number of log probabilities per token; None leaves them out."""
    rows = None
    if logprobs is not None:
        top_k = {token + i: SimpleNamespace(logprob=-1.0, rank=i + 1) for i in range(logprobs + 1)}
        rows = [top_k] * length
    return SimpleNamespace(
        index=index, text="", token_ids=[token] * length, logprobs=rows, cumulative_logprob=-length,
        finish_reason="length", stop_reason=None,
    )  # fmt: skip


def files_bytes(model: str) -> int | None:
    """Return bytes of the weights of `model`, a folder or cached Hub name; None if missing."""
    folder = Path(model) if model else None
    if folder is not None and not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(model, local_files_only=True))
        except Exception:  # several kinds of errors, all of which mean that there is no cache
            return None
    files = () if folder is None else (*folder.glob("*.safetensors"), *folder.glob("*.bin"))
    return sum(path.stat().st_size for path in files) or None


class Finder(StubFinder):
    """Import finder of the vLLM stub. If vLLM is installed or imported, all importers get the stub.
    Otherwise only the script and TRL get it."""

    def __init__(self, mode: CudaSimMode) -> None:
        self._mode = mode
        self._is_installed = PathFinder.find_spec("vllm") is not None
        engine = type("LLM", (LLM,), {"mode": mode, "__module__": "vllm"})
        params_module = {"SamplingParams": SamplingParams} | dict.fromkeys(
            ("StructuredOutputsParams", "GuidedDecodingParams", "RequestOutputKind"), Options
        )
        self._contents: dict[str, dict[str, Any]] = {
            "vllm": {"LLM": engine, "SamplingParams": SamplingParams, "RequestOutput": Options},
            "vllm.sampling_params": params_module,
            "vllm.lora.request": {"LoRARequest": Options},
            "vllm.inputs": {"TokensPrompt": dict},
        }

    def serves(self, fullname: str) -> bool:
        """Return whether an import of the module `fullname` gets a stub. Only `vllm` and its
        submodules have stubs. If vLLM is installed or already imported, each importer gets the
        stub. Otherwise only the script and TRL get the stub."""
        if fullname.partition(".")[0] != "vllm":
            return False
        if self._is_installed or "vllm" in sys.modules:
            return True
        frame = self.importing_frame()
        if frame is None:
            return False
        importer = frame.f_globals.get("__name__", "").partition(".")[0]
        return importer == "trl" or self._mode.attribution.lines.script_frame(frame) is frame

    def exec_module(self, module: ModuleType) -> None:
        """Fill a stub module; names that the stub lacks raise when they are called."""
        name = module.__name__
        vars(module).update(self._contents.get(name, {}))
        if name == "vllm":
            vars(module)["__version__"] = installed_versions("vllm").get("vllm", VERSION)

        def missing(attribute: str) -> Any:
            if attribute.startswith("_"):
                raise AttributeError(attribute)
            return type(attribute, (), {"__init__": refusing(f"`{name}.{attribute}`")})

        vars(module)["__getattr__"] = missing
