"""Triton with kernel launches that compute nothing and request the same memory.

Where Triton cannot be installed, a stub replaces it, so that libraries take the same paths. With
it libraries can be imported; their kernel launches do nothing. `Finder` serves `import triton`.
Source: triton 3.6.0, runtime/jit.py, runtime/autotuner.py, runtime/driver.py, testing.py.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import sys
from collections import namedtuple
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from memest.errors import UnsupportedError
from memest.estimator.gpu.imports import ImportHooks, StubFinder
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.hardware.work import fused_work
from memest.estimator.tensors.patches import NOT_COMPILED, Patches, constant, refusing
from memest.estimator.tensors.placement import GPU
from memest.plan.reading import read_table
from memest.units import ceil_div

VERSION = "3.6.0"  # version of triton that the wheels of torch 2.11 require
_NAMES: dict[str, Any] = read_table(__file__, "triton.json")
"""Names of Triton 3.6.0: of its `modules` and its `language`, and the lists of its `dtypes`.

Other names do not exist. `triton.testing` has the names that bitsandbytes before 0.49 imports.
"""


class Symbol:
    """Name of Triton's language, such as `tl.load`, which only a compiled kernel can call."""

    def __init__(self, name: str) -> None:
        self.name = self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an `UnsupportedError`: the name is called outside of a kernel."""
        raise UnsupportedError(
            f"`triton.language.{self.name}` is called outside of a kernel",
            hint="kernels do not run on the virtual GPU",
        )

    def __repr__(self) -> str:
        return f"triton.language.{self.name}"


class Constexpr:
    """Stub of `tl.constexpr`: an annotation, or a value known when a kernel is compiled."""

    def __init__(self, value: Any) -> None:
        self.value = getattr(value, "value", value)

    def __class_getitem__(cls, item: Any) -> "type[Constexpr]":
        return cls

    def __index__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == getattr(other, "value", other))

    def __hash__(self) -> int:
        return hash(self.value)


class KernelInterface:
    """Stub of a kernel that `kernel[grid](...)` launches; `fn` is a function or another kernel."""

    def __init__(self, fn: Any = None, **options: Any) -> None:
        self.fn = fn
        self.arg_names: list[str] = getattr(fn, "arg_names", [])
        self.__name__ = getattr(fn, "__name__", "kernel")
        vars(self).update(options)

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing in place of a kernel launch."""

    warmup = run

    def __class_getitem__(cls, item: Any) -> "type[KernelInterface]":
        return cls

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run


class JITFunction(KernelInterface):
    """Stub of `triton.JITFunction`: a kernel that is never compiled."""

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        super().__init__(fn)
        self.__doc__ = fn.__doc__
        self.__module__ = fn.__module__
        self.signature = inspect.signature(fn)
        self.arg_names = list(self.signature.parameters)
        self.device_caches: dict[int, Any] = {}
        self.cache: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a `RuntimeError`, as triton does for a call without a grid."""
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")


@dataclass(eq=False)
class Config:
    """Stub of `triton.Config`: meta-parameters and launch options of one variant of a kernel."""

    kwargs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int | None = None
    pre_hook: Any = None
    ir_override: Any = None

    def all_kwargs(self) -> dict[str, Any]:
        numbers = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
        launch_options = {name: getattr(self, name) for name in numbers}
        return {**self.kwargs, **{n: v for n, v in launch_options.items() if v is not None}}


class Autotuner(KernelInterface):
    """Stub of the kernel that `triton.autotune` returns; configs are timed for new arguments."""

    def __init__(self, fn: Any, configs: Sequence[Config], **options: Any) -> None:
        super().__init__(fn)
        self.base_fn = getattr(fn, "base_fn", None) or getattr(fn, "fn", fn)
        self.configs = list(configs) or [Config({})]
        self.keys = list(options.get("key") or ())
        self.restore_value = list(options.get("restore_value") or ())
        self.cache: dict[Any, Config] = {}
        self.best_config = self.configs[0]

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Time all configs if dtypes or values of the arguments in `keys` are new; then launch."""
        arguments = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        dtypes = [str(value.dtype) for value in arguments.values() if hasattr(value, "dtype")]
        key = (*(arguments[name] for name in self.keys if name in arguments), *dtypes)
        if len(self.configs) > 1 and key not in self.cache:
            for _ in self.configs:
                do_bench(lambda: [arguments[name].clone() for name in self.restore_value])
            self.cache[key] = self.configs[0]
        KernelInterface.run(self, *args, **kwargs)


class Heuristics(KernelInterface):
    """Stub of the kernel that `triton.heuristics` returns; the heuristics are not computed."""


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return the stub kernel of the function `fn`, or the decorator if only options are given."""
    if fn is None:
        return lambda function: JITFunction(function, **options)
    return JITFunction(fn)


def autotune(configs: Sequence[Config], key: Sequence[str] = (), **options: Any) -> Any:
    """Return a decorator that makes an `Autotuner` of `configs`. They are timed whenever the
    arguments named in `key` have new values."""
    return lambda fn: Autotuner(fn, configs, key=key, **options)


def heuristics(values: dict[str, Any]) -> Any:
    """Return a decorator that makes a `Heuristics`; `values` maps argument names to functions."""
    return lambda fn: Heuristics(fn, values=values)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is not below `n`."""
    return 1 if n < 2 else 1 << (n - 1).bit_length()


@cache
def _name_of_class(name: str, base: type = object) -> type:
    return type(name, (base,), {"__doc__": f"`{name}` of triton."})


def _unchanged(function: Any = None, **options: Any) -> Any:
    return function if function is not None else (lambda inner: inner)


GPUTarget = namedtuple("GPUTarget", ("backend", "arch", "warp_size"))


@dataclass(eq=False)
class _TensorDescriptor:
    """Stub of `triton.tools.tensor_descriptor.TensorDescriptor`."""

    base: Any
    shape: Any
    strides: Any
    block_shape: Any
    padding: str = "zero"

    @staticmethod
    def from_tensor(tensor: Any, block_shape: Any, padding: str = "zero") -> "_TensorDescriptor":
        return _TensorDescriptor(tensor, tensor.shape, tensor.stride(), block_shape, padding)


def _module_getattr(make: Callable[[str], Any], names: Container[str] | None = None) -> Any:
    """Return a module's `__getattr__`, which returns `make(name)`. It raises `AttributeError` for
    names outside `names`, or by default for names that begin with two underscores."""

    def look_up(name: str) -> Any:
        if name.startswith("__") if names is None else name not in names:
            raise AttributeError(f"the stub of triton has no attribute '{name}'")
        return make(name)

    return look_up


_ERRORS: dict[str, type] = {"TritonError": _name_of_class("TritonError", Exception)}
_ERRORS |= {
    name: _name_of_class(name, _ERRORS["TritonError"])
    for name in ("CompilationError", "OutOfResources", "InterpreterError", "PTXASError")
}

_REFUSED = {"compile": "triton.compile", "make_backend": "triton.compiler.make_backend"}
_REFUSED |= {name: name for name in _NAMES["modules"]["triton.testing"]}
_OWN: dict[str, Any] = {
    "__version__": VERSION, "triton_key": constant(VERSION), "GPUTarget": GPUTarget,
    "KernelInterface": KernelInterface, "JITFunction": JITFunction, "JITCallable": JITFunction,
    "jit": jit, "constexpr_function": _unchanged, "reinterpret": _unchanged,
    "must_use_result": _unchanged, "T": Any, "LazyDict": dict, "Config": Config,
    "autotune": autotune, "Autotuner": Autotuner, "heuristics": heuristics,
    "Heuristics": Heuristics, "cdiv": ceil_div, "next_power_of_2": next_power_of_2,
    "set_allocator": constant(None), "TensorDescriptor": _TensorDescriptor,
    **_ERRORS, **{name: refusing(f"`{full}`", NOT_COMPILED) for name, full in _REFUSED.items()},
}  # fmt: skip
"""Objects by their names in modules; all other names are empty classes."""


def _contents(driver: Callable[[Any], Any]) -> dict[str, dict[str, Any]]:
    modules: dict[str, dict[str, Any]] = {
        module: {name: _OWN[name] if name in _OWN else _name_of_class(name) for name in names}
        for module, names in _NAMES["modules"].items()
    }
    dtype = type("dtype", (Symbol,), {"__doc__": "`dtype` of triton.", **_NAMES["dtypes"]})
    language = _module_getattr(Symbol, _NAMES["language"])
    for name in ("triton.language", "triton.language.core"):
        modules[name] = {"constexpr": Constexpr, "__getattr__": language, "dtype": dtype}
    for name in ("extra.cuda", "extra.cuda.libdevice", "extra.libdevice", "math", "random",
                 "standard"):  # fmt: skip
        modules[f"triton.language.{name}"] = {"__getattr__": _module_getattr(Symbol)}
    modules["triton.backends"]["backends"] = {"nvidia": SimpleNamespace(driver=None, compiler=None)}
    modules["triton.knobs"]["__getattr__"] = _module_getattr(lambda name: SimpleNamespace())
    active = SimpleNamespace(active=driver(GPUTarget), set_active=constant(None))
    modules["triton.runtime.driver"]["driver"] = active
    modules["triton.testing"] |= _BENCHES
    return modules


class _Distribution(importlib.metadata.Distribution):
    """Metadata of the stub, which `importlib.metadata.version("triton")` finds."""

    def read_text(self, filename: str) -> str | None:
        """Return the metadata if `filename` is `METADATA`, else None: there are no other files."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: triton\nVersion: {VERSION}\n"

    def locate_file(self, path: Any) -> Any:
        """Return the path unchanged; there are no files."""
        return path


class Finder(StubFinder, importlib.metadata.DistributionFinder):
    """Import finder that loads the stub for `import triton`.

    `driver` is a function from the class `GPUTarget` to the object `triton.runtime.driver.active`.
    """

    def __init__(self, driver: Callable[[Any], Any]) -> None:
        self._contents = _contents(driver)

    def serves(self, fullname: str) -> bool:
        return fullname in self._contents

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        vars(module).update(self._contents[name])
        for submodule in self._contents:
            if submodule.rpartition(".")[0] == name:
                __import__(submodule)
        if name == "triton.runtime":  # `triton.runtime.driver` is an object, not a module
            vars(module)["driver"] = self._contents["triton.runtime.driver"]["driver"]

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """Yield the stub's metadata if `context` names `triton` or no package."""
        if context is None or context.name in (None, "triton"):
            yield _Distribution()


MILLISECONDS = 1.0  # assumed time of every kernel that a script times
CLEARED_BYTES = 256 * 2**20
"""Array that is cleared before a timed kernel (triton/backends/nvidia/driver.py)."""


def driver_of(mode: CudaSimMode, target: Callable[..., Any]) -> SimpleNamespace:
    """Return a replacement of `triton.runtime.driver.active` that describes the virtual GPU.

    `target` is Triton's class of a compile target: (backend, architecture, warp size).
    """
    major, minor = mode.gpu.capability

    def properties(device: int = 0) -> dict[str, int]:
        """Return the GPU's properties that persistent kernels read."""
        gpu: Any = torch.cuda.get_device_properties(0)
        return {
            "max_shared_mem": gpu.shared_memory_per_block_optin,
            "max_num_regs": gpu.regs_per_multiprocessor,
            "multiprocessor_count": gpu.multi_processor_count,
            "warpSize": gpu.warp_size,
            "sm_clock_rate": 0,
            "mem_clock_rate": 0,
            "mem_bus_width": 0,
        }

    driver = SimpleNamespace(
        get_current_stream=lambda device=0: mode.timeline.stream,
        get_current_device=constant(0),
        set_current_device=constant(None),  # only one GPU is visible
        get_device_capability=constant(mode.gpu.capability),
        get_current_target=lambda: target("cuda", major * 10 + minor, 32),
        get_active_torch_device=lambda: GPU.device,
        get_device_interface=lambda: torch.cuda,
        get_device_properties=properties,
        get_benchmarker=constant(do_bench),
        is_active=constant(True),
    )
    driver.utils = driver
    return driver


def do_bench(
    fn: Callable[[], Any], warmup: int = 0, rep: int = 0, *options: Any, **named: Any
) -> Any:
    """Run `fn`, then again with an array that clears the L2 cache; return a constant time in ms."""
    fn()
    l2_buffer = torch.empty(CLEARED_BYTES, dtype=torch.uint8, device="cuda")
    result = do_bench_cudagraph(fn, rep, *options, **named)
    del l2_buffer
    return result


def do_bench_cudagraph(
    fn: Callable[[], Any], rep: int = 0, grad_to_none: Any = None, quantiles: Any = None, **_: Any
) -> Any:
    """Run `fn` once; return a constant time in ms, or a list of it for each of `quantiles`."""
    fn()
    return MILLISECONDS if quantiles is None else [MILLISECONDS] * len(quantiles)


_BENCHES = {"do_bench": do_bench, "do_bench_cudagraph": do_bench_cudagraph}


def _renew(patches: Patches) -> None:
    """Put the stub's names into Inductor's modules that were imported without Triton."""
    compat: Any = sys.modules.get("torch._inductor.runtime.triton_compat")
    if compat is None or hasattr(compat.triton, "Config"):
        return
    copy = module_from_spec(compat.__spec__)
    compat.__spec__.loader.exec_module(copy)
    before = dict(vars(compat))
    changes = {k: v for k, v in vars(copy).items() if k[:2] != "__" and v is not before.get(k)}
    for module in [m for name, m in sys.modules.items() if name.startswith("torch._inductor.")]:
        for name in changes.keys() & vars(module).keys():
            if vars(module)[name] is before.get(name):
                patches.set(module, name, changes[name])


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Make Triton's launches do nothing, and provide a stub if Triton is not installed."""

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        """Record the estimated work of `kernel` in place of a launch."""
        arguments = (*args, *kwargs.values())
        mode.work.add(fused_work(value for value in arguments if isinstance(value, Tensor)))

    is_installed = "triton" in sys.modules or PathFinder.find_spec("triton") is not None
    if not is_installed:
        patches.set(KernelInterface, "run", launch)
        Finder(partial(driver_of, mode)).install(patches, is_first=False)
        _renew(patches)
        return

    def without_launches(module: Any) -> None:
        patches.set_all({"run": launch, "warmup": constant(None)}, module.JITFunction)

    def with_driver(module: ModuleType) -> None:
        target = __import__("triton.backends.compiler", fromlist=["GPUTarget"]).GPUTarget
        # Triton 3.2 (torch 2.6) has no property in front of it
        name = "_active" if "_active" in vars(module.driver) else "active"
        patches.set(module.driver, name, driver_of(mode, target))

    hooks.after("triton.runtime.jit", without_launches)
    hooks.after("triton.runtime.driver", with_driver)
    hooks.after("triton.testing", lambda module: patches.set_all(_BENCHES, module))
