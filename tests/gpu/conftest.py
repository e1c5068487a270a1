"""Every test in this folder needs a GPU; without one the run's summary says which reason skipped how many."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
WARM_UP_SECONDS = 80  # beside a first test of its own within that test's bound


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them all ``gpu`` (tests/conftest.py skips those with its reason) and bound each: a hang ends the process."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if item.config.pluginmanager.hasplugin("timeout"):
                # In a thread: a signal waits for Python, which a hung kernel never gives back.
                item.add_marker(pytest.mark.timeout(240, method="thread"))


@pytest.fixture(scope="session", autouse=True)
def _compiled_in_parallel(request: pytest.FixtureRequest) -> None:
    """Compile the kernels of a long run in several processes; what fails there fails again in its own test."""
    if len(request.session.items) < 50 or "PYTEST_XDIST_WORKER" in os.environ:
        return
    from warm_kernels import JOBS

    command = [sys.executable, str(HERE / "warm_kernels.py")]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    workers = [subprocess.Popen([*command, str(i)], **quiet) for i in range(len(JOBS))]
    deadline = time.monotonic() + WARM_UP_SECONDS
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()


@pytest.fixture(autouse=True)
def _no_error_left_behind() -> Iterator[None]:
    """A kernel's asynchronous error belongs to the test that launched it."""
    yield
    import torch

    torch.cuda.synchronize()
