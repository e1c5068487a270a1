"""What choose() costs on a hit, beside a plain dictionary's lookup by the same key: ``python benchmarks/choose.py FILE``."""

from __future__ import annotations

import json
import os
import platform
import sys
import timeit
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dash_kernels import Problem, choose

CALLS = 20_000
REPEATS = 25


def microseconds(call: Callable[[], Any]) -> dict[str, float]:
    """Least and median of REPEATS means of CALLS calls."""
    found = sorted(timeit.repeat(call, number=CALLS, repeat=REPEATS))
    least, middle = found[0], found[len(found) // 2]
    return {"least": round(least / CALLS * 1e6, 3), "median": round(middle / CALLS * 1e6, 3)}


def main() -> None:
    gpu = "h200"
    problem = Problem("causal", 128, 4096, batch=4, heads=16)
    first = choose(problem, gpu)
    again = Problem("causal", 128, 4096, batch=4, heads=16)  # equal, not the same object
    plain = {(problem, gpu, True, False): first}
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    found = {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "machine": {"cpu": cpu, "cores": os.cpu_count(), "load_before": os.getloadavg()[0]},
        "python": platform.python_version(),
        "unit": "microseconds a call",
        "choose, equal problem": microseconds(lambda: choose(again, gpu)),
        "choose, same problem": microseconds(lambda: choose(problem, gpu)),
        "choose, no device named": microseconds(lambda: choose(problem)),
        "dict, equal key": microseconds(lambda: plain[again, gpu, True, False]),
        "dict, same key": microseconds(lambda: plain[problem, gpu, True, False]),
    }
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
