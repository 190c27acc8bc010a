"""What is done to a library once the script has imported it.

memest imports no library on behalf of a script: where one needs a stand-in, the stand-in is put in
place when the script's own import has run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class ImportHooks(MetaPathFinder):
    """Calls actions right after modules have been imported, or at once where they have been."""

    def __init__(self) -> None:
        self._actions: dict[str, list[Action]] = {}
        self._looking: set[str] = set()
        self.at_end = ExitStack()
        """What is to be cleared away with the hooks."""

    def after(self, name: str, action: Action) -> None:
        """Let `action` see the module `name` once it is imported."""
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            action(module)
        else:
            self._actions.setdefault(name, []).append(action)

    def install(self) -> None:
        """See every import from now on."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """See none any more."""
        sys.meta_path.remove(self)
        self.at_end.close()
        self._actions.clear()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, its loader with the actions behind it."""
        if fullname not in self._actions or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is not None and spec.loader is not None:
            self._follow(fullname, spec.loader)
        return spec

    def _follow(self, name: str, loader: Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for action in self._actions.pop(name, ()):
                action(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]


_found: dict[tuple[int, int], tuple[Any, list[tuple[ModuleType, str]]]] = {}


def names_of(original: Any) -> list[tuple[ModuleType, str]]:
    """Where `original` has been imported by name: modules and the name that it has there.

    Looked for once for as many modules as there are: it takes 30 ms.
    """
    key = id(original), len(sys.modules)
    if key in _found:
        return _found[key][1]
    found = []
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                found.append((module, name))
    _found[key] = original, found
    return found
