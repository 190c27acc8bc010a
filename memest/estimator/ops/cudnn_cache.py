"""Answers of the installed cuDNN in a file of the user's cache folder.

One file for each cuDNN, GPU and version of this code. A file holds at most `MOST_ANSWERS` answers;
the oldest are dropped. A file that cannot be read is ignored and replaced. Processes that write at
the same time each replace the whole file, so that a reader never sees half of one.
"""

from __future__ import annotations

import atexit
import hashlib
import json
from contextlib import suppress

from memest.writing import cache_folder, write_whole

MOST_ANSWERS = 20_000
"""About 0.7 MB."""

WRITE_EVERY = 256
"""New answers after which the file is written; it is also written when the process ends."""

Answer = tuple[int, ...]


class Answers:
    """Answers by key; not for several threads at once."""

    def __init__(self, fingerprint: str) -> None:
        self.path = cache_folder() / f"cudnn-{fingerprint}.json"
        self._found = self._read()
        self._num_new = 0
        atexit.register(self.write)

    @staticmethod
    def key(row: tuple[int, ...], *settings: object) -> str:
        """Return 16 letters that stand for a call and its settings."""
        text = repr((row, settings)).encode()
        return hashlib.blake2b(text, digest_size=8).hexdigest()

    def get(self, key: str) -> Answer | None:
        """Return the stored answer; None if there is none."""
        return self._found.get(key)

    def put(self, key: str, answer: Answer) -> Answer:
        """Store an answer and return it."""
        self._found[key] = answer
        self._num_new += 1
        if self._num_new >= WRITE_EVERY:
            self.write()
        return answer

    def write(self) -> None:
        """Add the new answers to the file; a folder that cannot be written is passed over."""
        if not self._num_new:
            return
        self._num_new = 0
        merged = self._read() | self._found
        kept = dict(list(merged.items())[-MOST_ANSWERS:])
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(kept))

    def _read(self) -> dict[str, Answer]:
        try:
            read = json.loads(self.path.read_text(encoding="utf-8"))
            return {str(key): tuple(map(int, answer)) for key, answer in read.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}
