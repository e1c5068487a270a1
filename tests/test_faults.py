"""The service when something breaks: what was committed stays, the answer is a clear 503, and it heals without a restart.

Every number here is FAKE.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_rows import fill
from fastapi.testclient import TestClient
from postgres_server import EXTERNAL, NoPostgres, PostgresServer
from processes import gone_within
from service import TOKEN, body_of, row_body
from sqlalchemy import event

from server.app import create_app
from server.settings import Settings
from tuner.export import freeze
from tuner.results.limits import limit_queries
from tuner.results.rows import StoreError
from tuner.results.store import Store

BEST = "/best?mask=causal&d=128"
READS = (BEST, "/results", "/releases", "/gpus", "/healthz", "/curves?mask=causal&d=128", "/")


def client_of(store: Store) -> TestClient:
    return TestClient(create_app(store, Settings(token="fake-token", retry_after_s=3)))


def settled() -> None:
    """Past the moment for which a server goes by the state that it knows."""
    time.sleep(0.08)


def post(client: TestClient | httpx.Client, number: int = 0, **run: Any) -> int:
    problem = {"mask": "causal", "head_dim": 128, "seq_len": 1024, "heads": 16, "batch": number + 1}
    body = body_of(row_body(problem=problem), **run)
    return client.post("/results", json=body, headers=TOKEN).status_code


def away(client: TestClient, paths: tuple[str, ...] = READS) -> None:
    """Every read is 503 with Retry-After and no word about where the database is."""
    for path in paths:
        answer = client.get(path)
        assert answer.status_code == 503, (path, answer.text)
        assert answer.headers["retry-after"] == "3"
        assert answer.headers["content-type"] == "application/problem+json"
        assert "/" not in answer.json()["detail"]
    assert "dash_database_up 0.0" in client.get("/metrics").text


def well(client: TestClient) -> None:
    for path in READS:
        assert client.get(path).status_code == 200, path
    assert "dash_database_up 1.0" in client.get("/metrics").text


# -- SQLite ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fake.db"
    with Store.open(path) as store:
        fill(store)
        freeze(store, "h200", name="before")
    return path


def test_a_file_that_is_gone_and_back(file: Path) -> None:
    with Store.open(file) as store:
        client = client_of(store)
        well(client)
        aside = file.with_suffix(".aside")
        os.rename(file, aside)
        settled()
        away(client)
        os.rename(aside, file)
        settled()
        well(client)


def test_a_backup_put_in_its_place_is_served_without_a_restart(file: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup.db"
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(backup)) as copy:
        source.backup(copy)
    with Store.open(file) as store:
        client = client_of(store)
        freeze(store, "h200", name="after")
        settled()
        assert client.get(BEST).json()["release"] == "after"
        for leftover in file.parent.glob("fake.db-*"):
            leftover.unlink()
        os.replace(backup, file)
        settled()
        assert client.get(BEST).json()["release"] == "before"
        assert [r["name"] for r in client.get("/releases").json()] == ["before"]
        assert post(client) == 201


def test_a_full_disk(file: Path) -> None:
    with Store.open(file) as store:
        client = client_of(store)
        pages = file.stat().st_size // 4096
        limit = {"pages": pages}

        @event.listens_for(store._engine, "checkout")
        def bounded(connection: Any, *_: Any) -> None:
            connection.execute(f"PRAGMA max_page_count = {limit['pages']}")

        store.close()
        before = len(client.get("/results?limit=1000").json()["results"])
        answers = [post(client, number) for number in range(150)]
        assert answers[-1] == 503
        assert set(answers) == {201, 503}
        answer = client.post("/results", json=body_of(row_body(error="x" * 9000)), headers=TOKEN)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
        well(client)
        limit["pages"] = 2**30
        assert post(client, 500) == 201
        with closing(sqlite3.connect(file)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            (stored,) = connection.execute("SELECT count(*) FROM dash_results").fetchone()
        assert stored == store.count()
        assert before + answers.count(201) + 1 == stored


def test_a_file_that_another_program_locks(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASH_SQLITE_BUSY_S", "0.2")
    with Store.open(file) as store:
        client = client_of(store)
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            begin = time.monotonic()
            answer = client.post("/results", json=body_of(row_body()), headers=TOKEN)
            assert time.monotonic() - begin < 5
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
            settled()
            assert client.get(BEST).status_code == 200, "readers do not wait for a writer"
            other.execute("ROLLBACK")
        assert post(client) == 201


SLOW = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 100000000) SELECT max(x) FROM n"


def test_a_query_that_takes_too_long_is_ended_and_the_next_one_is_well(file: Path) -> None:
    with Store.open(file) as store:
        limit_queries(store, 0.2)
        client = client_of(store)
        begin = time.monotonic()
        with pytest.raises(StoreError, match="interrupted"), store.reading() as connection:
            connection.exec_driver_sql(SLOW)
        assert time.monotonic() - begin < 10
        limit_queries(store, 60.0)
        well(client)


def test_a_migration_that_was_killed_halfway_leaves_the_schema_before_it(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    halfway = """
import os, sys
from sqlalchemy import event
from tuner.results import migrate
from tuner.results.store import Store
real = migrate.upgrade
def die(connection):
    @event.listens_for(connection, "before_cursor_execute")
    def count(conn, cursor, statement, *rest):
        die.seen += 1
        if die.seen == int(sys.argv[2]):
            os.kill(os.getpid(), 9)
    real(connection)
die.seen = 0
migrate.upgrade = die
Store.open(sys.argv[1])
"""
    for statement in (4, 8):
        command = [sys.executable, "-c", halfway, str(path), str(statement)]
        died = subprocess.run(command, timeout=60, capture_output=True)
        assert died.returncode == -signal.SIGKILL, died.stderr.decode()
        with closing(sqlite3.connect(path)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master").fetchall()
        assert tables == [], "a migration happens whole or not at all"
    with Store.open(path) as store:
        assert client_of(store).get("/healthz").status_code == 200


# -- PostgreSQL -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(os.environ.get(EXTERNAL)), reason="the server is not ours to crash")
def test_postgresql_that_crashes_and_comes_back() -> None:
    try:
        server = PostgresServer()
    except NoPostgres as reason:
        pytest.skip(f"no PostgreSQL: {reason}")
    try:
        with Store.open(server.database()) as store:
            client = client_of(store)
            assert [post(client, number) for number in range(5)] == [201] * 5
            freeze(store, "h200", name="before")
            limit_queries(store, 0.2)
            with pytest.raises(StoreError, match="timeout"), store.reading() as connection:
                connection.exec_driver_sql("SELECT pg_sleep(20)")
            limit_queries(store, 60.0)
            settled()
            well(client)
            server.crash()
            settled()
            away(client)
            assert post(client, 6) == 503
            server.launch()
            settled()
            well(client)
            assert post(client, 7) == 201
            assert store.count() == 6
            assert client.get(BEST).json()["release"] == "before"
    finally:
        server.stop()


# -- processes ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A ``dash-serve`` process and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "server.cli", "--port", str(port), *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DASH_TOKEN": "fake-token", "DASH_LOG": "json", **environment},
    )
    lines: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
    reader.start()
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: httpx.get(f"{address}/healthz", timeout=20).status_code == 200)
        yield process, address
    finally:
        process.terminate()
        process.wait(30)
        reader.join(5)


def wait_for(ready: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if ready():
                return
        time.sleep(0.1)
    raise AssertionError("not ready in time")


def workers_of(pid: int) -> list[int]:
    """The server processes that the supervisor has started, without multiprocessing's own helper."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def test_four_workers_from_no_file_lose_no_committed_row_when_one_is_killed(tmp_path: Path) -> None:
    """Eight writers beside readers: every worker starts, nothing fails, what was taken is there, the dead one is replaced."""
    path = tmp_path / "new" / "fake.db"
    options = ("--db", str(path), "--workers", "4")
    with serving(*options, DASH_SQLITE_BUSY_S="30") as (process, address):
        wait_for(lambda: len(workers_of(process.pid)) == 4)
        before = workers_of(process.pid)
        stop = threading.Event()
        accepted: list[str] = []
        broken: list[tuple[str, int]] = []

        def write(place: int) -> None:
            number = 0
            while not stop.is_set():
                number += 1
                uuid = f"{place:016x}{number:016x}"
                with (
                    contextlib.suppress(httpx.TransportError),  # its worker died
                    httpx.Client(base_url=address, timeout=60) as client,
                ):
                    status = post(client, number, uuid=uuid)
                    if status == 201:
                        accepted.append(uuid)
                    else:
                        broken.append(("POST", status))

        def read(place: int) -> None:
            asked = ("/results?limit=20", "/gpus", "/healthz", BEST, "/releases")[place % 5]
            while not stop.is_set():
                with contextlib.suppress(httpx.TransportError):
                    status = httpx.get(f"{address}{asked}", timeout=60).status_code
                    if status != 200:
                        broken.append((asked, status))
                time.sleep(0.3)

        crowd = [threading.Thread(target=write, args=(place,)) for place in range(8)]
        crowd += [threading.Thread(target=read, args=(place,)) for place in range(5)]
        for thread in crowd:
            thread.start()
        wait_for(lambda: len(accepted) > 15)
        os.kill(before[0], signal.SIGKILL)
        assert gone_within(before[0])
        reached = len(accepted)
        wait_for(lambda: len(accepted) > reached + 15)
        wait_for(lambda: len(workers_of(process.pid)) == 4)
        stop.set()
        for thread in crowd:
            thread.join(90)
        assert httpx.get(f"{address}{BEST}", timeout=60).status_code == 200
        text = httpx.get(f"{address}/metrics", timeout=60).text
    assert broken == []
    with Store.open(path) as store:
        stored = {run.uuid.replace("-", "") for run in store.runs()}
    assert set(accepted) <= stored
    counted = sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith('dash_requests_total{method="POST",route="/results",status="201"}')
    )
    assert counted >= len(accepted), "the counts of every worker, the dead one's too"


def test_a_request_in_flight_is_answered_before_the_server_ends(file: Path) -> None:
    body = json.dumps(body_of(row_body())).encode()
    head = (
        "POST /results HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer fake-token\r\nExpect: 100-continue\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with serving("--db", str(file)) as (process, address):
        port = int(address.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(head.encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 100"), "the server is reading it"
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            connection.sendall(body)
            assert connection.recv(1000).startswith(b"HTTP/1.1 201")
        assert process.wait(30) in (0, -signal.SIGTERM)


def test_headers_without_an_end_are_cut_off(file: Path) -> None:
    with serving("--db", str(file)) as (_, address):
        port = int(address.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: ")
            with contextlib.suppress(ConnectionError):
                for _ in range(200):
                    connection.sendall(b"a" * 100_000)
                pytest.fail("20 MB of one header were taken")
        assert httpx.get(f"{address}/healthz", timeout=30).status_code == 200
