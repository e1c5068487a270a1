"""The command line: bad usage is one clear line and exit code 2, and nothing is written for it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import gone_within

import tuner.command
import tuner.doctor
import tuner.results.database
from dash_kernels import __version__
from dash_kernels.problem import Config, Problem
from tuner.cli import main
from tuner.nvml import VisibleGpu
from tuner.results import ResultRow, RunInfo, Store, StoreError

H200 = VisibleGpu(0, "GPU-1", "NVIDIA H200", (9, 0))


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "rows.sqlite"
    monkeypatch.setenv("DASH_DB", str(path))
    no_gpu(monkeypatch)
    return path


def no_gpu(monkeypatch: pytest.MonkeyPatch, gpus: list[VisibleGpu] | None = None) -> None:
    for module in (tuner.command, tuner.doctor):
        monkeypatch.setattr(module, "visible_gpus", lambda: gpus or [])


def fill(db: Path) -> None:
    """The baseline and a better config of one cell."""
    problem = Problem("causal", 128, 4096, batch=4, heads=16)
    with Store.open(db) as store:
        run = store.start_run(RunInfo("h100", {"gpu": "h100", "sms": 132}))
        for kind, launch, tflops in (
            ("ascending", "ascending", 300.0),
            ("shortest_first", "descending", 550.0),
        ):
            config = Config(schedule=kind, launch_order=launch)
            values = {"tflops": tflops, "ms": 1.0, "min_resident": 1, "numerics_key": "k"}
            store.add(run, ResultRow.of(problem, config, gpu="h100", **values))
        store.finish_run(run)


def dash_tune(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dash-tune", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    code = end.value.code
    return code if isinstance(code, int) else 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h2000"], ["unknown GPU 'h2000'", "h200"]),
        (["--gpu", "h200"], ["no NVIDIA GPU", "--compile-only"]),
        (["--gpu", "auto"], ["no NVIDIA GPU", "--compile-only"]),
        (["--gpu", "auto", "--compile-only"], ["--gpu h800"]),
        (["--gpu", "h800", "--compile-only", "--mask", "diagonal"], ["mask 'diagonal'", "causal"]),
        (["--gpu", "h800", "--compile-only", "--schedule", "zigzag"], ["'zigzag'", "shift"]),
        (["--gpu", "h800", "--compile-only", "--head-dim", "0"], ["--head-dim '0'"]),
        (["--gpu", "h800", "--compile-only", "--seq-len", "5²"], ["--seq-len '5²'"]),
        (["--gpu", "h800", "--compile-only", "--tile", "64"], ["--tile '64'", "64x128"]),
        (["--gpu", "h800", "--compile-only", "--budget", "soon"], ["'soon'", "15m"]),
        (
            ["--gpu", "h800", "--compile-only", "--engine", "ray"],
            ["--engine ray", "this machine alone"],
        ),
        (["--gpu", "h800", "--dry-run", "--window", "7"], ["--window '7'", "1023:0"]),
        (["--gpu", "h800", "--dry-run", "--window=-1:0", "--mask", "full"], ["mask causal"]),
        (["--gpu", "h800", "--dry-run", "--softcap", "15"], ["--softcap is '15'", "on, off"]),
        (["--gpu", "h800", "--dry-run", "--head-dim", "192/x"], ["--head-dim 'x'"]),
        (["--gpu", "h800", "--dry-run", "--head-dim", "64/"], ["--head-dim '64/'", "192/128"]),
        (["--gpu", "h800", "--dry-run", "--head-dim", "64,/64"], ["--head-dim '/64'", "192/128"]),
        (["--gpu", "h800", "--dry-run", "--head-dim", "7"], ["--head-dim '7'", "multiples of 8"]),
        (["--gpu", "h800", "--dry-run", "--head-dim", "64/12"], ["'64/12'", "multiples of 8"]),
        (["--gpu", "h800", "--dry-run", "--heads", "4", "--head-group", "3"], ["head-group 3"]),
        (["--gpu", "h800", "--simulate", "--dry-run"], ["--simulate", "--compile-only"]),
        (
            ["--gpu", "h800", "--dry-run", "--backend", "hopper", "--head-dim", "264"],
            ["no config runs this problem", "head_dim 264 is above 256"],
        ),
        (
            ["--gpu", "a100", "--compile-only", "--backend", "hopper"],
            [
                "--backend hopper: ",
                "needs compute capability 9.0; this is 8.0",
                "--backend portable",
            ],
        ),
        (
            ["--gpu", "a100", "--engine", "ray", "--backend", "hopper"],
            ["needs compute capability 9.0; this is 8.0"],
        ),
        (["--gpu", "h800", "--dry-run", "--mask", ","], ["--mask names nothing"]),
        (["show", "--db", ""], ["--db names nothing"]),
        (["release", "--gpu", "h200", "--db", ""], ["--db names nothing"]),
        (["show", "--head-dim", "9" * 30], ["a positive integer that fits 32 bits"]),
        (["show", "--head-dim", "-1", "--json"], ["--head-dim is -1"]),
        (["--gpu", "h800", "--dry-run", "--head-dim", ""], ["--head-dim names nothing"]),
        (["--gpu", "h800", "--dry-run", "--seq-len", "4294967296"], ["does not fit 32 bits"]),
        (["--gpu", "h800", "--dry-run", "--window", "4294967296:0"], ["does not fit 32 bits"]),
        (["--gpu", "h800", "--dry-run", "--seq-len", "9" * 5000], ["not a positive integer"]),
        (["--gpu", "h800", "--dry-run", "--tile", f"64x{'9' * 5000}"], ["write 64x128"]),
        (["--gpu", "h800", "--dry-run", "--tile", "64x4294967296"], ["does not fit 32 bits"]),
        (["export", "rows.csv", "--name", "mine"], ["--name is for a lookup table (.json)"]),
        (["export", "table.json", "--name", "../mine"], ["release name '../mine'"]),
        (["export", "rows.txt"], ["rows.txt: the ending tells the format", ".t4.json"]),
        (["show", "--gpu", "b200"], ["'b200'"]),
        (["show", "--mask", "diagonal"], ["mask 'diagonal'"]),
        (["export", "table.t4.json", "--gpu", "b200"], ["'b200'"]),
        (
            ["--db", "other.sqlite", "release"],
            ["--db stands before release", "dash-tune release --db"],
        ),
        (["--gpu", "h800", "show"], ["--gpu stands before show", "dash-tune show --gpu"]),
        (["doctor", "--why", "9" * 23], ["no row of this number"]),
        (["import", "missing.csv"], ["missing.csv"]),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(
    db: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    assert dash_tune(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dash-tune: ")
    assert len(err.strip().splitlines()) == 1
    assert all(word in err for word in words)


@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_the_named_backend_alone_is_swept_in_every_shape(
    backend: str, db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = [
        "--gpu",
        "h800",
        "--mask",
        "causal",
        "--head-dim",
        "128,192/128,256",
        "--seq-len",
        "512",
    ]
    command = [*shapes, "--backend", backend, "--dry-run", "--json"]
    assert dash_tune(monkeypatch, *command) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {entry["config"]["backend"] for entry in listed} == {backend}
    assert {entry["problem"]["head_dim"] for entry in listed} == {128, 192, 256}


def test_show_without_a_winner_says_where_rows_are(
    db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(db) as store:
        run = store.start_run(RunInfo("h800", {"gpu": "h800"}, source="modelled"))
        problem = Problem("causal", 128, 4096)
        row = ResultRow.of(problem, Config(), gpu="h800", source="modelled", predicted=1.0)
        store.add(run, row)
    assert dash_tune(monkeypatch, "show", "--gpu", "h800") == 2
    assert capsys.readouterr().err.endswith("rows.sqlite; --source modelled has rows\n")
    assert dash_tune(monkeypatch, "show", "--gpu", "h800", "--source", "compiled") == 2
    assert "--source modelled has rows" in capsys.readouterr().err


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert dash_tune(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"dash-tune {__version__}\n"


def test_nothing_is_written_for_bad_usage(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["--gpu", "h200"], ["--gpu", "h800", "--compile-only", "--mask", "x"]):
        dash_tune(monkeypatch, *arguments)
    assert not db.exists()


def test_unknown_option_is_exit_2(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dash_tune(monkeypatch, "--gpus", "h200") == 2


def test_another_gpu_than_the_named_one_names_the_one_found(
    db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_gpu(monkeypatch, [H200])
    assert dash_tune(monkeypatch, "--gpu", "h800") == 2
    err = capsys.readouterr().err
    assert "this machine has NVIDIA H200 (h200)" in err
    assert "--gpu auto" in err
    assert not db.exists()


def test_a_name_is_never_matched_by_its_beginning(
    db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_gpu(monkeypatch, [VisibleGpu(0, "GPU-1", "NVIDIA H20", (9, 0))])
    assert dash_tune(monkeypatch, "--gpu", "h200") == 2
    assert "NVIDIA H20 (h20)" in capsys.readouterr().err


def test_dry_run_lists_and_writes_nothing(
    db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = ["--mask", "causal", "--head-dim", "128", "--seq-len", "1024,4096"]
    assert dash_tune(monkeypatch, "--gpu", "h800", "--dry-run", "--json", *narrow) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {entry["problem"]["seq_len"] for entry in entries} == {1024, 4096}
    assert entries[0]["config"]["schedule"] == "ascending"
    assert dash_tune(monkeypatch, "--gpu", "h800", "--dry-run", *narrow) == 0
    assert f"{len(entries)} configs for h800; nothing was run" in capsys.readouterr().out
    assert not db.exists()


def test_a_ptxas_that_fails_stops_early_and_names_what_is_wrong(
    db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/bin/false")
    ok = tuner.doctor.Check("triton", "ok", "3.6.0")
    monkeypatch.setattr(tuner.doctor, "triton_version", lambda: ok)
    assert dash_tune(monkeypatch, "--gpu", "h800", "--compile-only") == 2
    err = capsys.readouterr().err
    assert "/bin/false" in err
    assert "sm_90a" in err
    assert "Triton 3.6.0" in err
    assert not db.exists()


def test_cpu_only_torch_on_a_gpu_machine_is_said(
    db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_gpu(monkeypatch, [H200])
    monkeypatch.setattr(
        tuner.doctor, "torch_version_file", lambda: {"__version__": "2.13.0", "cuda": None}
    )
    assert dash_tune(monkeypatch, "--gpu", "h200") == 2
    assert "torch 2.13.0 is built without CUDA; reinstall torch" in capsys.readouterr().err


def test_doctor_lists_every_check_and_fails_without_a_gpu(
    db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dash_tune(monkeypatch, "doctor", "--json") == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert {"gpu", "driver", "torch", "triton", "ptxas", "compiler", "headers"} <= set(checks)
    assert checks["gpu"]["state"] == "missing"
    assert checks["gpu"]["remedy"]


def test_a_ptxas_that_hangs_is_a_warning_and_leaves_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "ptxas"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/pid\nsleep 600\n")
    script.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(script))
    monkeypatch.setattr(tuner.doctor, "PTXAS_TIMEOUT_S", 0.5)
    check = tuner.doctor.ptxas((9, 0))
    assert check.state == "warning"
    assert "did not answer" in check.found
    assert gone_within(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_named_as_hidden(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert "hides every GPU" in tuner.doctor.gpu().line


def test_stored_rows_are_shown_exported_imported_and_released(
    db: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fill(db)
    assert dash_tune(monkeypatch, "show", "--gpu", "h100", "--json") == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert cell["served"]["config"]["schedule"] == "shortest_first"
    for alias in ("h100", "H100"):
        assert dash_tune(monkeypatch, "show", "--gpu", alias) == 0
        assert "shortest_first" in capsys.readouterr().out
    for name in ("table.json", "rows.csv", "rows.parquet", "h100.json.gz"):
        assert dash_tune(monkeypatch, "export", str(tmp_path / name), "--gpu", "h100") == 0
    assert json.loads((tmp_path / "table.json").read_text())["gpu"] == "h100"
    other = str(tmp_path / "other.sqlite")
    for name, added in (("rows.csv", 2), ("rows.parquet", 0), ("h100.json.gz", 0)):
        capsys.readouterr()
        assert dash_tune(monkeypatch, "import", str(tmp_path / name), "--db", other) == 0
        assert f"{added} rows added" in capsys.readouterr().out
    assert dash_tune(monkeypatch, "release", "--gpu", "h100", "--name", "first") == 0
    assert re.match(r"release \d+: first, digest \w+$", capsys.readouterr().out)


def test_what_cannot_be_written_is_shown_and_exported_as_it_is(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(db)

    def refuse(path: Path) -> None:
        raise StoreError(f"database {path} cannot be written (permission denied)")

    monkeypatch.setattr(tuner.results.database, "_require_writable", refuse)
    assert dash_tune(monkeypatch, "show", "--gpu", "h100") == 0
    assert "shortest_first" in capsys.readouterr().out
    assert dash_tune(monkeypatch, "export", str(tmp_path / "rows.csv"), "--gpu", "h100") == 0
    capsys.readouterr()
    assert dash_tune(monkeypatch, "release", "--gpu", "h100") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_numerics_key_that_no_row_has_is_said_with_where_to_find_one(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(db)
    table = str(tmp_path / "table.json")
    for command in (["show", "--json"], ["show"], ["export", table], ["export", table + ".csv"]):
        key = ["--gpu", "h100", "--numerics-key"]
        assert dash_tune(monkeypatch, *command, *key, "junk") == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("dash-tune: no row of h100 in ")
        assert "has numerics key 'junk'" in err
        assert "dash-tune show --gpu h100 --json" in err
        assert dash_tune(monkeypatch, *command, *key, "k") == 0
        capsys.readouterr()
    dump = str(tmp_path / "all.json.gz")
    assert dash_tune(monkeypatch, "export", dump, "--gpu", "h100", "--numerics-key", "k") == 2
    assert not Path(dump).exists()
    assert dash_tune(monkeypatch, "show", "--numerics-key", "k", "--source", "compiled") == 2
    assert "only measured rows have a numerics key" in capsys.readouterr().err


def test_the_time_left_is_no_more_than_the_budget_leaves() -> None:
    from tuner.report import Progress

    progress = Progress()
    progress.begin(total=1000, resumed=0, budget_s=60.0)
    progress.started -= 50.0
    progress.done = 1
    left = progress.seconds_left()
    assert left is not None
    assert 9.0 <= left <= 10.0
    progress.budget_s = 0.0
    assert (progress.seconds_left() or 0.0) > 1000.0


SLOW_IMPORT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from tuner.entry import main
assert not {"typer", "sqlalchemy", "tuner.cli"} & set(sys.modules), "the entry is light"

class Slow:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == sys.argv[0]:
            print("importing", flush=True)
            time.sleep(60)

sys.argv = sys.argv[1:]
sys.meta_path.insert(0, Slow)
main()
"""


@pytest.mark.parametrize("module", ["typer", "sqlalchemy", "tuner.stored"])
def test_ctrl_c_while_modules_are_imported_is_quiet_and_exit_130(module: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORT, module, "show"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out, err.strip()) == (130, "", "")
