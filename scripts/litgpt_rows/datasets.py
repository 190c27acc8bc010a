"""Rows with the lengths of Alpaca2k's, drawn at random: what recipes get in place of a download.

Alpaca2k is a part of the cleaned Alpaca: 42 MB of JSON in 51,760 rows, so 940 characters a row with
the prompt. The longest of all rows has 1,304 tokens of Llama 2 (LitGPT's resource tables). Both are
those of a log-normal distribution with a mean of 235 tokens and a sigma of 0.44.
"""

import math
import random

NUM_ROWS = 2000
CHARACTERS = 4
"""Characters of a token, as in dummy tokenizers."""

SIGMA = 0.44
MEDIAN = 235 / math.exp(SIGMA**2 / 2)
PROMPTS = {False: 165, True: 215}
"""Characters of Alpaca's prompts, without and with an input."""

WORDS = (
    "a the of to and in is that it for on with as are this be or from by at an which you can "
    "water music number family answer history kitchen garden question"
).split()


class Rows(list):
    """What a data set is asked for."""

    def train_test_split(self, test_size, seed):
        """As the library's."""
        rows = list(self)
        random.Random(seed).shuffle(rows)
        cut = round(len(rows) * test_size)
        return {"train": Rows(rows[cut:]), "test": Rows(rows[:cut])}


def load_dataset(repo_id, cache_dir=None):
    """The rows; nothing is read or written."""
    draw = random.Random(repo_id)

    def text(num_characters):
        words = []
        while num_characters > 0:
            words.append(draw.choice(WORDS))
            num_characters -= len(words[-1]) + 1
        return " ".join(words)

    rows = Rows()
    for _ in range(NUM_ROWS):
        total = CHARACTERS * MEDIAN * draw.lognormvariate(0, SIGMA)
        has_input = draw.random() < 0.4
        instruction, given = text(60), text(50) if has_input else ""
        rest = total - PROMPTS[has_input] - len(instruction) - len(given)
        rows.append({"instruction": instruction, "input": given, "output": text(max(10, rest))})
    return {"train": rows}
