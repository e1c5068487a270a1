"""A stand-in for NVIDIA's pynvml: the GPUs are those that ``DASH_FAKE_GPUS`` names, separated by commas."""

from __future__ import annotations

import os
from typing import Any

CAPABILITIES = {"H100": (9, 0), "H200": (9, 0), "A100": (8, 0)}


class NVMLError(Exception):
    pass


def nvmlInit() -> None:
    pass


def nvmlShutdown() -> None:
    pass


def _names() -> list[str]:
    return [name for name in os.environ.get("DASH_FAKE_GPUS", "").split(",") if name]


def nvmlDeviceGetCount() -> int:
    return len(_names())


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    return int(uuid.rsplit("-", 1)[1])


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-fake-{handle}"


def nvmlDeviceGetName(handle: int) -> str:
    return _names()[handle]


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:
    return next(found for part, found in CAPABILITIES.items() if part in _names()[handle])


def __getattr__(name: str) -> Any:
    if name.startswith("NVML_"):
        return 0

    def missing(*_: Any) -> Any:
        raise NVMLError(f"{name} is not supported by this fake")

    return missing
