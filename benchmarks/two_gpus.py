"""One GPU against all GPUs of this host on one sweep: configs a second, their ratio, and how far the winners agree.

    python benchmarks/two_gpus.py --output benchmarks/results/two-gpus-GPU-DATE.json
    python benchmarks/two_gpus.py --one ONE.sqlite --all ALL.sqlite --output FILE

The first sweeps, each side from an empty database and an empty kernel cache (other options go to ``dash-tune``; a few dozen
configs end before the GPUs are busy); the second compares two sweeps that were stored. The pace counts from the first row
to the last, so neither start-up nor final rounds are in it. How far the winners agree is said for several bounds of a tie.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tuner import winners
from tuner.nvml import visible_gpus
from tuner.results import ResultRow, Store

BOUNDS = (0.005, 0.0075, winners.NOISE, 0.0125, 0.02)
Candidates = list[tuple[ResultRow, str]]


def sweep(folder: Path, uuids: list[str], options: list[str]) -> Path:
    """The database of a sweep with these GPUs."""
    folder.mkdir()
    db, cache = folder / "rows.sqlite", folder / "triton"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(uuids), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tuner.cli", "--db", str(db), *options]
    code = subprocess.run(command, env=env, stdout=sys.stderr).returncode
    if code not in (0, 3):
        sys.exit(f"the sweep ended with exit code {code}")
    return db


def read(db: Path) -> tuple[Candidates, dict[str, Any]]:
    """The rows of the one sweep that a database holds, and where it ran."""
    with Store.open(str(db), read_only=True) as store:
        (gpu,) = store.gpus()
        found = store.candidates(gpu)
        if len({name for _, name in found}) != 1:
            sys.exit(f"{db} holds no sweep or several; give a database of one")
        return found, dict(store.runs(gpu)[0].environment)


def pace(rows: Candidates) -> dict[str, Any]:
    times = [row.created_at for row, _ in rows if not winners.is_final(row) and row.created_at]
    rate = (len(times) - 1) / (max(times) - min(times)).total_seconds()
    return {
        "configs": len(times),
        "first_row": min(times).isoformat(),
        "configs_a_second": round(rate, 3),
    }


def served(rows: Candidates) -> tuple[dict[str, ResultRow], float]:
    """What is served for each shape, and its speed over the fastest that may be served, in the geometric mean."""
    chosen, leads = {}, []
    for cell in winners.winners(rows):
        if cell.served is None:
            continue
        row = cell.served.row
        chosen[f"{cell.mask} d={cell.head_dim} seq_len={cell.seq_len}"] = row
        rivals = [
            other.tflops
            for other, _ in rows
            if (other.mask, other.head_dim, other.seq_len, other.policy, other.min_resident)
            == (row.mask, row.head_dim, row.seq_len, "ordered", 1)
            and winners.is_final(other)
            and other.tflops
        ]
        leads.append(math.log((row.tflops or math.nan) / max(rivals, default=math.nan)))
    return chosen, round(math.exp(sum(leads) / len(leads)), 4)


def agreement(one: Candidates, many: Candidates, bound: float) -> dict[str, Any]:
    """Of how many shapes both sweeps serve one config, with ties up to ``bound``, and where they do not."""
    winners.NOISE = bound
    (a, share_a), (b, share_b) = served(one), served(many)
    different = [
        {"shape": shape}
        | {
            side: [row.to_config().label(), round(row.tflops or 0.0, 1)]
            for side, row in (("one", a[shape]), ("all", b[shape]))
        }
        for shape in sorted(a.keys() & b.keys())
        if a[shape].config_hash != b[shape].config_hash
    ]
    shapes = len(a.keys() & b.keys())
    return {
        "ties_up_to": bound,
        "shapes": shapes,
        "same_served": shapes - len(different),
        "served_over_fastest": [share_a, share_b],
        "different": different,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", type=Path, help="database of the sweep by one GPU")
    parser.add_argument("--all", type=Path, help="database of the sweep by several")
    parser.add_argument("--output", type=Path, required=True)
    given, options = parser.parse_known_args()
    if (given.one is None) != (given.all is None):
        parser.error("--one and --all name the two sweeps to compare: give both, or neither")
    with tempfile.TemporaryDirectory() as folder:
        one, many = given.one, given.all
        if one is None:
            uuids = [gpu.uuid for gpu in visible_gpus()]
            if len(uuids) < 2:
                sys.exit(f"this host shows {len(uuids)} GPUs; two are needed")
            one = sweep(Path(folder) / "one", uuids[:1], options)
            many = sweep(Path(folder) / "all", uuids, options)
        (one_rows, environment), (all_rows, _) = read(one), read(many)
    paces = {"one": pace(one_rows), "all": pace(all_rows)}
    answer = {
        "what": __doc__.splitlines()[0],
        "environment": environment,
        **paces,
        "ratio": round(paces["all"]["configs_a_second"] / paces["one"]["configs_a_second"], 3),
        "agreement": [agreement(one_rows, all_rows, bound) for bound in BOUNDS],
    }
    given.output.write_text(json.dumps(answer, indent=1) + "\n")
    print(f"ratio {answer['ratio']}; wrote {given.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
