"""What leaves the database comes back whole: lookup tables, releases, CSV, Parquet, dumps, shipped rows."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from dash_kernels.lookup import TABLES, LookupTable, digest_of, shipped_gpus
from dash_kernels.problem import Config, Problem
from tuner import export, importing
from tuner.results import ResultRow, RunInfo, Store, StoreError
from tuner.results.queries import Question, answer
from tuner.results.rows import ResultFilter
from tuner.t4 import rows_t4

RUN = RunInfo(
    "h200",
    {"gpu": "h200", "driver": "580", "triton": "3.6.0"},
    {"zeroing": True},
    "dash-tune --gpu h200 --db /home/someone/results.db",
    started=datetime(2026, 1, 1, tzinfo=timezone.utc),
    finished=datetime(2026, 1, 2, tzinfo=timezone.utc),
)
PROBLEM = Problem("causal", 128, 4096, batch=4, heads=16, heads_kv=4)
SUFFIXES = (".csv", ".parquet", ".json", ".json.gz", ".t4.json")


def measured(config: Config, tflops: float, problem: Problem = PROBLEM) -> ResultRow:
    return ResultRow.of(
        problem, config, gpu="h200", tflops=tflops, ms=problem.flops() / tflops * 1e-9, min_resident=1,
        samples=[1.0, 1.5], telemetry={"sm_clock": [1980]}, bits_equal=True, numerics_key="k" * 16,
    )  # fmt: skip


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.open("sqlite://") as opened:
        run_id = opened.start_run(RUN)
        opened.add(run_id, measured(Config(), 549.0))
        opened.add(run_id, measured(Config(schedule="ascending", launch_order="ascending"), 273.0))
        failed = ResultRow.of(
            replace(PROBLEM, mask="full"),
            Config(),
            gpu="h200",
            status="compile",
            error="=cmd() in /opt/x/ptxas",
        )
        opened.add(run_id, failed)
        opened.finish_run(run_id)
        yield opened


def write(store: Store, path: Path) -> Path:
    rows, runs = store.results(limit=None), store.runs()
    if path.suffix == ".csv":
        path.write_bytes(export.rows_csv(rows, runs).encode())
    elif path.suffix == ".parquet":
        path.write_bytes(export.rows_parquet(rows, runs))
    elif path.name.endswith(".t4.json"):
        path.write_text(rows_t4(rows, runs))
    else:
        text = json.dumps(export.dump(store), allow_nan=False).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def content(store: Store) -> list[ResultRow]:
    return [replace(row, id=None, run_id=None) for row in store.results(limit=None)]


# -- lookup tables --------------------------------------------------------------------------------------------------


def test_the_dispatcher_reads_the_table_of_winners(store: Store) -> None:
    table = export.lookup_table(store, "h200", "h200-test")
    loaded = LookupTable.from_json(export.table_json(table))
    assert (loaded.gpu, loaded.release, loaded.digest) == ("h200", "h200-test", table["digest"])
    assert loaded.environment == RUN.environment
    assert loaded.measurement_policy == RUN.measurement_policy
    cell, matched = loaded.find(PROBLEM) or pytest.fail("no cell")
    assert matched == "exact"
    assert cell.served is not None
    assert cell.served.config == Config()
    assert cell.served.speedup_vs_baseline == pytest.approx(549 / 273)
    assert cell.baselines["ascending"].tflops == 273.0
    assert table == export.lookup_table(store, "h200", "h200-test")


def test_a_gpu_without_winners_has_no_table(store: Store) -> None:
    with pytest.raises(
        StoreError, match="no measured winner for h800 .*; run dash-tune --gpu h800 first"
    ):
        export.lookup_table(store, "h800")
    with pytest.raises(StoreError, match="no measured winner"):
        export.freeze(store, "h800")
    assert store.releases() == []


def test_cells_of_an_older_environment_are_kept_and_told(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    newer = replace(RUN, environment={"driver": "581"})
    store.add(store.start_run(newer), measured(Config(), 560.0, replace(PROBLEM, seq_len=8192)))
    table = export.lookup_table(store, "h200")
    assert [cell["seq_len"] for cell in table["cells"]] == [4096, 8192]
    assert table["environment"] == {"driver": "581"}
    assert "1 of 2 cells of h200 come from an older environment" in caplog.text


def test_a_release_is_numbered_named_and_frozen(store: Store) -> None:
    first = export.freeze(store, "h200", "first notes")
    second = export.freeze(store, "h200")
    assert (first.id, second.id) == (1, 2)
    assert second.name == f"{first.name}.2"
    assert first.name.startswith("h200-20")
    kept = store.get_release(1)
    assert kept is not None
    assert (kept.notes, kept.digest) == ("first notes", LookupTable.from_json(kept.table).digest)
    assert kept.overall[0]["config"] == Config().to_dict()
    with pytest.raises(StoreError, match="immutable"):
        export.freeze(store, "h200", name=first.name)


@pytest.mark.parametrize(
    ("there", "named"),
    [
        ((), "h200-2026-11-30"),
        (("h200-2026-11-29-2", "mine"), "h200-2026-11-30"),
        (("h200-2026-11-30",), "h200-2026-11-30.2"),
        (("h200-2026-11-30-2",), "h200-2026-11-30.3"),
        (("h200-2026-11-30.2", "h200-2026-11-30.10"), "h200-2026-11-30.11"),
        (("h200-2026-12-05.4", "h200-2026-11-30"), "h200-2026-12-05.5"),
        (("h200-2026-11-30.7-imported",), "h200-2026-11-30.8"),
        (("h200x2-2027-01-01",), "h200-2026-11-30"),
    ],
)
def test_a_release_without_a_name_is_named_after_all_there_are(
    store: Store, monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], named: str
) -> None:
    days = [datetime(2027, 1, 1, tzinfo=timezone.utc)]  # and then the clock is set back
    monkeypatch.setattr(export, "utc_now", lambda: days[0])
    for name in there:
        export.freeze(store, "h200", name=name)
    days[0] = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)
    assert export.freeze(store, "h200").name == named


@pytest.mark.parametrize("name", ["h200-2099-01-01.1", "2099-01-01.1", "mine-2026-12-02"])
def test_a_name_of_a_day_after_tomorrow_is_refused_as_later_names_would_follow_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    now = datetime(2026, 11, 30, 23, tzinfo=timezone.utc)
    monkeypatch.setattr(export, "utc_now", lambda: now)
    with pytest.raises(StoreError, match=r"20.* is after tomorrow .*day up to 2026-12-01, or none"):
        export.freeze(store, "h200", name=name)
    export.freeze(store, "h200", name="h200-2026-12-01")
    with Store.open("sqlite://") as other:
        table = LookupTable.from_dict(export.lookup_table(store, "h200", name))
        assert importing.import_table(other, table, "table.json").releases == 1, "what exists stays"


# -- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_and_runs_survive_the_way_out_and_in(
    store: Store, tmp_path: Path, suffix: str
) -> None:
    options = replace(PROBLEM, window_left=1023, head_dim_v=64, softcap=True, varlen=True)
    store.add(store.runs()[0].id or 0, measured(Config(), 400.0, options))
    path = write(store, tmp_path / f"rows{suffix}")
    with Store.open("sqlite://") as other:
        assert importing.import_file(other, path) == importing.Imported(4, 0)
        assert importing.import_file(other, path) == importing.Imported(0, 4)
        assert content(other) == content(store)
        assert [replace(run, id=None) for run in other.runs()] == [
            replace(run, id=None) for run in store.runs()
        ]
        assert export.lookup_table(other, "h200") == export.lookup_table(store, "h200")


def test_databases_that_share_a_run_merge_without_duplicates(store: Store, tmp_path: Path) -> None:
    path = write(store, tmp_path / "a.parquet")
    with Store.open("sqlite://") as other:
        other.start_run(replace(RUN, uuid="another"))
        importing.import_file(other, path)
        shared = next(run.id for run in other.runs() if run.uuid != "another")
        other.add(shared or 0, measured(Config(num_stages=3), 500.0))
        assert importing.import_file(
            store, write(other, tmp_path / "b.json")
        ) == importing.Imported(1, 3)
        assert store.count() == 4


def test_a_spreadsheet_runs_no_cell_as_a_formula(store: Store) -> None:
    run_id = store.start_run(replace(RUN, command="@SUM(1)"))
    for number, start in enumerate(("=", "+", "-", "@", "\t", "\r")):
        problem = Problem("full", 64, 64 * (number + 1))
        store.add(
            run_id,
            ResultRow.of(problem, Config(), gpu="h200", status="runtime", error=f"{start}1+1"),
        )
    text = export.rows_csv(store.results(), store.runs())
    cells = [cell for line in csv.reader(io.StringIO(text, newline="")) for cell in line]
    assert sum(cell.startswith("'") for cell in cells) == 1 + 6 + 6
    words = [cell for cell in cells if not re.fullmatch(r"-?\d+", cell)]
    assert not [cell for cell in words if cell.startswith(export.FORMULA_STARTS)]


def test_negative_numbers_stay_numbers() -> None:
    row = replace(measured(Config(), 500.0), rel_error=-0.5)
    (record,) = csv.DictReader(io.StringIO(export.rows_csv([row])))
    assert record["rel_error"] == "-0.5"


def test_no_rows_still_have_their_header() -> None:
    assert export.rows_csv([]).startswith("gpu,mask,head_dim,")
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(io.BytesIO(export.rows_parquet([])))
    assert table.column_names == list(export.ROW_COLUMNS)
    assert str(table.schema.field("created_at").type) == "timestamp[us, tz=UTC]"


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("rows", "min_resident", "x"),
        ("rows", "numerics_key", 5),
        ("rows", "bits_equal", "no"),
        ("rows", "telemetry", [1]),
        ("rows", "min_resident", 2**63),
        ("run", "command", None),
        ("run", "measurement_policy", None),
        ("config", "schedule", None),
    ],
)
def test_a_value_that_no_reader_could_use_is_refused(
    store: Store, tmp_path: Path, where: str, name: str, value: Any
) -> None:
    path = tmp_path / "dump.json.gz"
    export.dump_shipped(store, "h200", path)
    data = json.loads(gzip.decompress(path.read_bytes()))
    run = data["runs"][0]
    if where == "rows":
        run["rows"][0][run["columns"].index(name)] = value
    else:
        (run if where == "run" else run["configs"][0])[name] = value
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    with Store.open("sqlite://") as other:
        with pytest.raises(importing.NotAnExport, match=f"{name} is {re.escape(repr(value))}"):
            importing.import_file(other, path)
        assert (other.count(), other.runs()) == (0, [])


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.csv", "gpu,mask\nh200,full\n", "a.csv is .* it lacks the columns head_dim, seq_len, "),
        ("a.csv", "gpu,mask\n", "it lacks the columns head_dim, seq_len, dtype, "),
        ("a.csv", "", "a.csv is not an export of dash: it lacks the columns mask, head_dim, "),
        ("a.csv", "\n\n", "it lacks the columns mask, head_dim, "),
        ("a.json", "[]", 'no "kind": "dash-results"'),
        (
            "a.json",
            '{"kind": "dash-results", "format": 9, "runs": []}',
            "format 9; this release reads 1",
        ),
        ("a.json", '{"kind": "dash-results", "format": 1}', "it lacks 'runs'"),
        (
            "a.json",
            '{"kind": "dash-results", "format": 1, "runs": [1]}',
            "is not an export of dash",
        ),
        ("a.json", "", "is not an export of dash"),
        ("a.json", "{", "is not an export of dash"),
        ("a.json", "[" * 100_000, "is not an export of dash"),
        ("a.json.gz", "plain", "is not an export of dash"),
        ("a.parquet", "plain", "is not an export of dash"),
        ("a.parquet", "", "is not an export of dash"),
        ("a.xlsx", "", "the ending tells the format"),
    ],
)
def test_a_file_that_is_no_export_is_refused_and_nothing_written(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with Store.open("sqlite://") as other:
        with pytest.raises(StoreError, match=problem):
            importing.import_file(other, path)
        assert (other.count(), other.runs()) == (0, [])
    with (
        Store.open("sqlite://") as other,
        pytest.raises(StoreError, match="cannot be read: No such file"),
    ):
        importing.import_file(other, tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("old", "new"), [("causal", "diagonal"), ("measured", "guessed"), ("549.0", "fast")]
)
def test_one_wrong_value_refuses_the_whole_file(
    store: Store, tmp_path: Path, old: str, new: str
) -> None:
    path = write(store, tmp_path / "rows.csv")
    path.write_text(path.read_text().replace(old, new))
    with Store.open("sqlite://") as other:
        with pytest.raises(StoreError, match=new):
            importing.import_file(other, path)
        assert other.runs() == []


# -- shipped rows ---------------------------------------------------------------------------------------------------


def test_shipped_rows_load_once_and_hold_no_folder_of_the_machine(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "h200.json.gz"
    assert export.dump_shipped(store, "h200", path) == 3
    assert export.dump_shipped(store, "h200", tmp_path / "again.json.gz") == 3
    assert path.read_bytes() == (tmp_path / "again.json.gz").read_bytes()
    monkeypatch.setattr(importing, "shipped_files", lambda: [path])
    with Store.open("sqlite://") as other:
        assert other.load_shipped() == 3
        assert other.load_shipped() == 0
        assert other.runs()[0].command == "dash-tune --gpu h200 --db results.db"
        assert other.runs()[0].environment == RUN.environment
        assert other.results(ResultFilter(status="compile"))[0].error == "=cmd() in ptxas"
        assert export.lookup_table(other, "h200") == export.lookup_table(store, "h200")


def test_the_rows_in_the_package_load_and_give_the_tables_in_the_package() -> None:
    with Store.open("sqlite://") as fresh:
        added = fresh.load_shipped()
        assert added == fresh.count()
        assert fresh.load_shipped() == 0
        assert [f.name for f in importing.shipped_files()] == [
            f"{g}.json.gz" for g in shipped_gpus()
        ]
        for gpu in shipped_gpus():
            (release,) = fresh.releases(gpu)
            text = (TABLES / f"{gpu}.json").read_text(encoding="utf-8")
            assert release.table == text
            made = export.lookup_table(fresh, gpu, release.name)
            assert export.table_json(made) == text, "export the table again from the shipped rows"
            question = Question(gpu, "causal", 128)
            released, draft = answer(question, release), answer(question, None, fresh.winners(gpu))
            assert (released["release"], draft["release"]) == (release.name, None)
            assert released["best"] == draft["best"] | {"release": release.name}


def test_rows_shipped_with_the_package_do_not_come_before_a_newer_sweep_of_this_machine(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export.dump_shipped(store, "h200", tmp_path / "h200.json.gz")
    monkeypatch.setattr(importing, "shipped_files", lambda: [tmp_path / "h200.json.gz"])
    monkeypatch.setattr(importing, "TABLES", tmp_path)
    (tmp_path / "h200.json").write_text(
        export.table_json(export.lookup_table(store, "h200", "first"))
    )
    with Store.open("sqlite://") as own:
        run = own.start_run(replace(RUN, uuid="own", environment={"driver": "999"}))
        row = store.results(ResultFilter(status="ok"))[0]
        slow = replace(row, id=None, run_id=None, run_uuid=None, created_at=None, tflops=1.0)
        own.add(run, slow)
        frozen = export.freeze(own, "h200", name="own")
        assert own.load_shipped() == 3
        (cell,) = own.winners("h200", ResultFilter(seq_len=row.seq_len))
        assert cell.best.row.tflops == 1.0, (
            "ids tell when rows were loaded, not when they were made"
        )
        assert {release.name for release in own.releases()} == {"own", "first"}
        assert own.get_release(gpu="h200") == frozen
        body = json.loads((tmp_path / "h200.json").read_text()) | {
            "created": "2099-01-01T00:00:00Z"
        }
        later = LookupTable.from_dict(body | {"digest": digest_of(body)})
        (tmp_path / "h200.json").write_text(later.to_json())
        assert (own.load_shipped(), own.load_shipped()) == (0, 0)
        newest = own.get_release(gpu="h200")
        assert newest is not None
        assert newest.digest == later.digest, "a later package's table is a release of its own"
        assert newest.name.startswith("first.")
        assert len(own.releases()) == 3


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("in /a/b-c/d.py line 3", "in d.py line 3"),
        ("--db=/tmp/x.db", "--db=x.db"),
        ("ratio 1/2/3, https://host/path/x", "ratio 1/2/3, https://host/path/x"),
    ],
)
def test_without_folders(text: str, cut: str) -> None:
    assert export.without_folders(text) == cut
