"""GPU identity: exact names only, and a clear line with the remedy where there is no GPU to use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dash_kernels import device

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("driver_name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200 MIG 3g.71gb", None),
        ("H200", None),
    ],
)
def test_only_exact_driver_names_are_known(driver_name: str, key: str | None) -> None:
    assert device.gpu_name(driver_name) == key


def test_a_gpu_resolves_by_key_and_by_driver_name() -> None:
    assert device.resolve_gpu("H800") is device.resolve_gpu("NVIDIA H800")
    with pytest.raises(ValueError, match=r"unknown GPU 'h900'; known: h200, h100, h800"):
        device.resolve_gpu("h900")


def test_the_sxm_hopper_chips_are_kin_and_an_a100_is_none_of_them() -> None:
    kin = {name for name, spec in device.GPUS.items() if spec.family == device.GPUS["h200"].family}
    assert kin == {"h200", "h100", "h800"}
    assert {device.GPUS[name].sms for name in kin} == {132}
    alone = ("h100-pcie", "h100-nvl", "h200-nvl", "h800-pcie", "h20")
    assert all(device.GPUS[name].family == name for name in alone)
    assert device.GPUS["a100"].sms == 108


def test_no_alias_names_two_gpus() -> None:
    aliases = [alias for spec in device.GPUS.values() for alias in spec.aliases]
    assert len(aliases) == len(set(aliases))


def test_an_unknown_chip_gets_a_file_name() -> None:
    assert device.slug("NVIDIA H200 MIG 3g.71gb") == "h200-mig-3g-71gb"
    assert device.slug("NVIDIA GeForce RTX 3090 Ti") == "geforce-rtx-3090-ti"


class _FakeCuda:
    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def is_initialized() -> bool:
        return False


@pytest.mark.parametrize(
    ("cuda_build", "present", "visible", "says"),
    [
        (None, True, None, "build without CUDA; reinstall torch with CUDA"),
        (None, False, None, "no NVIDIA GPU on this machine"),
        ("13.0", True, None, "update the driver"),
        ("13.0", False, None, "no NVIDIA GPU on this machine"),
        ("13.0", False, "", "CUDA_VISIBLE_DEVICES hides every GPU"),
    ],
)
def test_no_gpu_names_the_cause_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
    cuda_build: str | None,
    present: bool,
    visible: str | None,
    says: str,
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", cuda_build)
    monkeypatch.setattr(torch, "cuda", _FakeCuda)
    monkeypatch.setattr(device, "nvidia_gpu_present", lambda: present)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(device.NoGpuError, match=says):
        device.current_gpu()


def test_environment_is_json_and_knows_its_kernels() -> None:
    environment = device.environment()
    assert json.loads(json.dumps(environment)) == environment
    assert len(environment["kernel_hash"]) == 64
    assert set(environment) >= {
        "gpu",
        "gpu_name",
        "sms",
        "capability",
        "driver",
        "cuda",
        "ptxas",
        "triton",
        "torch",
    }


def test_import_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import dash_kernels; took = time.perf_counter() - start\n"
        "from dash_kernels import Problem, SCHEDULES, simulate, use_table, choose, numerics_key\n"
        "import dash_kernels.lookup\n"
        "print(took, *[m for m in ('torch', 'triton', 'numpy', 'sqlalchemy', 'fastapi') if m in sys.modules])"
    )
    took = []
    for _ in range(3):
        said = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        seconds, *heavy = said.stdout.split()
        assert not heavy
        took.append(float(seconds))
    assert min(took) < 0.2


def test_choosing_and_reading_a_table_initialises_no_cuda() -> None:
    code = (
        "import dash_kernels as dk; from dash_kernels.lookup import shipped_gpus, LookupTable, TABLES\n"
        "dk.choose(dk.Problem('causal', 128, 4096), 'h200')\n"
        "import torch; print(torch.cuda.is_initialized())"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "False"


def test_a_machine_without_torch_is_told_so_by_what_needs_it() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import dash_kernels as dk\n"
        "print(dk.choose(dk.Problem('causal', 128, 4096), 'h200').config.label())\n"
        "dk.attention"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert said.stdout.startswith("shortest_first")
    assert (
        "ImportError: dash_kernels.attention needs PyTorch, which is not installed here"
        in said.stderr
    )


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import dash_kernels

    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        _ = dash_kernels.atention
    assert set(dash_kernels.__all__) <= set(dir(dash_kernels))
