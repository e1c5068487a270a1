"""How the service holds with a million rows: ``python benchmarks/load.py --db PATH_OR_URL --output FILE``.

/best is measured in turn with a FastAPI route that declares the same parameters and returns a constant, each with one
worker; then each at half of what it can, on a schedule that waits for no answer, with how far this machine kept its
pace meanwhile; then /curves and the calls of the dashboard one after another, and the first call
after a new row. ``--soak MINUTES`` runs a mixed load instead and watches the server's memory. On a machine with cores to
spare, ``--server-cores 4,5 --client-cores 10`` keeps the servers and the client out of each other's way.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import urllib.request
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import load_client
from load_client import Connection, flat_out, quantile
from million import GPUS

HOST = "127.0.0.1"
SOAK_RATE = 40.0
CONSTANT = """
from typing import Annotated
from fastapi import FastAPI, Query
from server.params import BestQuery
app = FastAPI()
@app.get("/best")
async def best(query: Annotated[BestQuery, Query()]) -> dict[str, str]:
    return {"answer": "constant"}
"""
BEST = [
    f"/best?mask={mask}&d={dim}&gpu=h200{length}"
    for mask in ("causal", "full")
    for dim in (64, 128)
    for length in ("", "&s=512", "&s=4096", "&s=5000")
]
PAGES = [
    "/curves?mask=causal&d=128&gpu=h200",
    "/curves?mask=full&d=64&gpu=a100",
    "/?gpu=h200",
    "/?gpu=b200&mask=full&d=64",
    "/figures/speedup?gpu=h200&mask=causal&d=128",
    "/figures/tflops?gpu=h100&mask=causal&d=128",
    "/figures/registers?gpu=h200&mask=causal&d=128",
    "/figures/failures?gpu=h200",
    "/figures/gantt?kind=shift&gantt_mask=full",
    "/gpus",
    "/releases",
    "/results?gpu=h200&limit=100",
    "/results?gpu=h800&mask=causal&d=128&schedule=descending&limit=100",
]
VERSIONS = ("fastapi", "starlette", "uvicorn", "pydantic", "sqlalchemy", "psycopg")


def start(command: list[str], port: int, path: str, cores: set[int]) -> subprocess.Popen[bytes]:
    places = os.pathsep.join(filter(None, [".", os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": places}, stderr=subprocess.DEVNULL
    )
    os.sched_setaffinity(process.pid, cores)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=60).close()
            return process
        except OSError:
            time.sleep(0.2)
    process.kill()
    raise SystemExit(f"no answer from {' '.join(command)}")


def serve(db: str, port: int, cores: set[int]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "server.cli", "--port", str(port), "--db", db]
    return start(command, port, "/healthz", cores)


def constant(port: int, folder: Path, cores: set[int]) -> subprocess.Popen[bytes]:
    (folder / "constant_app.py").write_text(CONSTANT)
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(folder), "constant_app:app"]
    options = ["--port", str(port), "--log-level", "warning", "--no-access-log"]
    return start(command + options, port, BEST[0], cores)


def resident_mebibytes(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def milliseconds(seconds: list[float]) -> dict[str, float]:
    return {
        name: round(quantile(seconds, share) * 1000, 2)
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))
    }


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(
    servers: dict[str, tuple[int, int]], seconds: float, rounds: int, width: int
) -> dict[str, Any]:
    """Requests a second of each of ``servers`` (port, process), in turn, and the ratio of each round.

    Processor time a request is beside it: on a machine that others use too, rates swing and it does not.
    """
    rates: dict[str, list[float]] = {name: [] for name in servers}
    costs: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(rounds):
        for name, (port, pid) in servers.items():
            before = cpu_seconds(pid)
            tally = asyncio.run(flat_out(HOST, port, BEST, seconds, width))
            assert not tally.failed, f"{tally.failed} answers of {name} were not 200"
            rates[name].append(len(tally.seconds) / seconds)
            costs[name].append((cpu_seconds(pid) - before) / len(tally.seconds))
    ratios = [a / b for a, b in zip(rates["best"], rates["constant"], strict=True)]
    return {
        "requests_per_second": {
            name: round(statistics.median(found)) for name, found in rates.items()
        },
        "cpu_us_per_request": {
            name: round(statistics.median(found) * 1e6) for name, found in costs.items()
        },
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


async def one_by_one(port: int, path: str, times: int) -> load_client.Tally:
    tally, connection = load_client.Tally(), Connection(HOST, port)
    for _ in range(times):
        begin = time.perf_counter()
        status, _ = await connection.get(path)
        tally.seconds.append(time.perf_counter() - begin)
        tally.failed += status != 200
    connection.close()
    return tally


def pages(port: int, times: int) -> dict[str, Any]:
    found = {}
    for path in PAGES:
        tally = asyncio.run(one_by_one(port, path, times))
        assert not tally.failed, path
        found[path] = milliseconds(tally.seconds)
    return found


def after_a_row(db: str, port: int, times: int) -> dict[str, float]:
    """The first /best and the first page after a row was stored: what a running sweep costs its readers."""
    from million import templates

    from tuner.results.rows import ResultRow, RunInfo
    from tuner.results.store import Store

    values = {k: v for k, v in templates("h200")[0].items() if k not in ("run_id", "created_at")}
    tally = load_client.Tally()
    with Store.open(db) as store:
        for number in range(times):
            run = RunInfo("h200", {"gpu": "h200", "driver": "0", "note": "FAKE"}, {"version": 0})
            row = ResultRow(**values)
            store.add(store.start_run(run), row)
            time.sleep(0.1)  # past the state that the server holds
            path = BEST[number % len(BEST)]
            tally.seconds += asyncio.run(one_by_one(port, path, 1)).seconds
    return milliseconds(tally.seconds)


def waited(pid: int) -> float:
    """Seconds for which the first thread of a process was ready to run and had no core; NaN where none are counted."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return math.nan


def stolen() -> tuple[float, float]:
    """Processor seconds that the host took from this machine's cores so far, and all that there were."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return fields[7] / os.sysconf("SC_CLK_TCK"), sum(fields) / os.sysconf("SC_CLK_TCK")


def share(part: float, whole: float) -> float | None:
    """``part`` of ``whole``; None where the kernel counts neither."""
    return round(part / whole, 3) if whole and not math.isnan(part) else None


def half_load(port: int, pid: int, rate: float, seconds: float, width: int) -> dict[str, Any]:
    """Latencies at ``rate``, with what the machine and this client add to them.

    ``steady_ms`` are those of the half seconds in which the machine kept its pace; None where it never did.
    """
    before = {"server": waited(pid), "client": waited(os.getpid())}
    used, taken = cpu_seconds(pid), stolen()
    tally = asyncio.run(load_client.at_rate(HOST, port, BEST, seconds, rate, width))
    taken = tuple(now - then for now, then in zip(stolen(), taken, strict=True))
    after = {"server": waited(pid), "client": waited(os.getpid())}
    kept, steady, windows = load_client.steady(tally)
    return {
        "rate": rate,
        "failed": tally.failed,
        "ms": milliseconds(tally.seconds),
        "steady_ms": milliseconds(kept) if kept else None,
        "steady_half_seconds": f"{steady} of {windows}",
        "client_late_ms": milliseconds(tally.late),
        "server_cpu": round((cpu_seconds(pid) - used) / seconds, 2),
        "waited_for_a_core": {name: share(after[name] - before[name], seconds) for name in before},
        "stolen_by_the_host": share(*taken),
        "load_average": round(os.getloadavg()[0], 2),
    }


def soak(db: str, port: int, minutes: float, server: subprocess.Popen[bytes]) -> dict[str, Any]:
    """A mixed load at a steady rate, which leaves the machine usable; resident memory each half minute."""
    paths = [*BEST * 8, *PAGES]
    samples, failed, made = [], 0, 0
    end = time.monotonic() + minutes * 60
    while time.monotonic() < end:
        tally = asyncio.run(load_client.at_rate(HOST, port, paths, 30.0, SOAK_RATE, 16))
        failed, made = failed + tally.failed, made + len(tally.seconds)
        samples.append(resident_mebibytes(server.pid))
        print(f"{made:,} requests, {samples[-1]} MiB", file=sys.stderr)
    settled = samples[len(samples) // 4 :]
    return {
        "minutes": minutes,
        "requests": made,
        "failed": failed,
        "resident_mebibytes": samples,
        "growth": round(settled[-1] / settled[0] - 1, 4),
    }


def about(db: str) -> dict[str, Any]:
    """The machine, the versions and the database, without names that tell where this ran."""
    from tuner.results.store import Store

    with Store.open(db, read_only=True) as store:
        rows, kind = store.count(), store.url.get_backend_name()
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "machine": {"cpu": cpu, "cores": os.cpu_count(), "load_before": os.getloadavg()[0]},
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "database": {"kind": kind, "rows": rows, "data": "FAKE rows of benchmarks/million.py"},
        "workers": 1,
    }


def core_numbers(text: str) -> set[int]:
    """``4,5`` as core numbers, each one that this process may use."""
    cores, allowed = {int(number) for number in text.split(",")}, os.sched_getaffinity(0)
    if not cores <= allowed:
        raise argparse.ArgumentTypeError(
            f"{text} names cores that this process may not use; choose of {listed(allowed)}"
        )
    return cores


def listed(cores: set[int]) -> str:
    return ",".join(map(str, sorted(cores)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--db", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8650)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=8, help="connections")
    for side in ("server", "client"):
        parser.add_argument(
            f"--{side}-cores",
            type=core_numbers,
            default=os.sched_getaffinity(0),
            metavar="N,N",
            help="cores that it keeps to; default: all",
        )
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES")
    options = parser.parse_args()
    found = about(options.db)
    found["machine"]["server_cores"] = listed(options.server_cores)
    found["machine"]["client_cores"] = listed(options.client_cores)
    os.sched_setaffinity(0, options.client_cores)
    begin = time.perf_counter()
    server = serve(options.db, options.port, options.server_cores)
    try:
        found["first_answer_s"] = round(time.perf_counter() - begin, 2)
        begin = time.perf_counter()
        asyncio.run(one_by_one(options.port, BEST[0], 1))
        found["first_best_s"] = round(time.perf_counter() - begin, 2)
        for gpu in GPUS:  # the server takes every GPU's snapshot when it starts
            asyncio.run(one_by_one(options.port, f"/curves?mask=causal&d=128&gpu={gpu}", 1))
        found["all_snapshots_s"] = round(time.perf_counter() - begin, 2)
        if options.soak:
            found["soak"] = soak(options.db, options.port, options.soak, server)
        else:
            found |= measure(options, server)
    finally:
        server.terminate()
        server.wait(30)
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def measure(options: argparse.Namespace, server: subprocess.Popen[bytes]) -> dict[str, Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        other = constant(options.port + 1, Path(folder), options.server_cores)
        try:
            servers = {
                "constant": (options.port + 1, other.pid),
                "best": (options.port, server.pid),
            }
            compared = compare(servers, options.seconds, options.rounds, options.width)
            rates = compared["requests_per_second"]
            half = {
                name: half_load(
                    *servers[name], rates[name] / 2, 3 * options.seconds, 4 * options.width
                )
                for name in servers
            }
        finally:
            other.terminate()
            other.wait(30)
    return {
        "best_against_constant": compared,
        "at_half_load": half,
        "calls_ms": pages(options.port, 20),
        "best_after_a_new_row_ms": after_a_row(options.db, options.port, 12),
        "resident_mebibytes": resident_mebibytes(server.pid),
    }


if __name__ == "__main__":
    main()
