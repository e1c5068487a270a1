"""Worker processes: answers, failures, deaths and timeouts, and that nothing they started survives them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import alive, gone_within

import tuner.worker
from dash_kernels.problem import Config, Problem
from tuner.engines.local import Pool
from tuner.worker import Worker, WorkerStartError

ECHO = "fake_handlers:Echo"


@pytest.fixture(autouse=True)
def handlers_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(ECHO, {"name": "one"}, {"CUDA_VISIBLE_DEVICES": "GPU-1"})
    yield made
    made.kill()


def pid_in(file: Path) -> int:
    deadline = time.monotonic() + 10
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return int(file.read_text())


def test_answers_tasks_in_one_process_of_its_own(worker: Worker) -> None:
    first, second = worker.call({"n": 1}, 10), worker.call({"n": 2}, 10)
    assert first.ok
    assert first.result["echo"] == {"n": 1}
    assert first.result["cuda"] == "GPU-1"
    assert second.result["pid"] == first.result["pid"] == worker.pid != os.getpid()
    assert worker.info == {"options": {"name": "one"}}


def test_an_exception_is_a_reply_and_the_worker_goes_on(worker: Worker) -> None:
    reply = worker.call({"do": "raise"}, 10)
    assert (reply.ok, reply.failure, reply.error) == (False, "runtime", "ValueError: a bad task")
    assert not reply.dead
    assert worker.call({"n": 3}, 10).ok


def test_a_death_names_how_and_the_last_words(worker: Worker) -> None:
    reply = worker.call({"do": "die"}, 10)
    assert reply.dead
    assert reply.failure == "runtime"
    assert reply.error == "the worker process died (exit status 3): last words"


def test_a_killed_worker_names_the_signal(worker: Worker) -> None:
    worker.wait_ready()
    worker.submit({"do": "child", "file": os.devnull}, 30)
    os.kill(worker.pid, signal.SIGKILL)
    reply = None
    while reply is None:
        time.sleep(0.02)
        reply = worker.poll()
    assert "SIGKILL" in reply.error
    assert reply.failure == "runtime"


@pytest.mark.parametrize("apart", [False, True], ids=["in its group", "in a session of its own"])
def test_a_timeout_kills_the_worker_with_its_children(
    worker: Worker, tmp_path: Path, apart: bool
) -> None:
    worker.wait_ready()
    started = time.monotonic()
    reply = worker.call({"do": "child", "apart": apart, "file": str(tmp_path / "pid")}, 1.0)
    assert reply.failure == "timeout"
    assert reply.dead
    assert time.monotonic() - started < 5
    assert gone_within(pid_in(tmp_path / "pid"), 3)
    assert not alive(worker.pid)


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    script = f"""
import sys, time
from tuner.worker import Worker
worker = Worker({ECHO!r}, {{}})
worker.wait_ready()
worker.submit({{"do": "child", "file": {str(tmp_path / "pid")!r}}}, 600)
print(worker.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    child = pid_in(tmp_path / "pid")
    parent.kill()
    parent.wait()
    assert gone_within(pid, 5)
    assert gone_within(child, 5)


def test_a_ptxas_that_hangs_is_a_timeout_and_leaves_no_child(
    tmp_path: Path, triton_pythons: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real compiler, with an assembler that starts a child and sleeps."""
    script = tmp_path / "ptxas"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/pid\nsleep 600\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(triton_pythons[0]))
    places = {"TRITON_PTXAS_PATH": str(script), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    worker = Worker("tuner.compile:Compiler", {"capability": (9, 0), "gpu": "h200"}, places)
    task = {
        "kind": "compile",
        "problem": Problem("causal", 128, 1024).to_dict(),
        "config": Config().to_dict(),
        "cooperative": False,
    }
    worker.wait_ready()
    worker.submit(task, 600)
    child = pid_in(tmp_path / "pid")
    worker.submit(task, 0.1)  # the limit is what is left of it from now on
    reply = None
    while reply is None:
        time.sleep(0.05)
        reply = worker.poll()
    assert (reply.failure, reply.dead) == ("timeout", True)
    assert gone_within(child)


def test_a_handler_that_cannot_start_says_why() -> None:
    worker = Worker("fake_handlers:Missing", {})
    with pytest.raises(WorkerStartError, match="Missing"):
        worker.wait_ready()


def test_a_process_that_the_system_does_not_give_is_a_worker_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spawn, notes, left = tuner.worker._spawn, [], [2]

    def scarce(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return spawn(*arguments)

    monkeypatch.setattr(tuner.worker, "_spawn", scarce)
    before = len(os.listdir("/proc/self/fd"))
    pool = Pool(ECHO, [({}, {"uuid": f"GPU-{n}"}) for n in range(4)], notes.append, "worker")
    why = "a worker process could not be made: Resource temporarily unavailable"
    try:
        said = "of GPU-{} could not start, the others go on without it"
        assert notes == [f"the worker {said.format(n)}: {why}" for n in (2, 3)]
        for slot in pool.slots:
            slot.worker.wait_ready()
            pool.submit(slot, slot.options["uuid"], {"do": "die"}, 10)
        finished = []
        while len(finished) < 2:
            finished += [ticket for _, ticket, _ in pool.poll()]
        assert sorted(finished) == ["GPU-0", "GPU-1"], "also what the last one had in hand"
        assert len(notes) == 3
        with pytest.raises(WorkerStartError, match=f"no worker is left, .* start: {why}"):
            pool.poll()
        with pytest.raises(WorkerStartError, match=f"no worker is left, .* start: {why}"):
            Pool(ECHO, [({}, {})] * 2, notes.append, "worker")
    finally:
        pool.close()
    del pool, slot
    assert len(os.listdir("/proc/self/fd")) <= before, "no file stays open"


def test_the_pool_replaces_a_dead_worker() -> None:
    pool = Pool(ECHO, [({}, {})], print, "worker")
    try:
        slot = pool.slots[0]
        slot.worker.wait_ready()
        pool.submit(slot, "a", {"do": "die"}, 10)
        finished = []
        while not finished:
            finished = pool.poll()
        assert [(ticket, reply.dead) for _, ticket, reply in finished] == [("a", True)]
        slot.worker.wait_ready()
        assert slot.idle
        assert slot.starts == 2
        assert slot.worker.call({"n": 1}, 10).ok
    finally:
        pool.close()
