"""Hooks that install stubs when the script imports a library."""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from traceback import walk_stack
from types import FrameType, ModuleType
from typing import Any

from memest.estimator.tensors.patches import Patches

Action = Callable[[ModuleType], None]


class ImportHooks(MetaPathFinder):
    """Import hook that calls functions ("actions") with a module as soon as it is imported. `note`
    is called with a text for the report, if the module lacks what an action uses."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note
        self._actions: dict[str, list[Action]] = {}
        self._contexts: dict[str, Callable[[], Any]] = {}
        self._being_searched: set[str] = set()

    def after(self, name: str, action: Action) -> None:
        """Call `action` with the module `name` once it is imported, or now if it already is."""
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            self._run(action, module)
        else:
            self._actions.setdefault(name, []).append(action)

    def _run(self, action: Action, module: ModuleType) -> None:
        """Call `action(module)`; add a note if the library's release lacks a name that it uses."""
        try:
            action(module)
        except AttributeError as error:
            if not isinstance(error.obj, ModuleType | type):
                raise
            owner = getattr(error.obj, "__qualname__", error.obj.__name__)
            self._note(
                f"the installed release of `{module.__name__}` has no `{owner}.{error.name}`: "
                "what memest adds there is left out"
            )

    def within(self, name: str, context: Callable[[], Any]) -> None:
        """Run the import of module `name` in the context manager `context()`. Do nothing if the
        module is already imported."""
        if name not in sys.modules:
            self._contexts[name] = context
            self._actions.setdefault(name, [])

    def install(self) -> None:
        """Install the hooks for all later imports."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Remove the hooks."""
        sys.meta_path.remove(self)
        self._actions.clear()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return a spec whose loader runs the actions of module `fullname`; None if it has none."""
        if fullname not in self._actions or fullname in self._being_searched:
            return None
        self._being_searched.add(fullname)
        try:
            spec = find_spec(fullname)
        finally:
            self._being_searched.discard(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with self._contexts.pop(fullname, nullcontext)():
                execute(module)
            for action in self._actions.pop(fullname, ()):
                self._run(action, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_Names = list[tuple[ModuleType, str, int]]  # module, name in it, position of its object
_found: dict[tuple[int, ...], tuple[Sequence[Any], _Names]] = {}
"""Results of `names_of` by ids of the originals, which are stored so that no id is used again."""


def names_of(originals: Sequence[Any]) -> _Names:
    """Return (module, name, index) for each global name that is bound to `originals[index]`. The
    result is cached by the number of modules, since the search takes 10 ms."""
    positions = {id(original): index for index, original in enumerate(originals)}
    key = *positions, len(sys.modules)
    if key in _found:
        _, bindings = _found[key]
        return bindings
    bindings = []
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if not positions.keys().isdisjoint(map(id, list(names.values()))):  # most end here, in C
            pairs = ((name, positions.get(id(value))) for name, value in list(names.items()))
            bindings += [(module, name, index) for name, index in pairs if index is not None]
    _found[key] = originals, bindings
    return bindings


def replace_everywhere(patches: Patches, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Replace `old` by `new`, for each of `pairs` (old, new), in all modules with a global name for
    `old`. `patches` undoes it."""
    originals, replacements = zip(*pairs, strict=True)
    for owner, name, index in names_of(originals):
        patches.set(owner, name, replacements[index])


def wrap_everywhere(
    patches: Patches, module: Any, name: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator. The decorated function replaces `module.name` in all modules until
    `patches` undoes it, and gets the original as its first argument."""
    original = getattr(module, name)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        wrapper = wraps(original)(lambda *args, **kwargs: function(original, *args, **kwargs))
        replace_everywhere(patches, [(original, wrapper)])
        return wrapper

    return decorate


class StubFinder(MetaPathFinder, Loader):
    """Import finder and loader that provides stubs for a library that is not installed."""

    def serves(self, fullname: str) -> bool:
        """Return whether the module of this full name is imported as a stub."""
        raise NotImplementedError

    def install(self, patches: Patches, *, is_first: bool = True) -> None:
        """Put the finder first in `sys.meta_path`, or last; `patches` removes it and its stubs."""
        sys.meta_path.insert(0 if is_first else len(sys.meta_path), self)
        self._found: list[str] = []
        patches.on_undo(self._remove)

    def _remove(self) -> None:
        sys.meta_path.remove(self)
        for name in self._found:
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if getattr(spec, "loader", None) is self:
                del sys.modules[name]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a stub package `fullname`; None if `serves(fullname)` is False."""
        if not self.serves(fullname):
            return None
        self._found.append(fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def importing_frame(self) -> FrameType | None:
        """Return the frame whose import statement is running; None if there is none."""
        for frame, _ in walk_stack(sys._getframe(1)):
            is_finders = frame.f_locals.get("self") is self
            if not is_finders and "importlib" not in frame.f_code.co_filename:
                return frame
        return None
