"""Running line of the user's code, and notes for the report."""

import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

import torch

from memest.packages import is_in_packages


class ScriptLines:
    """Finder of the running line of the user's script, by its innermost stack frame. Code in the
    folders `roots`, or outside of the Python installation, is the script's. Frames of torch,
    libraries and memest are skipped."""

    def __init__(self, roots: tuple[Path, ...] = ()) -> None:
        self._roots = tuple(str(root.resolve()) + os.sep for root in roots)
        paths = {sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")}
        paths |= {str(Path(torch.__file__).parent), str(Path(__file__).resolve().parents[2])}
        self._foreign = tuple(p + os.sep for p in sorted(filter(None, paths)))
        # by identity, with the code kept alive: constants of Dynamo's code can have no hash
        self._is_script_by_code: dict[int, tuple[CodeType, bool]] = {}
        self._texts: dict[tuple[str, int], str] = {}  # by file and line
        self._places: dict[str, tuple[str, int]] = {}  # file and line by text
        self._file_by_name: dict[str, str] = {}  # first file with this name, by the name

    def script_frame(self, frame: FrameType | None) -> FrameType | None:
        """Return the innermost frame of the script, from `frame` outwards, or None."""
        while frame is not None:
            code = frame.f_code
            entry = self._is_script_by_code.get(id(code))
            if entry is None:
                entry = self._is_script_by_code[id(code)] = code, self._is_script(frame)
            _, is_script = entry
            if is_script:
                return frame
            frame = frame.f_back
        return None

    def current(self) -> str:
        """Return the running line of the script, such as `train.py:12`; "" if none runs."""
        frame = self.script_frame(sys._getframe(1))
        if frame is None:
            return ""
        location = frame.f_code.co_filename, frame.f_lineno
        return self._texts.get(location) or self._text(*location)

    def place_of(self, text: str) -> tuple[str, int]:
        """Return (file, line number) of `text`, a result of `current`; ("", 0) for other texts."""
        return self._places.get(text, ("", 0))

    def _text(self, file: str, line: int) -> str:
        """Return `file:line`, with the folder in front of a package's `__init__.py`, and if another
        file has the same name."""
        name = os.path.basename(file)
        if self._file_by_name.setdefault(name, file) != file or name == "__init__.py":
            name = os.path.join(os.path.basename(os.path.dirname(file)), name)
        text = self._texts[file, line] = f"{name}:{line}"
        self._places.setdefault(text, (file, line))
        return text

    def _is_script(self, frame: FrameType) -> bool:
        """Return whether the code of `frame` is the script's."""
        name = frame.f_code.co_filename
        if name == "<string>":  # `python -c`, or generated code
            return bool(frame.f_globals.get("__name__") == "__main__")
        if name.startswith("<") and not name.startswith(("<ipython", "<stdin>")):
            return False
        if "inductor_ops" in frame.f_globals and "extern_kernels" in frame.f_globals:
            return False  # written by Inductor
        path = os.path.abspath(name)
        if any(path.startswith(root) for root in self._roots):
            return True
        return not path.startswith(self._foreign) and not is_in_packages(path)


class Notes:
    """Notes and warnings of a report, in the order of their addition; a note is added once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.warnings: list[str] = []  # sentences that the report prints above all figures

    def add(self, text: str) -> None:
        """Add the note `text`, unless it was added before."""
        if text not in self.texts:
            self.texts.append(text)


LARGEST = "the size of some results depends on unknown values: they are as large as they can be"
