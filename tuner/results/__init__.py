"""The results database: values (rows), tables (models), and the one way in and out (Store).

Store is imported on first use, so that the values alone need no SQLAlchemy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.results.rows import (
    Release,
    ResultFilter,
    ResultRow,
    RunInfo,
    StoreError,
    StoreUnavailable,
    config_hash,
    environment_key,
)

if TYPE_CHECKING:
    from tuner.results.store import Store

__all__ = [
    "Release",
    "ResultFilter",
    "ResultRow",
    "RunInfo",
    "Store",
    "StoreError",
    "StoreUnavailable",
    "config_hash",
    "environment_key",
]


def __getattr__(name: str) -> Any:
    if name == "Store":
        from tuner.results.store import Store

        return Store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
