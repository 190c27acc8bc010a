"""Attributes of modules and classes, replaced during a simulation and restored afterwards."""

import ctypes
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial, wraps
from inspect import getattr_static
from types import FunctionType, ModuleType
from typing import Any

from memest.errors import UnsupportedError

_ABSENT = object()


def constant(value: Any) -> Callable[..., Any]:
    """Return a function that returns `value` for all arguments."""
    return lambda *args, **kwargs: value


def constants(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {name: function that returns `values[name]` for all arguments}."""
    return {name: constant(value) for name, value in values.items()}


_WITHOUT = "run the script without it; see docs/run.md"

NOT_COMPILED = "nothing is compiled on the virtual GPU"  # hint for calls of compilers


def unsupported(what: str, hint: str = _WITHOUT) -> UnsupportedError:
    """Return the error that `what`, a part of torch, cannot be simulated; `hint` is the remedy."""
    return UnsupportedError(f"{what} cannot be simulated", hint=hint)


def refusing(what: str, hint: str = _WITHOUT) -> Callable[..., Any]:
    """Return a function that raises `unsupported(what, hint)`, whatever its arguments are."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise unsupported(what, hint)

    return refused


@contextmanager
def setting(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set the attribute `name` of `owner` to `value` until the block ends."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Patches:
    """Record of replaced attributes and items; `undo` restores the originals."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self._afterwards: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set attribute `name` of `owner`, such as a module or class, to `value`, until `undo`."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        if isinstance(owner, type) and isinstance(value, FunctionType):
            value.__name__ = name  # Dynamo recognizes methods of tensors by it
        _restore(owner, name, value)

    def set_all(self, values: Mapping[str, Any], *owners: Any) -> None:
        """Set the attributes {name: value} of `values` on each of `owners`, until `undo`."""
        for name, value in values.items():
            for owner in owners:
                self.set(owner, name, value)

    def set_methods(self, functions: Any, *owners: Any, prefix: str = "") -> None:
        """Replace functions of `owners` by the public methods of the object `functions`. The method
        `name` replaces the function called `prefix + name`."""
        for name in [name for name in vars(type(functions)) if not name.startswith("_")]:
            self.set_all({prefix + name: getattr(functions, name)}, *owners)

    def wrap(self, owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator: the decorated function replaces the attribute `name` of `owner`, and
        gets the original as first argument."""
        original = getattr(owner, name)
        is_static = isinstance(getattr_static(owner, name), staticmethod)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                return function(original, *args, **kwargs)

            self.set(owner, name, staticmethod(call) if is_static else call)
            return call

        return decorate

    def within(self, owner: Any, name: str, context: Callable[..., Any]) -> None:
        """Make the function `name` of `owner` run within a context manager. `context(*args)`
        returns it for the function's positional arguments."""

        @self.wrap(owner, name)
        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with context(*args):
                return original(*args, **kwargs)

    def set_item(self, owner: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Set `owner[key]` to `value`, until `undo`."""
        before = owner.get(key, _ABSENT)
        owner[key] = value
        self.on_undo(
            partial(owner.pop, key, None)
            if before is _ABSENT
            else partial(owner.__setitem__, key, before)
        )

    def on_undo(self, action: Callable[[], object]) -> None:
        """Register `action`, which `undo` calls after it has restored the originals."""
        self._afterwards.append(action)

    def originals(self) -> dict[Any, Any]:
        """Return {replacement: original} of the replaced functions and classes. Methods of pybind11
        have no hash, so they are left out (torch 2.5 has some)."""
        originals: dict[Any, Any] = {}
        for owner, name, before in reversed(self._before):
            if before is _ABSENT and isinstance(owner, type):
                before = getattr(super(owner, owner), name, None)
            current = vars(owner).get(name)
            are_functions = callable(before) and callable(current) and isinstance(before, Hashable)
            if isinstance(owner, ModuleType | type) and are_functions:
                originals[current] = before
        return originals

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore the originals within the block, and the replacements at its end."""
        current = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in self._before]
        for owner, name, before in reversed(self._before):
            _restore(owner, name, before)
        try:
            yield
        finally:
            for owner, name, value in current:
                _restore(owner, name, value)

    def undo(self) -> None:
        """Restore all originals, the last replaced first; then call the actions of `on_undo`, the
        last registered first."""
        while self._before:
            owner, name, before = self._before.pop()
            _restore(owner, name, before)
        while self._afterwards:
            self._afterwards.pop()()


def _restore(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
        return
    setattr(owner, name, value)
    if name == "__getitem__" and isinstance(value, FunctionType):  # `Tensor`'s is a C function
        _clear_sequence_slot(owner)


def _clear_sequence_slot(kind: type) -> None:
    """Make C++ read a 0-d tensor in a list as a number again, as in `torch.tensor([t])`. If a class
    has a `__getitem__` written in Python, C++ reads its 0-d tensors as lists (`compute_sizes` of
    tensor_new.cpp, torch 2.11). The reason is that Python then sets the slot
    `tp_as_sequence->sq_item` of the class, so `PySequence_Check` is true. This function clears the
    slot of `kind`, a class of tensors, and of its subclasses. The offsets are those of
    `PyTypeObject` and `PySequenceMethods` (Include/cpython/object.h, Python 3.11 to 3.14)."""
    pointer = ctypes.c_void_p
    if methods := pointer.from_address(id(kind) + object.__basicsize__ + 11 * 8).value:
        pointer.from_address(methods + 3 * 8).value = None
    subclasses: list[type] = type.__subclasses__(kind)
    for subclass in subclasses:
        if "__getitem__" not in vars(subclass):
            _clear_sequence_slot(subclass)
