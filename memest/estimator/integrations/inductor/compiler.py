"""Inductor without a GPU: its graphs are on `cuda`, and no pass runs a kernel.

Fake tensors are on `cuda` in Python and on `meta` in C++. Without a GPU, C++ refuses autograd for
tensors on `cuda`: `InputMetadata` reads the current stream. Operators above autograd take CUDA's
decisions (`ops/autograd_ops.py`).
"""

import copy
import importlib
import inspect
import linecache
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.abc import InspectLoader
from struct import unpack_from
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memest.errors import UnsupportedError
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.hardware.work import fused_work, rate_of
from memest.estimator.ops.attention import cudnn_output
from memest.estimator.ops.autograd_ops import CASTS
from memest.estimator.ops.convolution import convolution_format
from memest.estimator.tensors.known_values import KnownValues, ValueUnknown
from memest.estimator.tensors.patches import Patches, setting
from memest.estimator.tensors.placement import CPU, GPU, INSIDE, META, storage_key
from memest.estimator.versions import allows_tf32, simulated
from memest.units import round_up

_DEVICE = torch.ops.prim.device.default
_ATTENTION = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_ENCODER_LAYER = torch.ops.aten._transformer_encoder_layer_fwd.default


def install_fakes(patches: Patches) -> None:
    """Make fake tensors of the GPU have device `meta` in C++, and `cuda` in Python."""
    from torch._subclasses import fake_tensor

    kind: Any = fake_tensor.FakeTensor
    make, dispatch = kind.__new__, kind.__torch_dispatch__.__func__  # originals
    handlers: Any = fake_tensor._DISPATCH_META_HANDLERS

    def new(cls: Any, mode: Any, elem: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        return make(cls, mode, elem, _in_c(torch.device(device)), *args, **kwargs)

    def device(tensor: Any) -> torch.device:
        in_kernel = tensor.fake_mode.in_kernel_invocation
        return META if in_kernel else fake_device(tensor)

    def fake_device(tensor: Any) -> torch.device:
        fake: torch.device = vars(tensor)["fake_device"]
        return GPU.device if fake.type == "meta" else fake

    def set_fake_device(tensor: Any, value: torch.device) -> None:
        vars(tensor)["fake_device"] = _in_c(value)

    def device_in_c(args: Any) -> torch.device:
        in_kernel = args[0].fake_mode.in_kernel_invocation
        return META if in_kernel else vars(args[0])["fake_device"]

    def torch_dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return device_in_c(args)
        return dispatch(cls, func, types, args, kwargs or {})

    patches.set(kind, "__new__", staticmethod(new))
    patches.set(kind, "__torch_dispatch__", classmethod(torch_dispatch))
    patches.set(kind, "device", property(device, kind.device.fset))
    patches.set(kind, "fake_device", property(fake_device, set_fake_device))
    no_gpu = property(lambda mode: True)  # `torch.tensor` makes its data on the host first
    patches.set(fake_tensor.FakeTensorMode, "avoid_device_init", no_gpu)
    patches.set_item(handlers, _DEVICE, device_in_c)
    _install_op_rules(patches)


def encoder_layer_like(fake_mode: Any, func: Any, source: Tensor, *args: Any) -> Tensor:
    """Return a fake tensor like `source` as the result of `func`, which has no meta kernel."""
    with fake_mode:
        return torch.empty_like(source)


def _install_op_rules(patches: Patches) -> None:
    """Add the fake result of the encoder layer. Give outputs of cuDNN's attention the strides of
    the query, as torch 2.8 and later do, if such a release is simulated with an older one."""
    from torch import _meta_registrations
    from torch._subclasses.fake_impls import op_implementations_dict

    patches.set_item(op_implementations_dict, _ENCODER_LAYER, encoder_layer_like)
    meta_kernel = _meta_registrations.meta__scaled_dot_product_cudnn_attention
    is_older = "alloc_with_matching_layout" not in meta_kernel.__code__.co_names
    if is_older and simulated().version >= (2, 8):
        patches.set_item(op_implementations_dict, _ATTENTION, attention_as_on_cuda)


def attention_as_on_cuda(fake_mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return fake results of attention by `func`; the first has the strides of the query."""
    with in_kernel_invocation_manager(fake_mode):
        outputs = cudnn_output(args, func(*args, **kwargs))
    return fake_mode.wrap_meta_outputs_with_default_device_logic(outputs, func, args, None)


def _in_c(device: torch.device) -> torch.device:
    return META if device.type == "cuda" else device


aten = torch.ops.aten

EAGERLY = "`torch.compile` ran {name} as it is written, which keeps more temporaries: {why}"


class NotSimulated(UnsupportedError):
    """Error: the installed compiler lacks what its simulation needs, a private name or Triton."""


@contextmanager
def as_the_compiler(mode: CudaSimMode) -> Iterator[None]:
    """Make Inductor compile for the virtual GPU within the block."""
    with warnings.catch_warnings(action="ignore"):  # torch's own warnings
        from torch._inductor import config

        patches = Patches()
        try:
            _install(patches, mode)
            _install_contexts(patches, mode)
            _install_padding(patches, mode)
            install_fakes(patches)
        except (AttributeError, ImportError, KeyError) as error:
            patches.undo()
            raise NotSimulated(f"torch {torch.__version__} lacks {error}", hint="") from None
    try:
        with (
            setting(CASTS, "_casts", {}),
            setting(INSIDE, "compiles", True),
            config.patch(compile_threads=1, force_disable_caches=True),
            nullcontext() if is_estimated() else config.patch(shape_padding=False),
            warnings.catch_warnings(action="ignore"),
            setting(logging.getLogger("torch._inductor"), "disabled", True),  # the report has them
        ):
            yield
    finally:
        patches.undo()


def _install(patches: Patches, mode: CudaSimMode) -> None:
    from torch import _ops
    from torch._dynamo import utils
    from torch._inductor import async_compile, compile_fx
    from torch._inductor.codegen import triton_utils
    from torch._subclasses import fake_tensor
    from torch.fx.experimental import proxy_tensor
    from torch.utils import _triton

    @patches.wrap(_ops, "resolve_key")
    def key_of(resolve: Any, op: Any, key: Any) -> Any:
        """Return the dispatch key of the kernel of `op` that runs for the dispatch key `key`.
        The function `resolve`, torch's own, decides in all cases but one. In that case, `key` is
        AutogradMeta, C++ decomposes `op`, and `op` has no meta kernel. Then return
        CompositeImplicitAutograd, the key of the decomposition."""
        keys = torch._C.DispatchKey
        if key == keys.AutogradMeta and isinstance(op, _ops.OpOverload):  # others call operators
            has_kernel = partial(torch._C._dispatch_has_kernel_for_dispatch_key, op._name)
            if has_kernel("CompositeImplicitAutograd") and not has_kernel("Meta"):
                return keys.CompositeImplicitAutograd
        return resolve(op, key)

    @patches.wrap(compile_fx, "_recursive_joint_graph_passes")
    def on_gpu_passes(passes: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        place_on_gpu(graph)
        return passes(graph, *args, **kwargs)

    def on_gpu(graph: Any, inputs: Any, **options: Any) -> Any:
        return _lower(mode, graph, inputs, options)

    @patches.wrap(compile_fx, "compile_fx")
    def compile_graph(whole: Any, *args: Any, inner_compile: Any = on_gpu, **options: Any) -> Any:
        return whole(*args, inner_compile=inner_compile, **options)

    @contextmanager
    def with_constants_on_the_gpu() -> Iterator[Any]:
        """Create a graph's constants on the virtual GPU within the block. Replace torch's
        `unset_fake_temporarily`, and yield the same as it: the `FakeTensorMode` that is turned off
        within the block, or None if none was on."""
        with unset_fake() as fake_mode, mode, _Puts():  # type: ignore[no-untyped-call]
            yield fake_mode

    unset_fake = vars(proxy_tensor)["unset_fake_temporarily"]
    guards: Any = torch._C._dynamo.guards
    triton = importlib.import_module("triton")
    utils.__dict__.setdefault("triton", triton)  # Inductor imports it there if there is CUDA
    patches.set(proxy_tensor, "unset_fake_temporarily", with_constants_on_the_gpu)
    if isinstance(vars(triton_utils).get("AttrsDescriptorWrapper"), type):  # Triton is a stub
        patches.set(triton_utils, "AttrsDescriptorWrapper", lambda *args, **kwargs: {})
    patches.set(_triton, "triton_hash_with_backend", lambda: "virtual")
    patches.set(fake_tensor, "init_gpu_context", lambda device: None)  # allocates on the GPU
    patches.set(
        async_compile.AsyncCompile, "triton",
        lambda self, name, source, *args, **options: Kernel(name, source, mode),
    )  # fmt: skip
    patches.set(
        torch._C, "_conv_determine_backend_memory_format",
        lambda tensor, weight, backend: convolution_format(tensor, weight),
    )  # fmt: skip

    patches.set(guards, "_empty_strided_cuda", partial(_empty_cuda, mode))
    patches.set(guards, "copy_if_misaligned", lambda tensor: tensor)


def _empty_cuda(mode: CudaSimMode, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    """Return a new buffer on the GPU with unknown values, which a kernel will write."""
    buffer = torch.empty_strided(size, stride, dtype=dtype, device="cuda")
    mode.values.drop(storage_key(buffer))
    return buffer


def _install_contexts(patches: Patches, mode: CudaSimMode) -> None:
    """Make Inductor fold constants on the host, and wait for collectives on the virtual GPU."""
    from torch._inductor.fx_passes import joint_graph
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    folder: Any = joint_graph.UniformValueConstantFolder
    patches.within(folder, "run", lambda self: _constants_on_the_host(self.module))
    if hasattr(folder, "_add_peephole_patterns"):
        patches.within(folder, "_add_peephole_patterns", lambda self: _OnHost())
    patches.within(  # for a graph's arguments
        AsyncCollectiveTensor, "trigger_wait",
        lambda pending: mode if type(pending.elem) is Tensor else nullcontext(),
    )  # fmt: skip


def _lower(mode: CudaSimMode, graph: Any, inputs: Any, options: Any) -> Any:
    """Return the function that Inductor compiles from an FX `graph`. `inputs` and `options` are
    arguments of `compile_fx_inner`. A backward can be compiled when it first runs. If Inductor
    fails then, warn, and return the uncompiled function `graph.forward`. If Inductor fails while a
    frame is being compiled (`INSIDE.compiles`), raise its error."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor import compile_fx

    if INSIDE.compiles:
        place_on_gpu(graph)
        follow = _follow_values(mode.values, graph)
        compiled = compile_fx.compile_fx_inner(graph, inputs, **options)
        if hasattr(compiled, "current_callable"):
            compiled.current_callable = follow(compiled.current_callable)
        return compiled
    hooks = mode.attribution.modules.without_hooks
    try:
        with _disable_current_modes(), as_the_compiler(mode), hooks():
            return _lower(mode, graph, inputs, options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        mode.guesses.warn(EAGERLY.format(name="a backward", why=why(error)))
        return make_boxed_func(graph.forward)


class _Name(str):
    """Name of an FX node; the type distinguishes it from a string among a node's arguments."""


def _follow_values(values: KnownValues, graph: Any) -> Callable[[Any], Any]:
    """Return a decorator for the function that was compiled from the FX `graph`. The decorated
    function calls the compiled one. Then it stores the values of integer and boolean results in
    `values`, since later shapes can depend on these values. They are computed on the CPU by the
    nodes of `graph`, if the values of the inputs are known."""
    from torch.fx.node import map_arg

    def named(value: Any) -> Any:
        return map_arg(value, lambda node: _Name(node.name))

    nodes = {n.name: (n.op, n.target, named(n.args), named(n.kwargs)) for n in graph.graph.nodes}
    inputs = [name for name, (op, *_) in nodes.items() if op == "placeholder"]
    ((results,),) = (args for op, _, args, _ in nodes.values() if op == "output")

    def decorate(call: Any) -> Any:
        def call_and_store(arguments: Any) -> Any:
            is_guessed = values.is_guessed(arguments)
            node_values = {
                n: values.value_of(v) if isinstance(v, Tensor) else v
                for n, v in zip(inputs, arguments, strict=False)
            }
            outputs = call(arguments)
            for name, tensor in zip(results, outputs, strict=False):
                is_tensor = isinstance(name, _Name) and isinstance(tensor, Tensor)
                if is_tensor and not tensor.is_floating_point() and values.may_hold(tensor):
                    errors = (ValueUnknown, NotImplementedError, RuntimeError)
                    with suppress(*errors), _disable_current_modes():
                        values.adopt_like(tensor, _value(values, nodes, node_values, name))
                        if is_guessed:
                            values.guessed.add(storage_key(tensor))
            return outputs

        return call_and_store

    return decorate


def _value(values: KnownValues, nodes: Any, node_values: dict[str, Any], name: str) -> Any:
    """Return the value of the graph's node `name`, computed from the nodes it reads. `nodes` has
    (op, target, args, kwargs) of each node by name. `node_values` caches values by node name;
    `values` runs operators on the CPU. `ValueUnknown` if an input's value is unknown."""
    from torch.fx.node import map_aggregate

    def value_of(value: Any) -> Any:
        return _value(values, nodes, node_values, value) if isinstance(value, _Name) else value

    if name not in node_values:
        op, func, args, kwargs = nodes[name]
        if op != "call_function":
            raise ValueUnknown(name)
        args, kwargs = map_aggregate((args, kwargs), value_of)
        is_op = isinstance(func, torch._ops.OpOverload)
        node_values[name] = values.compute(func, args, kwargs) if is_op else func(*args, **kwargs)
    if node_values[name] is None:
        raise ValueUnknown(name)
    return node_values[name]


class _Puts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that runs `prims.device_put` as `Tensor.to`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prims.device_put.default:
            return args[0].to(args[1])
        return func(*args, **(kwargs or {}))


class _OnHost(TorchFunctionMode):
    """Function mode that makes tensors on the host, because Inductor reads their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = CPU
        return func(*args, **kwargs)


def place_on_gpu(graph: Any) -> None:
    """Replace device `meta` by the GPU in the arguments of all nodes of an FX `graph`."""
    _set_devices(graph.graph.nodes, lambda device: GPU.device if device.type == "meta" else device)
    graph.recompile()


def _set_devices(nodes: Iterable[Any], choose: Callable[[torch.device], torch.device]) -> None:
    """Replace each device in the arguments of the FX `nodes` by `choose(device)`."""
    from torch.fx.node import map_aggregate

    def replace_device(value: Any) -> Any:
        return choose(value) if isinstance(value, torch.device) else value

    for node in nodes:
        node.args = map_aggregate(node.args, replace_device)
        node.kwargs = map_aggregate(node.kwargs, replace_device)


@contextmanager
def _constants_on_the_host(graph: Any) -> Iterator[None]:
    """Put constants of the FX `graph` on the host within the block, where Inductor folds them."""
    puts = torch.ops.prims.device_put.default
    constants = (aten.full.default, aten.scalar_tensor.default, puts)
    constant_nodes = [node for node in graph.graph.nodes if node.target in constants]
    arguments = [(node, node.args, node.kwargs) for node in constant_nodes]
    _set_devices(constant_nodes, lambda device: CPU)
    yield
    for node, args, kwargs in arguments:
        node.args, node.kwargs = args, kwargs


def why(error: Exception) -> str:
    """Return one line with the type and the message of the innermost cause of `error`."""
    error = getattr(error, "inner_exception", error)
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    cause_line = next((line for line in lines if ": got " in line), lines[0])
    _, _, cause = cause_line.rpartition(": got ")  # `X: got Y`, of errors of fake tensors
    return f"{type(error).__name__}: {cause[:200]}"


class Kernel:
    """Triton kernel that Inductor has generated as Python `source`; a run computes no values.

    The first run times several launch configs (`benchmark_gpu`, `bench` of `CachingAutotuner`).
    The fastest config is cached by the source (autotune_cache.py), for graphs compiled later.
    """

    def __init__(self, name: str, source: str, mode: CudaSimMode) -> None:
        self.name = name
        self._mode = mode
        self._declared = declaration = Declaration.load(source)
        # the fastest launch is unknown: assume the first config
        configs = declaration.configs[:1] if source in mode.timed else declaration.configs
        try:
            self._num_configs_to_time = len(timed_configs(declaration, configs, mode.gpu))
        except Exception as error:  # of Triton, which compiles the kernel to count registers
            self._num_configs_to_time = len(configs)
            note = "`torch.compile`: smaller blocks of reductions are not timed"
            mode.notes.add(f"{note}: {why(error)}")
        self._source = source

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Record a launch. The first run also allocates what the timing of configs allocates."""
        tensors = [value for value in args if isinstance(value, Tensor)]
        pairs = zip(tensors, self._declared.names, strict=False)
        updated = [tensor for tensor, name in pairs if name.startswith("in_out")]
        self._mode.work.add(fused_work([*tensors, *updated]))  # those are read and written
        outputs = [tensors[i] for i in self._declared.changes if i < len(tensors)]
        for tensor in outputs:
            self._mode.values.drop(storage_key(tensor))
        num_configs = self._num_configs_to_time
        self._num_configs_to_time = 0  # Inductor then launches the fastest one
        if num_configs > 1:
            self._mode.timed[self._source] = True
            for _ in range(num_configs):
                self._time_config(outputs)

    def _time_config(self, outputs: list[Tensor]) -> None:
        """Allocate as the timing of one config does: each call copies `outputs`, which it writes.
        `benchmark_gpu` calls the kernel once, makes a buffer that clears the L2 cache, and calls
        the kernel again, several times, before it frees the buffer."""
        budget = float(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
        if not self._declared.saves_memory:
            budget = math.inf
        sources = []
        for tensor in outputs:  # others are copied to the host
            if tensor.nbytes <= budget:
                sources.append(tensor)
                budget -= tensor.nbytes
        copies = [tensor.clone() for tensor in sources]
        del copies
        cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        l2_buffer = torch.empty(cache_bytes, dtype=torch.uint8, device="cuda")
        copies = [tensor.clone() for tensor in sources]
        del copies, l2_buffer


@dataclass(slots=True)
class Declaration:
    """Arguments of the decorators of a Triton kernel in the source that Inductor generates."""

    function: Any = None  # function decorated with `triton.jit`
    configs: Sequence[Any] = (None,)  # ways to launch it
    size_hints: Mapping[str, int] = field(default_factory=dict)
    triton_meta: Mapping[str, Any] = field(default_factory=dict)
    inductor_meta: Mapping[str, Any] = field(default_factory=dict)
    is_reduction: bool = False

    @property
    def names(self) -> list[str]:
        """Names of the tensor arguments; those that are read and written begin with `in_out`."""
        signature = self.triton_meta.get("signature", {})
        keys = [key for key, kind in signature.items() if str(kind)[:1] == "*"]
        names = list(inspect.signature(getattr(self.function, "fn", self.function)).parameters)
        return [names[key] if isinstance(key, int) else key for key in keys]  # int in torch 2.5

    @property
    def changes(self) -> list[int]:
        """Positions of the tensor arguments that the kernel writes."""
        changed, names = self.inductor_meta.get("mutated_arg_names", ()), self.names
        return [names.index(name) for name in changed if name in names]

    @property
    def saves_memory(self) -> bool:
        """True in backward and inference: copies for timing that raise the peak go to the host.

        `CachingAutotuner.copy_args_to_cpu_if_needed`, from torch 2.6 on.
        """
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        has_copies = hasattr(CachingAutotuner, "copy_args_to_cpu_if_needed")
        return has_copies and bool(self.inductor_meta.get("optimize_mem", True))

    @classmethod
    def load(cls, source: str) -> "Declaration":
        """Execute a kernel's Python `source`; return the arguments of its decorators."""
        from torch._inductor.runtime import triton_helpers, triton_heuristics

        declaration = cls()

        def cached_autotune(
            size_hints: Any, configs: Any, triton_meta: Any, heuristic_type: Any, **options: Any
        ) -> Any:
            is_by_name = isinstance(size_hints, Mapping)  # a list before torch 2.6
            declaration.size_hints = size_hints if is_by_name else {"x": (size_hints or [1])[0]}
            declaration.configs, declaration.triton_meta = configs, triton_meta
            declaration.inductor_meta = options["inductor_meta"]
            declaration.is_reduction = heuristic_type.name == "REDUCTION"

            def decorate(function: Any) -> Any:
                declaration.function = function
                return function

            return decorate

        triton: Any = vars(triton_heuristics)["triton"]
        patches = Patches()
        replacements = {"Config": _Config, "InductorConfig": _Config}
        patches.set_all(replacements | {"cached_autotune": cached_autotune}, triton_heuristics)
        patches.set(triton, "Config", _Config)
        patches.set(triton_helpers, "set_driver_to_gpu", lambda: None)
        try:
            _load(source)
        finally:
            patches.undo()
        return declaration


def timed_configs(kernel: Declaration, configs: Sequence[Any], gpu: Gpu) -> list[Any]:
    """Return configs that Inductor times: `configs`, some also with half the reduction block."""
    timed = list(configs)
    for config in timed:
        if is_scaled(kernel, config, gpu):
            blocks = reduction_blocks(config)
            largest = max(blocks, key=lambda name: blocks[name])
            smaller = copy.copy(config)
            smaller.kwargs = config.kwargs | {largest: blocks[largest] // 2}
            if all(vars(smaller) != vars(other) for other in timed):
                timed.append(smaller)
    return timed


def is_scaled(kernel: Declaration, config: Any, gpu: Gpu) -> bool:
    """Return whether Inductor also times `config` with half its reduction block: for a reduction
    whose registers per thread keep the GPU below full occupancy."""
    meta = kernel.inductor_meta
    if not kernel.is_reduction or meta.get("persistent_reduction"):
        return False
    device: Any = torch.cuda.get_device_properties(0)
    registers, num_sms = device.regs_per_multiprocessor, device.multi_processor_count
    blocks = -(-kernel.size_hints["x"] // config.kwargs.get("XBLOCK", 1))
    reduction_size = math.prod(reduction_blocks(config).values())
    if reduction_size <= 64 or blocks <= num_sms or not meta.get("dynamic_scale_rblock", True):
        return False
    # the source is `_dynamic_scale_rblock` (triton_heuristics.py), as is the bound of 64
    per_thread = num_registers(kernel, config, gpu)
    per_block = per_thread * 32 * config.num_warps
    resident_blocks = max(registers // max(per_block, 1), 1) * num_sms
    has_low_occupancy = per_thread > registers // device.max_threads_per_multi_processor
    return has_low_occupancy and blocks > resident_blocks


def reduction_blocks(config: Any) -> dict[str, int]:
    """Return {name: elements} of the blocks of `config` along dimensions that are reduced."""
    return {name: size for name, size in config.kwargs.items() if name.startswith("R")}


def num_registers(kernel: Declaration, config: Any, gpu: Gpu) -> int:
    """Return the registers per thread of `kernel` as Triton compiles it with `config` for `gpu`.

    Raises:
        NotSimulated: Triton is not installed.
    """
    if not hasattr(kernel.function, "cache_key"):
        raise NotSimulated("Triton, which counts registers, is not installed", hint="")
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget
    meta = kernel.triton_meta
    signature = {n: "constexpr" if n in config.kwargs else k for n, k in meta["signature"].items()}
    constants = {**config.kwargs, **meta["constants"]}
    source = compiler.ASTSource(kernel.function, signature, constants, meta["configs"][0])
    major, minor = gpu.capability
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    # a folder of memest's own, whose files are not the script's
    with TemporaryDirectory(prefix="memest-") as folder, setting(tempfile, "tempdir", folder):
        binary = compiler.compile(source, target("cuda", major * 10 + minor, 32), options)
    return _registers_of(binary.asm["cubin"])


def _registers_of(cubin: bytes) -> int:
    """Return the registers per thread of compiled code, an ELF file: `EIATTR_REGCOUNT` (0x2F) in
    its section `.nv.info`. Entries of kind 4 (`EIFMT_SVAL`) have a value of `length` bytes."""
    (start,) = unpack_from("<Q", cubin, 0x28)  # `e_shoff`
    header_bytes, count, names_index = unpack_from("<HHH", cubin, 0x3A)
    sections = [unpack_from("<IIQQQQ", cubin, start + i * header_bytes) for i in range(count)]
    *_, names_at, _ = sections[names_index]
    for name_offset, *_, offset, num_bytes in sections:
        if cubin[names_at + name_offset :].startswith(b".nv.info\0"):
            end = offset + num_bytes
            while offset < end:
                kind, attribute, length = unpack_from("<BBH", cubin, offset)
                if (kind, attribute) == (4, 0x2F):
                    _, num_registers_per_thread = unpack_from("<II", cubin, offset + 4)
                    return int(num_registers_per_thread)
                offset += 4 + (length if kind == 4 else 0)
    raise NotSimulated("the machine code of a kernel does not name its registers", hint="")


class _Config:
    """Replacement of `triton.Config` that stores the arguments and does not need Triton."""

    def __init__(self, kwargs: Any, **options: Any) -> None:
        defaults = {"num_warps": 4, "num_stages": 2, "dynamic_scale_rblock": True}
        vars(self).update({"kwargs": kwargs} | defaults | options)


class _Source(InspectLoader):
    """Loader of a module from a text in place of a file."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        return self._text


def _load(source: str) -> None:
    """Execute the source of a kernel as a module. Meanwhile `linecache` has the source's lines,
    since `triton.jit` reads them by `inspect`."""
    file = "<string>"  # name of the file in the code of `InspectLoader`
    module = ModuleType("kernel")
    vars(module).update({"__file__": file, "AttrsDescriptor": dict, "AttrsDescriptorWrapper": dict})
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    try:
        _Source(source).exec_module(module)
    finally:
        del linecache.cache[file]


# Measured on an H100 80GB (torch 2.11): 368 products in tests/data/padded-products-h100.json.
# They are shares of the peak rate for 16-bit types and of the memory bandwidth (data sheet).
_ALIGNED = 0.7
_EVEN = 0.25  # share of the peak rate where a leading dimension is even, and no multiple of 8
_ODD_INPUT = 0.145
_ODD_OUTPUT = 0.1
_ROWS_APPENDED = 0.8
_COLUMNS_APPENDED = 0.6
_TRANSPOSED = 0.15  # share of the bandwidth of `torch.cat` of a transposed matrix with zeros
_LAUNCH_S = 3e-6
_MARGIN = 1.1  # factor by which padding must be faster (`is_padded_faster` in pad_mm.py)


def is_estimated() -> bool:
    """Return whether memest estimates where Inductor pads products: from torch 2.11 on it does."""
    from torch._inductor.fx_passes import pad_mm

    return hasattr(pad_mm, "_should_pad")


def _install_padding(patches: Patches, mode: CudaSimMode) -> None:
    """Make Inductor pad matrix products where `is_faster_padded` estimates a gain. `pad_mm.py` of
    Inductor pads matrices whose sides are no multiples of 8 (16-bit) or 4 (32-bit) if it times the
    padded product as faster. The timing runs on the virtual GPU, so its memory is counted."""
    from torch._inductor import utils
    from torch._inductor.fx_passes import pad_mm
    from torch.fx.experimental.proxy_tensor import unset_fake_temporarily  # type: ignore[attr-defined]

    if not is_estimated():
        return
    should_pad = inspect.unwrap(vars(pad_mm)["_should_pad"])
    gpu = mode.gpu
    decisions: list[bool] = []

    def decide(match: Any, mat1: Any, mat2: Any, op: Any, input: Any = None) -> bool:
        is_free = pad_mm.should_exclude_padding_time
        are_free = is_free(match, "mat1"), is_free(match, "mat2")
        decisions.append(is_faster_padded(gpu, mat1, mat2, are_free))
        try:
            return bool(should_pad(match, mat1, mat2, op, input))
        finally:
            decisions.pop()

    @contextmanager
    def on_gpu() -> Iterator[None]:
        with unset_fake_temporarily(), mode:
            yield

    def is_padded_faster(key: str, *times: float) -> bool:
        timed[key] = decisions[-1]
        return timed[key]

    def set_value(key: str, *, value: bool) -> None:
        timed[key] = value

    # replaces Inductor's cache on disk: a run is simulated as the first on its machine
    timed = mode.timed
    cache = SimpleNamespace(lookup=timed.get, set_value=set_value)
    patches.set(pad_mm, "_should_pad", decide)
    patches.set(pad_mm, "is_padded_faster", is_padded_faster)
    patches.set(pad_mm, "no_dispatch", on_gpu)
    patches.set(pad_mm, "get_pad_cache", lambda: cache)
    patches.set(utils, "get_device_tflops", lambda dtype: _peak_flops(gpu, dtype) / 1e12)
    patches.set(utils, "get_gpu_dram_gbps", lambda: gpu.memory_gb_s)


def is_faster_padded(gpu: Gpu, mat1: Any, mat2: Any, are_free: tuple[bool, bool]) -> bool:
    """Return whether padding `mat1` and `mat2` makes their product faster by Inductor's margin.

    A product takes operations / (share * peak rate); the share depends on how leading dimensions
    are aligned. A padded copy takes bytes read and written / (share * bandwidth). `are_free` has
    True for a matrix whose copy Inductor does not time. In float32 without TF32, padding only
    adds copies: kernels need no alignment.
    """
    dtype = mat1.dtype
    if dtype is torch.float32 and not allows_tf32("matmul"):
        return False
    align = 16 // dtype.itemsize  # elements of 16 bytes, as `get_alignment_size`
    num_products = _hint(mat1.shape[0]) if mat1.dim() == 3 else 1
    m, k = (_hint(side) for side in mat1.shape[-2:])
    n = _hint(mat2.shape[-1])
    padded_m, padded_k, padded_n = (_padded(side, align) for side in (m, k, n))

    def product_s(flops: float, share: float) -> float:
        return _LAUNCH_S + num_products * flops / (share * _peak_flops(gpu, dtype))

    def copy_s(matrix: Any, rows: int, columns: int) -> float:
        old_rows, old_columns = (_hint(side) for side in matrix.shape[-2:])
        if (rows, columns) == (old_rows, old_columns):
            return 0.0
        if _hint(matrix.stride(-1)) != 1:
            share = _TRANSPOSED
        else:
            share = _COLUMNS_APPENDED if columns > old_columns else _ROWS_APPENDED
        num_bytes: int = 2 * num_products * old_rows * old_columns * dtype.itemsize
        return _LAUNCH_S + num_bytes / (share * gpu.memory_gb_s * 1e9)

    input_alignment = min(_alignment(_leading(matrix), align) for matrix in (mat1, mat2))
    output_alignment = _alignment(n, align)
    if input_alignment == 1:
        share = _ODD_INPUT
    elif output_alignment == 1:
        share = _ODD_OUTPUT
    else:
        share = _ALIGNED if min(input_alignment, output_alignment) == align else _EVEN
    padded_s = product_s(2 * padded_m * padded_k * padded_n, _ALIGNED)
    is_mat1_free, is_mat2_free = are_free
    if not is_mat1_free:
        padded_s += copy_s(mat1, padded_m, padded_k)
    if not is_mat2_free:
        padded_s += copy_s(mat2, padded_k, padded_n)
    return product_s(2 * m * k * n, share) > _MARGIN * padded_s


def _peak_flops(gpu: Gpu, dtype: torch.dtype) -> float:
    return 1e12 * gpu.tflops_of(rate_of(dtype, "matmul"))


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _leading(matrix: Any) -> int:
    """Return BLAS's leading dimension of `matrix`: the stride of rows, of columns if transposed."""
    rows, columns = (_hint(stride) for stride in matrix.stride()[-2:])
    return rows if columns == 1 else columns


def _alignment(size: int, align: int) -> int:
    """Return the largest power of 2 that divides `size`, at most `align`.

    >>> _alignment(50257, 8), _alignment(30522, 8), _alignment(768, 8)
    (1, 2, 8)
    """
    return min(size & -size, align)


def _padded(side: int, align: int) -> int:
    """Return `side` rounded up to `align`; Inductor leaves sides of 1 alone.

    >>> _padded(50257, 8), _padded(1, 8)
    (50264, 1)
    """
    return side if side == 1 else round_up(side, align)
