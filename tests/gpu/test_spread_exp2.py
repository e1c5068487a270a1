"""The exponentials that the FMA units work out, beside those of the special-function units."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
gluon = pytest.importorskip("triton.experimental.gluon")
gl = gluon.language

from dash_kernels.kernels.spread_exp2 import VALUES, spread_exp2  # noqa: E402

BLOCK = 1024
LAYOUT = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))


@gluon.jit
def exp2_kernel(x, y, BLOCK: gl.constexpr):
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, LAYOUT)
    gl.store(y + at, spread_exp2(gl.load(x + at)))


def exp2(values: list[float]) -> list[tuple[float, ...]]:
    """Of each value, what each of the VALUES registers of a thread that go together gives."""
    count = VALUES.value
    x = torch.tensor(values, device="cuda").repeat_interleave(count)
    padded = torch.zeros(-(-x.numel() // BLOCK) * BLOCK, device="cuda")
    padded[: x.numel()] = x
    y = torch.empty_like(padded)
    exp2_kernel[(padded.numel() // BLOCK,)](padded, y, BLOCK, num_warps=4)
    found: list[tuple[float, ...]] = list(map(tuple, y[: x.numel()].view(-1, count).tolist()))
    return found


def test_every_register_is_near_enough() -> None:
    values = torch.linspace(-125.9, 1.0, 40_001).tolist()
    for value, found in zip(values, exp2(values), strict=True):
        assert all(abs(y / 2.0**value - 1) < 4e-6 + 2e-7 * abs(value) for y in found), value


def test_whole_numbers_are_powers_of_two() -> None:
    values = [float(n) for n in range(-126, 2)]
    for value, found in zip(values, exp2(values), strict=True):
        assert found[-1] == 2.0**value


def test_what_is_masked_is_zero_and_what_is_no_number_stays_none() -> None:
    masked, deep, none = exp2([-math.inf, -1e30, math.nan])
    assert set(masked) == set(deep) == {0.0}
    assert all(map(math.isnan, none))
