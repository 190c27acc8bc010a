"""Reading of text and YAML from paths of users, which may be devices, pipes or malicious files."""

import json
import os
import select
import stat
from itertools import chain
from pathlib import Path
from typing import Any

from memest.errors import PlanError
from memest.packages import require

MAX_FILE_BYTES = 512 << 10  # above any config or suite of a thousand experiments
MAX_NODES = 100_000  # YAML nodes with aliases expanded; a suite of a thousand experiments has fewer
_MAX_WAIT_S = 60.0  # seconds for which a pipe may send nothing
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # Unix, Windows


def read_table(module: str, name: str) -> Any:
    """Return the content of the JSON file `name` in the folder of the Python file `module`."""
    return json.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


def read_limited(path: Path, max_bytes: int = MAX_FILE_BYTES, *, what: str = "plans") -> str:
    """Return the text of the regular file or pipe `path`. `what` names its content in error hints.

    Raises:
        PlanError: it cannot be read, is larger than `max_bytes`, not text, a device or a folder.
    """
    hint = f"name a file of {what}"
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
        try:
            status = os.fstat(descriptor)
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
                is_folder = stat.S_ISDIR(status.st_mode)
                raise PlanError(
                    f"`{path}` is {'a folder' if is_folder else 'no regular file'}", hint=hint
                )
            data = b"" if status.st_size > max_bytes else _read(descriptor, max_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PlanError(f"`{path}` cannot be read: {error.strerror}", hint=hint) from error
    if max(status.st_size, len(data)) > max_bytes:
        size = f"{max_bytes >> 10} KiB" if max_bytes < 1 << 20 else f"{max_bytes >> 20} MiB"
        raise PlanError(f"`{path}` is larger than {size}", hint=hint)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"`{path}` is not text", hint=hint) from error


def _read(descriptor: int, max_bytes: int) -> bytes:
    """Return the content of an open file or pipe. A pipe ends early after `_MAX_WAIT_S` without
    data. The result is longer than `max_bytes`, but may be cut, if the content is."""
    data = bytearray()
    while len(data) <= max_bytes:
        try:
            chunk = os.read(descriptor, 1 << 16)
        except BlockingIOError:  # the writer of the pipe is slow
            is_ready, _, _ = select.select([descriptor], [], [], _MAX_WAIT_S)
            if is_ready:
                continue
            break
        if not chunk:
            break
        data += chunk
    return bytes(data)


def parse_yaml(text: str, path: Path) -> Any:
    """Return the value in `text`, None if empty: YAML or JSON, or TOML if `path` ends with `.toml`.

    Raises:
        PlanError: it is not valid, or has more than `MAX_NODES` values with YAML aliases expanded.
    """
    if path.suffix == ".toml":
        import tomllib

        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(
                f"`{path}` is not valid TOML: {error}", hint="correct the file"
            ) from error
    if text.lstrip().startswith(("{", "[")):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass  # YAML has braces too
    require("yaml")
    import yaml

    loader: Any = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}, set()) > MAX_NODES:
            raise PlanError(
                f"`{path}` has more than {MAX_NODES} values, aliases written out",
                hint="name a YAML or JSON file of plans",
            )
        return loader.construct_document(node)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PlanError(f"`{path}` is not valid YAML: {reason}", hint="correct the file") from error
    finally:
        loader.dispose()


def _size(node: Any, sizes: dict[int, int], ancestors: set[int]) -> int:
    """Return the number of values in a YAML `node`, with aliases expanded. The result is above
    `MAX_NODES` if the node contains itself.

    `sizes` is {id of a node: its size}; the call adds the nodes that it counts. `ancestors` are the
    ids of the nodes that contain `node`; the call leaves them as they are.
    """
    if id(node) in ancestors:
        return MAX_NODES + 1
    if id(node) not in sizes:
        ancestors.add(id(node))
        children = [] if node.id == "scalar" else node.value
        if node.id == "mapping":
            children = [*chain.from_iterable(node.value)]  # keys and values
        sizes[id(node)] = 1 + sum(_size(child, sizes, ancestors) for child in children)
        ancestors.discard(id(node))
    return sizes[id(node)]
