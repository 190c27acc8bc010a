"""Settings of a project: `[tool.memest]` in its pyproject.toml."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from memest.errors import PlanError, closest, shown

FILE = "pyproject.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """Settings in `[tool.memest]` of the nearest pyproject.toml; empty if there are none."""

    gpu: str = ""  # GPU to simulate if a command or test names none
    limit: str = ""  # memory that a script or test may use on it, such as `38GiB`
    command: tuple[str, ...] = ()  # of `memest run` without a script: `--max-steps 3 train.py`
    folder: Path | None = None  # folder of the file, or None without one


def find_project(folder: Path) -> Project:
    """Return settings of the nearest pyproject.toml, from `folder` up; `PlanError` if invalid."""
    for parent in (folder, *folder.parents):
        if (parent / FILE).is_file():
            return _read_project(parent / FILE)
    return Project()


def _read_project(path: Path) -> Project:
    import tomllib

    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"`{path}` cannot be read: {error}", hint="correct the file") from error
    tools = tables.get("tool", {})
    values: Any = tools.get("memest", {}) if isinstance(tools, Mapping) else tools
    if not isinstance(values, Mapping):
        raise PlanError(f"`tool.memest` of `{path}` is no table", hint="begin it by [tool.memest]")
    names = [field.name for field in fields(Project) if field.name != "folder"]
    for key, value in values.items():
        if key not in names:
            near = closest(key, names)
            hint = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(names)}"
            raise PlanError(f"`[tool.memest]` of `{path}` has no key {shown(key)}", hint=hint)
        is_list = isinstance(value, list) and all(isinstance(word, str) for word in value)
        if not (isinstance(value, str) or (key == "command" and is_list)):
            raise PlanError(
                f"`{key}` in `[tool.memest]` of `{path}` is {shown(value)}",
                hint='write text, such as gpu = "a100-40gb"',
            )
    settings = dict(values)
    command = settings.pop("command", [])
    try:
        arguments = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        raise PlanError(
            f"`command` in `[tool.memest]` of `{path}` cannot be split: {error}",
            hint='close its quotes, or write a list: command = ["train.py", "a b"]',
        ) from error
    return Project(command=tuple(arguments), folder=path.parent, **settings)
