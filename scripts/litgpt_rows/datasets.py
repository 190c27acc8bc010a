"""Rows with the lengths of Alpaca2k's, drawn at random: what recipes get in place of a download.

Alpaca2k is a part of the cleaned Alpaca: 42 MB of JSON in 51,760 rows, so 940 characters a row with
the prompt. The longest of all rows has 1,304 tokens of Llama 2 (LitGPT's resource tables). Both are
those of a log-normal distribution with a mean of 235 tokens and a sigma of 0.44.
"""

import math
import random
import runpy
from pathlib import Path

LAB = runpy.run_path(str(Path(__file__).parents[1] / "labs" / "datasets.py"))
"""The rows of the labs, which are longer."""

CHARACTERS = 4
"""Characters of a token, as in dummy tokenizers."""

SIGMA = 0.44
MEDIAN = 235 / math.exp(SIGMA**2 / 2)
PROMPTS = {False: 165, True: 215}
"""Characters of Alpaca's prompts, without and with an input."""


def load_dataset(repo_id, cache_dir=None):
    """The rows; nothing is read or written."""
    draw = random.Random(repo_id)

    def text(num_characters):
        words = []
        while num_characters > 0:
            words.append(draw.choice(LAB["WORDS"]))
            num_characters -= len(words[-1]) + 1
        return " ".join(words)

    rows = LAB["Rows"]()
    for _ in range(LAB["NUM_ROWS"]):
        total = CHARACTERS * MEDIAN * draw.lognormvariate(0, SIGMA)
        has_input = draw.random() < 0.4
        instruction, given = text(60), text(50) if has_input else ""
        rest = total - PROMPTS[has_input] - len(instruction) - len(given)
        rows.append({"instruction": instruction, "input": given, "output": text(max(10, rest))})
    return {"train": rows}
