"""``--engine ray`` on a real Ray cluster of several nodes on this machine: fake GPUs of two kinds, a real PostgreSQL."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from postgres_server import PostgresServer

from tuner.command import SweepRequest, UsageError, run_sweep
from tuner.engines.ray import Outcome, connect, merge
from tuner.plan import Summary
from tuner.results import ResultRow, Store
from tuner.space import SpaceFilter, space
from tuner.worker import _descendants

TESTS = Path(__file__).resolve().parent
FILTERS = SpaceFilter(("causal", "full"), (128,), (1024,), schedules=("shortest_first", "shift"))
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
CONFIGS = len(space((9, 0), FILTERS))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with one H200, and a node with an H200 and an H100."""
    pytest.importorskip("ray", reason='Ray is not installed: pip install "dash-kernels[ray]"')
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        path = [str(TESTS), str(TESTS / "fake_nvml"), str(TESTS.parent)]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("DASH_QUICK_S", "0.1")
        made = Cluster()
        quick = {"health_check_period_ms": 500, "health_check_timeout_ms": 500}
        for names, config in ((H200, quick), (f"{H200},{H100}", None)):
            gpus = {"num_gpus": len(names.split(",")), "env_vars": {"DASH_FAKE_GPUS": names}}
            made.add_node(num_cpus=1, include_dashboard=False, _system_config=config, **gpus)
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        ray.shutdown()
        made.shutdown()


def request(db: str, **values: Any) -> SweepRequest:
    fixed: dict[str, Any] = {
        "gpu": "auto",
        "filters": FILTERS,
        "db": db,
        "engine": "ray",
        "jobs": 1,
        "lease_s": 2.0,
        "measurer": "quick_handlers:QuickMeasurer",
        "compiler": "quick_handlers:QuickCompiler",
    }
    return SweepRequest(**{**fixed, **values})


def first_pass(db: str, gpu: str) -> list[ResultRow]:
    with Store.open(db) as store:
        rows = store.results(limit=None)
    return [row for row in rows if row.gpu == gpu and (row.telemetry or {}).get("round") != "final"]


def agents() -> list[int]:
    """Pids of the agents that this process runs now, no other's; Ray names its processes after what they do."""
    found = []
    for pid in _descendants(os.getpid()):
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::Agent"):
                found.append(pid)
    return found


def after_rows(db: str, count: int, act: Callable[[], None]) -> threading.Thread:
    """A thread that acts once the database has this many rows."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        with Store.open(db) as store:
            while store.count() < count and time.monotonic() < deadline:
                time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def assert_complete(db: str, gpu: str) -> None:
    counted = Counter(row.config_hash for row in first_pass(db, gpu))
    assert len(counted) == CONFIGS
    assert set(counted.values()) == {1}


def test_every_gpu_works_on_one_sweep_though_an_agent_is_killed(
    cluster: Any, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    db = postgres.database()
    killer = after_rows(db, 10, lambda: os.kill(agents()[0], signal.SIGKILL))
    assert run_sweep(request(db)) == 0
    killer.join()
    out = capsys.readouterr().out
    assert "its agent died; what it had in hand returns to the others within 2 s" in out
    assert_complete(db, "h200")
    assert_complete(db, "h100")
    assert len({row.run_id for row in first_pass(db, "h200")}) >= 2, "both nodes did a part"
    deadline = time.monotonic() + 5  # Ray ends a process some time after it was asked to
    while agents() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert agents() == []


def test_other_nodes_are_left_out_and_a_gpu_whose_nodes_are_lost_is_named(
    cluster: Any, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    db = postgres.database()
    (node,) = cluster.worker_nodes
    killer = after_rows(db, 5, lambda: cluster.remove_node(node, allow_graceful=False))
    assert run_sweep(request(db, gpu="h100")) == 2
    killer.join()
    said = capsys.readouterr()
    assert "has h200, not h100; it is left out" in said.out
    assert "h100 was not swept: the nodes that have it were lost" in said.err
    with Store.open(db) as store:
        assert store.gpus() == ["h100"]
        assert len(store.results()) == len({row.config_hash for row in store.results()}) >= 5
    with pytest.raises(UsageError, match="cannot take this sweep: .* has h200, not b200"):
        run_sweep(request(db, gpu="b200"))


# -- without a cluster ------------------------------------------------------------------------------------------------


def test_a_missing_ray_is_named_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r'pip install "dash-kernels\[ray\]"'):
        run_sweep(request(str(tmp_path / "rows.db")))
    assert not list(tmp_path.iterdir())


def test_bad_usage_is_refused_before_ray_is_asked(tmp_path: Path) -> None:
    db = str(tmp_path / "rows.db")
    with pytest.raises(UsageError, match="unknown engine 'slurm'; choose from local, ray"):
        run_sweep(request(db, engine="slurm"))
    for option in ("compile_only", "simulate"):
        with pytest.raises(
            UsageError, match="is for measuring; .* --simulate work on this machine"
        ):
            run_sweep(request(db, **{option: True}))
    with pytest.raises(UsageError, match="unknown GPU 'h9000'"):
        run_sweep(request(db, gpu="h9000"))


class FakeRay:
    """What ``connect`` asks of Ray."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        gpus = {"GPU": 1.0}
        return [{"Alive": True, "NodeManagerAddress": h, "Resources": gpus} for h in self.hosts]


def test_several_hosts_need_a_database_that_all_can_reach(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay("10.0.0.1", "10.0.0.2"))
    with pytest.raises(UsageError, match="needs one PostgreSQL, not .*rows.db"):
        connect(request(str(tmp_path / "rows.db")))
    connect(request("postgresql://db/dash"))
    monkeypatch.setitem(sys.modules, "ray", FakeRay("10.0.0.1"))
    connect(request(str(tmp_path / "rows.db")))


def test_summaries_of_one_gpu_name_count_what_all_saw_once() -> None:
    first = Summary(Counter(ok=3, timeout=1), resumed=5, usable=12, left=0, gpu_busy=0.8)
    second = Summary(Counter(ok=4), resumed=6, usable=12, elsewhere=4, gpu_busy=0.6)
    other = Summary(Counter(ok=2), resumed=1, usable=3)
    parts = [Outcome("h200", first), Outcome("h200", second), Outcome("h100", other)]
    merged = merge([*parts, Outcome("h100", None, "no compiler")])
    assert merged.counts == Counter(ok=9, timeout=1)
    assert (merged.resumed, merged.usable) == (7, 15)
    assert merged.gpu_busy == pytest.approx(0.7)
