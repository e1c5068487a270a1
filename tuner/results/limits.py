"""Bounds what one query may cost, so that a caller of a shared server cannot hold a connection for long."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import event

from tuner.results.store import Store

STEPS = 200_000
"""Steps of SQLite's virtual machine between two looks at the clock: some milliseconds."""


def limit_queries(store: Store, seconds: float) -> None:
    """End every query of ``store`` that takes longer: it raises StoreError, and the connection goes on.

    Holds for connections that are taken from now on. PostgreSQL counts each statement, SQLite the time since the
    connection was taken from the pool. Waiting for another writer is not counted.
    """
    engine = store._engine

    @event.listens_for(engine, "checkout")
    def taken(connection: Any, *_: Any) -> None:
        if store.is_sqlite:
            end = time.monotonic() + seconds
            connection.set_progress_handler(lambda: time.monotonic() > end, STEPS)
        else:
            connection.execute(f"SET statement_timeout = {seconds * 1000:.0f}")
            connection.commit()

    @event.listens_for(engine, "checkin")
    def returned(connection: Any, *_: Any) -> None:
        if store.is_sqlite and connection is not None:
            connection.set_progress_handler(None, 0)
