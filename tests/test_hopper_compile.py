"""The Hopper kernel, compiled for sm_90a without a GPU or torch by the oldest and the newest Triton that we support."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dash_kernels.kernels.compile import main as compile_command
from dash_kernels.kernels.compile import shared_barriers

ROOT = Path(__file__).resolve().parent.parent
COMPILE = ["-m", "dash_kernels.kernels.compile"]


def reports(python: Path, cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """The reports, a JSON line each, that Python prints with these arguments."""
    ran = subprocess.run(
        [str(python), *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def compiled(python: Path, cache: Path, *arguments: str) -> list[dict[str, Any]]:
    return reports(python, cache, *COMPILE, *arguments)


def test_shipped_winners_compile_to_what_the_table_says(
    triton_pythons: list[Path], tmp_path: Path
) -> None:
    """The table's own Triton: no C75xx, and the registers, spills and bytes of shared memory that were measured.

    Spills of up to 128 bytes a thread are the writers' and what is read once a KV tile; a matmul operand that spilled
    would cost hundreds.
    """
    reports = compiled(triton_pythons[0], tmp_path, "--shipped", "--max-head-dim", "256")
    assert {report["mask"] for report in reports} == {"full", "causal"}
    assert {report["head_dim"] for report in reports} == {64, 128, 192, 256}
    for report in reports:
        assert report["spill_bytes"] <= 128, report
        assert report["warnings"] == [], report
    table = json.loads((ROOT / "dash_kernels" / "tables" / "h200.json").read_text())
    assert table["environment"]["triton"] == reports[0]["triton_version"]
    measured = table["environment"]["kernel_hash"]
    assert measured == reports[0]["kernel_hash"], (
        "dash_kernels/kernels differs from what the shipped table measured: sweep again and export"
    )
    found = {
        (report["registers"], report["spill_bytes"], report["shared_bytes"]) for report in reports
    }
    for cell in table["cells"]:
        for name in ("served", "best"):
            said = cell[name]
            assert (said["registers"], said["spill_bytes"], said["shared_bytes"]) in found


def test_a_largest_head_dim_below_all_that_are_shipped_is_refused_with_the_choices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compile_command(["--shipped", "--max-head-dim", "8"]) == 2
    out, err = capsys.readouterr()
    remedy = "choose --max-head-dim (MAX_HEAD_DIM) from 64, 128, 192, 256"
    assert (out, err) == ("", f"error: no shipped winner has a head_dim of 8 or less; {remedy}\n")


def test_a_hardware_barrier_that_triton_takes_too_is_a_warning() -> None:
    own = "bar.arrive %r12, 288; barrier.sync 1; bar.sync \t0, 128;"
    assert shared_barriers(own, 5) == []
    assert shared_barriers(own + " bar.sync 9, 128; barrier.cta.sync.aligned 13;", 5) == [
        "hardware barrier 9 is the kernel's own and Triton's",
        "hardware barrier 13 is the kernel's own and Triton's",
    ]
    assert shared_barriers("bar.sync 9, 128;", 5) == [], "a kernel without any of its own"


def test_symmetric_shift_costs_no_registers(triton_pythons: list[Path], tmp_path: Path) -> None:
    """The paper's kind spilled at head_dim 128; read from arrays it has the registers of every other kind."""

    def pair(head_dim: int, block_m: int) -> list[dict[str, Any]]:
        tile = {"block_m": block_m}
        shift = {**tile, "schedule": "symmetric_shift", "launch_order": "ascending"}
        return [
            compiled(triton_pythons[0], tmp_path, "--head-dim", str(head_dim), "--config", *arguments)[0]
            for arguments in ([json.dumps(shift), "--cooperative"], [json.dumps(tile)])
        ]  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        for shifted, plain in pool.map(pair, (64, 128), (128, 64)):
            assert shifted["registers"] == plain["registers"]
            assert shifted["spill_bytes"] == plain["spill_bytes"]


FORMS_OF_THE_NEWEST = (
    ["--mask", "full", "--dtype", "float16"],
    ["--mask", "causal", "--config", '{"policy": "unordered"}'],
    ["--cooperative", "--config", '{"schedule": "symmetric_shift", "launch_order": "ascending"}'],
    ["--head-dim", "64", "--dtype", "float16", "--config", '{"block_m": 128}'],
)


def test_every_form_compiles_with_the_newest(triton_pythons: list[Path], tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(
            lambda form: compiled(triton_pythons[-1], tmp_path, *form), FORMS_OF_THE_NEWEST
        )
        for (report,) in found:
            assert report["kernel"] == "backward_hopper"
            assert report["warnings"] == []
            assert 0 < report["shared_bytes"] <= 232448


FORMS = """
import json, sys
from dataclasses import asdict
from dash_kernels.default_rule import default_config
from dash_kernels.kernels.compile import compile_spec, hopper_spec
from dash_kernels.problem import Problem, hopper_shared_bytes

for *dims, causal, options in json.loads(sys.argv[1]):
    problem = Problem("causal", dims[0], 1024, head_dim_v=dims[1])
    config = default_config(problem, (9, 0), "hopper")
    spec = hopper_spec(config, dims[0], "bfloat16", causal, head_dim_v=dims[1], **options)
    print(json.dumps({**asdict(compile_spec(spec, (9, 0))), "counted": hopper_shared_bytes(config, *dims)}))
"""
EVERY_OPTION = dict.fromkeys(("grouped", "windowed", "softcap", "packed"), True)
TAIL = False, {"tail": True}


@pytest.mark.parametrize(
    ("head_dims", "masks", "spilled", "spilled_newest"),
    [
        ((64, 64), [], [1588], 1648),
        ((256, 256), [TAIL], [0, 0], 0),
        ((192, 128), [TAIL], [220, 36], 468),
    ],
    ids=["64", "256", "192/128"],
)
def test_every_option_at_once_keeps_what_its_loops_carry(
    triton_pythons: list[Path], tmp_path: Path, head_dims: tuple[int, int], masks: list[Any], spilled: list[int],
    spilled_newest: int,
) -> None:  # fmt: skip
    """Triton 3.6 dropped the step at which a grouped head begins, and the launch hung; 3.9 does not drop it.

    The options have a window; of the kernels above head_dim 128 the oldest compiles the cut last tile too. None
    spills more than it did when this was written, and what problem.py counts of shared memory is enough for all.
    """

    def run(python: Path, bounds: list[int]) -> list[dict[str, Any]]:
        forms = [(True, EVERY_OPTION), *masks][: len(bounds)]
        cases = json.dumps([(*head_dims, *form) for form in forms])
        found = reports(python, tmp_path, "-c", FORMS, cases)
        for report, most in zip(found, bounds, strict=True):
            assert report["warnings"] == [], report
            assert report["spill_bytes"] <= most, report
            assert report["shared_bytes"] <= report["counted"] <= 232448, report
        return found

    ends = triton_pythons[0], triton_pythons[-1]
    with ThreadPoolExecutor(len(ends)) as pool:
        (old, *_), (new,) = pool.map(run, ends, (spilled, [spilled_newest]))
    assert old["carried"] == new["carried"] > 0


def test_a_config_of_another_kernel_is_named(triton_pythons: list[Path], tmp_path: Path) -> None:
    ran = subprocess.run(
        [str(triton_pythons[0]), *COMPILE, "--config", '{"block_q": 64}'],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert ran.returncode == 2
    assert "block_q" in ran.stderr
