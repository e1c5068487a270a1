"""What ``/best`` answers out of rows as they are, and out of a release."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from test_winners import (
    ASCENDING,
    RUN,
    SERVED,
    SHIFT,
    TWO_PASS,
    measured,
    shape,
    two_lengths,
)

from dash_kernels.problem import Problem
from server.app import create_app
from server.settings import Settings
from tuner.export import freeze
from tuner.results import Store


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.open("sqlite://") as opened:
        yield two_lengths(opened)


def ask(store: Store, **asked: Any) -> Any:
    """The body of /best, of the rows as they are unless a release is asked for."""
    query = {"gpu": "h200", "mask": "causal", "d": 128, "release": "draft", **asked}
    with TestClient(create_app(store, Settings())) as client:
        return client.get("/best", params={k: v for k, v in query.items() if v is not None}).json()


def test_best_names_the_winner_over_all_and_by_seq_len(store: Store) -> None:
    answer = ask(store)
    assert (answer["gpu"], answer["matched"], answer["release"]) == ("h200", "exact", None)
    assert answer["best"]["config"] == TWO_PASS.to_dict()
    assert list(answer["by_seq_len"]) == ["2048", "8192"]
    short, long = answer["by_seq_len"].values()
    assert (short["config"], long["config"]) == (TWO_PASS.to_dict(), SERVED.to_dict())
    assert long["fastest"]["config"] == SHIFT.to_dict()
    assert long["fastest"]["min_resident"] == 32
    assert long["speedup_vs_baseline"] == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    ("asked", "answered"), [(8192, 8192), (5000, 8192), (1, 2048), (4096, 2048), (10**6, 8192)]
)
def test_a_seq_len_is_answered_exactly_or_by_the_nearest(
    store: Store, asked: int, answered: int
) -> None:
    answer = ask(store, seq_len=asked)
    assert list(answer["by_seq_len"]) == [str(answered)]
    assert answer["best"]["seq_len"] == answered
    assert answer["matched"] == ("exact" if asked == answered else "nearest")


def test_batch_and_heads_choose_among_shapes_only_when_asked(store: Store) -> None:
    small = replace(shape(8192), batch=1, heads=2, heads_kv=2)
    store.add(1, measured(ASCENDING, 200, small))
    assert ask(store, seq_len=8192)["best"]["heads"] == 16
    exact = ask(store, seq_len=8192, batch=1, heads=2)
    assert (exact["best"]["heads"], exact["matched"]) == (2, "exact")
    assert ask(store, seq_len=8192, batch=1, heads=4)["matched"] == "nearest"


def test_head_groups_are_never_crossed(store: Store) -> None:
    assert "head group 8" in ask(store, heads=16, heads_kv=2)["detail"]
    store.add(1, measured(SERVED, 450, replace(shape(8192), heads_kv=2)))
    assert list(ask(store, heads=16, heads_kv=2)["by_seq_len"]) == ["8192"]


def test_nothing_measured_says_what_is(store: Store) -> None:
    said = ask(store, mask="full", d=64)["detail"]
    assert "no measured winner for full d=64" in said
    assert "it has: causal d=128 bfloat16" in said
    assert "it has: nothing yet" in ask(store, source="compiled")["detail"]


def test_other_sources_answer_only_when_asked(store: Store) -> None:
    modelled = store.start_run(replace(RUN, source="modelled"))
    plain = {"tflops": None, "ms": None, "samples": None, "source": "modelled"}
    store.add(modelled, measured(SERVED, 1, Problem("full", 64, 512), predicted=1.0, **plain))
    assert "no measured winner" in ask(store, mask="full", d=64)["detail"]
    answer = ask(store, mask="full", d=64, source="modelled")
    assert answer["best"]["config"] == SERVED.to_dict()
    assert answer["best"]["tflops"] is None


def test_a_new_row_changes_the_answer_and_a_release_does_not_change(store: Store) -> None:
    before = ask(store)["by_seq_len"]
    release = freeze(store, "h200")
    store.add(1, measured(SERVED.with_(num_stages=3), 800, shape(8192)))
    assert ask(store)["by_seq_len"]["8192"]["tflops"] > 790
    for asked in (None, release.id, release.name):
        answer = ask(store, release=asked)
        assert (answer["release"], answer["release_id"]) == (release.name, release.id)
        assert answer["best"]["config"] == TWO_PASS.to_dict()
        for seq_len, entry in answer["by_seq_len"].items():
            assert entry["tflops"] == before[seq_len]["tflops"]
    said = ask(store, release="99")["detail"]
    assert f"release 99 of h200 does not exist; there is 1 ({release.name})" in said
