"""The lookup table's JSON: exact round trip, a digest that catches edits, errors that say where."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dash_kernels.lookup import Cell, Entry, LookupTable, TableError, digest_of
from dash_kernels.problem import Config, Problem

MONOTONE = Config()
RESIDENT = Config(schedule="shift", launch_order="ascending")


def cell(
    seq_len: int, served: Config | None = MONOTONE, min_resident: int | None = 1, **problem: Any
) -> Cell:
    fields = {"mask": "causal", "head_dim": 128, "batch": 4, "heads": 16} | problem
    entry = Entry(served, tflops=500.0, ms=1.0, min_resident=min_resident) if served else None
    best = Entry(
        RESIDENT,
        tflops=510.0,
        ms=0.98,
        min_resident=32,
        confidence={"lead": 0.02, "low": 0.01, "high": 0.03},
    )
    return Cell(
        Problem(seq_len=seq_len, **fields),
        "backward",
        entry,
        best,
        {"ascending": Entry(MONOTONE, 300.0, 1.6)},
    )


def table(*cells: Cell, gpu: str = "h200", release: str = "h200-test") -> LookupTable:
    return LookupTable(
        gpu, release, "2026-01-01T00:00:00Z", cells, {"torch": "2.11.0"}, {"runs": 30}
    )


def test_round_trip_keeps_everything_and_the_digest() -> None:
    first = table(cell(1024), cell(4096), cell(4096, seq_len_kv=8192))
    again = LookupTable.from_json(first.to_json())
    assert again == first
    assert again.digest == first.digest == digest_of(first.to_dict())


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    data = table(cell(1024)).to_dict()
    data["cells"][0]["served"]["tflops"] = 900.0
    path = tmp_path / "t.json"
    path.write_text(json.dumps(data))
    with pytest.raises(TableError, match=r"t\.json: digest says .* was edited or damaged"):
        LookupTable.load(path)


def _without(name: str) -> Any:
    def change(data: dict[str, Any]) -> None:
        del data[name]

    return change


def _set(path: list[Any], value: Any) -> Any:
    def change(data: dict[str, Any]) -> None:
        place: Any = data
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set(["format"], 3), "format is 3; this version reads formats 1 and 2"),
        (_without("release"), "release is missing"),
        (_set(["cells"], {}), "cells is {}; expected list"),
        (_set(["cells", 0, "mask"], "casual"), r"cells\[0\]: mask is 'casual'"),
        (_set(["cells", 0, "head_group"], 3), r"cells\[0\]: head_group 3 does not divide heads 16"),
        (
            _set(["cells", 0, "served", "config", "block_x"], 1),
            r"cells\[0\].served.config: unknown Config field",
        ),
        (_set(["cells", 0, "served", "speed"], 1), r"cells\[0\].served: unknown field 'speed'"),
        (
            _set(["cells", 0, "served", "tflops"], "fast"),
            "tflops is 'fast'; expected float or null",
        ),
        (
            _set(["cells", 0, "best", "min_resident"], True),
            "min_resident is True; expected int or null",
        ),
    ],
)
def test_what_is_wrong_is_named(change: Any, says: str) -> None:
    data = copy.deepcopy(table(cell(1024)).to_dict())
    change(data)
    with pytest.raises(TableError, match=says):
        LookupTable.from_dict(data)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": NaN}'])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(TableError):
        LookupTable.from_json(text)


def test_not_a_number_is_never_written() -> None:
    bad = Cell(Problem("full", 64, 512), "backward", Entry(MONOTONE, tflops=math.nan), None)
    with pytest.raises(TableError, match="no NaN"):
        table(bad).to_json()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"absent\.json: No such file"):
        LookupTable.load(tmp_path / "absent.json")


def test_find_is_exact_then_nearest_in_log_length_ties_to_the_shorter() -> None:
    t = table(cell(1024), cell(4096), cell(16384))
    found = [t.find(Problem("causal", 128, s)) for s in (4096, 512, 2000, 2048, 2100, 65536)]
    assert [(f[0].problem.seq_len, f[1]) for f in found if f] == [
        (4096, "exact"), (1024, "nearest"), (1024, "nearest"), (1024, "nearest"), (4096, "nearest"), (16384, "nearest"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        Problem("full", 128, 4096),
        Problem("causal", 64, 4096),
        Problem("causal", 128, 4096, dtype="float16"),
        Problem("causal", 128, 4096, heads=8, heads_kv=2),
    ],
)
def test_find_never_crosses_mask_head_dim_dtype_or_head_group(other: Problem) -> None:
    assert table(cell(4096)).find(other) is None


def test_only_monotone_deterministic_entries_serve() -> None:
    problem = Problem("causal", 128, 4096)
    assert table(cell(4096, RESIDENT, min_resident=32)).find(problem) is None
    assert table(cell(4096, MONOTONE.with_(policy="unordered"))).find(problem) is None
    assert table(cell(4096, None)).find(problem) is None
    assert table(cell(4096, MONOTONE, min_resident=None)).find(problem) is None
    assert table(cell(4096, MONOTONE.with_(policy="two_pass"))).find(problem) is not None


def test_batch_and_heads_count_only_when_asked() -> None:
    t = table(cell(4096, MONOTONE, batch=1), cell(4096, MONOTONE.with_(num_stages=1), batch=8))
    problem = Problem("causal", 128, 4096, batch=1, heads=16)
    plain, asked = t.find(problem), t.find(problem, match_batch=True)
    assert plain is not None
    assert asked is not None
    assert (plain[0].problem.batch, plain[1]) == (8, "exact")
    assert (asked[0].problem.batch, asked[1]) == (1, "exact")
    missed = t.find(Problem("causal", 128, 4096, batch=2, heads=16), match_batch=True)
    assert missed is not None
    assert missed[1] == "nearest"
