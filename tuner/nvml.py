"""What NVML says of this machine's GPUs: which are visible, their clocks, temperature, power and throttle reasons.

Every function works on a machine with no driver: then there are no GPUs, and samples are empty.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

THROTTLE_REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
# The software power cap is these chips' normal state under load; the others make a sample worthless.
SPOILING = 0x8 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """A GPU that this process may use, or a MIG slice of one, which has a UUID and a name of its own.

    ``index`` is the NVML index of the whole GPU, ``driver_name`` what the driver calls it, ``slice_of`` the UUID of the
    GPU that a slice belongs to.
    """

    index: int
    uuid: str
    driver_name: str
    capability: tuple[int, int]
    slice_of: str = ""


@contextmanager
def session() -> Iterator[Any]:
    """The pynvml module, initialised, or None where there is no driver or no pynvml."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def visible_gpus() -> list[VisibleGpu]:
    """The machine's GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in its order."""
    with session() as nvml:
        if nvml is None:
            return []
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            whole = VisibleGpu(index, _text(uuid), _text(name), (int(major), int(minor)))
            found += list(_slices(nvml, handle, whole)) if mig_is_on(nvml, handle) else [whole]
    return _selected(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def mig_is_on(nvml: Any, handle: Any) -> bool:
    """Whether the GPU is cut into slices, so that it cannot be used whole."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError:
        return False


def _slices(nvml: Any, handle: Any, whole: VisibleGpu) -> Iterator[VisibleGpu]:
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
        except nvml.NVMLError:  # no slice in this place
            continue
        name, uuid = _text(nvml.nvmlDeviceGetName(part)), _text(nvml.nvmlDeviceGetUUID(part))
        yield VisibleGpu(whole.index, uuid, name, whole.capability, slice_of=whole.uuid)


def _selected(gpus: list[VisibleGpu], visible: str | None) -> list[VisibleGpu]:
    """As CUDA reads the variable: indices or UUID prefixes, up to the first entry that names no GPU."""
    if visible is None:
        return gpus
    chosen = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit():
            match = [gpu for gpu in gpus if gpu.index == int(entry)]
        else:
            match = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
            match = match or [gpu for gpu in gpus if gpu.slice_of and gpu.slice_of == entry]
        if not match:
            break
        chosen.append(match[0])
    return chosen


class Monitor:
    """Samples one GPU. ``sample()`` takes about a millisecond and never raises for a value the chip lacks."""

    def __init__(self, uuid: str) -> None:
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = self._memory = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            if uuid.startswith("MIG-"):  # clocks are the whole GPU's, memory is the slice's
                self._handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._memory)
            self._nvml = pynvml
        except ImportError:
            return
        except pynvml.NVMLError:
            return

    def memory_used(self) -> int | None:
        """Bytes in use on the GPU by every process, None where the driver does not say."""
        nvml = self._nvml
        if nvml is None:
            return None
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(self._memory).used)
        except nvml.NVMLError:
            return None

    def sample(self) -> dict[str, int | float]:
        """sm_mhz, memory_mhz, celsius, watts and the throttle bits, those that the driver answers."""
        nvml = self._nvml
        if nvml is None:
            return {}
        readings: dict[str, Callable[[], int | float]] = {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_MEM),
            "celsius": lambda: nvml.nvmlDeviceGetTemperature(
                self._handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "watts": lambda: nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000,
            "throttle": lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)),
        }
        found: dict[str, int | float] = {}
        for name, read in readings.items():
            try:
                found[name] = read()
            except nvml.NVMLError:
                continue
        return found


def throttle_names(bits: int) -> list[str]:
    """The reasons in a throttle bit mask that tell of a slower chip."""
    return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
