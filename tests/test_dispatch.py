"""choose(): each rung of the ladder says that it answered, a table once used stays, and keys mean bits."""

from __future__ import annotations

import functools
import http.server
import logging
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from test_lookup import MONOTONE, RESIDENT, cell, table

from dash_kernels import (
    Config,
    Problem,
    check_ranks,
    choose,
    dispatch,
    numerics,
    numerics_key,
    require_numerics,
    use_table,
)
from dash_kernels.device import GPUS, NoGpuError, environment
from dash_kernels.lookup import LookupTable, TableError, shipped_gpus
from dash_kernels.problem import supports
from dash_kernels.schedules import TileGrid, build, check
from dash_kernels.schedules.launch import Launch

PROBLEM = Problem("causal", 128, 4096)


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test is a process that has chosen nothing yet and that ships no table."""
    monkeypatch.setattr(dispatch, "_state", dispatch._State())
    monkeypatch.setattr("dash_kernels.lookup.TABLES", tmp_path / "shipped")
    monkeypatch.setattr(dispatch, "TABLES", tmp_path / "shipped")
    monkeypatch.delenv("DASH_ALLOW_FAMILY", raising=False)
    monkeypatch.setenv("DASH_CACHE", str(tmp_path / "cache"))
    dispatch._choose.cache_clear()
    yield
    dispatch._choose.cache_clear()


def write(path: Path, content: LookupTable) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content.to_json())
    return path


def test_the_ladder_says_which_rung_answered(tmp_path: Path) -> None:
    won = MONOTONE.with_(num_stages=1)
    use_table(write(tmp_path / "t.json", table(cell(1024), cell(4096, won))))
    exact, nearest = choose(PROBLEM, "h200"), choose(Problem("causal", 128, 5000), "h200")
    assert (exact.config, exact.matched, exact.release) == (won, "exact", "h200-test")
    assert (nearest.config, nearest.matched) == (won, "nearest")
    missing = choose(Problem("full", 128, 4096), "h200")
    assert (missing.matched, missing.release) == ("default", dispatch.DEFAULT_RULE)
    assert "no cell for full head_dim 128" in missing.reason


def test_a_table_of_kin_answers_only_when_allowed(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", table(cell(4096)))
    use_table(path)
    refused = choose(PROBLEM, "h800")
    assert refused.matched == "default"
    assert "allow_family=True" in refused.reason
    assert choose(PROBLEM, "a100").matched == "default"


def test_family_is_said(tmp_path: Path) -> None:
    use_table(write(tmp_path / "t.json", table(cell(4096))), allow_family=True)
    kin = choose(PROBLEM, "h800")
    assert (kin.matched, kin.release) == ("family", "h200-test")
    assert "measured on h200" in kin.reason
    assert choose(PROBLEM, "a100").matched == "default"


def test_family_by_environment_uses_the_shipped_table_of_kin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "shipped" / "h200.json", table(cell(4096)))
    monkeypatch.setenv("DASH_ALLOW_FAMILY", "1")
    assert choose(PROBLEM, "h100").matched == "family"
    assert choose(PROBLEM, "h200").matched == "exact"


def test_a_config_that_waits_on_later_ctas_is_never_served(tmp_path: Path) -> None:
    use_table(write(tmp_path / "t.json", table(cell(4096, RESIDENT, min_resident=32))))
    assert choose(PROBLEM, "h200").config.schedule == "shortest_first"


def test_an_answer_does_not_depend_on_batch_or_heads(tmp_path: Path) -> None:
    use_table(
        write(
            tmp_path / "t.json",
            table(cell(4096, MONOTONE, batch=1), cell(4096, MONOTONE.with_(num_stages=1))),
        )
    )
    answers = {
        choose(Problem("causal", 128, 4096, batch=b, heads=h), "h200")
        for b in (1, 8)
        for h in (1, 16)
    }
    assert len(answers) == 1


def test_a_table_once_used_is_frozen(tmp_path: Path) -> None:
    first = write(tmp_path / "a.json", table(cell(4096)))
    other = write(tmp_path / "b.json", table(cell(1024), release="h200-other"))
    use_table(other)
    use_table(first)
    choose(PROBLEM, "h200")
    use_table(first)
    with pytest.raises(RuntimeError, match="table h200-test has already answered in this process"):
        use_table(other)


def test_dash_table_names_the_table_and_its_digest_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content = table(cell(4096))
    monkeypatch.setenv("DASH_TABLE", str(write(tmp_path / "t.json", content)))
    with caplog.at_level(logging.INFO, "dash_kernels"):
        for seq_len in (1024, 4096, 8192):
            choose(Problem("causal", 128, seq_len), "h200")
    assert [content.digest in record.getMessage() for record in caplog.records] == [True]


def test_a_broken_dash_table_is_an_error_and_not_the_default_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.json").write_text("{}")
    monkeypatch.setenv("DASH_TABLE", str(tmp_path / "t.json"))
    with pytest.raises(TableError, match=r"t\.json: format is None"):
        choose(PROBLEM, "h200")


def test_a_release_is_fetched_once_and_cached_a_live_table_each_time(tmp_path: Path) -> None:
    site = tmp_path / "site"
    content = table(cell(4096))
    write(site / "releases" / "3" / "table.json", content)
    write(site / "table.json", content)
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_request(self, *_: object) -> None:
            asked.append(self.path)

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(site))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    try:
        for _ in range(2):
            assert dispatch.fetch_table(f"{base}/releases/3/table.json") == content
            assert dispatch.fetch_table(f"{base}/table.json") == content
        use_table(f"{base}/releases/3/table.json")
        with pytest.raises(TableError, match=r"(?i)not found"):
            use_table(f"{base}/releases/4/table.json")
    finally:
        server.shutdown()
        server.server_close()
    assert asked.count("/releases/3/table.json") == 1
    assert asked.count("/table.json") == 2
    with pytest.raises(TableError, match="refused"):
        dispatch.fetch_table(f"{base}/table.json")


def test_a_cache_that_cannot_be_written_costs_only_the_next_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    dispatch._write_cache(tmp_path / "file" / "t.json", b"{}")
    assert "cannot cache the lookup table" in caplog.text


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
@pytest.mark.parametrize("head_dim", [8, 64, 104, 128])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_default_rule_runs_and_is_monotone_everywhere(
    mask: str, head_dim: int, capability: tuple[int, int]
) -> None:
    for seq_len in (1, 77, 512, 3000):
        problem = Problem(mask, head_dim, seq_len, dtype="float16")
        config = dispatch.default_config(problem, capability)
        support = supports(config, problem, capability)
        assert support, support.reason
        grid = TileGrid.for_config(problem, config)
        launch = Launch(config.launch_order, config.heads_interleaved)
        assert check(build(config.schedule, grid, config.group), launch).min_resident == 1


def test_the_default_rule_is_what_the_docs_say() -> None:
    rule = dispatch.default_config
    assert rule(PROBLEM, (9, 0)).label() == "shortest_first 64x128 descending deferred"
    assert (
        rule(Problem("causal", 64, 4096), (9, 0)).label()
        == "shortest_first 128x128 descending plain"
    )
    assert (
        rule(Problem("full", 128, 4096), (9, 0)).label()
        == "ascending 64x128 ascending x4 heads deferred"
    )
    tiles = [
        (rule(Problem("full", d, s), (8, 0)).block_m, rule(Problem("full", d, s), (8, 0)).block_n)
        for d in (64, 128)
        for s in (2048, 4096)
    ]
    assert tiles == [(64, 128), (64, 64), (64, 64), (32, 64)]


def test_unordered_is_labelled_and_has_no_key() -> None:
    choice = choose(PROBLEM, "h200", deterministic=False)
    assert not choice.config.deterministic
    assert choice.numerics_key == ""
    assert "unordered: bits may differ" in choice.reason


def test_without_a_gpu_the_answer_says_for_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dash_kernels.device.no_gpu_reason", lambda: "no NVIDIA GPU on this machine"
    )
    assert "answered for h200: no NVIDIA GPU" in choose(PROBLEM).reason
    with pytest.raises(NoGpuError):
        choose(PROBLEM, "cuda:0")


def test_a_cpu_torch_on_a_gpu_machine_is_never_answered_for_another_chip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "this machine has an NVIDIA GPU but PyTorch is a build without CUDA; reinstall torch with CUDA"
    monkeypatch.setattr("dash_kernels.device.no_gpu_reason", lambda: said)
    with pytest.raises(NoGpuError, match="reinstall torch"):
        choose(PROBLEM)


@pytest.mark.parametrize("device", ["h900", "cpu", "cuda:x"])
def test_a_device_that_is_none_is_named(device: str) -> None:
    with pytest.raises(ValueError, match=device):
        choose(PROBLEM, device)


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


def test_every_shipped_table_is_sound_and_every_served_config_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    for gpu in shipped_gpus():
        shipped = LookupTable.load(dispatch.TABLES / f"{gpu}.json")
        assert shipped.gpu == gpu
        for each in shipped.cells:
            assert each.served is not None
            assert each.served.servable
            assert supports(each.served.config, each.problem, GPUS[gpu].capability)


def test_environment_gives_what_a_key_needs() -> None:
    assert set(BITS) <= set(environment())
