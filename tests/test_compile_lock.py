"""A kernel that many processes meet at once is compiled once, and a killed holder holds nobody up."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dash_kernels import compile_lock
from dash_kernels.compile_lock import compile_once, lock_path

ROOT = Path(__file__).resolve().parent.parent
RANK = """
import sys, time
from pathlib import Path
from dash_kernels.compile_lock import compile_once
cache = Path(sys.argv[1])
with compile_once("kernel"):
    if not (cache / "built").exists():
        time.sleep(0.3)
        with (cache / "log").open("a") as file:
            file.write("compiled\\n")
        (cache / "built").touch()
    if len(sys.argv) > 2:
        print("held", flush=True)
        time.sleep(600)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DASH_CACHE", str(tmp_path))
    monkeypatch.setattr(compile_lock, "_warned", threading.Event())
    return tmp_path


def rank(cache: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RANK, str(cache), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_eight_ranks_compile_a_new_kernel_once(cache: Path) -> None:
    ranks = [rank(cache) for _ in range(8)]
    assert [process.wait(60) for process in ranks] == [0] * 8
    assert (cache / "log").read_text() == "compiled\n"


def test_a_killed_holder_holds_nobody_up(cache: Path) -> None:
    holder = rank(cache, "hold")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    other = rank(cache)
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(1.0)
    holder.kill()
    assert other.wait(20) == 0
    holder.wait()


def test_kernels_and_triton_caches_have_locks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {lock_path("one"), lock_path("two")}
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    assert len(paths | {lock_path("one")}) == 3
    with compile_once("one"), compile_once("two"):
        pass


def test_an_error_inside_gives_the_lock_back() -> None:
    with pytest.raises(ValueError, match="ptxas"), compile_once("kernel"):
        raise ValueError("ptxas")
    started = time.monotonic()
    with compile_once("kernel"):
        assert time.monotonic() - started < 1


@pytest.mark.parametrize("error", [NotImplementedError("no flock"), OSError(37, "No locks")])
def test_where_locks_are_not_to_be_had_one_warning_says_so(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with caplog.at_level(logging.WARNING, "dash_kernels"):
        for name in ("one", "two"):
            with compile_once(name):
                pass
    (said,) = caplog.messages
    assert "each process compiles its kernels for itself" in said
    assert "DASH_CACHE" in said


def test_a_holder_that_never_ends_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cache: Path
) -> None:
    monkeypatch.setattr(compile_lock, "WAIT_S", 0.2)
    holder = rank(cache, "hold")
    assert holder.stdout is not None
    holder.stdout.readline()
    with compile_once("kernel"):
        pass
    assert "was held for over" in caplog.messages[0]
    holder.kill()
    holder.wait()


def test_a_user_without_a_cache_folder_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_lock, "cache_folder", lambda: None)
    with compile_once("kernel"):
        pass
    assert "DASH_CACHE" in caplog.messages[0]
