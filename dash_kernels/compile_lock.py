"""Many processes that meet a new kernel at once compile it once: a file lock that dies with its holder.

Triton keeps compiled kernels in a folder, but processes that start together all find it empty and all compile. Here the
first of them compiles while the others wait, and find the result in Triton's cache.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dash_kernels.fetch import cache_folder

logger = logging.getLogger("dash_kernels")

WAIT_S = 600.0
"""A holder that is alive but has not finished by then is not waited for any longer."""


@contextmanager
def compile_once(name: str) -> Iterator[None]:
    """Hold the lock of the kernel that ``name`` names, while it is compiled or first launched.

    Processes of one user with one Triton cache share it. Where locks are not to be had (no folder, a file system without
    them), there is one warning in a process and everyone compiles.
    """
    held = _acquired(name)
    try:
        yield
    finally:
        if held is not None:
            held.release()


def _acquired(name: str) -> Any:
    """The lock, held; None where there is none to be had."""
    path = lock_path(name)
    if path is None:
        return _warn("this user has no cache folder: set DASH_CACHE to one")
    try:
        from filelock import FileLock, Timeout
    except ImportError:
        return _warn("filelock is not installed")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, timeout=WAIT_S)
        lock.acquire()
    except Timeout:
        return _warn(f"{path} was held for over {WAIT_S:.0f} s")
    except (OSError, NotImplementedError) as error:
        return _warn(
            f"{path} cannot be locked ({error}): set DASH_CACHE to a folder on a local disk"
        )
    return lock


def lock_path(name: str) -> Path | None:
    """The lock file of a kernel, one for each Triton cache; None for a user who has no cache folder."""
    folder = cache_folder()
    if folder is None:
        return None
    where = os.environ.get("TRITON_CACHE_DIR", "")
    digest = hashlib.sha256(f"{where}\0{name}".encode()).hexdigest()[:16]
    return folder / "locks" / f"{digest}.lock"


_warned = threading.Event()


def _warn(why: str) -> None:
    if not _warned.is_set():
        _warned.set()
        logger.warning("each process compiles its kernels for itself: %s", why)
