"""Write the tables of docs/plan.md from the rows and texts of the plan keys.

python scripts/plan_page.py    # a second
"""

from __future__ import annotations

import re
from itertools import groupby

from pages import ROOT, table, with_part

from memest.plan import TrainingPlan, keys
from memest.plan.keys import Key
from memest.plan.training_plan import PLAN_KEYS
from memest.report.schema import field_docs

PAGE = ROOT / "docs" / "plan.md"
BEGIN, END = "<!-- keys: scripts/plan_page.py -->\n", "<!-- end of keys -->\n"


def main() -> None:
    """Replace the tables of the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def page(text: str) -> str:
    """Return the page `text` with new tables."""
    return with_part(text, BEGIN, END, f"{tables()}\n")


def tables() -> str:
    """Return one table for each section of `memest predict --help`."""
    meanings = docstrings()
    parts: list[str] = []
    sections = list(dict.fromkeys(row.section for row in PLAN_KEYS.values()))
    rows = sorted(PLAN_KEYS.values(), key=lambda row: sections.index(row.section))
    for section, members in groupby(rows, key=lambda row: row.section):
        cells = [
            (f"`{row.name}`", f"`{row.flags[0]}`" if row.flag else "", default_of(row),
             meanings[row.name] + more(row))
            for row in members
        ]  # fmt: skip
        parts.append(f"\n## {section}\n\n{table(['key', 'flag', 'default', 'meaning'], cells)}")
    return "".join(parts)


def docstrings() -> dict[str, str]:
    """Return the text of each field of `TrainingPlan`, names of `plan/keys.py` written out."""
    return {
        name: re.sub(r"`([A-Z]{3,})`", _written_out, " ".join(text.split()))
        for name, text in field_docs(TrainingPlan).items()
    }


def _written_out(match: re.Match[str]) -> str:
    return ", ".join(f"`{value}`" for value in getattr(keys, match[1]))


def default_of(row: Key) -> str:
    """Return the default of a key in words."""
    text = row.unset
    if not text and row.default not in (None, "", ()):
        is_text = isinstance(row.default, str)
        text = f"`{row.default}`" if is_text else f"{row.default:g}".lower()
        if isinstance(row.default, int):
            text = str(row.default).lower()
    loops = (f"{value:g} in `{loop}`" for loop, value in row.in_loops.items())
    return ", ".join([text, *loops])


def more(row: Key) -> str:
    """Return the other names of a key."""
    names = ", ".join(f"`{name}`" for name in row.other_names)
    return f" TrainingArguments: {names}." if names else ""


if __name__ == "__main__":
    main()
