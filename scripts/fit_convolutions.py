"""Fits the trees that say what workspaces cuDNN's convolutions take, and tests them.

    pip install scikit-learn
    python scripts/fit_convolutions.py            # 30 minutes
    python scripts/fit_convolutions.py --tried    # only the trees of what the benchmark tries
    python scripts/fit_convolutions.py --test     # only what is said of the trees

Reads the measured calls beside memest/estimator/kernels/cudnn_convolution.py
(`measure_convolutions.py`), and writes the trees, of which that module says what they hold. Calls
of which `kept_aside` is true are not seen by the fit; how many of them are right is printed, for
calls of common networks (`is_common`) and for random ones.

A workspace is known, its two parts are not. A call whose workspace is one of `FORMS` and at most
`OWN_BYTES` is taken at its word; any other is given the form that a tree of the former finds
likely and that leaves a number of weights, or of tiles, as the sums.

What `cudnn.benchmark` tries (`cudnn_search`) has one tree a direction, of how many times as large
as the operands the largest workspace is.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from memest.estimator.kernels import cudnn_convolution as cudnn
from memest.estimator.kernels.cudnn_search import (
    LEAST_BYTES,
    RATIO_ONE,
    operand_bytes,
    search_features,
)

Array = np.ndarray[Any, Any]

OWN_BYTES = 1600
"""Most that kernels were seen to ask for by themselves: counters, headers, pointers."""

NO_OPERANDS_BYTES = 1024

NUM_FORMS, NUM_LEAVES = 26, (6000, 9000)
"""Forms that are told apart in a direction, and leaves of the trees of operands and of sums."""

NUM_ROUNDS, GUIDE_LEAVES = 3, 1500
"""How the forms of the other calls are found."""

MOST_SUMS_BYTES, TILE_BYTES, MOST_WEIGHTS = 64 << 20, 64 * 64 * 4, 2048

SHARE_OF_FEATURES = 0.25
"""Of the features, drawn at each node, among which a tree looks for its best question, so that the
trees differ.
"""

TRIED_LEAVES, TRIED_CALLS = 12_000, 2
"""Of the trees of what is tried, and the fewest calls at a leaf."""


def in_blocks(num_bytes: Array) -> Array:
    """Blocks of the allocator."""
    return -(-num_bytes // cudnn.BLOCK_BYTES)


def tree(
    leaves: int, seen: Array, labels: Array, *, share: float | None = None, number: int = 0
) -> DecisionTreeClassifier:
    """A tree that tells labels apart."""
    made = DecisionTreeClassifier(max_leaf_nodes=leaves, max_features=share, random_state=number)
    return made.fit(seen, labels)


class Direction:
    """The calls of one direction that are fitted to."""

    def __init__(self, calls: Array, sizes: Array, found: Array) -> None:
        self.calls, self.sizes, self.features = calls, sizes, found
        self.samples = calls[:, 4]
        self.weight_bytes = cudnn.Calls(calls).weight_bytes
        self.forms = self._forms()
        self.sums = self.sizes - self._operands(self.forms)

    def _operands(self, forms: Array) -> Array:
        operands = np.zeros_like(self.sizes)
        for form in np.unique(forms):
            chosen = forms == form
            operands[chosen] = cudnn.FORMS[form].num_bytes(self.calls[chosen])
        return operands

    def _forms(self) -> Array:
        """The form of each call's operands, by its place in `FORMS`."""
        forms = np.full(len(self.calls), -1)
        for i, form in enumerate(cudnn.FORMS):
            rest = self.sizes - form.num_bytes(self.calls)
            most = OWN_BYTES if i else NO_OPERANDS_BYTES
            forms[(forms < 0) & (rest >= 0) & (rest <= most)] = i
        common = [f for f, _ in Counter(forms[forms >= 0].tolist()).most_common(NUM_FORMS)]
        forms[~np.isin(forms, common)] = -1
        others = np.flatnonzero(forms < 0)
        seen = np.flatnonzero(forms >= 0)
        for _ in range(NUM_ROUNDS):
            guide = tree(GUIDE_LEAVES, self.features[seen], forms[seen])
            likely = guide.predict_proba(self.features[others])
            forms[others] = self._likeliest(others, guide.classes_, likely)
            seen = np.arange(len(forms))
        return forms

    def _likeliest(self, others: Array, forms: Array, likely: Array) -> Array:
        """Which form leaves whole weights or tiles, weighed by what the guide finds likely."""
        best, chosen = np.full(len(others), -np.inf), np.zeros(len(others), dtype=int)
        weight = self.weight_bytes[others]
        for column, form in enumerate(forms):
            rest = self.sizes[others] - cudnn.FORMS[form].num_bytes(self.calls[others])
            own = rest % weight
            are_weights = (rest // weight >= 1) & (rest // weight <= MOST_WEIGHTS)
            are_weights &= own <= np.minimum(OWN_BYTES, weight // 4)
            are_tiles = (rest >= TILE_BYTES) & (rest % TILE_BYTES <= OWN_BYTES)
            factor = np.where(are_weights, 8.0, np.where(are_tiles, 4.0, 1.0))
            score = np.log(likely[:, column] + 1e-4) + np.log(factor)
            score[(rest < 0) | (rest > MOST_SUMS_BYTES)] = -np.inf
            chosen[score > best] = form
            best = np.maximum(best, score)
        return chosen

    def codes(self) -> Array:
        """What kind of sums each call has: bytes, a weight per sample, weights, or a size."""
        rest, weight = self.sums, self.weight_bytes
        count, own = rest // weight, rest % weight
        are_weights = (count >= 1) & (count <= MOST_WEIGHTS)
        are_weights &= own <= np.minimum(OWN_BYTES, weight // 4)
        is_per_sample = np.abs(rest - self.samples * weight) <= cudnn.BLOCK_BYTES
        size = 30_000 + np.floor(np.log2(np.maximum(rest, 1)) * 8).astype(int)
        kinds = (rest <= OWN_BYTES, is_per_sample, are_weights)
        return np.select(kinds, (rest, 10_000, 20_000 + np.minimum(count, 200)), size)

    def leaf_of_sums(self, rows: Array) -> tuple[int, int, int]:
        """Weights per sample, weights and bytes that are nearest to the sums of a leaf's calls."""
        rest, weight, samples = self.sums[rows], self.weight_bytes[rows], self.samples[rows]
        constants = [n for n, _ in Counter(rest.tolist()).most_common(3)] + [int(np.median(rest))]
        counts = [n for n, _ in Counter((rest // weight).tolist()).most_common(3) if n > 0]
        candidates = [(0, 0, n) for n in constants]
        for per_sample, count in [(1, 0), *((0, n) for n in counts)]:
            own = rest - (per_sample * samples + count) * weight
            candidates += [(per_sample, count, int(np.clip(np.median(own), 0, OWN_BYTES)))]

        def error(candidate: tuple[int, int, int]) -> float:
            per_sample, count, own = candidate
            found = (per_sample * samples + count) * weight + own
            blocks = np.abs(in_blocks(rest) - in_blocks(found))
            return float(np.log2(blocks + 8.0).mean())

        return min(candidates, key=error)


class Fitted:
    """Both trees of a direction, the `number`-th of several."""

    def __init__(self, data: Direction, number: int) -> None:
        of_forms, of_sums = NUM_LEAVES
        drawn: dict[str, Any] = {"share": SHARE_OF_FEATURES, "number": number}
        self.operands = tree(of_forms, data.features, data.forms, **drawn)
        self.sums = tree(of_sums, data.features, data.codes(), **drawn)
        led = self.sums.apply(data.features)
        self.leaves = {
            leaf: data.leaf_of_sums(np.flatnonzero(led == leaf)) for leaf in np.unique(led).tolist()
        }

    def arrays(self) -> dict[str, dict[str, Array]]:
        """Both trees as `cudnn_convolution.Tree` reads them."""
        classes, values = self.operands.classes_, self.operands.tree_.value
        return {
            "operands": preorder(
                self.operands.tree_, lambda node: (int(classes[values[node].argmax()]),)
            ),
            "sums": preorder(self.sums.tree_, lambda node: self.leaves[node]),
        }


def preorder(nodes: Any, leaf: Callable[[int], tuple[int, ...]]) -> dict[str, Array]:
    """A tree as `cudnn_convolution.Tree` reads it, with what `leaf` says of its leaves."""
    right = np.zeros(nodes.node_count, dtype=np.int32)
    order: list[int] = []
    leaves: list[tuple[int, ...]] = []
    waiting = [(0, -1)]
    while waiting:
        node, parent = waiting.pop()
        if parent >= 0:
            right[parent] = len(order)
        place = len(order)
        order.append(node)
        if nodes.children_left[node] < 0:
            right[place] = len(leaves)
            leaves.append(leaf(node))
        else:
            waiting += [(nodes.children_right[node], place), (nodes.children_left[node], -1)]
    feature = nodes.feature[order].astype(np.int8)
    feature[feature < 0] = -1
    return {
        "feature": feature,
        "threshold": np.where(feature < 0, 0.0, nodes.threshold[order]),
        "right": right,
        "leaves": np.array(leaves, dtype=np.int64),
    }


def tree_of_tried(calls: Array, largest: Array) -> dict[str, Array]:
    """How many times as large as the operands the largest workspace is."""
    ratios = np.log2((largest + LEAST_BYTES) / operand_bytes(calls))
    fitted = DecisionTreeRegressor(
        max_leaf_nodes=TRIED_LEAVES, min_samples_leaf=TRIED_CALLS, random_state=0
    ).fit(search_features(calls), ratios)
    values = fitted.tree_.value
    return preorder(
        fitted.tree_, lambda node: (round(2.0 ** float(values[node].item()) * RATIO_ONE),)
    )


def say_tried(name: str, sizes: Array, found: Array) -> None:
    """How near the largest workspaces are."""
    away = np.abs(sizes - found) / np.maximum(sizes, 1 << 20)
    shares = ", ".join(f"{(away <= most).mean():.0%} within {most:.0%}" for most in (0.01, 0.1, 1))
    print(f"  {name}: {len(sizes)} calls tried, {np.median(away):.1%} off in the median, {shares}")


def say(name: str, sizes: Array, found: Array, sure: Array) -> None:
    """How near predictions are."""
    away = np.abs(sizes - found)
    right = in_blocks(sizes) == in_blocks(found)
    near, far = (away <= 1 << 20).mean(), (away > 8 << 20).mean()
    print(
        f"  {name}: {len(sizes)} calls, {right.mean():.1%} right to 512 B, {near:.1%} within 1 MiB,"
        f" {far:.1%} more than 8 MiB off; of {sure.mean():.1%} that are sure"
        f" {right[sure].mean():.1%} right"
    )


def ask(calls: Array, direction: str) -> tuple[Array, Array]:
    """Workspaces of calls by the trees as they were written, and whether they agree on them."""
    found = np.stack([np.asarray(v) for v in cudnn.features(calls).values()], 1)
    rows = found.astype(np.float32).astype(float).tolist()
    said = np.stack([_of_tree(calls, rows, direction, n) for n in range(cudnn.NUM_TREES)], 1)
    blocks = in_blocks(said)
    votes = (blocks[:, :, None] == blocks[:, None, :]).sum(2)
    most = votes.max(1)
    likeliest = said[np.arange(len(said)), votes.argmax(1)]
    middle = np.sort(said, 1)[:, cudnn.NUM_TREES // 2]
    return np.where(most == 1, middle, likeliest), most == cudnn.NUM_TREES


def _of_tree(calls: Array, rows: list[list[float]], direction: str, number: int) -> Array:
    operands, sums = (
        np.array([cudnn.trees()[f"{direction}_{part}_{number}"].leaf(row) for row in rows])
        for part in ("operands", "sums")
    )
    total: Array = (sums[:, 0] * calls[:, 4] + sums[:, 1]) * cudnn.Calls(calls).weight_bytes
    total += sums[:, 2]
    for form in np.unique(operands):
        chosen = operands[:, 0] == form
        total[chosen] += cudnn.FORMS[form].num_bytes(calls[chosen])
    return total


def main() -> None:
    """Fit, write, and say how good it is."""
    measured = cudnn.read()
    calls, workspaces = measured["calls"].astype(np.int64), measured["workspaces"].astype(np.int64)
    kept_aside, is_common = measured["kept_aside"], measured["is_common"]
    found = np.stack([np.asarray(v) for v in cudnn.features(calls).values()], 1)
    found = found.astype(np.float32)
    tried = measured["tried"][:, :, 0]
    is_asked = tried.min(1) >= 0
    arrays: dict[str, Array] = {}
    if cudnn.FITTED.exists():
        with np.load(cudnn.FITTED) as data:
            arrays = {name: data[name] for name in data.files}
    if "--test" not in sys.argv and "--tried" not in sys.argv:
        arrays = {name: columns for name, columns in arrays.items() if "_tried_" in name}
        for i, direction in enumerate(cudnn.DIRECTIONS):
            data = Direction(calls[~kept_aside], workspaces[~kept_aside, i], found[~kept_aside])
            for number in range(cudnn.NUM_TREES):
                for part, columns in Fitted(data, number).arrays().items():
                    name = f"{direction}_{part}_{number}"
                    arrays |= {f"{name}_{key}": v for key, v in columns.items()}
    if "--test" not in sys.argv:
        rows = is_asked & ~kept_aside
        for i, direction in enumerate(cudnn.DIRECTIONS):
            columns = tree_of_tried(calls[rows], tried[rows, i])
            arrays |= {f"{direction}_tried_{key}": v for key, v in columns.items()}
        np.savez_compressed(cudnn.FITTED, **arrays)
        print(f"{cudnn.FITTED}: {cudnn.FITTED.stat().st_size / 1e3:.0f} kB")
    for i, direction in enumerate(cudnn.DIRECTIONS):
        print(direction)
        for name, chosen in (("common", is_common), ("random", ~is_common)):
            rows = kept_aside & chosen
            total, sure = ask(calls[rows], direction)
            say(name, workspaces[rows, i], total, sure)
            rows &= is_asked
            asked = search_features(calls[rows]).tolist()
            leaves = [cudnn.trees()[f"{direction}_tried"].leaf(row)[0] for row in asked]
            largest = np.array(leaves) * operand_bytes(calls[rows]) // RATIO_ONE
            say_tried(name, tried[rows, i], largest)


if __name__ == "__main__":
    main()
