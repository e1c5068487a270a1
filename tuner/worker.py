"""A worker process: one handler fed over a pipe, killed with everything it started.

The parent's side is :class:`Worker`. The child (``python -m tuner.worker``) builds the handler named on its command
line, for instance ``tuner.measure:Measurer``, answers ``ready``, and then answers one task at a time. It leads a
process group of its own, so that a kill reaches ptxas and whatever else a task has started.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Protocol

LOG_TAIL_BYTES = 4000
PARENT_POLL_S = 0.5


class Handler(Protocol):
    """What a worker runs. It is built once, with the options of its worker, in the worker process."""

    def handle(self, task: dict[str, Any]) -> dict[str, Any]:
        """Do one task. An exception's ``failure`` attribute, if any, is the class that its row gets."""

    def healthy(self) -> bool:
        """After an exception: whether this process can take another task (no sticky CUDA error)."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a task: its result, or a failure class with the message. ``dead``: the process has gone."""

    ok: bool
    result: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    error: str = ""
    dead: bool = False
    seconds: float = 0.0


class WorkerStartError(RuntimeError):
    """There is no process, or the handler could not be built in it; the message is one line for the user."""


class Worker:
    """One child process. It takes one task at a time; after a reply that is ``dead`` build another.

    Raises WorkerStartError when the system gives no process (memory, the limit on processes or on open files).
    """

    def __init__(
        self, handler: str, options: dict[str, Any], env: dict[str, str] | None = None
    ) -> None:
        with contextlib.ExitStack() as unless_started:
            try:
                parent_end, child_end = socket.socketpair()
                unless_started.callback(parent_end.close)
                with child_end:
                    self._log = unless_started.enter_context(tempfile.TemporaryFile())
                    self._process = _spawn(child_end, self._log, handler, options, env or {})
            except OSError as error:
                said = error.strerror or str(error)
                raise WorkerStartError(f"a worker process could not be made: {said}") from None
            unless_started.pop_all()
        self.connection = Connection(parent_end.detach())
        self.started = time.monotonic()
        self.ready = False
        self.info: dict[str, Any] = {}
        self._task_started: float | None = None
        self._timeout = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def busy(self) -> bool:
        return self._task_started is not None

    def submit(self, task: dict[str, Any], timeout: float) -> None:
        """Hand over a task; it has ``timeout`` seconds, counted from when the handler is built."""
        self._task_started = time.monotonic()
        self._timeout = timeout
        with contextlib.suppress(OSError):  # a dead child is reported by the next poll
            self.connection.send_bytes(json.dumps(task).encode())

    def seconds_left(self, start_timeout: float) -> float:
        """Seconds until :meth:`poll` would kill this worker; infinity when it waits for a task."""
        if not self.ready:
            return self.started + start_timeout - time.monotonic()
        if self._task_started is None:
            return float("inf")
        return self._task_started + self._timeout - time.monotonic()

    def poll(self, start_timeout: float = 300.0) -> Reply | None:
        """The reply to the task in hand if there is one now, or its death or timeout; else None.

        Raises WorkerStartError when the handler could not be built.
        """
        try:
            while self.connection.poll(0):
                message = json.loads(self.connection.recv_bytes())
                if message["kind"] == "reply":
                    return self._finish(message)
                if message["kind"] == "unable":
                    self.kill()
                    raise WorkerStartError(message["error"])
                self._become_ready(message["info"])
        except (EOFError, OSError):
            return self._died()
        if self._process.poll() is not None and not self.connection.poll(0):
            return self._died()
        if self.seconds_left(start_timeout) <= 0:
            waited = self._timeout if self.ready else start_timeout
            self.kill()
            if not self.ready:
                raise WorkerStartError(
                    f"a worker process did not start within {start_timeout:.0f} s"
                )
            return Reply(
                False,
                failure="timeout",
                error=f"no answer within {waited:g} s",
                dead=True,
                seconds=waited,
            )
        return None

    def wait_ready(self, timeout: float = 300.0) -> None:
        """Block until the handler is built. Raises WorkerStartError when it is not within ``timeout`` seconds."""
        while not self.ready:
            self.connection.poll(min(0.5, max(0.0, self.seconds_left(timeout))))
            reply = self.poll(timeout)
            if reply is not None:
                raise WorkerStartError(reply.error)

    def call(self, task: dict[str, Any], timeout: float) -> Reply:
        """Submit a task and wait for its reply."""
        self.wait_ready()
        self.submit(task, timeout)
        while True:
            self.connection.poll(min(1.0, max(0.0, self.seconds_left(timeout))))
            reply = self.poll()
            if reply is not None:
                return reply

    def kill(self) -> None:
        """End the process and everything it started, also what has left its group, and reap it."""
        strays = _descendants(self._process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()

    def _become_ready(self, info: dict[str, Any]) -> None:
        self.ready, self.info = True, info
        if self._task_started is not None:
            self._task_started = time.monotonic()

    def _finish(self, message: dict[str, Any]) -> Reply:
        started, self._task_started = self._task_started, None
        seconds = time.monotonic() - (started or self.started)
        if message["sticky"]:
            self.kill()
        return Reply(
            message["ok"],
            message["result"],
            message["failure"],
            message["error"],
            message["sticky"],
            seconds,
        )

    def _died(self) -> Reply:
        seconds = time.monotonic() - (self._task_started or self.started)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.returncode
        self.kill()
        how = (
            f"exit status {code}"
            if code is None or code >= 0
            else f"signal {signal.Signals(-code).name}"
        )
        detail = self.log_tail().strip().splitlines()
        error = f"the worker process died ({how})" + (f": {detail[-1].strip()}" if detail else "")
        if not self.ready:
            raise WorkerStartError(error)
        return Reply(False, failure="runtime", error=error, dead=True, seconds=seconds)

    def log_tail(self) -> str:
        """The end of what the child printed, for a failed row and for a person."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace")


def _spawn(
    end: socket.socket, log: IO[bytes], handler: str, options: dict[str, Any], env: dict[str, str]
) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    fd = end.fileno()
    return subprocess.Popen(
        [sys.executable, "-m", "tuner.worker", str(fd), handler, json.dumps(options)],
        env={**os.environ, "PYTHONPATH": path, **env},
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _descendants(pid: int) -> list[int]:
    """Processes that ``pid`` has started, and those that they have, of which /proc knows."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may be gone by now
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found = [pid]
    for one in found:  # grows while it is walked
        found += children.get(one, [])
    return found[1:]


def _child(fd: int, handler_name: str, options: dict[str, Any]) -> None:
    connection = Connection(fd)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        module, _, name = handler_name.partition(":")
        handler = getattr(importlib.import_module(module), name)(options)
    except (
        Exception
    ) as error:  # whatever kept the handler from starting is told to the parent, in its words
        connection.send_bytes(json.dumps({"kind": "unable", "error": _described(error)}).encode())
        return
    info = getattr(handler, "info", {})
    connection.send_bytes(json.dumps({"kind": "ready", "info": info}).encode())
    while True:
        try:
            task = json.loads(connection.recv_bytes())
        except EOFError:
            return
        message = _answer(handler, task)
        connection.send_bytes(json.dumps(message).encode())
        if message["sticky"]:
            return


def _answer(handler: Handler, task: dict[str, Any]) -> dict[str, Any]:
    try:
        result = handler.handle(task)
    except Exception as error:  # a candidate's failure, of whatever type, is a row with its class
        failure = getattr(error, "failure", "runtime")
        details = getattr(error, "details", {})
        return {
            "kind": "reply",
            "ok": False,
            "result": details,
            "failure": failure,
            "error": _described(error),
            "sticky": not handler.healthy(),
        }
    return {
        "kind": "reply",
        "ok": True,
        "result": result,
        "failure": "",
        "error": "",
        "sticky": False,
    }


def _described(error: BaseException) -> str:
    """The message; with the type's name before it unless the class of the failure says as much."""
    said = str(error).strip()
    if hasattr(error, "failure"):
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _end_with_parent(parent: int) -> None:
    """Take the whole group down when the parent has gone (SIGKILL gives it no chance to do so)."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _child(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
