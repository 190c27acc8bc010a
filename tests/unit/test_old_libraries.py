"""Releases of libraries that lack names which memest uses."""

from __future__ import annotations

import ctypes
import importlib
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import memest
from memest.errors import UnsupportedError
from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.hardware.work import WorkLog
from memest.estimator.integrations import bitsandbytes
from memest.estimator.integrations.bitsandbytes import KernelLibrary
from memest.estimator.tensors.patches import Patches
from memest.estimator.torch_api.attributes import constructors
from memest.estimator.torch_api.files.pretrained import NoWeights, dtype_of
from memest.loops import data
from memest.models_meta import flash_attention, registry
from memest.models_meta.build import BuiltModel
from memest.models_meta.quantized import layers_to_quantize
from memest.models_meta.registry import resolve_config
from memest.plan import TrainingPlan


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
    call = partial(dtype_of, _get_torch_dtype)

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


def test_calls_of_old_bitsandbytes_are_noted() -> None:
    library = KernelLibrary(lambda path: pytest.fail(path), "")
    c, tensor = ctypes.c_int, ctypes.c_void_p(8)
    sizes = c(64), c(4096)

    assert library.cdequantize_blockwise_fp16_nf4(*[tensor] * 4, *sizes, tensor) == 0
    assert WorkLog.has_called
    WorkLog.has_called = False


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


OLD_BITSANDBYTES = {
    "__init__": "from . import functional",
    "cextension": """
class CudaBNBNativeLibrary:
    compiled_with_cuda = True

    def __init__(self, lib):
        self._lib = lib

    def __getattr__(self, name):
        return getattr(self._lib, name)

lib = None
""",
    "functional": """
from .cextension import lib

name2qmap = {}
UPDATES = [lib.cadam32bit_grad_fp32]
""",
}
"""Modules as in bitsandbytes 0.45, whose functions call the library."""


def test_bitsandbytes_before_0_46_has_no_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    for name, text in OLD_BITSANDBYTES.items():
        (tmp_path / "bitsandbytes").mkdir(exist_ok=True)
        (tmp_path / "bitsandbytes" / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    hooks, patches = ImportHooks(pytest.fail), Patches()
    mode: Any = None  # paged states alone use it
    bitsandbytes.install(patches, mode, hooks)
    hooks.install()
    try:
        functional: Any = importlib.import_module("bitsandbytes.functional")
    finally:
        hooks.remove()
        patches.undo()
        for name in ("", ".cextension", ".functional"):
            del sys.modules[f"bitsandbytes{name}"]

    assert [update() for update in functional.UPDATES] == [0]


class Loaded(nn.Module):
    """Model that stores the arguments of `from_pretrained`."""

    dtype, config = torch.float32, None
    options: ClassVar[dict[str, Any]] = {}

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> nn.Module:
        cls.options.update(options)
        return cls()


@pytest.mark.parametrize(("device", "expected"), [("cuda:0", 0), ("cuda", "cuda")])
def test_the_device_map_has_an_index_which_accelerate_1_2_accepts(
    device: str, expected: object
) -> None:
    plan, built = TrainingPlan(model_name="gpt2"), BuiltModel(module=Loaded(), notes=())

    data.load_base(plan, resolve_config("gpt2"), built, is_random=True, device=device)

    assert Loaded.options["device_map"] == {"": expected}


class Rows(torch.Tensor):
    """Made of a tensor, as the images of torchvision are."""


def test_subclasses_are_made_as_torch_2_5_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constructors, "makes_subclasses_under_modes", lambda: False)
    with memest.virtual_gpu("h100-80gb"):
        x = torch.ones(3, device="cuda", requires_grad=True)
        rows = x.as_subclass(Rows)  # type: ignore[attr-defined]
        rows.sum().backward()

        assert (type(rows), str(rows.device)) == (Rows, "cuda:0")
        assert x.grad is not None
        assert type(torch.ones(3).as_subclass(Rows)) is Rows  # type: ignore[attr-defined]


def test_a_replaced_method_without_a_hash_is_left_out() -> None:
    class Method:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> None:
            """Do nothing."""

    owner = ModuleType("owner")
    owner.method = Method()  # type: ignore[attr-defined]
    patches = Patches()
    patches.set(owner, "method", lambda: None)

    assert patches.originals() == {}


def test_dynamo_finds_the_gpu_by_its_number() -> None:
    with memest.virtual_gpu("h100-80gb"):
        from torch._dynamo.device_interface import get_interface_for_device

        assert get_interface_for_device("cuda:0") is get_interface_for_device("cuda")
