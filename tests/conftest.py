"""Shared by all tests: nothing is read from or written to the user's own data, and GPU tests say why they skip."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from postgres_server import PostgresServer

ROOT = Path(__file__).resolve().parent.parent
USER_SETTINGS = (
    *("DB", "READ_ONLY", "SQLITE_BUSY_S", "SQLITE_JOURNAL", "QUERY_SECONDS", "RETRY_AFTER_S"),
    *("TOKEN", "TOKENS_FILE", "MAX_BODY_BYTES", "CORS_ORIGINS", "ROOT_PATH", "LOG", "LOG_REQUESTS"),
    *("TABLE", "DEFAULT_GPU", "SERVE_RELEASE", "ALLOW_FAMILY", "ALLOW_COMPILER"),
)


def _why_no_gpu() -> str:
    """Empty when a kernel can be launched here, else the reason in a few words."""
    try:
        import torch
    except ModuleNotFoundError:
        return "PyTorch is not installed"
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is a CPU build"
    if not torch.cuda.is_available():
        return "no usable NVIDIA GPU (torch.cuda.is_available() is False)"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if "gpu" in item.keywords]
    reason = _why_no_gpu() if marked else ""
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _own_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees the settings, the database or the fetched tables of the user who runs it."""
    for name in USER_SETTINGS:
        monkeypatch.delenv(f"DASH_{name}", raising=False)
    monkeypatch.setenv("DASH_CACHE", str(tmp_path / "user-cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user-data"))


@pytest.fixture(scope="session")
def triton_pythons() -> list[Path]:
    """Interpreters of the torch-free environments, oldest Triton first (`make test` creates and names them)."""
    named = os.environ.get("DASH_TRITON_ENVS", "")
    if not named:
        pytest.skip("DASH_TRITON_ENVS names no environment; `make test` creates them")
    return [Path(path) for path in named.split(os.pathsep)]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for the whole session; tests that need one skip where none can be had."""
    from postgres_server import NoPostgres, PostgresServer

    try:
        server = PostgresServer()
    except NoPostgres as reason:
        pytest.skip(f"no PostgreSQL: {reason}")
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh database of each kind."""
    if request.param == "sqlite":
        return str(tmp_path / "results.db")
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.database()
