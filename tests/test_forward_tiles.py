"""The Hopper forward's bookkeeping, run as Python: which KV tiles a Q tile walks and masks, and whose Q tile a slot is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("triton")

from dash_kernels.kernels import forward_hopper_copy as module  # noqa: E402
from dash_kernels.kernels.hopper_shared import (  # noqa: E402
    CAUSAL_MASK,
    NO_MASK,
    TAIL_MASK,
    WINDOW_MASK,
)
from dash_kernels.kernels.sequences import is_windowed, reaches  # noqa: E402

M, N = 128, 128
STAGES = 3


def number(value: Any) -> Any:
    return getattr(value, "value", value)


class Array(np.ndarray):
    def to(self, dtype: Any) -> Any:
        return self.astype(int)


class Pointer:
    def __init__(self, values: list[int], at: Any = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.values, self.at + offset)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the producer wrote and loaded, its Triton functions replaced by Python's."""
    seen: dict[str, Any] = {"words": {}, "loads": []}
    language = SimpleNamespace(
        constexpr=module.gl.constexpr,
        static_range=lambda n: range(number(n)),
        minimum=lambda a, b: np.minimum(number(a), number(b)),
        maximum=lambda a, b: np.maximum(number(a), number(b)),
        arange=lambda begin, end, layout: np.arange(begin, number(end)).view(Array),
        sum=lambda x, axis: int(x.sum()),
        load=lambda pointer: np.asarray(pointer.values)[pointer.at],
        int32=None,
        BlockedLayout=lambda *_: None,
    )
    monkeypatch.setattr(module, "gl", language)
    quiet = SimpleNamespace(**dict.fromkeys(("wait", "arrive", "expect"), lambda *_, **__: None))
    monkeypatch.setattr(module, "mbarrier", quiet)
    monkeypatch.setattr(module, "arrive_and_wait", quiet.wait)
    monkeypatch.setattr(module, "PROBES", 128)
    monkeypatch.setattr(
        module, "write_word", lambda w, tile, word, value: seen["words"].update({number(word): int(number(value))})
    )  # fmt: skip
    for load in ("load_rows", "load_pieces"):
        monkeypatch.setattr(
            module, load,
            lambda desc, b, h, row, rows, end, *_: seen["loads"].append((desc, int(number(row)))),
        )  # fmt: skip
    return seen


MASKS = [
    (False, (-1, -1)), (True, (-1, -1)), (True, (0, -1)), (True, (100, -1)), (True, (300, -1)), (False, (70, 40)),
    (False, (-1, 33)), (False, (500, -1)), (False, (0, 0)), (False, (128, 128)),
]  # fmt: skip


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize(
    ("rows", "keys"), [(512, 512), (333, 333), (127, 300), (700, 129), (1, 1), (65, 1000), (9, 0)]
)
def test_a_walk_shows_each_row_its_keys(
    rows: int, keys: int, causal: bool, window: tuple[int, int], sent: dict[str, Any]
) -> None:
    left, right = reaches(causal, window)
    mask = (
        WINDOW_MASK if is_windowed(causal, window)
        else CAUSAL_MASK if causal else TAIL_MASK if keys % N or not keys else NO_MASK
    )  # fmt: skip
    bars = SimpleNamespace(index=lambda _: None)
    memory = SimpleNamespace(index=lambda _: None)
    for row in range(0, rows, M):
        sent["words"].clear()
        sent["loads"].clear()
        steps = module.send_tile.fn(
            "q", "k", "v", memory, memory, memory, None, bars, bars, bars, 0, 0, 0, 0, 0, row, rows, keys, 0, 0, 0, left, right,
            mask, False, 2, N, 64, 64, STAGES,
        )  # fmt: skip
        count, masked, plain_end, reach, limit = (
            sent["words"].get(number(word), 0)
            for word in (module.COUNT, module.MASKED, module.PLAIN_END, module.REACH, module.LIMIT)
        )
        first = {desc: next(at for name, at in sent["loads"] if name == desc) for desc in "kv"}
        walked = [at for name, at in sent["loads"] if name == "k"]
        assert walked == [at for name, at in sent["loads"] if name == "v"]
        assert walked == list(range(first["k"], first["k"] - count * N, -N))
        assert steps == count >= 1
        query = np.arange(row, min(row + M, rows))[:, None]
        shown = np.zeros((len(query), max(keys, 0) + N), bool)
        for place, at in enumerate(walked):
            key = np.arange(N)[None, :]
            ends = reach + place * N + (query - row if mask in (CAUSAL_MASK, WINDOW_MASK) else 0)
            visible = np.ones((len(query), N), bool)
            begins = ends - (left + right + 1)
            if place == 0 and mask == WINDOW_MASK:
                ends = np.minimum(ends, limit)
            plain = max(masked, 1) <= place < (plain_end if mask == WINDOW_MASK else count)
            if mask != NO_MASK and not plain:
                visible = key < ends
                if mask == WINDOW_MASK:
                    visible = visible & (key >= begins)
                visible = np.broadcast_to(visible, (len(query), N))
            shown[:, at : at + N] |= visible
        place_of = query + keys - rows
        key = np.arange(shown.shape[1])[None, :]
        expected = (key < keys) & (key >= place_of - left) & (key <= place_of + right)
        assert (shown == expected).all()


def sequence_of(slot: int, starts: Any) -> int:
    return int(module.sequence_of.fn(slot, Pointer(starts), len(starts) - 1, M))


@pytest.mark.parametrize(
    "lengths",
    [[1], [300, 0, 1, 127, 700, 64], [i * 37 % 41 for i in range(300)], [0, 0, 5], [129] * 128],
)
def test_every_q_tile_of_a_pack_has_one_slot(lengths: list[int], sent: dict[str, Any]) -> None:
    starts = np.cumsum([0, *lengths])
    found = []
    for slot in range(int(starts[-1]) // M + len(lengths)):
        sequence = sequence_of(slot, starts)
        row = (slot - starts[sequence] // M - sequence) * M
        if row < lengths[sequence]:
            found.append((sequence, int(row)))
    assert found == [(i, row) for i, length in enumerate(lengths) for row in range(0, length, M)]


def test_a_search_of_several_rounds(sent: dict[str, Any]) -> None:
    starts = np.cumsum([0] + [1, 0, 200, 3] * 5000)
    for sequence in range(0, 20000, 97):
        assert sequence_of(int(starts[sequence]) // M + sequence, starts) == sequence
