"""Worker processes of this host: one a GPU for measuring, some for compiling, each replaced when it dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tuner.nvml import VisibleGpu
from tuner.worker import Reply, Worker, WorkerStartError

START_TIMEOUT_S = 300.0


@dataclass
class Slot:
    """A place for a worker: its process now, the ticket in its hands, and what it last worked on.

    ``lost``: its process could not start, and no other one will.
    """

    env: dict[str, str]
    options: dict[str, Any]
    worker: Worker
    ticket: Any = None
    held: Any = None
    starts: int = 1
    lost: bool = False

    @property
    def idle(self) -> bool:
        return self.worker.ready and self.ticket is None and not self.lost


class Pool:
    """As many workers of one handler as there are ``places``: (environment variables, handler options) pairs.

    A place whose worker cannot start, at first or again, is lost and told to ``note``; the others go on. ``what`` are
    the workers in the words of that note.
    """

    def __init__(
        self,
        handler: str,
        places: Sequence[tuple[dict[str, str], dict[str, Any]]],
        note: Callable[[str], None],
        what: str,
    ) -> None:
        self.handler, self.note, self.what = handler, note, what
        self.slots = [Slot(env, options, Worker(handler, options, env)) for env, options in places]

    @property
    def _living(self) -> list[Slot]:
        return [slot for slot in self.slots if not slot.lost]

    @property
    def connections(self) -> list[Connection]:
        return [slot.worker.connection for slot in self._living]

    @property
    def busy(self) -> bool:
        return any(slot.ticket is not None for slot in self.slots)

    def idle_slots(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.idle]

    def submit(self, slot: Slot, ticket: Any, task: dict[str, Any], timeout: float) -> None:
        slot.ticket = ticket
        slot.worker.submit(task, timeout)

    def poll(self) -> list[tuple[Slot, Any, Reply]]:
        """Finished tasks as (slot, ticket, reply). A dead worker is replaced before its reply is handed out.

        Raises WorkerStartError when every place is lost; the caller closes the pool.
        """
        finished = []
        for slot in self._living:
            try:
                reply = slot.worker.poll(START_TIMEOUT_S)
            except WorkerStartError as error:
                self._lose(slot, error)
                continue
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

    def _lose(self, slot: Slot, error: WorkerStartError) -> None:
        slot.lost = True
        if not self._living:
            raise WorkerStartError(f"no {self.what} is left, the last could not start: {error}")
        place = f" of {slot.options['uuid']}" if "uuid" in slot.options else ""
        self.note(f"the {self.what}{place} could not start, the others go on without it: {error}")

    def seconds_left(self) -> float:
        """Until the first worker in the pool runs out of time."""
        left = (slot.worker.seconds_left(START_TIMEOUT_S) for slot in self._living)
        return min(left, default=float("inf"))

    def close(self) -> None:
        for slot in self._living:
            slot.worker.kill()


def gpu_pool(
    handler: str, gpus: Sequence[VisibleGpu], options: dict[str, Any], note: Callable[[str], None]
) -> Pool:
    """One measuring worker for each GPU; each process sees its own GPU only."""
    places = [({"CUDA_VISIBLE_DEVICES": gpu.uuid}, {**options, "uuid": gpu.uuid}) for gpu in gpus]
    return Pool(handler, places, note, "GPU worker")


def compile_pool(
    handler: str, jobs: int, options: dict[str, Any], note: Callable[[str], None]
) -> Pool:
    """``jobs`` compile workers. They see no GPU: a compile must not take its memory."""
    places = [({"CUDA_VISIBLE_DEVICES": ""}, options)] * jobs
    return Pool(handler, places, note, "compile process")
