"""Lines of the user's code."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FunctionType

from memest.estimator.tensors.lines import ScriptLines


def test_code_with_constants_that_have_no_hash_is_the_users() -> None:
    """Dynamo writes such code."""
    lines = ScriptLines()

    def script() -> object:
        return lines.script_frame(sys._getframe()), "mark"

    code = script.__code__
    constants = tuple({"mark": 1} if value == "mark" else value for value in code.co_consts)
    written = FunctionType(code.replace(co_consts=constants), globals(), closure=script.__closure__)

    frame, mark = written()

    assert mark == {"mark": 1}
    assert frame is not None
    assert frame.f_code.co_name == "script"


def test_the_name_of_a_package_is_in_front_of_its_first_file(tmp_path: Path) -> None:
    lines = ScriptLines()
    code = compile("line = current()", str(tmp_path / "engine" / "__init__.py"), "exec")
    scope: dict[str, object] = {"current": lines.current}

    exec(code, scope)

    assert scope["line"] == "engine/__init__.py:1"
