"""The portable backward's arithmetic on the CPU, in Triton's interpreter, against float64."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from portable_process import ask, needs_interpreter, within_budget

pytestmark = needs_interpreter
GRADIENTS = ("dq", "dk", "dv")


def case(
    schedule: str,
    policy: str,
    seq_lens: tuple[int, int] | None,
    tile: tuple[int, int],
    **more: Any,
) -> dict[str, Any]:
    lengths = {"seq_lens": seq_lens} if seq_lens else {}
    numbers = {"schedule": schedule, "policy": policy, "tile": tile, **lengths, **more}
    return {"causal": schedule != "ascending", **numbers}


CASES = {
    "full, ragged": case("ascending", "ordered", (77, 50), (32, 64)),
    "full, ragged, no turnstile": case("ascending", "unordered", (77, 50), (32, 64)),
    "full, two passes": case("ascending", "two_pass", (50, 77), (32, 64)),
    "more keys than queries": case("shortest_first", "ordered", (50, 77), (32, 64)),
    "more queries than keys": case("shortest_first", "ordered", (77, 40), (32, 64)),
    "causal, two passes": case("shortest_first", "two_pass", (77, 50), (32, 64)),
    "one key": case("shortest_first", "ordered", (40, 1), (32, 64)),
    "one query": case("ascending", "ordered", (1, 40), (32, 64), causal=True),
    "the diagonal last, persistent": case(
        "descending", "ordered", (130, 130), (32, 32), heads=1, persistent=True
    ),
    "heads interleaved, head_dim 128": case(
        "shortest_first", "ordered", (70, 100), (64, 64), batch=2, heads=3, interleaved=4, dim=128
    ),
    "a group of 3, head_dim of V 32, a gradient of LSE": case(
        "shortest_first", "ordered", (50, 50), (32, 64), heads=6, heads_kv=2, dim_v=32, dlse=True
    ),
    "one KV head for all, interleaved, persistent": case(
        "ascending", "ordered", (40, 40), (32, 32), batch=2, heads=2, heads_kv=1, interleaved=2, persistent=True
    ),
    "a window on both sides, capped scores": case(
        "ascending", "ordered", (130, 110), (32, 32), window=(40, 33), softcap=2.0, heads=1
    ),
    "a window of the past, walked down": case(
        "descending", "ordered", (130, 150), (32, 32), window=(50, -1), heads=1
    ),
    "a window whose queries see nothing at first": case(
        "ascending", "two_pass", (20, 200), (32, 64), window=(30, 10), heads=1
    ),
    "packed, empty sequences and lengths of 1": case(
        "shortest_first", "ordered", None, (32, 64), heads=1, lengths=((40, 40), (0, 9), (1, 1), (5, 0), (33, 70))
    ),
    "packed, nothing at all": case("ascending", "ordered", None, (32, 64), lengths=((0, 0), (0, 0))),
    "packed, groups, window, cap, two passes": case(
        "shortest_first", "two_pass", None, (32, 64), lengths=((30, 50), (50, 30)), heads=2, heads_kv=1,
        window=(20, -1), softcap=5.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_gradients_within_budget(name: str) -> None:
    within_budget(ask(CASES[name]), GRADIENTS)


@st.composite
def options(draw: Any) -> dict[str, Any]:
    """Options as users combine them, on sizes that the interpreter is quick with."""
    causal, groups = draw(st.booleans()), draw(st.sampled_from([1, 2]))
    side, length = st.integers(-1, 50), st.integers(0, 60)
    chosen = {
        "policy": draw(st.sampled_from(["ordered", "two_pass"])),
        "causal": causal,
        "tile": draw(st.sampled_from([(32, 64), (32, 32)])),
        "window": (draw(side), -1 if causal else draw(side)),
        "softcap": draw(st.sampled_from([0.0, 1.5, 30.0])),
        "dlse": draw(st.booleans()),
        "heads_kv": draw(st.sampled_from([1, 2])),
        "dim": 32,
        "dim_v": draw(st.sampled_from([32, 64])),
        "interleaved": draw(st.integers(0, 2)),
        "apart": True,
    }
    chosen["heads"] = chosen["heads_kv"] * groups
    kinds = ["ascending", "shortest_first"]
    if draw(st.booleans()):
        lengths = draw(st.lists(st.tuples(length, length), min_size=1, max_size=2))
        return {**chosen, "schedule": draw(st.sampled_from(kinds)), "lengths": lengths}
    sizes = draw(st.integers(1, 80)), draw(st.integers(1, 80))
    kind = draw(st.sampled_from([*kinds, "descending"]))
    return {**chosen, "schedule": kind, "seq_lens": sizes, "batch": draw(st.sampled_from([1, 2]))}


@given(options())
@settings(max_examples=7, deadline=None, derandomize=True, database=None)
def test_options_combined(chosen: dict[str, Any]) -> None:
    """In budget; and a sample in a batch, or a packed sequence, has the bits that it has alone."""
    answer = ask(chosen)
    within_budget(answer, GRADIENTS)
    assert answer["same_bits"]


def test_storing_turn_0_equals_adding_to_zeros() -> None:
    """Programs run in ticket order here, so the unordered sum has the ordered one's order, from a zeroed buffer."""
    ordered, unordered = (ask(CASES[f"full, ragged{policy}"]) for policy in ("", ", no turnstile"))
    assert ordered["dq"] == unordered["dq"]


def test_a_turn_that_has_not_come_is_seen() -> None:
    wrong = case("shortest_first", "ordered", (50, 77), (32, 64), wrong_turn=True)
    assert "has not come" in ask(wrong)["raised"]


def test_rows_that_see_no_key_give_zeros() -> None:
    """76 queries and one key, causal: only the last query sees it, so dV is its dO, and dQ and dK are nothing."""
    answer = ask(case("shortest_first", "ordered", (76, 1), (32, 64), heads=1, dim=32, dout=1.0))
    assert answer["largest"][2] == 1.0
    assert max(answer["largest"][:2]) < 1e-5


def test_kinds_without_a_closed_form_are_refused_for_packed_sequences() -> None:
    answer = ask(case("descending", "ordered", None, (32, 64), lengths=((40, 40),)))
    assert "descending has no closed form" in answer["raised"]
