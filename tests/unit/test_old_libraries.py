"""Releases of libraries that lack names which memest uses."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from memest.errors import UnsupportedError
from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.hardware.work_log import WorkLog
from memest.estimator.integrations.bitsandbytes import KernelLibrary
from memest.estimator.torch_api.files.pretrained import NoWeights, _dtype_without_files
from memest.models_meta import flash_attention, registry
from memest.models_meta.quantized import layers_to_quantize


class Engine:
    pass


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import importlib.machinery

    made = ModuleType("some_library")
    made.__spec__ = importlib.machinery.ModuleSpec("some_library", None)
    made.Engine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_library", made)
    return made


def test_a_name_that_a_release_lacks_is_a_note(library: ModuleType) -> None:
    notes: list[str] = []

    ImportHooks(notes.append).after("some_library", lambda module: module.Engine.step)

    assert notes == [
        "the installed release of `some_library` has no `Engine.step`: "
        "what memest adds there is left out"
    ]


def test_other_missing_attributes_are_errors(library: ModuleType) -> None:
    def action(module: Any) -> None:
        object().step  # type: ignore[attr-defined]  # noqa: B018

    with pytest.raises(AttributeError):
        ImportHooks(pytest.fail).after("some_library", action)


def test_the_dtype_is_found_without_files_in_transformers_4_51() -> None:
    def _get_torch_dtype(
        cls: Any, torch_dtype: Any, checkpoint_files: Any, config: Any, sharded_metadata: Any,
        state_dict: Any, weights_only: bool,
    ) -> Any:  # fmt: skip
        return state_dict

    files = [NoWeights("model.safetensors")]
    call = _dtype_without_files(_get_torch_dtype)

    assert list(call(nn.Module, torch.float16, files, None, None, None, True)) == [""]
    assert call(nn.Module, torch.float16, ["a"], None, None, None, True) is None


def test_skipped_layers_stay_unquantised_before_transformers_5(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.quantizers import quantizers_utils

    model = nn.ModuleDict({"head": nn.Linear(2, 2), "body": nn.ModuleDict({"a": nn.Linear(2, 2)})})
    monkeypatch.delattr(quantizers_utils, "should_convert_module")

    assert [name for name, _ in layers_to_quantize(model, ["head"])] == ["body.a"]
    assert [name for name, _ in layers_to_quantize(model, ["body"])] == ["head"]


def test_the_dtype_keyword_is_the_releases_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    assert registry.dtype_keyword() == "dtype"
    monkeypatch.setattr(transformers, "PretrainedConfig", object)
    assert registry.dtype_keyword() == "torch_dtype"


def test_numbers_of_old_bitsandbytes_are_c_integers() -> None:
    library = KernelLibrary(lambda path: pytest.fail(path), "")
    c, tensor = ctypes.c_int, ctypes.c_void_p(8)
    sizes = c(64), c(4096)

    assert library.cdequantize_blockwise_fp16_nf4(*[tensor] * 4, *sizes, tensor) == 0
    name, args = WorkLog.library_call
    WorkLog.library_call = "", ()

    assert (name, args[4:6]) == ("cdequantize_blockwise_fp16_nf4", (64, 4096))


def test_flash_attention_of_an_old_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_flash_attention_utils as utils

    monkeypatch.delattr(utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX")
    monkeypatch.delattr(utils, "_lazy_imports")
    with (
        pytest.raises(UnsupportedError, match="too old"),
        flash_attention.replace_functions(),
    ):
        pass


def test_flash_attention_of_transformers_4_57_has_four_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import modeling_flash_attention_utils as utils
    from transformers import modeling_utils

    assert modeling_utils  # imports the matrix

    monkeypatch.delattr(utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX")
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: False)
    with flash_attention.replace_functions():
        assert utils.is_flash_attn_2_available()
        found = utils._lazy_imports("flash_attention_2")

    assert [function.__name__ for function in found] == [
        "flash_attn_func", "flash_attn_varlen_func", "pad_input", "unpad_input",
    ]  # fmt: skip
    assert not utils.is_flash_attn_2_available()
