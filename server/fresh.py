"""The database's state as answers need it: at most a moment old, asked for by one request at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from tuner.results.database import file_identity
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


class Look(NamedTuple):
    """What the database said, when it was asked, and how often this process had written by then."""

    state: State
    begun: float
    writes: int


class Fresh:
    """Asks a store for its state. A SQLite file that was put in the place of another one is opened anew.

    Time is the monotonic clock's, so that a clock set back neither keeps an answer nor loses one. Under load the next
    state is asked for when half of the time of this one is over, so that no request waits for it.
    """

    def __init__(
        self, store: Store, replaced: Callable[[], None], seconds: float = SECONDS
    ) -> None:
        self._store, self._replaced, self._seconds = store, replaced, seconds
        self._last: Look | None = None
        self._writes = 0
        self._counting = threading.Lock()
        self._lock = threading.Lock()
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="dash-fresh")
        self._asked: Future[Look] | None = None
        self._path = store.url.database if store.is_sqlite else None
        self._file = file_identity(store.url) if self._path else None
        self._files = 0

    async def current(self) -> State:
        """:meth:`now` for the event loop: one thread asks, for all requests together.

        A request takes what was being asked for when it came, unless this process had written since: two at most.
        """
        held = self._held()
        if held is not None:
            if time.monotonic() > held.begun + self._seconds / 2:
                self._ask()
            return held.state
        writes, found = self._writes, None
        while found is None or found.writes < writes:
            found = await asyncio.shield(asyncio.wrap_future(self._ask()))
        return found.state

    def now(self) -> State:
        """The state. Raises StoreUnavailable where the database does not answer."""
        found = self._held()
        if found is None:
            with self._lock:
                found = self._held() or self._look()  # another thread may have asked meanwhile
        return found.state

    def expire(self) -> None:
        """This process has written: the next request asks."""
        with self._counting:
            self._writes += 1

    def _held(self) -> Look | None:
        """The last look, None where it is too old."""
        last = self._last
        if last is None or last.writes != self._writes:
            return None
        return last if time.monotonic() < last.begun + self._seconds else None

    def _ask(self) -> Future[Look]:
        if self._asked is None or self._asked.done():
            self._asked = self._asker.submit(self._locked_look)
        return self._asked

    def _locked_look(self) -> Look:
        with self._lock:
            return self._look()

    def _look(self) -> Look:
        begun, writes = time.monotonic(), self._writes
        self._look_at_the_file()
        self._last = Look(State(self._files, *self._store.state()), begun, writes)
        return self._last

    def _look_at_the_file(self) -> None:
        if self._path is None:
            return
        found = file_identity(self._store.url)
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
