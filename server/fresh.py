"""The database's state as answers need it: at most a moment old, asked for by one request at a time."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from tuner.results.migrate import HEAD
from tuner.results.rows import StoreUnavailable
from tuner.results.store import Store

SECONDS = 0.05
"""How old a state may be: what another process commits is answered within this, what this one does at once."""


class State(NamedTuple):
    """Equal states give equal answers. ``database`` counts the files that stood at the database's path."""

    database: int
    row: int
    release: int


class Fresh:
    """Asks a store for its state. A SQLite file that was put in the place of another one is opened anew.

    Time is the monotonic clock's, so that a clock set back neither keeps an answer nor loses one. Under load the next
    state is asked for when half of the time of this one is over, so that no request waits for it.
    """

    def __init__(
        self, store: Store, replaced: Callable[[], None], seconds: float = SECONDS
    ) -> None:
        self._store, self._replaced, self._seconds = store, replaced, seconds
        self._held: State | None = None
        self._until = 0.0
        self._expired = 0
        self._lock = threading.Lock()
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="dash-fresh")
        self._asked: Future[State | None] | None = None
        self._path = store.url.database if store.is_sqlite else None
        self._file = self._identity() if self._path else None
        self._files = 0

    async def current(self) -> State:
        """:meth:`now` for the event loop: one thread asks, for all requests together."""
        held = self._peek()
        if held is not None:
            if time.monotonic() > self._until - self._seconds / 2:
                self._ask()
            return held
        found = None
        while found is None:
            found = await asyncio.shield(asyncio.wrap_future(self._ask()))
        return found

    def now(self) -> State:
        """The state. Raises StoreUnavailable where the database does not answer."""
        found = self._peek()
        while found is None:
            with self._lock:
                found = self._peek() or self._look()  # another thread may have asked meanwhile
        return found

    def expire(self) -> None:
        """This process has written: the next request asks."""
        self._expired += 1
        self._until = 0.0

    def _peek(self) -> State | None:
        return self._held if time.monotonic() < self._until else None

    def _ask(self) -> Future[State | None]:
        if self._asked is None or self._asked.done():
            self._asked = self._asker.submit(self._locked_look)
        return self._asked

    def _locked_look(self) -> State | None:
        with self._lock:
            return self._look()

    def _look(self) -> State | None:
        """What the database says, held for a moment; None where this process has written meanwhile."""
        begin, expired = time.monotonic(), self._expired
        self._look_at_the_file()
        found = State(self._files, *self._store.state())
        if expired != self._expired:
            return None
        self._held, self._until = found, begin + self._seconds
        return found

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = os.stat(str(self._path))
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _look_at_the_file(self) -> None:
        if self._path is None:
            return
        found = self._identity()
        if found is None:
            raise StoreUnavailable(f"database {self._path} is gone")
        if found == self._file:
            return
        self._store.close()  # connections to the file that was there
        version = self._store.schema_version()
        if version != HEAD:
            raise StoreUnavailable(
                f"database {self._path} was replaced by one of schema {version}; this server reads {HEAD}"
            )
        self._file, self._files = found, self._files + 1
        self._replaced()
