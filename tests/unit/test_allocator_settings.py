"""`PYTORCH_ALLOC_CONF`: read as torch reads it, refused where and how torch refuses it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from memest.errors import PlanError, UnsupportedError
from memest.estimator.allocator.settings import (
    DEFAULT,
    NEWER,
    AllocatorSettings,
    changed_settings,
    describe,
    parse_settings,
    settings_from,
)
from memest.estimator.versions import simulating

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", AllocatorSettings()),
        ("expandable_segments:True", AllocatorSettings(expandable_segments=True)),
        ("expandable_segments : False", AllocatorSettings()),
        ("max_split_size_mb:64", AllocatorSettings(max_split_bytes=64 * MIB)),
        ("max_split_size_mb:64.9,", AllocatorSettings(max_split_bytes=64 * MIB)),
        (
            "max_non_split_rounding_mb:32",
            AllocatorSettings(max_non_split_rounding_bytes=32 * MIB),
        ),
        ("garbage_collection_threshold:.8", AllocatorSettings(garbage_collection_threshold=0.8)),
        ("per_process_memory_fraction:0.5", AllocatorSettings(memory_fraction=0.5)),
        ("large_segment_size_mb:40", AllocatorSettings(large_segment_bytes=40 * MIB)),
        ("roundup_power2_divisions:4", AllocatorSettings(roundup_divisions=(4,) * 16)),
        (
            "roundup_power2_divisions:[64:8,256:4,1024:2,>:1]",
            AllocatorSettings(roundup_divisions=(8,) * 7 + (0, 4, 0, 2) + (1,) * 5),
        ),
        ("backend:native", AllocatorSettings()),
    ],
)
def test_what_torch_takes_is_taken(text: str, wanted: AllocatorSettings) -> None:
    found = parse_settings(text)

    assert found.text == text
    assert replace(found, text="") == wanted
    assert found.is_default == (wanted == DEFAULT)


REFUSED = {
    "max_split_size_mb:10": "CachingAllocator option max_split_size_mb too small, must be >= 20",
    "max_non_split_rounding_mb:2": "option max_non_split_rounding_mb too small, must be >= 20",
    "max_split_size_mb:many": "stoull",
    "max_split_size_mb": "Index out of bounds in ConfigTokenizer",
    "max_split_size_mb:64 expandable_segments:True": "Index out of bounds in ConfigTokenizer",
    "expandable_segments:1": "Expected 'True' or 'False' at index 2 in ConfigTokenizer but got '1'",
    "expandable_segments:true": "Expected 'True' or 'False' at index 2",
    "garbage_collection_threshold:1": "garbage_collect_threshold is invalid, set it in (0.0, 1.0)",
    "garbage_collection_threshold:x": "stod",
    "large_segment_size_mb:10": "CachingAllocator option large_segment_size_mb must be > 10 MB",
    "roundup_power2_divisions:3": "For roundups, the divisions has to be power of 2",
    "roundup_power2_divisions:[64:3]": "has to be power of 2 or 0 to disable roundup",
    "roundup_power2_divisions:[63:4]": "For roundups, the intervals have to be power of 2",
    "roundup_power2_divisions:[64:4": "Index out of bounds in ConfigTokenizer",
    "roundup_power2_divisions:[": "Expected closing bracket ']' in ConfigTokenizer but reached end",
    "large_segment_size_mb:40,max_split_size_mb:32": "max_split_size_mb too small, must be >= 40",
    "max_non_split_rounding_mb:32,large_segment_size_mb:40": "too small, must be >= 40",
    "pinned_use_background_threads:1": "Expected 'True' or 'False' at index 2 in ConfigTokenizer",
}
REFUSED_BY_CUDA = {
    "expandable_segment:True": "Unrecognized key 'expandable_segment' in CUDA allocator config.",
    "per_process_memory_fraction:2": "per_process_memory_fraction is invalid, set it in [0.0, 1.0]",
    "backend:mine": "Unknown allocator backend, options are native and cudaMallocAsync",
}
"""As torch 2.11.0+cu130 says it on an H100."""


@pytest.mark.parametrize(("text", "says"), [*REFUSED.items(), *REFUSED_BY_CUDA.items()])
def test_what_torch_refuses_is_refused_with_its_message(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)) as refused:
        parse_settings(text)

    assert f"`PYTORCH_ALLOC_CONF={text}` is refused by torch" in str(refused.value)


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """torch's own parser, of which this build has the part that is not CUDA's."""
    if torch.version.cuda is not None:
        pytest.skip("a build for CUDA has an allocator whose settings this would change")
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False,large_segment_size_mb:20")


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize(("text", "says"), REFUSED.items())
def test_torch_says_so_itself(text: str, says: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=re.escape(says)):
        torch._C._accelerator_setAllocatorSettings(text)


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "expandable_segments:True,",
        "max_split_size_mb:64.9",
        "max_split_size_mb:-5",
        "roundup_power2_divisions:[64:8,256:4,1024:2,>:1],garbage_collection_threshold:.5",
        "max_split_size_mb;64:1",
    ],
)
def test_torch_takes_what_is_taken(text: str) -> None:
    torch._C._accelerator_setAllocatorSettings(text)
    if ";" not in text:  # an unknown key, which only CUDA's part refuses
        parse_settings(text)


def test_another_allocator_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="`backend:cudaMallocAsync` is another allocator"):
        parse_settings("backend:cudaMallocAsync")


def test_no_cache_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="`PYTORCH_NO_CUDA_MEMORY_CACHING` selects an"):
        settings_from({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def test_options_that_change_nothing_on_the_gpu_are_named() -> None:
    found = parse_settings("pinned_use_background_threads:True,expandable_segments:True")

    assert found.without_effect == ("pinned_use_background_threads",)
    assert describe(found) == (
        "PyTorch's allocator with `pinned_use_background_threads:True,expandable_segments:True`"
        " (pinned_use_background_threads: no effect on GPU memory)"
    )
    assert parse_settings("pinned_use_background_threads:True").is_default


@pytest.mark.parametrize("key", NEWER)
def test_torch_2_11_refuses_what_later_torch_takes(key: str) -> None:
    text = f"{key}:{8 if key.endswith('_mb') else True}"
    with pytest.raises(PlanError, match=f"Unrecognized key '{key}' in CUDA allocator config"):
        parse_settings(text)

    with simulating(".".join(map(str, NEWER[key]))):
        found = parse_settings(text)

    assert found.is_default
    is_reserve = key.startswith("expandable")
    assert describe(found).endswith(
        f"({key}: no effect on GPU memory) (torch 2.11 does not know {key})"
        + " (assumed that no segment reaches its reserve)" * is_reserve
    )


def test_torch_2_15_takes_a_reserve_for_each_class() -> None:
    text = "expandable_segments_reserve_by_class:[serving:0.25,sparse:8G],expandable_segments:True"
    with simulating("2.14"), pytest.raises(PlanError, match="Unrecognized key"):
        parse_settings(text)
    with simulating("2.15"):
        assert parse_settings(text).expandable_segments


def test_both_variables_count() -> None:
    """The newer one for what all devices share, the older one for what is CUDA's alone."""
    assert settings_from({}) is DEFAULT
    older = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,per_process_memory_fraction:0.5"}
    found = settings_from(older)
    assert (found.max_split_bytes, found.memory_fraction) == (64 * MIB, 0.5)

    both = settings_from({**older, "PYTORCH_ALLOC_CONF": "max_split_size_mb:128"})
    assert (both.max_split_bytes, both.memory_fraction) == (128 * MIB, 0.5)


def test_a_later_text_keeps_what_torch_keeps() -> None:
    before = parse_settings("expandable_segments:True,max_split_size_mb:64")

    after = changed_settings(before, "garbage_collection_threshold:0.5")

    assert after.expandable_segments
    assert after.max_split_bytes is None
    assert after.garbage_collection_threshold == 0.5


def test_the_bounds_of_a_later_text_follow_the_large_segments_that_stay() -> None:
    before = parse_settings("large_segment_size_mb:40")

    with pytest.raises(PlanError, match="max_split_size_mb too small, must be >= 40"):
        changed_settings(before, "max_split_size_mb:32")

    assert changed_settings(before, "max_split_size_mb:48").large_segment_bytes == 40 * MIB
