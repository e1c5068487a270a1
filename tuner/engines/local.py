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

    ``lost``: its process could not start, or none could be made, and no other one will.
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
    the workers in the words of that note. Raises WorkerStartError when no process can be made for any place.
    """

    def __init__(
        self,
        handler: str,
        places: Sequence[tuple[dict[str, str], dict[str, Any]]],
        note: Callable[[str], None],
        what: str,
    ) -> None:
        self.handler, self.note, self.what = handler, note, what
        self.slots: list[Slot] = []
        self._last_loss = ""
        lost: dict[str, None] = {}  # the same line for each of many compile processes is said once
        for env, options in places:
            try:
                self.slots.append(Slot(env, options, Worker(handler, options, env)))
            except WorkerStartError as error:
                lost[self._loss(options, error)] = None
                self._last_loss = str(error)
        if not self.slots:
            raise self._none_left()
        for line in lost:
            note(line)

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

        Raises WorkerStartError when every place is lost and no reply is left; the caller closes the pool.
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
                self._replace(slot)
            if ticket is not None:
                finished.append((slot, ticket, reply))
        if not finished and not self._living:
            raise self._none_left()
        return finished

    def _replace(self, slot: Slot) -> None:
        slot.held = None
        slot.starts += 1
        try:
            slot.worker = Worker(self.handler, slot.options, slot.env)
        except WorkerStartError as error:
            self._lose(slot, error)

    def _lose(self, slot: Slot, error: WorkerStartError) -> None:
        slot.lost = True
        self._last_loss = str(error)
        if self._living:
            self.note(self._loss(slot.options, error))

    def _loss(self, options: dict[str, Any], error: WorkerStartError) -> str:
        place = f" of {options['uuid']}" if "uuid" in options else ""
        return f"the {self.what}{place} could not start, the others go on without it: {error}"

    def _none_left(self) -> WorkerStartError:
        last = f"the last could not start: {self._last_loss}"
        return WorkerStartError(f"no {self.what} is left, {last}")

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
