"""Worker processes of this host: one a GPU for measuring, some for compiling, each replaced when it dies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tuner.nvml import VisibleGpu
from tuner.worker import Reply, Worker

START_TIMEOUT_S = 300.0


@dataclass
class Slot:
    """A place for a worker: its process now, the ticket in its hands, and what it last worked on."""

    env: dict[str, str]
    options: dict[str, Any]
    worker: Worker
    ticket: Any = None
    held: Any = None
    starts: int = 1

    @property
    def idle(self) -> bool:
        return self.worker.ready and self.ticket is None


class Pool:
    """As many workers of one handler as there are ``places``: (environment variables, handler options) pairs.

    Raises WorkerStartError when a worker cannot start; the caller closes the pool.
    """

    def __init__(
        self, handler: str, places: Sequence[tuple[dict[str, str], dict[str, Any]]]
    ) -> None:
        self.handler = handler
        self.slots = [Slot(env, options, Worker(handler, options, env)) for env, options in places]

    @property
    def connections(self) -> list[Connection]:
        return [slot.worker.connection for slot in self.slots]

    @property
    def busy(self) -> bool:
        return any(slot.ticket is not None for slot in self.slots)

    def idle_slots(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.idle]

    def submit(self, slot: Slot, ticket: Any, task: dict[str, Any], timeout: float) -> None:
        slot.ticket = ticket
        slot.worker.submit(task, timeout)

    def poll(self) -> list[tuple[Slot, Any, Reply]]:
        """Finished tasks as (slot, ticket, reply). A dead worker is replaced before its reply is handed out."""
        finished = []
        for slot in self.slots:
            reply = slot.worker.poll(START_TIMEOUT_S)
            if reply is None:
                continue
            ticket, slot.ticket = slot.ticket, None
            if reply.dead:
                slot.worker = Worker(self.handler, slot.options, slot.env)
                slot.held = None
                slot.starts += 1
            if ticket is not None:
                finished.append((slot, ticket, reply))
        return finished

    def seconds_left(self) -> float:
        """Until the first worker in the pool runs out of time."""
        return min(
            (slot.worker.seconds_left(START_TIMEOUT_S) for slot in self.slots), default=float("inf")
        )

    def close(self) -> None:
        for slot in self.slots:
            slot.worker.kill()


def gpu_pool(handler: str, gpus: Sequence[VisibleGpu], options: dict[str, Any]) -> Pool:
    """One measuring worker for each GPU; each process sees its own GPU only."""
    places = [({"CUDA_VISIBLE_DEVICES": gpu.uuid}, {**options, "uuid": gpu.uuid}) for gpu in gpus]
    return Pool(handler, places)


def compile_pool(handler: str, jobs: int, options: dict[str, Any]) -> Pool:
    """``jobs`` compile workers. They see no GPU: a compile must not take its memory."""
    return Pool(handler, [({"CUDA_VISIBLE_DEVICES": ""}, options) for _ in range(jobs)])
