"""Sweeps in processes of their own, started fast: one process imports the tuner and forks for each.

``SweepForks`` is the test's side. A sweep is a ``SweepRequest`` with the handlers of ``quick_handlers`` and as many fake
GPUs as asked for; everything else (database, claims, worker processes, signals) is real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


class SweepForks:
    def __init__(self, **env: str) -> None:
        path = os.pathsep.join((str(TESTS), str(ROOT)))
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONPATH": path, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._ask({"do": "hello"}) == os.getpid()

    def _ask(self, message: dict[str, Any]) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(message) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def start(self, db: str, gpus: int = 1, log: Path | None = None, **values: Any) -> int:
        """The pid of a new sweep. ``values`` are ``filters`` (keywords), ``env``, or fields of SweepRequest.

        With ``own_machine`` the others take it for a process of another host, of which they learn by its heartbeat only.
        """
        return self._ask(
            {"do": "start", "db": db, "gpus": gpus, "log": str(log or os.devnull), **values}
        )

    def wait(self, pid: int) -> int:
        """Its exit code; -N when signal N ended it."""
        return os.waitstatus_to_exitcode(self._ask({"do": "wait", "pid": pid}))

    def ended(self, pid: int) -> bool:
        """Whether it has ended, without waiting; ``wait`` still answers how."""
        return bool(self._ask({"do": "peek", "pid": pid}))

    def close(self) -> None:
        """End whatever still runs."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(60)


def _start(message: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = _run(message)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()
        os._exit(code)


def _run(message: dict[str, Any]) -> int:
    import tuner.command
    import tuner.results.claims
    from tuner.command import SweepRequest, run_sweep
    from tuner.nvml import VisibleGpu
    from tuner.space import SpaceFilter

    kept = ("do", "db", "gpus", "log", "env", "filters", "own_machine")
    os.environ.update(message.get("env", {}))
    if message.get("own_machine"):
        machine = f"machine-{os.getpid()}"
        tuner.results.claims._machine = lambda: machine  # type: ignore[assignment]
    fakes = [
        VisibleGpu(place, f"GPU-{place}", "NVIDIA H200", (9, 0)) for place in range(message["gpus"])
    ]
    tuner.command.visible_gpus = lambda: fakes  # type: ignore[assignment]
    filters = SpaceFilter(**{k: tuple(v) for k, v in message.get("filters", {}).items()})
    values: dict[str, Any] = {
        "gpu": "h200",
        "jobs": 1,
        "measurer": "quick_handlers:QuickMeasurer",
        "compiler": "quick_handlers:QuickCompiler",
        **{name: value for name, value in message.items() if name not in kept},
    }
    return run_sweep(SweepRequest(db=message["db"], filters=filters, **values))


def _serve() -> None:
    import alembic.command  # noqa: F401  (imported once, here, instead of by every sweep)

    import tuner.command
    import tuner.results.store  # noqa: F401
    from dash_kernels.device import software
    from tuner.space import SpaceFilter, space

    software()  # found out once, and inherited by every fork
    space((9, 0), SpaceFilter(("causal",), (128,), (1024,)))
    running: set[int] = set()
    for line in sys.stdin:
        message = json.loads(line)
        if message["do"] == "start":
            answer = _start(message)
            running.add(answer)
        elif message["do"] == "wait":
            answer = os.waitpid(message["pid"], 0)[1]
            running.remove(message["pid"])
        elif message["do"] == "peek":
            seen = os.waitid(os.P_PID, message["pid"], os.WEXITED | os.WNOHANG | os.WNOWAIT)
            answer = int(seen is not None)
        else:
            answer = os.getppid()
        print(answer, flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _serve()
