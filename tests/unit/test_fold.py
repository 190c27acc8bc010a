"""Lines of a report are broken between words where a terminal is narrower."""

from __future__ import annotations

import sys

import pytest

from memest.cli import main
from memest.cli.terminal import folded
from memest.report.text import fold

ROW = "rounding          0.031 GiB    1.5 %  blocks minus requests in bytes: requests round up"


def test_a_note_continues_under_its_column() -> None:
    first, second = fold(ROW, 80).splitlines()

    assert first == ROW[: ROW.index(" round up")]
    assert second == " " * ROW.index("blocks") + "round up"


def test_short_lines_commands_and_long_words_stay_whole() -> None:
    command = "more: memest advise --model gpt2 --bs 8 --precision 32-true --gpu a100-80gb"
    word = "x" * 90

    assert fold(f"a\n\n{command}\n{word}", 40).splitlines() == ["a", "", command, word]


def test_colours_take_no_columns() -> None:
    line = f"\x1b[2m{'word ' * 15}end\x1b[0m"

    assert fold(line, 80) == line


def test_the_lists_fold_as_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        main(["gpus"])
    rows = capsys.readouterr().out.splitlines()

    assert max(map(len, rows)) <= 40
    assert "t4               14.75 GiB  135.15 MiB" in rows


def test_only_a_terminal_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "60")

    assert folded(ROW) == ROW
    assert max(map(len, folded(ROW, Terminal()).splitlines())) <= 60  # type: ignore[arg-type]
