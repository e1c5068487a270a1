"""Numerics keys: they name bits and nothing else, a process keeps one or stops, and ranks that differ are named."""

from __future__ import annotations

import multiprocessing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from test_dispatch import PROBLEM, write
from test_lookup import MONOTONE, cell, table

from dash_kernels import (
    Config,
    check_ranks,
    choose,
    dispatch,
    numerics,
    numerics_key,
    require_numerics,
    use_table,
)
from dash_kernels.device import environment
from dash_kernels.fetch import Copy, _copy_path, _write_copy


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test is a process that has chosen nothing yet and that ships no table."""
    monkeypatch.setattr(dispatch, "_state", dispatch._State())
    monkeypatch.setattr("dash_kernels.lookup.TABLES", tmp_path / "shipped")
    monkeypatch.setattr(dispatch, "TABLES", tmp_path / "shipped")
    monkeypatch.setenv("DASH_CACHE", str(tmp_path / "cache"))


BITS = {
    "capability": "9.0",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "ptxas": "12.9.86",
    "kernel_hash": "k",
}


def test_a_key_changes_with_what_can_change_bits_and_with_nothing_else() -> None:
    def key(config: Config = MONOTONE, dtype: str = "bfloat16", **env: str) -> str:
        return numerics.config_key(config, dtype=dtype, head_dim=128, environment=BITS | env)

    cannot = {
        "num_stages": 3,
        "dq_stages": 3,
        "signal": "plain",
        "launch_order": "ascending",
        "heads_interleaved": 4,
    }
    can = {"backend": "portable", "schedule": "ascending", "group": 2, "policy": "two_pass",
           "block_m": 128, "block_n": 64, "num_warps": 4}  # fmt: skip
    assert set(cannot) | set(can) == {f.name for f in fields(Config)}
    assert {key(MONOTONE.with_(**{name: value})) for name, value in cannot.items()} == {key()}
    changed = [key(MONOTONE.with_(**{name: value})) for name, value in can.items()]
    changed += [key(dtype="float16"), *(key(**{name: "other"}) for name in BITS)]
    assert len({key(), *changed}) == 1 + len(changed)
    assert key(driver="1", sms="66", gpu="h100") == key()


def test_a_process_key_is_kept_or_refused(tmp_path: Path) -> None:
    use_table(write(tmp_path / "t.json", table(cell(4096))))
    mine = numerics_key("h200")
    require_numerics(mine, "h200")
    assert choose(PROBLEM, "h200").release == "h200-test"
    with pytest.raises(
        numerics.NumericsError, match=r"the checkpoint asks for 0123.*table h200-test"
    ):
        require_numerics("0123", "h200")


def test_a_process_key_is_of_bits_and_not_of_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for name, content in {
        "same": table(cell(4096)),
        "faster": table(cell(4096, MONOTONE.with_(num_stages=1)), release="h200-next"),
        "tiles": table(cell(4096, MONOTONE.with_(block_m=128))),
    }.items():
        monkeypatch.setattr(dispatch, "_state", dispatch._State())
        use_table(write(tmp_path / f"{name}.json", content))
        keys.append(numerics_key("h200"))
    assert keys[0] == keys[1] != keys[2]


def test_check_ranks_passes_alone_and_names_a_missing_init(monkeypatch: pytest.MonkeyPatch) -> None:
    check_ranks()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        check_ranks()


@pytest.mark.parametrize("differ", ["", "table", "key"])
def test_check_ranks_names_the_ranks_that_differ(
    monkeypatch: pytest.MonkeyPatch, differ: str
) -> None:
    import torch.distributed as dist

    def gather(into: list[object], mine: tuple[str, str, str], group: object = None) -> None:
        release, digest, key = mine
        theirs = (release, "d" * 64 if differ == "table" else digest, "k" if differ else key)
        into[:] = [mine, mine, theirs]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 3)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    if not differ:
        check_ranks()
        return
    what = {"table": "lookup table", "key": "numerics key"}[differ]
    with pytest.raises(numerics.NumericsError, match=f"ranks 2 differ from rank 0 in their {what}"):
        check_ranks()


def test_environment_gives_what_a_key_needs() -> None:
    assert set(BITS) <= set(environment())


def test_a_checkpoint_resumes_on_its_own_table_though_a_newer_one_is_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = table(cell(4096, MONOTONE.with_(schedule="descending")), release="h200-old")
    use_table(write(tmp_path / "old.json", old))
    key = numerics_key("h200")
    url = "http://dash.invalid/releases/1/table.json"
    path = _copy_path(url)
    assert path is not None
    _write_copy(path, Copy(url, "", old.to_json().encode()))

    monkeypatch.setattr(dispatch, "_state", dispatch._State())
    use_table(write(tmp_path / "new.json", table(cell(4096), release="h200-new")))
    require_numerics(key, "h200")
    assert choose(PROBLEM, "h200").release == "h200-old"
    assert numerics_key("h200") == key

    monkeypatch.setattr(dispatch, "_state", dispatch._State())
    use_table(tmp_path / "new.json")
    choose(PROBLEM, "h200")
    with pytest.raises(numerics.NumericsError, match="table h200-new"):
        require_numerics(key, "h200")


def test_a_rank_without_a_table_fails_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    def gather(into: list[object], mine: tuple[str, str, str], group: object = None) -> None:
        into[:] = [mine, (None, "t.json: No such file", "")]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(numerics.NumericsError, match=r"ranks 1 have no .*t\.json: No such file"):
        check_ranks()


def _rank(rank: int, tables: list[str], meeting: str, answers: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        use_table(tables[rank])
        check_ranks()
        answers.put((rank, "agree"))
    except Exception as error:  # whatever it is, the test reads it
        answers.put((rank, f"{type(error).__name__}: {error}"))
    finally:
        dist.destroy_process_group()


def test_two_real_ranks_with_two_tables_both_stop(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    paths = [
        str(write(tmp_path / f"{name}.json", table(cell(4096), release=f"h200-{name}")))
        for name in ("one", "two")
    ]
    answers = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, paths, str(tmp_path / "meeting"), answers))
        for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    said = dict(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(30)
    for rank in (0, 1):
        assert "ranks 1 differ from rank 0 in their lookup table" in said[rank], said
        assert "h200-one" in said[rank]
        assert "h200-two" in said[rank]
