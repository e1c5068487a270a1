"""The database's state as answers need it: at most a moment old, asked for by one request at a time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
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

    Time is the monotonic clock's, so that a clock set back neither keeps an answer nor loses one.
    """

    def __init__(
        self, store: Store, replaced: Callable[[], None], seconds: float = SECONDS
    ) -> None:
        self._store, self._replaced, self._seconds = store, replaced, seconds
        self._held: State | None = None
        self._until = 0.0
        self._lock = threading.Lock()
        self._path = store.url.database if store.is_sqlite else None
        self._file = self._identity() if self._path else None
        self._files = 0

    def peek(self) -> State | None:
        """The state without asking the database, None where it is too old."""
        return self._held if time.monotonic() < self._until else None

    def now(self) -> State:
        """The state. Raises StoreUnavailable where the database does not answer."""
        held = self.peek()
        if held is not None:
            return held
        with self._lock:
            held = self.peek()  # another thread may have asked meanwhile
            if held is not None:
                return held
            self._look_at_the_file()
            row, release = self._store.state()
            self._held = State(self._files, row, release)
            self._until = time.monotonic() + self._seconds
            return self._held

    def expire(self) -> None:
        """This process has written: the next request asks."""
        self._until = 0.0

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
