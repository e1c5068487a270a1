"""Every test in this folder needs a GPU; without one the run's summary says which reason skipped how many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them all ``gpu`` (tests/conftest.py skips those with its reason) and bound each: a hang is a failure."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if item.config.pluginmanager.hasplugin("timeout"):
                item.add_marker(pytest.mark.timeout(120))


@pytest.fixture(autouse=True)
def _no_error_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A kernel's asynchronous error belongs to the test that launched it."""
    yield
    if request.node.get_closest_marker("skip") is None:
        import torch

        torch.cuda.synchronize()
