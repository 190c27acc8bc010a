import re
import subprocess
import sys
from dataclasses import replace

import pytest

from memest.errors import PlanError
from memest.estimator.hardware import gpus
from memest.estimator.hardware.gpus import (
    DEFAULT_GPUS,
    custom_gpu,
    find_gpu,
    list_gpus,
    match_device,
)
from memest.units import GIB, MIB


def test_every_name_in_the_catalogue_is_unique() -> None:
    names = [gpu.name for gpu in list_gpus()]
    assert len(set(names)) == len(names)
    assert {"t4", "v100-16gb", "a100-40gb", "a10g", "l4", "rtx-4090", "h200", "b200"} <= set(names)


@pytest.mark.parametrize("gpu", list_gpus(), ids=lambda g: g.name)
def test_every_entry_is_plausible_and_names_its_source(gpu) -> None:
    assert 14 * GIB < gpu.memory_bytes < 200 * GIB
    assert 100 * MIB < gpu.context_bytes < GIB
    assert gpu.num_sms >= 40
    assert re.search(r"#\d+|/README.md|documentation|measured with", gpu.source)
    assert re.search(r"Context:|Memory and context:", gpu.source)


@pytest.mark.parametrize("gpu", list_gpus(), ids=lambda g: g.name)
def test_every_entry_is_found_by_its_name_and_its_vendor_name(gpu) -> None:
    assert find_gpu(gpu.name) == gpu
    assert find_gpu(gpu.label) == gpu
    assert match_device(gpu.label, gpu.memory_bytes) == gpu


def test_a_context_taken_from_the_h200_equals_the_h200s() -> None:
    """And no other does but that of the H100, which was measured: it lies in 742 to 762 MiB."""
    h200 = find_gpu("h200")
    borrowed = [gpu for gpu in list_gpus() if "taken from the H200's" in gpu.source]
    assert {gpu.context_bytes for gpu in borrowed} == {h200.context_bytes}
    same = [gpu for gpu in list_gpus() if gpu.context_bytes == h200.context_bytes]
    assert [gpu.name for gpu in same if gpu not in borrowed] == ["h100-80gb", "h200"]


def test_the_h200_has_the_measured_figures() -> None:
    gpu = find_gpu("h200")
    assert gpu.memory_bytes == 150109880320
    assert gpu.context_bytes == 796917760
    assert gpu.limit_bytes == 150109880320 - 796917760
    assert (gpu.capability, gpu.num_sms) == ((9, 0), 132)


def test_the_80_gb_a100_leaves_what_public_experiments_could_use() -> None:
    gpu = find_gpu("a100-80gb")
    assert gpu.memory_bytes == round(79.15 * 2**30)
    # In use 9.25 GiB, allocated 8.27 GiB, reserved without being allocated 500.38 MiB.
    assert gpu.context_bytes == round((9.25 - 8.27) * 2**30 - 500.38 * 2**20)
    # 77.8 GiB reserved fit on this card, and 78.4 to 78.6 GiB served as its usable memory.
    assert 78.6 * GIB < gpu.limit_bytes < 78.7 * GIB


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a100", "a100-80gb"),
        ("A100 40GB", "a100-40gb"),
        ("NVIDIA_A100_80GB", "a100-80gb"),
        ("nvidia-h100", "h100-80gb"),
        ("H100 PCIe", "h100-pcie-80gb"),
        ("v100", "v100-32gb"),
        ("RTX4090", "rtx-4090"),
        ("GeForce RTX 5090", "rtx-5090"),
        ("RTX A6000", "a6000"),
        ("NVIDIA T4", "t4"),
        ("gh200", "gh200-96gb"),
    ],
)
def test_spelling_does_not_matter(text, name) -> None:
    assert find_gpu(text).name == name


def test_an_unknown_name_is_answered_with_the_closest_names_and_a_way_out() -> None:
    with pytest.raises(PlanError, match=r"`a100-60gb` is not .*; closest: .*`a100-80gb`") as error:
        find_gpu("a100-60gb")
    assert "memest gpus" in error.value.hint
    assert "--gpu-memory" in error.value.hint


def test_a_name_like_no_other_is_answered_without_suggestions() -> None:
    with pytest.raises(PlanError, match=r"^`zzzz` is not in the catalogue of GPUs$"):
        find_gpu("zzzz")


def test_the_default_gpus_are_in_the_catalogue() -> None:
    assert [find_gpu(name).name for name in DEFAULT_GPUS] == list(DEFAULT_GPUS)


def test_a_custom_gpu_follows_the_h200_unless_told_otherwise() -> None:
    gpu, h200 = custom_gpu(24 * GIB), find_gpu("h200")
    assert (gpu.name, gpu.memory_bytes) == ("24.00GiB", 24 * 2**30)
    assert (gpu.capability, gpu.num_sms) == ((9, 0), 132)
    assert gpu.limit_bytes == 24 * 2**30 - h200.context_bytes
    assert gpu.source.startswith("Memory: given by the user. All else: as `h200`.")


def test_a_custom_gpu_like_another_has_its_kernels_and_context() -> None:
    t4 = find_gpu("t4")
    gpu = custom_gpu(12 * GIB, like=t4)
    assert (gpu.capability, gpu.num_sms, gpu.context_bytes) == ((7, 5), 40, t4.context_bytes)


def test_a_custom_gpu_smaller_than_its_context_is_refused() -> None:
    with pytest.raises(PlanError, match=r"0\.50 GiB has no room besides its CUDA context"):
        custom_gpu(GIB // 2)


@pytest.mark.parametrize(
    ("device", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.25, "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", 79.14, "a100-80gb"),
        ("A100-SXM4-40GB", 39.59, "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", 39.39, "a100-40gb"),
        ("Tesla V100-SXM2-16GB", 15.77, "v100-16gb"),
        ("Tesla V100-PCIE-32GB", 31.75, "v100-32gb"),
        ("NVIDIA H100 80GB HBM3", 79.20, "h100-80gb"),
        ("NVIDIA H100 PCIe", 79.18, "h100-pcie-80gb"),
        ("Tesla T4", 14.56, "t4"),
        ("NVIDIA L4", 22.03, "l4"),
        ("NVIDIA L40S", 44.52, "l40s"),
        ("NVIDIA GeForce RTX 4090", 23.52, "rtx-4090"),
        ("NVIDIA GH200 480GB", 94.5, "gh200-96gb"),
    ],
)
def test_a_device_is_matched_by_name_and_memory(device, gib, name) -> None:
    found = match_device(device, round(gib * GIB))
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    ("device", "gib"),
    [
        ("NVIDIA GeForce RTX 4090", 47.5),  # modified card with twice the memory
        ("NVIDIA GeForce RTX 4090 D", 23.6),  # fewer multiprocessors
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 19.5),  # that of another A100
        ("NVIDIA GeForce RTX 4090 MIG 3g.40gb", 39.5),
        ("NVIDIA A100-SXM-64GB", 63.4),
        ("NVIDIA H100 NVL", 93.1),
        ("NVIDIA RTX 6000 Ada Generation", 44.43),  # ECC on
        ("Quadro RTX 6000", 47.48),
        ("NVIDIA A10", 22.06),
        ("AMD Instinct MI300X", 191.98),
        ("", 80.0),
    ],
)
def test_a_device_outside_the_catalogue_matches_nothing(device, gib) -> None:
    assert match_device(device, round(gib * GIB)) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a100-80gb-mig-3g.40gb", "a100-80gb-mig-3g.40gb"),
        ("A100 MIG 3g.40gb", "a100-80gb-mig-3g.40gb"),
        ("NVIDIA H200 MIG 1g.18gb", "h200-mig-1g.18gb"),
        ("a100_40gb_mig_1g.5gb+me", "a100-40gb-mig-1g.5gb"),
        ("h100-1g.10gb", "h100-80gb-mig-1g.10gb"),
    ],
)
def test_an_instance_is_found_by_its_gpu_and_profile(text, name) -> None:
    assert find_gpu(text).name == name
    assert find_gpu(name) == find_gpu(text)


def test_links_are_those_of_the_newest_older_chip() -> None:
    h200 = find_gpu("h200")

    assert h200.link_gb_s == replace(h200, capability=(9, 9)).link_gb_s == 450
    assert replace(h200, capability=(6, 1)).link_gb_s == 150


def test_an_instance_has_its_own_memory_and_multiprocessors() -> None:
    whole, gpu = find_gpu("a100-80gb"), find_gpu("a100-80gb-mig-3g.40gb")
    assert (gpu.memory_bytes, gpu.num_sms) == (40192 * MIB, 42)  # 39.25 GiB in torch's messages
    assert gpu.limit_bytes == gpu.memory_bytes - whole.context_bytes
    assert gpu.memory_share == 0.5
    assert gpu.chip != whole.chip, "its kernels split otherwise"
    assert gpu.tflops_of("float16") == whole.tflops_of("float16") * 42 / 108
    assert "assumed" in gpu.source


@pytest.mark.parametrize(("name", "known"), gpus.mig_profiles().items())
def test_every_profile_is_a_part_of_its_gpu(name, known) -> None:
    whole = find_gpu(name)
    for profile in known:
        gpu = find_gpu(f"{name}-mig-{profile}")
        slices, nominal = re.fullmatch(r"(\d)g\.(\d+)gb", profile).groups()
        sm_share = gpu.num_sms / whole.num_sms
        assert 0.96 * int(slices) / 8 < sm_share <= max(gpu.memory_share, int(slices) / 7)
        assert 0.87 < gpu.memory_bytes / GIB / int(nominal) <= 1
        assert gpu.memory_bytes <= whole.memory_bytes * 1.01


def test_instances_are_not_listed() -> None:
    assert not [gpu.name for gpu in list_gpus() if gpu.whole]


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        (
            "a100-mig-3g.20gb",
            "`a100-80gb` has no MIG profile `3g.20gb`.*`3g.40gb`",
            "a100-40gb-mig",
        ),
        ("h200-mig", "no MIG profile of `h200` is named.*`1g.18gb`", "memest gpus"),
        ("t4-mig-1g.5gb", "`t4` has no MIG profiles", "`a100-40gb`"),
        ("mig-3g.40gb", "named without its GPU", "`h100-80gb-mig-3g.40gb`"),
        ("h2-mig-1g.18gb", "`h2` is not in the catalogue", "memest gpus"),
    ],
)
def test_an_unknown_instance_is_answered_with_those_that_exist(name, message, hint) -> None:
    with pytest.raises(PlanError, match=message) as error:
        find_gpu(name)
    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("device", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.25, "a100-80gb-mig-3g.40gb"),
        ("NVIDIA A100 80GB PCIe MIG 3g.40gb", 39.5, "a100-80gb-mig-3g.40gb"),
        ("NVIDIA A100-PCIE-40GB MIG 1g.5gb", 4.75, "a100-40gb-mig-1g.5gb"),
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 79.12, "h100-80gb-mig-7g.80gb"),
    ],
)
def test_a_device_under_mig_is_matched(device, gib, name) -> None:
    found = match_device(device, round(gib * GIB))
    assert found is not None
    assert found.name == name


def test_the_catalogue_needs_no_torch() -> None:
    code = "import sys; from memest.estimator.hardware.gpus import list_gpus; list_gpus(); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_other_processes_hold_is_not_there_for_the_run() -> None:
    gpu = find_gpu("a100-80gb")

    shared = gpu.beside(24 * GIB)

    assert shared.limit_bytes == gpu.limit_bytes - 24 * GIB
    assert gpu.beside(None) == gpu


def test_other_processes_that_fill_the_gpu_are_refused() -> None:
    with pytest.raises(PlanError, match=r"with 80\.00 GiB leave nothing of `a100-80gb`"):
        find_gpu("a100-80gb").beside(80 * GIB)
