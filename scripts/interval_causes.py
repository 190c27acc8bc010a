"""Why intervals of scripts on two GPUs are wide: which blocks, and which line of torch shares them.

python scripts/interval_causes.py [NAMES...]

Runs the cases of validation/scripts/simulated_ranks.json whose interval is wide, as
compare_ranks.py does. Each rank is replayed twice more: only NCCL's stashes return late, or only
blocks that two streams use. The cause is the one that makes the wider interval. Its line is the
innermost one of torch's Python that stashed or shared the most bytes.
validation/scripts/interval_causes.json has the result, and validation/ranks.md its table. Use
torch 2.11, with which the runs were measured.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import compare_scripts
from compare_ranks import CAUSES, FIGURES, is_wide
from compare_scripts import GPU, RESULTS, read


def main() -> int:
    """Find the causes of the named cases, or of all with a wide interval; 1 if one failed."""
    if sys.argv[1:2] == ["--run"]:
        return _run(Path(sys.argv[2]), sys.argv[3:])
    cases, kept = read("measured_ranks")["cases"], read("simulated_ranks")["cases"]
    path = RESULTS / f"{CAUSES}.json"
    found = read(CAUSES) if path.is_file() else {}
    wide = [
        n for n, each in kept.items() if any(map(is_wide, each["allocated"] + each["reserved"]))
    ]
    failed = False
    for name in sys.argv[1:] or [n for n in wide if cases[n]["origin"] == "ours"]:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "causes")
            command = [sys.executable, __file__, "--run", str(out)]
            command += compare_scripts.watched(cases[name], None, folder)
            done = compare_scripts.run(command, cases[name], None, folder, LAB_SAMPLES="400")
            ranks = [Path(f"{out}.{rank}") for rank in range(2)]
            if not all(rank.is_file() for rank in ranks):
                failed = True
                print(name, done.stderr[-400:])
                continue
            found[name] = [json.loads(rank.read_text(encoding="utf-8")) for rank in ranks]
            print(name, found[name], flush=True)
        found = {n: found[n] for n in kept if n in found and n in wide}
        rows = [f" {json.dumps(n)}: {json.dumps(ranks)}" for n, ranks in found.items()]
        path.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    return int(failed)


def _run(out: Path, command: list[str]) -> int:
    """Run both ranks of a script, and write the causes of each to `out` with its number."""
    from memest.estimator.hardware.gpus import find_gpu
    from memest.run.ranks import Rank, chosen_ranks, run_together
    from memest.run.session import RunResult, Session, run_target
    from memest.run.target import find_module, find_script

    is_module = command[0] == "-m"
    make = find_module if is_module else find_script
    target = make(command[is_module], tuple(command[is_module + 1 :]))
    lines: dict[int, str] = {}
    _watch(lines)

    def one(rank: Rank) -> RunResult:
        session = Session(find_gpu(GPU), name=target.label, roots=target.roots, rank=rank)
        ran = run_target(target, session)
        if ran.report is None or ran.exit_code:
            sys.stderr.write(ran.error_text or str(ran.refusal))
            return ran
        text = json.dumps(_causes(session.virtual, lines))
        Path(f"{out}.{rank.rank}").write_text(text, encoding="utf-8")
        return ran

    run_together(chosen_ranks(2, 1), one)
    return 0


def _watch(lines: dict[int, str]) -> None:
    """Record the line of torch that stashes a storage or uses it on another stream."""
    from memest.estimator.gpu.memory import Memory

    share, stash_ = Memory.record_stream, Memory.stash

    def record_stream(memory: Memory, tensor: Any, stream: int) -> None:
        index = memory.id_of(tensor)
        if index is not None:
            lines[index] = _line()
        share(memory, tensor, stream)

    def stash(memory: Memory, index: int, done: float) -> None:
        lines[index] = _line()
        stash_(memory, index, done)

    Memory.record_stream, Memory.stash = record_stream, stash  # type: ignore[method-assign]


def _line() -> str:
    """The innermost line of torch's Python, or of another library's."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename.replace(os.sep, "/")
        is_ours = "/memest/" in name or name.startswith("<")
        if "/site-packages/" in name and not is_ours:
            return f"{name.rpartition('/site-packages/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "the script"


def _causes(virtual: Any, lines: dict[int, str]) -> dict[str, Any]:
    """`[percent, percent by stashes alone, by streams alone]` of each figure, and the lines."""
    from memest.estimator.tensors.storages import FreeTiming
    from memest.run.summary import run_of

    run, limit = run_of(virtual), virtual.allocator.limit_bytes
    storages = run.program.storages

    def peaks(**changed: Any) -> list[tuple[int, int]]:
        program = replace(run.program, storages=replace(storages, **changed))
        replays = [replace(run, program=program).on(limit, timing) for timing in FreeTiming]
        return [(each.peak_allocated_bytes, each.peak_reserved_bytes) for each in replays]

    every = peaks(), peaks(deferred=set()), peaks(stashed=set())
    found: dict[str, Any] = {}
    for place, key in enumerate(FIGURES):
        values = [[peak[place] for peak in each] for each in every]
        found[key] = [round(100 * (max(each) / min(each) - 1), 2) for each in values]
    for key, shared in (("stashes", storages.stashed), ("streams", storages.deferred)):
        counts: Counter[str] = Counter()
        for index in shared:
            counts[lines.get(index, "?")] += storages.num_bytes[index]
        found[key] = [line for line, _ in counts.most_common(3)]
    return found


if __name__ == "__main__":
    sys.exit(main())
