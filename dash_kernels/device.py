"""GPU identity: which chip this is, what is known of it, and the environment that rows and keys record.

The tuner and the dispatcher both ask here, so that a table tuned on a chip is found again on that chip. Nothing is
imported or initialised until a function that needs the driver is called.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MEBIBYTE = 1 << 20


class NoGpuError(RuntimeError):
    """No CUDA GPU that PyTorch can use; the message says which of the causes it is and the remedy."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """What is published of one GPU model.

    ``peak_tflops`` is the dense bf16 matrix rate of the vendor's data sheet, half of the figure printed "with
    sparsity". ``family`` groups models that share SM count and rate, so that a table of one may serve the others.
    """

    name: str
    capability: tuple[int, int]
    sms: int
    l2_bytes: int
    peak_tflops: float
    aliases: tuple[str, ...]
    source: str
    family: str = ""


def _spec(
    name: str,
    capability: tuple[int, int],
    sms: int,
    l2_mebibytes: int,
    peak_tflops: float,
    aliases: tuple[str, ...],
    source: str,
    family: str = "",
) -> GpuSpec:
    return GpuSpec(
        name, capability, sms, l2_mebibytes * MEBIBYTE, peak_tflops, aliases, source, family or name
    )


HOPPER_SXM = "hopper-sxm-132"
GPUS: dict[str, GpuSpec] = {
    spec.name: spec
    for spec in (
        _spec(
            "h200",
            (9, 0),
            132,
            50,
            989.5,
            ("NVIDIA H200",),
            "NVIDIA H200 data sheet: 1,979 TFLOPS bf16 with sparsity (SXM)",
            HOPPER_SXM,
        ),
        _spec(
            "h100",
            (9, 0),
            132,
            50,
            989.5,
            ("NVIDIA H100 80GB HBM3", "NVIDIA H100"),
            "NVIDIA H100 data sheet: 1,979 TFLOPS bf16 with sparsity (SXM)",
            HOPPER_SXM,
        ),
        _spec(
            "h800",
            (9, 0),
            132,
            50,
            989.5,
            ("NVIDIA H800",),
            "NVIDIA H800 data sheet: 1,979 TFLOPS bf16 with sparsity (SXM)",
            HOPPER_SXM,
        ),
        _spec(
            "h100-pcie",
            (9, 0),
            114,
            50,
            756.5,
            ("NVIDIA H100 PCIe",),
            "NVIDIA H100 data sheet: 1,513 TFLOPS bf16 with sparsity (PCIe)",
        ),
        _spec(
            "h100-nvl",
            (9, 0),
            132,
            50,
            835.5,
            ("NVIDIA H100 NVL",),
            "NVIDIA H100 data sheet: 1,671 TFLOPS bf16 with sparsity (NVL)",
        ),
        _spec(
            "h200-nvl",
            (9, 0),
            132,
            50,
            835.5,
            ("NVIDIA H200 NVL",),
            "NVIDIA H200 data sheet: 1,671 TFLOPS bf16 with sparsity (NVL)",
        ),
        _spec(
            "h800-pcie",
            (9, 0),
            114,
            50,
            756.5,
            ("NVIDIA H800 PCIe",),
            "NVIDIA H800 data sheet: 1,513 TFLOPS bf16 with sparsity (PCIe)",
        ),
        _spec(
            "h20",
            (9, 0),
            78,
            60,
            148.0,
            ("NVIDIA H20",),
            "press on HGX H20: 148 TFLOPS bf16, 78 SMs; NVIDIA publishes no data sheet",
        ),
        _spec(
            "a100",
            (8, 0),
            108,
            40,
            312.0,
            (
                "NVIDIA A100-SXM4-40GB",
                "NVIDIA A100-SXM4-80GB",
                "NVIDIA A100-PCIE-40GB",
                "NVIDIA A100 80GB PCIe",
            ),
            "NVIDIA A100 data sheet: 312 TFLOPS bf16",
        ),
        _spec(
            "a800",
            (8, 0),
            108,
            40,
            312.0,
            ("NVIDIA A800-SXM4-80GB", "NVIDIA A800 80GB PCIe"),
            "NVIDIA A800 data sheet: 312 TFLOPS bf16",
        ),
        _spec(
            "b200",
            (10, 0),
            148,
            126,
            2250.0,
            ("NVIDIA B200",),
            "NVIDIA HGX B200 data sheet: 36 PFLOPS bf16 with sparsity for eight",
        ),
        _spec(
            "l40s",
            (8, 9),
            142,
            96,
            362.0,
            ("NVIDIA L40S",),
            "NVIDIA L40S data sheet: 362.05 TFLOPS bf16, 733 with sparsity",
        ),
        _spec(
            "rtx4090",
            (8, 9),
            128,
            72,
            165.2,
            ("NVIDIA GeForce RTX 4090",),
            "NVIDIA Ada GPU architecture whitepaper: 165.2 TFLOPS bf16 with fp32 accumulate",
        ),
    )
}
_ALIASES = {alias: spec.name for spec in GPUS.values() for alias in spec.aliases}


def gpu_name(driver_name: str) -> str | None:
    """Key in :data:`GPUS` for the name that the driver, PyTorch or NVML prints; exact aliases only, else None."""
    return _ALIASES.get(driver_name.strip())


def resolve_gpu(name: str) -> GpuSpec:
    """Spec for a key ("h800") or a driver's name ("NVIDIA H800"). Raises ValueError listing the known keys."""
    key = gpu_name(name) or name.strip().lower()
    if key not in GPUS:
        raise ValueError(f"unknown GPU {name!r}; known: {', '.join(GPUS)}")
    return GPUS[key]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine. ``name`` is its key in :data:`GPUS`, or a slug of the driver's name."""

    name: str
    driver_name: str
    sms: int
    capability: tuple[int, int]
    l2_bytes: int
    index: int
    spec: GpuSpec | None = field(default=None, compare=False)

    @property
    def family(self) -> str:
        return self.spec.family if self.spec else self.name


def slug(driver_name: str) -> str:
    """File-name form of a driver's name for a chip that has no key: ``NVIDIA H20`` -> ``h20``."""
    words = re.sub(r"[^a-z0-9]+", "-", driver_name.lower()).strip("-")
    return words.removeprefix("nvidia-") or "unknown"


def nvidia_gpu_present() -> bool:
    """Whether this machine shows an NVIDIA GPU to this process, whatever PyTorch thinks of it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    try:
        listing = subprocess.run(
            [smi, "-L"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU 0" in listing.stdout


def no_gpu_reason() -> str | None:
    """Why PyTorch sees no CUDA GPU, with the remedy; None when it sees one."""
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed; install torch to run a kernel"
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        if nvidia_gpu_present():
            return (
                f"this machine has an NVIDIA GPU but PyTorch {torch.__version__} is a build without CUDA; "
                "reinstall torch with CUDA (the default wheel on Linux) and try again"
            )
        return f"no NVIDIA GPU on this machine, and PyTorch {torch.__version__} is a build without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU; unset it to use one"
    if nvidia_gpu_present():
        return (
            f"this machine has an NVIDIA GPU but PyTorch {torch.__version__} (CUDA {torch.version.cuda}) cannot "
            "use it; its driver is probably older than that CUDA: update the driver or install an older CUDA build"
        )
    return "no NVIDIA GPU on this machine"


def current_gpu(index: int | None = None) -> Gpu:
    """The CUDA GPU with this index (default: PyTorch's current one). Raises NoGpuError naming the remedy."""
    loaded = sys.modules.get("torch")
    if loaded is None or not loaded.cuda.is_initialized():
        reason = no_gpu_reason()
        if reason is not None:
            raise NoGpuError(reason)
    import torch

    index = torch.cuda.current_device() if index is None else index
    if not 0 <= index < torch.cuda.device_count():
        raise NoGpuError(
            f"GPU index {index} does not exist; this process sees {torch.cuda.device_count()}"
        )
    return _gpu_at(index)


@functools.cache
def _gpu_at(index: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    key = gpu_name(properties.name)
    return Gpu(
        name=key or slug(properties.name),
        driver_name=properties.name,
        sms=properties.multi_processor_count,
        capability=(properties.major, properties.minor),
        l2_bytes=properties.L2_cache_size,
        index=index,
        spec=GPUS.get(key) if key else None,
    )


def environment(index: int | None = None) -> dict[str, Any]:
    """What a row, a lookup table and a numerics key record of the machine and its software.

    Values are strings or ints; None where there is no such thing here (no GPU, no triton).
    """
    gpu = None if no_gpu_reason() else current_gpu(index)
    return {
        "gpu": gpu.name if gpu else None,
        "gpu_name": gpu.driver_name if gpu else None,
        "sms": gpu.sms if gpu else None,
        "capability": "{}.{}".format(*gpu.capability) if gpu else None,
        **software(),
    }


def software() -> dict[str, Any]:
    """The part of :func:`environment` that no GPU is asked for; PyTorch is not imported for it."""
    from dash_kernels import __version__

    return {
        "driver": driver_version(),
        "cuda": torch_cuda(),
        "ptxas": ptxas_version(),
        "triton": version_of("triton"),
        "torch": version_of("torch"),
        "kernel_hash": kernel_hash(),
        "dash_kernels": __version__,
        "python": platform.python_version(),
    }


def environment_key(environment: dict[str, Any]) -> str:
    """Sixteen hex digits that name an environment: rows and tables with equal keys were made alike."""
    text = json.dumps(environment, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def environment_difference(
    here: dict[str, Any], there: dict[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """The fields in which two environments differ, as (here, there), in the order of :func:`environment`."""
    names = dict.fromkeys((*here, *there))
    return {
        name: (here.get(name), there.get(name))
        for name in names
        if here.get(name) != there.get(name)
    }


@functools.cache
def kernel_hash() -> str:
    """SHA-256 over the kernels and their launches, in name order: changes whenever what runs on a GPU could."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "kernels").glob("*.py")):
        if path.name == "compile.py":  # reads what was built; builds nothing that runs
            continue
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def driver_version() -> str | None:
    """NVIDIA driver version, or None."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return _nvml_driver_version()
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else _nvml_driver_version()


def _nvml_driver_version() -> str | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


@functools.cache
def ptxas_version() -> str | None:
    """Release of the ptxas that Triton runs ("12.9.86"), or None without Triton or a working ptxas."""
    path = os.environ.get("TRITON_PTXAS_PATH") or bundled_ptxas()
    if path is None:
        return None
    try:
        said = run_bounded([path, "--version"], 10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bV(\d+\.\d+\.\d+)", said.stdout)
    return found.group(1) if found else None


def run_bounded(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command; at the limit it ends with everything it has started.

    Raises OSError or subprocess.TimeoutExpired. ``stdout`` of the answer holds stderr too.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        output.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, output.read())


def bundled_ptxas() -> str | None:
    """The ptxas inside the triton package, or None."""
    import importlib.util

    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return str(path) if path.is_file() else None


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def torch_cuda() -> str | None:
    """The CUDA that the installed PyTorch was built for, None for a CPU build; read from its version file."""
    return torch_version_file().get("cuda")


@functools.cache
def torch_version_file() -> dict[str, Any]:
    """The constants of PyTorch's own version file (``__version__``, ``cuda``), read without importing it."""
    import importlib.util

    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return {}
    try:
        text = (Path(found.origin).parent / "version.py").read_text()
    except OSError:
        return {}
    values: dict[str, Any] = {}
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant):
            values |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    return values
