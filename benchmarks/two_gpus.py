"""One GPU against all GPUs of this host on one sweep: configs a second, their ratio, and whether the winners agree.

    python benchmarks/two_gpus.py --mask causal --head-dim 128 --seq-len 1024,4096

Other options go to ``dash-tune``. Each side starts from an empty database and an empty kernel cache. The pace counts from
the first row to the last, so neither side's start-up is in it; the final rounds are not either.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tuner.nvml import visible_gpus
from tuner.results import ResultRow, Store
from tuner.winners import Cell, is_final


def sweep(folder: Path, uuids: list[str], options: list[str]) -> tuple[list[ResultRow], list[Cell]]:
    """Rows of the first pass and winners of a sweep with these GPUs."""
    folder.mkdir()
    db, cache = folder / "rows.db", folder / "triton"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(uuids), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tuner.cli", "--db", str(db), *options]
    code = subprocess.run(command, env=env, stdout=sys.stderr).returncode
    if code not in (0, 3):
        sys.exit(f"the sweep ended with exit code {code}")
    with Store.open(db) as store:
        (gpu,) = store.gpus()
        rows = [row for row in store.results(limit=None) if not is_final(row)]
        return rows, store.winners(gpu)


def pace(rows: list[ResultRow]) -> float:
    """Configs a second, from the first row to the last."""
    times = [row.created_at for row in rows if row.created_at is not None]
    return (len(times) - 1) / (max(times) - min(times)).total_seconds()


def disagreements(one: list[Cell], many: list[Cell]) -> list[dict[str, Any]]:
    """Cells whose served winners differ: each side's config and TFLOPS."""
    others = {(cell.mask, cell.head_dim, cell.seq_len): cell for cell in many}
    found = []
    for cell in one:
        other = others[cell.mask, cell.head_dim, cell.seq_len]
        pair = [side.served.row if side.served else None for side in (cell, other)]
        if len({row.config_hash if row else None for row in pair}) > 1:
            shape = f"{cell.mask} d={cell.head_dim} seq_len={cell.seq_len}"
            sides = [(row.to_config().label(), row.tflops) if row else None for row in pair]
            found.append({"shape": shape, "one": sides[0], "all": sides[1]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    _, options = parser.parse_known_args()
    uuids = [gpu.uuid for gpu in visible_gpus()]
    if len(uuids) < 2:
        sys.exit(f"this host shows {len(uuids)} GPUs; two are needed")
    with tempfile.TemporaryDirectory() as folder:
        one_rows, one = sweep(Path(folder) / "one", uuids[:1], options)
        all_rows, many = sweep(Path(folder) / "all", uuids, options)
    paces = pace(one_rows), pace(all_rows)
    answer = {
        "gpus": len(uuids),
        "configs": [len(one_rows), len(all_rows)],
        "configs_a_second": [round(each, 3) for each in paces],
        "ratio": round(paces[1] / paces[0], 3),
        "cells": len(one),
        "different_winners": disagreements(one, many),
    }
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
