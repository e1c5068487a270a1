"""The classes of failure that a config's row can have, and the exception that carries one."""

from __future__ import annotations

from typing import Any

CLASSES = ("constraints", "compile", "timeout", "runtime", "correctness", "nondeterministic")
TRANSIENT = ("timeout", "runtime")  # worth another try with --retry


class CandidateError(Exception):
    """A config that failed. ``failure`` is one of CLASSES, ``details`` are columns of its row."""

    def __init__(self, failure: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.failure = failure
        self.details = details
