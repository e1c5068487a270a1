"""A stand-in for pynvml: GPUs described by a test, with the calls that the tuner makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


@dataclass
class Slice:
    name: str
    uuid: str
    used: int = 0


@dataclass
class Board:
    name: str = "NVIDIA H200"
    uuid: str = "GPU-0"
    capability: tuple[int, int] = (9, 0)
    sm_mhz: int = 1500
    throttle: int = 0
    persistence: int = 1
    used: int = 0
    pids: tuple[int, ...] = ()
    slices: list[Slice] = field(default_factory=list)


class FakeNvml:
    """The module; handles are the boards and slices themselves."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_DEVICE_MIG_ENABLE = 0, 1, 0, 1

    def __init__(self, *boards: Board, driver: str = "580.10", cuda: int = 13000) -> None:
        self.boards, self.driver, self.cuda = boards, driver, cuda

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Board:
        return self.boards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        for handle in (*self.boards, *(part for board in self.boards for part in board.slices)):
            if handle.uuid == uuid:
                return handle
        raise NVMLError("not found")

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return str(handle.uuid)

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return str(handle.name)

    def nvmlDeviceGetCudaComputeCapability(self, board: Board) -> tuple[int, int]:
        return board.capability

    def nvmlDeviceGetMigMode(self, board: Board) -> list[int]:
        return [1, 1] if board.slices else [0, 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, board: Board) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, board: Board, place: int) -> Slice:
        if place >= len(board.slices):
            raise NVMLError("not found")
        return board.slices[place]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: Slice) -> Board:
        return next(board for board in self.boards if part in board.slices)

    def nvmlDeviceGetClockInfo(self, board: Board, kind: int) -> int:
        return board.sm_mhz

    def nvmlDeviceGetMaxClockInfo(self, board: Board, kind: int) -> int:
        return 1980

    def nvmlDeviceGetTemperature(self, board: Board, kind: int) -> int:
        return 50

    def nvmlDeviceGetPowerUsage(self, board: Board) -> int:
        return 600_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, board: Board) -> int:
        return board.throttle

    def nvmlDeviceGetPersistenceMode(self, board: Board) -> int:
        return board.persistence

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(used=handle.used)

    def nvmlDeviceGetComputeRunningProcesses(self, board: Board) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in board.pids]
