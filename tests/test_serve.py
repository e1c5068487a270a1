"""The OpenAPI document under a fuzzer, and ``dash-serve`` as a process. Every number here is FAKE."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from fake_rows import fake_problem, fake_row, fill

from dash_kernels.problem import Config
from server.app import create_app
from server.cli import check_names, read_settings, shared_metrics, warm
from server.settings import Settings
from tuner.export import freeze
from tuner.results.rows import RunInfo
from tuner.results.store import Store


def test_the_schema_survives_a_fuzzer(tmp_path: Path) -> None:
    """Generated calls, valid and not: no 5xx, every answer as the OpenAPI document says, bad input refused.

    ``make fuzz`` is the same for long, over HTTP and with writes.
    """
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from hypothesis import HealthCheck, Phase, given, settings

    store = Store.open(tmp_path / "fake.db")
    fill(store)
    freeze(store, "h200")
    app = create_app(store, Settings())
    schema = schemathesis.openapi.from_asgi("/openapi.json", app).exclude(path_regex="^/v1/")
    checks = [
        schemathesis.checks.not_a_server_error,
        schemathesis.checks.status_code_conformance,
        schemathesis.checks.content_type_conformance,
        schemathesis.checks.response_schema_conformance,
        schemathesis.checks.response_headers_conformance,
        schemathesis.checks.negative_data_rejection,
    ]
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 12
    for operation in operations:

        @settings(
            max_examples=5,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def call(case: Any) -> None:
            case.call_and_validate(checks=checks)

        call()
    store.close()


# -- dash-serve -----------------------------------------------------------------------------------------------------


def serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_serve_names_what_is_wrong(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        busy = serve("--port", port, "--db", str(tmp_path / "none.db"))
    assert (busy.returncode, busy.stderr.count("\n")) == (2, 1)
    assert f"port {port}" in busy.stderr
    assert not (tmp_path / "none.db").exists()
    (tmp_path / "text.db").write_text("this is no database, " * 100)
    broken = serve("--port", "0", "--db", str(tmp_path / "text.db"))
    assert (broken.returncode, broken.stderr.count("\n")) == (2, 1)
    assert "text.db" in broken.stderr
    pinned = serve("--port", "0", DASH_SERVE_RELEASE="h200:3")
    assert (pinned.returncode, pinned.stderr.count("\n")) == (2, 1)
    assert 'DASH_SERVE_RELEASE is not JSON; write it as {"h200": 3}' in pinned.stderr
    unknown = serve("--port", "0", DASH_DEFAULT_GPU="nope", DASH_DB=str(tmp_path / "new.db"))
    assert unknown.returncode == 2
    assert "DASH_DEFAULT_GPU names GPU 'nope'" in unknown.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DASH_ROOT_PATH", "dash", "DASH_ROOT_PATH is 'dash': it must be a path such as /dash"),
        ("DASH_SERVE_RELEASE", '{"h200": "x"}', "DASH_SERVE_RELEASE.h200 is 'x': it must be a"),
        ("DASH_SERVE_RELEASE", "[1]", 'write it as {"h200": 3}'),
        ("DASH_LOG", "xml", "DASH_LOG is 'xml': input should be 'text' or 'json'"),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_what_can(
    name: str,
    value: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(typer.Exit):
        read_settings()
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("chosen", "wrong"),
    [
        ({"default_gpu": "NVIDIA H800"}, ""),  # known, and without rows yet
        ({"default_gpu": "fake-chip"}, ""),  # unknown, and with rows
        ({"default_gpu": "other-chip"}, "DASH_DEFAULT_GPU names GPU 'other-chip'"),
        ({"serve_release": {"h20O": 1}}, "DASH_SERVE_RELEASE names GPU 'h20O'"),
    ],
)
def test_a_gpu_in_the_settings_is_known_or_has_rows(
    chosen: dict[str, Any], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open("sqlite://") as store:
        run = store.start_run(RunInfo("fake-chip", {"note": "FAKE"}, {}))
        store.add(run, fake_row(fake_problem("full", 64, 512), Config(), 1.0, "fake-chip"))
        if not wrong:
            check_names(Settings(**chosen), store)
            return
        with pytest.raises(typer.Exit):
            check_names(Settings(**chosen), store)
    said = capsys.readouterr().err
    assert wrong in said
    assert "choose one of h200, " in said
    assert "fake-chip" in said


def test_a_pinned_release_that_is_not_there_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with Store.open("sqlite://") as store:
        check_names(Settings(serve_release={"h200": 7}), store)
    assert "pins h200 to release 7, which is not there" in caplog.text


def test_the_collector_passes_over_what_a_server_holds() -> None:
    with Store.open("sqlite://") as store:
        fill(store)
        app = create_app(store, Settings())
        try:
            warm(app.state.context)
            assert gc.get_freeze_count() > 1000
        finally:
            gc.unfreeze()


def best_of_a_read_only_server(
    *arguments: str, prefix: Sequence[str] = (), cwd: str | None = None, **environment: str
) -> dict[str, Any]:
    """/best of a ``dash-serve`` started so, which has to refuse writes and to say nothing but what it is asked for."""
    given = {**os.environ, "DASH_TOKEN": "fake-token", **environment}
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "server.cli", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=given,
        cwd=cwd,
    )
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        address = next(line.split()[1] for line in lines if line.startswith("dash-serve: http"))
        answer = None
        for _ in range(100):
            try:
                answer = httpx.get(f"{address}/best?mask=causal&d=128", timeout=10)
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        assert answer is not None
        token = {"Authorization": "Bearer fake-token"}
        refused = httpx.post(f"{address}/results", json={}, headers=token, timeout=10)
        assert refused.status_code == 403
        assert "reading only" in refused.json()["detail"]
        found: dict[str, Any] = answer.json()
    finally:
        process.terminate()
        assert process.wait(20) in (0, -15)
    assert process.stderr.read() == ""
    return found


def test_serve_answers_from_a_database_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "fake.db"
    with Store.open(path) as store:
        fill(store)
        freeze(store, "h200")
    found = best_of_a_read_only_server("--db", str(path), DASH_READ_ONLY="1")
    assert found["best"]["config"]["schedule"] == "shortest_first"


def test_serve_without_a_folder_to_write_answers_from_the_shipped_rows() -> None:
    nowhere = {"HOME": "/proc/nowhere", "XDG_DATA_HOME": "/proc/nowhere", "DASH_DB": ""}
    found = best_of_a_read_only_server(**nowhere)
    with Store.open("sqlite://") as store:
        store.load_shipped()
        assert found["release"] == store.releases()[0].name
    named = serve("--port", "0", "--db", "/proc/nowhere/x.db", **nowhere)
    assert (named.returncode, named.stderr.count("\n")) == (2, 1)


NOBODY = ("setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups")
READS = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
"""Lets that user read what is root's alone, such as this checkout, and write nothing more."""


def as_nobody() -> tuple[str, ...]:
    """What starts this Python as a user who owns nothing here."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root, with setpriv of util-linux, can start a process as another user")
    for prefix in (NOBODY, (*NOBODY, *READS)):
        code = "import server.cli, sys; print(sys.version)"
        told = [*prefix, sys.executable, "-c", code]
        found = subprocess.run(told, capture_output=True, text=True, check=False)
        if found.stdout.strip() == sys.version.strip():
            return prefix
    pytest.skip("user 12345 may not read this checkout or run this Python")


def test_serve_as_a_user_without_a_home_in_a_folder_that_cannot_be_written() -> None:
    prefix = as_nobody()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fake.db"
        with Store.open(path) as store:
            fill(store)
            freeze(store, "h200")
        path.chmod(0o444)
        path.parent.chmod(0o555)
        before = sorted(os.listdir(folder))
        root = str(Path(__file__).resolve().parent.parent)
        found = best_of_a_read_only_server(
            "--db",
            str(path),
            prefix=("env", "--unset", "HOME", "--unset", "XDG_DATA_HOME", *prefix),
            cwd=folder,
            PYTHONPATH=root,
            TMPDIR=folder,
        )
        assert found["best"]["config"]["schedule"] == "shortest_first"
        assert sorted(os.listdir(folder)) == before


def test_workers_need_a_folder_that_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    with pytest.raises(typer.Exit):
        shared_metrics()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/named")
    with shared_metrics() as folder:
        assert folder == "/named"
