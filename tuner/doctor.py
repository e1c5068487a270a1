"""What a sweep needs of a machine, what is missing, and the remedy. No GPU memory is taken and torch is not imported.

``preflight`` is the part whose absence would turn into wrong rows (a config marked slow or failed for the machine's
fault); the sweep runs it before it starts anything.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dash_kernels.device import bundled_ptxas, run_bounded, torch_cuda, torch_version_file
from tuner.nvml import SPOILING, VisibleGpu, session, throttle_names, visible_gpus

PTXAS_TIMEOUT_S = 5.0
OLDEST_TRITON = (3, 6)
FIXED_BY_USER = 0x2  # NVML's reason for clocks that application clocks set


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. ``state`` is ok, warning or missing; ``remedy`` is said unless it is ok.

    ``spoils``: times taken while it lasts mean little.
    """

    name: str
    state: str
    found: str
    remedy: str = ""
    spoils: bool = False

    @property
    def line(self) -> str:
        return f"{self.name}: {self.found}" + (f"; {self.remedy}" if self.remedy else "")


def examine(capability: tuple[int, int] | None = None) -> list[Check]:
    """Every check, in the order in which a sweep would trip over them; the chip is the first GPU's, else Hopper."""
    devices = visible_gpus()
    capability = capability or (devices[0].capability if devices else (9, 0))
    checks = [gpu(), driver(), torch_build(), triton_version(), ptxas(capability), c_compiler()]
    checks += [python_headers(), kernel_cache()]
    for device in devices:
        checks += [clocks(device), persistence(device), slices(device), other_processes(device)]
    return checks


def preflight(capability: tuple[int, int], *, with_gpu: bool) -> list[Check]:
    """What is missing for a sweep (with a GPU) or for compiling only; empty when nothing is."""
    needed: list[Check] = [triton_version(), ptxas(capability)]
    if with_gpu:
        needed = [gpu(), driver(), torch_build(), *needed, c_compiler(), python_headers()]
    needed.append(kernel_cache())
    return [check for check in needed if check.state == "missing"]


def disturbances(devices: Sequence[VisibleGpu]) -> list[Check]:
    """What would spoil the times of a sweep that starts now: said before it starts, and no reason to refuse it."""
    found = [check for device in devices for check in (clocks(device), other_processes(device))]
    return [check for check in found if check.spoils]


def gpu() -> Check:
    """Whether this process may use an NVIDIA GPU."""
    gpus = visible_gpus()
    if gpus:
        return Check("gpu", "ok", ", ".join(device.driver_name for device in gpus))
    remedy = "use --compile-only to read registers and spills without a GPU"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not hidden.strip().strip("-1"):
        return Check(
            "gpu",
            "missing",
            f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU",
            f"unset it, or {remedy}",
        )
    if importlib.util.find_spec("pynvml") is None:
        return Check("gpu", "missing", "nvidia-ml-py is not installed", "pip install nvidia-ml-py")
    return Check("gpu", "missing", "no NVIDIA GPU found", remedy)


def driver() -> Check:
    with session() as nvml:
        if nvml is None:
            return Check("driver", "missing", "NVML does not answer", "install NVIDIA's driver")
        version = nvml.nvmlSystemGetDriverVersion()
        runs = int(_ask(nvml.nvmlSystemGetCudaDriverVersion) or 0) // 1000
    found = version.decode() if isinstance(version, bytes) else str(version)
    built_for = torch_cuda()
    if runs and built_for and int(built_for.split(".")[0]) > runs:
        found += f" runs CUDA {runs}, and PyTorch is built for CUDA {built_for}"
        remedy = f"update the driver, or install a PyTorch that is built for CUDA {runs}"
        return Check("driver", "missing", found, remedy)
    return Check("driver", "ok", found)


def torch_build() -> Check:
    """The CUDA that PyTorch was built for, read from its version file."""
    values = torch_version_file()
    if not values:
        return Check(
            "torch",
            "missing",
            "PyTorch is not installed",
            "pip install torch (Linux: the CUDA build)",
        )
    version, cuda = values.get("__version__"), values.get("cuda")
    if cuda is None:
        remedy = "reinstall torch from its CUDA index: a CPU build runs no kernel"
        return Check("torch", "missing", f"torch {version} is built without CUDA", remedy)
    return Check("torch", "ok", f"torch {version}, CUDA {cuda}")


def triton_version() -> Check:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        remedy = "pip install triton (Linux only); the results server runs without it"
        return Check("triton", "missing", "Triton is not installed", remedy)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TRITON:
        return Check(
            "triton",
            "missing",
            f"Triton {version} is too old",
            "the kernels need Triton 3.6 or newer",
        )
    return Check("triton", "ok", version)


def ptxas(capability: tuple[int, int]) -> Check:
    """Triton's assembler. One that hangs is a warning: candidates that wait for it become rows of class timeout."""
    override = os.environ.get("TRITON_PTXAS_PATH")
    path = override or bundled_ptxas()
    if path is None:
        return Check(
            "ptxas",
            "missing",
            "no ptxas in the triton package",
            "reinstall triton, or set TRITON_PTXAS_PATH",
        )
    arch = f"sm_{capability[0]}{capability[1]}{'a' if capability[0] >= 9 else ''}"
    triton = triton_version().found
    remedy = f"Triton {triton} needs it to build for {arch}: "
    remedy += "unset TRITON_PTXAS_PATH" if override else "reinstall triton"
    try:
        answer = run_bounded([path, "--version"], PTXAS_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Check(
            "ptxas",
            "warning",
            f"ptxas at {path} did not answer within {PTXAS_TIMEOUT_S:g} s",
            remedy,
        )
    except OSError as error:
        return Check("ptxas", "missing", f"ptxas at {path} does not run ({error.strerror})", remedy)
    release = re.search(r"V(\d+\.\d+\.\d+)", answer.stdout)
    if answer.returncode or release is None:
        return Check(
            "ptxas", "missing", f"ptxas at {path} failed (exit status {answer.returncode})", remedy
        )
    return Check("ptxas", "ok", f"{release.group(1)} at {path}")


def c_compiler() -> Check:
    """Triton builds a small launcher in C the first time it runs a kernel."""
    wanted = os.environ.get("CC")
    for name in filter(None, (wanted, "clang", "gcc")):
        path = shutil.which(name)
        if path:
            return Check("compiler", "ok", path)
        if name == wanted:
            return Check(
                "compiler", "missing", f"CC={wanted} is not found", "set CC to a C compiler"
            )
    return Check(
        "compiler",
        "missing",
        "no C compiler (gcc or clang)",
        "install gcc: Triton builds its launcher with it",
    )


def python_headers() -> Check:
    """Python.h, where Triton looks for it: in the scheme that pip installs by, or the plain one on Debian."""
    schemes = {sysconfig.get_default_scheme(), "posix_prefix"} & set(sysconfig.get_scheme_names())
    folders = [Path(sysconfig.get_path("include", scheme)) for scheme in sorted(schemes)]
    for folder in folders:
        if (folder / "Python.h").exists():
            return Check("headers", "ok", str(folder))
    remedy = "install Python's development package (python3-dev): Triton's launcher includes it"
    return Check("headers", "missing", f"Python.h is not in {folders[0]}", remedy)


def kernel_cache() -> Check:
    """Where Triton keeps compiled kernels: it has to be writable."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        said = f"{folder} cannot be written"
        return Check(
            "kernel cache", "missing", said, "set TRITON_CACHE_DIR to a folder of your own"
        )
    return Check("kernel cache", "ok", str(folder))


def clocks(device: VisibleGpu) -> Check:
    """Clocks and what holds them back now."""
    with session() as nvml:
        if nvml is None:
            return Check(f"clocks of GPU {device.index}", "warning", "NVML does not answer")
        handle = nvml.nvmlDeviceGetHandleByIndex(device.index)
        now = _ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        most = _ask(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
        bits = _ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    reasons = throttle_names(int(bits))
    name = f"clocks of GPU {device.index}"
    found = f"SM {now} of {most} MHz" + (f", held by {', '.join(reasons)}" if reasons else "")
    if int(bits) & SPOILING:
        remedy = "cool the GPU or check its power: such samples are thrown away"
        return Check(name, "warning", found, remedy, spoils=True)
    if int(bits) & FIXED_BY_USER:
        return Check(name, "ok", f"{found}, set by application clocks")
    remedy = "nvidia-smi -lgc locks them (as root); without it rivals are still sampled in turn"
    return Check(name, "warning", f"{found}, free to move unless locked with nvidia-smi", remedy)


def persistence(device: VisibleGpu) -> Check:
    """Without persistence mode the driver shuts the GPU down between two processes."""
    name = f"persistence of GPU {device.index}"
    with session() as nvml:
        on = None
        if nvml is not None:
            handle = nvml.nvmlDeviceGetHandleByIndex(device.index)
            on = _ask(lambda: nvml.nvmlDeviceGetPersistenceMode(handle))
    if on == 0:
        remedy = "nvidia-smi -pm 1 (as root), or run nvidia-persistenced: workers start sooner"
        return Check(name, "warning", "off: the GPU is set up anew for each process", remedy)
    return Check(name, "ok", "unknown" if on is None else "on")


def slices(device: VisibleGpu) -> Check:
    """A MIG slice has SMs, cache and a name of its own; its rows never stand for the whole GPU."""
    name = f"MIG of GPU {device.index}"
    if device.slice_of:
        remedy = "nvidia-smi -mig 0 (as root) gives the whole GPU"
        return Check(name, "warning", f"on: rows are {device.driver_name}'s own", remedy)
    return Check(name, "ok", "off")


def other_processes(device: VisibleGpu) -> Check:
    name = f"other processes on GPU {device.index}"
    with session() as nvml:
        if nvml is None:
            return Check(name, "warning", "NVML does not answer")
        handle = nvml.nvmlDeviceGetHandleByIndex(device.index)
        running = _ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    others = [str(process.pid) for process in running if process.pid != os.getpid()]
    if others:
        return Check(
            name,
            "warning",
            f"pids {', '.join(others)}",
            "stop them: times measured beside them mean little",
            spoils=True,
        )
    return Check(name, "ok", "none")


def _ask(question: Callable[[], Any]) -> Any:
    """An NVML value, or None where this chip or driver has none."""
    import pynvml

    try:
        return question()
    except pynvml.NVMLError:
        return None
