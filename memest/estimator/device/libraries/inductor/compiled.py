"""Functions and modules as `torch.compile` makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from inspect import getclosurevars
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memest.estimator.device.libraries.inductor.breaks import (
    Broken,
    broken_by_loggers,
    in_parts,
    inputs_of,
)
from memest.estimator.device.libraries.inductor.compiler import (
    MadeOnMeta,
    NotCompiled,
    as_the_compiler,
    fake,
    tell,
)
from memest.estimator.device.libraries.inductor.opened import Opened
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.tensors import INSIDE, Place

RECOMPILE_LIMIT = 8
"""`torch._dynamo.config.recompile_limit`: then a function runs as it is written."""

STRATEGIES = {
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DeepSpeedEngine",
}
"""Classes whose modules talk to other ranks as they run."""

AS_GRAPHS = (
    "`torch.compile`: what torch {version}'s Inductor makes of {name} as {graphs}; a real run may "
    "break it elsewhere, and pad matrices whose sides are no multiples of 8"
)
EAGERLY = "`torch.compile` ran {name} as it is written, which keeps more temporaries: {why}"


class Compiled:
    """A function, or the call of a module, as `torch.compile` makes it.

    Args:
        mode: of the virtual GPU.
        call: the function.
        graphs: those that were compiled before, of this function and of others.
    """

    def __init__(
        self, mode: CudaSimMode, call: Callable[..., Any], graphs: dict[Any, _Graph]
    ) -> None:
        self._mode = mode
        self._graphs = graphs
        self._call = call
        owner = call.__self__ if isinstance(call, MethodType) else None
        self._owner = owner if isinstance(owner, nn.Module) else None
        captured = [part for part in _captured(call) if isinstance(part, nn.Module)]
        self._module = nn.ModuleList(captured) if captured else self._owner
        self._name = type(owner).__name__ if owner is not None else _name_of(call)
        self._num_made = 0
        self._is_off = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        if self._is_off or INSIDE.depth:
            return self._call(*args, **kwargs)
        given, spec = pytree.tree_flatten((args, kwargs))
        try:
            _refuse_captured(self._call)
            if self._module is not None:
                _refuse_wrappers(self._module)
            state = self._state()
            graph = self._graph(given, spec, state)
        except NotCompiled as refused:
            self._give_up(str(refused))
            return self._call(*args, **kwargs)
        module = self._owner
        inside = nullcontext() if module is None else self._mode.attribution.modules.running(module)
        with inside:
            return graph.run([*state.values(), *filter(_is_tensor, given)])

    def _give_up(self, why: str) -> None:
        self._is_off = True
        self._mode.guesses.warn(EAGERLY.format(name=self._name, why=why))

    def _state(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, each once."""
        if self._module is None:
            return {}
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def _graph(self, given: Sequence[Any], spec: Any, state: dict[str, Tensor]) -> _Graph:
        tensors = [*state.values(), *filter(_is_tensor, given)]
        for tensor in tensors:
            if type(tensor) not in (Tensor, nn.Parameter):
                raise NotCompiled(f"an input is a {type(tensor).__name__}")
            if self._mode.host.place(tensor) is not Place.CARD and tensor.dim():
                raise NotCompiled("an input is on the host")
        constants = [value for value in given if not _is_tensor(value)]
        for value in constants:
            if Opened(value).tensors:  # it may be changed
                raise NotCompiled(f"an argument is a {type(value).__name__}")
        key = (
            self._code(), spec, repr(constants), tuple(map(_kind, tensors)), _modes(),
            () if self._module is None else tuple(m.training for m in self._module.modules()),
        )  # fmt: skip
        found = self._graphs.get(key)
        if found is None:
            if self._num_made == RECOMPILE_LIMIT:
                raise NotCompiled(f"it was compiled for {RECOMPILE_LIMIT} sets of inputs before")
            self._num_made += 1
            found = self._graphs[key] = _Graph(self._function(given, spec, list(state)), tensors)
            version = torch.__version__.partition("+")[0]
            graphs = "one graph" if found.num_parts == 1 else f"{found.num_parts} graphs"
            self._mode.notes.add(AS_GRAPHS.format(name=self._name, version=version, graphs=graphs))
        return found

    def _code(self) -> object:
        """What is compiled once: modules that are built alike share it, as their code does."""
        if self._module is None:
            return self._call
        parts = [_settings(part) for part in self._module.modules()]
        configs = {id(c): c for c in (vars(p).get("config") for p in self._module.modules())}
        parts += [_settings(config) for config in configs.values() if hasattr(config, "__dict__")]
        function = self._call if self._owner is None else type(self._module)
        return function, repr(self._module), tuple(parts)

    def _function(
        self, given: Sequence[Any], spec: Any, names: Sequence[str]
    ) -> Callable[..., Any]:
        """The function of tensors alone: parameters, buffers, and those among the arguments."""
        slots = [None if _is_tensor(value) else (value,) for value in given]
        call, module = self._call, self._module

        def run(*tensors: Tensor) -> Any:
            rest = iter(tensors[len(names) :])
            args, kwargs = pytree.tree_unflatten(
                [next(rest) if slot is None else slot[0] for slot in slots], spec
            )
            if module is None:
                return call(*args, **kwargs)
            swapped = dict(zip(names, tensors, strict=False))
            with (
                _as_it_was(module),
                nn.utils.stateless._reparametrize_module(module, swapped, tie_weights=True),
            ):
                return call(*args, **kwargs)

        return run


def _captured(call: Callable[..., Any]) -> list[Any]:
    """Values of the variables outside of a function that it names."""
    if not isinstance(call, FunctionType):
        return []
    found = getclosurevars(call)
    return [*found.nonlocals.values(), *found.globals.values()]


def _refuse_captured(call: Callable[..., Any]) -> None:
    """Refuse what a trace would keep as constants, or change.

    Raises:
        NotCompiled: `call` captures tensors or an optimizer.
    """
    owner = [call.__self__] if isinstance(call, MethodType) else []
    for value in (*owner, *_captured(call)):
        if isinstance(value, torch.optim.Optimizer):
            raise NotCompiled(f"it steps the optimizer {type(value).__name__}")
        if isinstance(value, Tensor) and value.requires_grad:
            raise NotCompiled("it captures a tensor that requires grad")


def _settings(part: object) -> tuple[tuple[str, Any], ...]:
    """What a module computes by, or its config says, of what it need not say of itself."""
    plain = (bool, int, float, str)
    return tuple((name, v) for name, v in vars(part).items() if isinstance(v, plain))


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Undoes what a traced call leaves in the attributes of `module`.

    Raises:
        NotCompiled: they are tensors, which nobody would compute again at the next call.
    """
    before = [(part, dict(vars(part))) for part in module.modules()]
    yield
    is_kept = False
    for part, attributes in before:
        for name, value in list(vars(part).items()):
            if value is not attributes.get(name) and Opened(value).tensors:
                is_kept = True
                del part.__dict__[name]
                if name in attributes:
                    part.__dict__[name] = attributes[name]
    if is_kept:
        raise NotCompiled("it keeps tensors in its attributes")


def _refuse_wrappers(module: nn.Module) -> None:
    """Those whose hooks do more than compute.

    Raises:
        NotCompiled: `module` holds one.
    """
    for part in module.modules():
        if any(name in STRATEGIES for name in (kind.__name__ for kind in type(part).__mro__)):
            raise NotCompiled(f"it holds a {type(part).__name__}")


def compiled_function(
    mode: CudaSimMode, function: Callable[..., Any], graphs: dict[Any, _Graph]
) -> Callable[..., Any]:
    """`function` as `torch.compile` makes it; a method of modules is compiled for each of them."""
    alone = Compiled(mode, function, graphs)
    of_modules: WeakKeyDictionary[nn.Module, Compiled] = WeakKeyDictionary()

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not (args and isinstance(args[0], nn.Module)):
            return alone(*args, **kwargs)
        found = of_modules.get(args[0])
        if found is None:
            method = MethodType(function, args[0])
            found = of_modules[args[0]] = Compiled(mode, method, graphs)
        return found(*args[1:], **kwargs)

    return run


class _Graph:
    """A function compiled for one set of shapes."""

    def __init__(self, function: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        self._found: Opened | None = None

        def flat(*inputs: Tensor) -> list[Tensor]:
            self._found = Opened(function(*inputs))
            return self._found.tensors

        self._compiled = _compile(flat, tensors)
        self.num_parts = getattr(self._compiled, "num_parts", 1)
        assert self._found is not None
        self._found.tensors = []

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """What the function returns for tensors like those that it was compiled for."""
        assert self._found is not None
        return self._found.fill(iter(self._compiled(*tensors)))


def _compile(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """The function in as many graphs as Dynamo would make of it."""
    try:
        return _compile_whole(function, tensors)
    except Broken:
        with _refused("it calls a logger, and in parts fails: "):
            parts: Any = in_parts(function, tensors)
            given = inputs_of(parts, tensors)
    for name, inputs in given.items():
        setattr(parts, name, _Part(getattr(parts, name), inputs))
    parts.num_parts = len(given)
    return parts  # type: ignore[no-any-return]


class _Part(nn.Module):
    """A piece between two breaks, compiled for these inputs."""

    def __init__(self, function: nn.Module, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._is_single = False

        def flat(*tensors: Tensor) -> Any:
            made = function(*tensors)
            self._is_single = _is_tensor(made)
            return (made,) if self._is_single else made

        self._compiled = _compile_whole(flat, inputs)

    def forward(self, *inputs: Tensor) -> Any:
        """What the piece returns."""
        made = self._compiled(*inputs)
        return made[0] if self._is_single else made


def _compile_whole(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Callable[..., Any]:
    class Whole(nn.Module):
        def forward(self, *inputs: Tensor) -> Any:
            with MadeOnMeta(), broken_by_loggers():
                return function(*inputs)

    def on_the_card(graph: Any, inputs: Sequence[Any], **options: Any) -> Any:
        """Called for the forward, and when it is needed for the backward."""
        from torch._guards import detect_fake_mode

        fake_mode = detect_fake_mode(inputs)
        with as_the_compiler() as inductor:
            tell(graph)
            return inductor.compile_fx_inner(
                graph, [fake(value, fake_mode) for value in inputs], **options
            )

    with _refused(), as_the_compiler() as inductor:
        made: Callable[..., Any] = inductor.compile_fx(
            Whole(), list(tensors), inner_compile=on_the_card
        )
        return made


@contextmanager
def _refused(prefix: str = "") -> Iterator[None]:
    """Lets what fails within it run as it is written, with the reason."""
    try:
        yield
    except (MemoryError, NotCompiled):
        raise
    except Exception as error:
        raise NotCompiled(f"{prefix}{_why(error)}") from error


def _modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    )


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _name_of(call: Any) -> str:
    return getattr(call, "__qualname__", None) or type(call).__name__


def _why(error: Exception) -> str:
    """The first line of the innermost reason."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:120]}" if first else type(error).__name__
