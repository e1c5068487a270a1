"""Other programs' formats and other databases: T4's schema, merges without duplicates, conflicts that are told."""

from __future__ import annotations

import json
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_export import PROBLEM, RUN, measured

from dash_kernels.lookup import LookupTable
from dash_kernels.problem import Config
from tuner import export, importing
from tuner.cli import main
from tuner.results import ResultRow, Store, StoreError
from tuner.t4 import rows_t4

# Kernel Tuner's results schema, T4 1.0.0: what a result must have, and the classes of invalidity.
REQUIRED = {"configuration", "times", "invalidity", "correctness"}
CLASSES = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}


def filled(path: Path, *rows: ResultRow, uuid: str = "one") -> Path:
    with Store.open(path) as store:
        run = store.start_run(replace(RUN, uuid=uuid))
        store.add_many(run, list(rows))
        store.finish_run(run)
    return path


def dash_tune(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dash-tune", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code if isinstance(end.value.code, int) else 0


def failed(status: str, config: Config) -> ResultRow:
    return ResultRow.of(PROBLEM, config, gpu="h200", status=status, error="said so")


def test_t4_holds_what_its_schema_asks(tmp_path: Path) -> None:
    statuses = ("timeout", "compile", "runtime", "correctness", "nondeterministic", "constraints")
    rows = [failed(name, Config(num_stages=3 + i)) for i, name in enumerate(statuses)]
    with Store.open(filled(tmp_path / "a.sqlite", measured(Config(), 549.0), *rows)) as store:
        document = json.loads(rows_t4(store.results(), store.runs()))
    assert document["schema_version"] == "1.0.0"
    for result in document["results"]:
        assert set(result) >= REQUIRED
        assert result["invalidity"] in CLASSES
        assert isinstance(result["correctness"], float)
        assert isinstance(result["times"]["runtimes"], list)
        for entry in result["measurements"]:
            assert isinstance(entry["name"], str)
            assert isinstance(entry["unit"], str)
            assert isinstance(entry["value"], (int, float, str, list))
            assert not isinstance(entry["value"], bool)
    good = document["results"][0]
    assert (good["invalidity"], good["correctness"]) == ("correct", 1.0)
    assert good["times"]["runtimes"] == [1.0, 1.5]
    assert good["configuration"]["schedule"] == "shortest_first"
    assert good["configuration"]["seq_len"] == 4096
    time = next(entry for entry in good["measurements"] if entry["name"] == good["objectives"][0])
    assert (time["unit"], time["value"]) == ("ms", pytest.approx(PROBLEM.flops() / 549.0 * 1e-9))
    assert [r["invalidity"] for r in document["results"][1:]] == [
        "correctness" if name == "nondeterministic" else name for name in statuses
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": "2.0.0"}, "'2.0.0'; this release reads 1.0.0"),
        ({"runs": []}, "another program wrote it"),
    ],
)
def test_t4_of_others_is_refused_by_name(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with Store.open(filled(tmp_path / "a.sqlite", measured(Config(), 549.0))) as store:
        document = json.loads(rows_t4(store.results(), store.runs()))
        path = tmp_path / "theirs.json"
        path.write_text(json.dumps(document | change))
        with pytest.raises(StoreError, match=said):
            importing.import_file(store, path)


def test_two_databases_merge_without_duplicates_and_conflicts_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared, mine = measured(Config(), 549.0), measured(Config(num_stages=3), 500.0)
    theirs, other = measured(Config(num_stages=3), 480.0), measured(Config(dq_stages=3), 470.0)
    here = filled(tmp_path / "here.sqlite", shared, mine)
    there = filled(tmp_path / "there.sqlite", shared, theirs, other)
    filled(there, measured(Config(), 540.0), uuid="two")
    assert dash_tune(monkeypatch, "import", str(there), "--db", str(here)) == 3
    out = capsys.readouterr().out
    assert "2 rows added" in out
    assert "1 conflicts: what was there stays" in out
    assert "3 stages: tflops is 500.0 here, 480.0 there" in out
    with Store.open(here) as store:
        assert store.count() == 4
        kept = [row for row in store.results() if row.config["num_stages"] == 3]
        assert [row.tflops for row in kept] == [500.0]
    again = dash_tune(monkeypatch, "import", str(there), "--db", str(here))
    assert (again, "0 rows added" in capsys.readouterr().out) == (3, True)
    with Store.open(there) as store:
        assert store.count() == 4, "the other database is only read"


def test_a_database_with_a_value_that_no_reader_could_use_is_refused(tmp_path: Path) -> None:
    here = filled(tmp_path / "here.sqlite", measured(Config(), 549.0))
    there = filled(tmp_path / "there.sqlite", measured(Config(num_stages=3), 500.0), uuid="two")
    with sqlite3.connect(there) as raw:
        raw.execute("UPDATE dash_results SET registers = 'many'")
    with Store.open(here) as store:
        with pytest.raises(importing.NotAnExport, match="run two: registers is 'many'"):
            importing.import_file(store, there)
        assert store.count() == 1


def test_releases_come_along_and_a_taken_name_is_a_conflict(tmp_path: Path) -> None:
    here = filled(tmp_path / "here.sqlite", measured(Config(), 549.0))
    there = filled(tmp_path / "there.sqlite", measured(Config(num_stages=3), 500.0), uuid="two")
    with Store.open(there) as store:
        export.freeze(store, "h200", name="first")
    with Store.open(here) as store:
        assert importing.import_file(store, there).releases == 1
        assert importing.import_file(store, there) == importing.Imported(0, 2)
        (release,) = store.releases("h200")
        assert release.name == "first"
    with Store.open(there) as store:
        store.add(1, measured(Config(), 560.0))
    elsewhere = filled(tmp_path / "elsewhere.sqlite", measured(Config(), 400.0), uuid="three")
    with Store.open(elsewhere) as store:
        export.freeze(store, "h200", name="first")
        done = importing.import_file(store, there)
        assert done.releases == 0
        assert "release first of h200 has digest" in done.conflicts[0]


def test_a_lookup_table_becomes_a_release_and_keeps_its_bytes(tmp_path: Path) -> None:
    with Store.open(filled(tmp_path / "a.sqlite", measured(Config(), 549.0))) as store:
        text = export.table_json(export.lookup_table(store, "h200", "tuned-elsewhere"))
    path = tmp_path / "table.json"
    path.write_text(text)
    with Store.open("sqlite://") as store:
        assert importing.import_file(store, path) == importing.Imported(releases=1)
        assert importing.import_file(store, path) == importing.Imported(known=1)
        release = store.get_release(gpu="h200")
        assert release is not None
        assert release.table == text
        assert release.digest == LookupTable.from_json(text).digest
    path.write_text(text.replace("549", "650"))
    with Store.open("sqlite://") as store, pytest.raises(StoreError, match="edited or damaged"):
        importing.import_file(store, path)


def test_a_foreign_file_is_one_line_and_exit_1_and_an_empty_export_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow
    import pyarrow.parquet

    db = str(tmp_path / "here.sqlite")
    foreign = tmp_path / "foreign.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"x": pyarrow.array([], pyarrow.int64())}), foreign)
    (tmp_path / "empty.csv").touch()
    (tmp_path / "table.json").write_text('{"cells": []}')
    for name in ("foreign.parquet", "empty.csv", "table.json"):
        assert dash_tune(monkeypatch, "import", str(tmp_path / name), "--db", db) == 1
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert name in err
    for name, content in (
        ("none.csv", export.rows_csv([], [RUN]).encode()),
        ("none.parquet", export.rows_parquet([], [RUN])),
        ("none.json", json.dumps({"format": 1, "kind": "dash-results", "runs": []}).encode()),
    ):
        (tmp_path / name).write_bytes(content)
        assert dash_tune(monkeypatch, "import", str(tmp_path / name), "--db", db) == 0
        assert capsys.readouterr().out.startswith("0 rows added")


@pytest.mark.parametrize(
    ("kind", "lacks"),
    [
        ("empty", "holds no table of dash"),
        ("another program's", "holds no table of dash"),
        ("notes", "is not a usable SQLite file (file is not a database)"),
    ],
)
def test_a_database_that_is_none_of_dash_is_one_line_and_exit_1(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    lacks: str,
) -> None:
    theirs, here = tmp_path / "theirs.sqlite", str(tmp_path / "here.sqlite")
    theirs.write_text("notes, and long enough to be read as a header" * 20 * (kind == "notes"))
    if kind == "another program's":
        with sqlite3.connect(theirs) as raw:
            raw.execute("CREATE TABLE studies (id INTEGER)")
    before = theirs.read_bytes()
    assert dash_tune(monkeypatch, "import", str(theirs), "--db", here) == 1
    out, err = capsys.readouterr()
    assert (out, theirs.read_bytes()) == ("", before)
    remedy = "name one that dash-tune has written, or a file that dash-tune export wrote"
    assert err == f"dash-tune: {theirs} is not a database of dash: it {lacks}; {remedy}\n"
