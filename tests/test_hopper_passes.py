"""The passes before and after the Hopper main kernel, in Triton's interpreter: delta and LSE, and dQ out of its flat layout."""

from __future__ import annotations

import pytest
from portable_process import ask, needs_interpreter

pytestmark = needs_interpreter
NOISE = 2e-5  # of a float32 sum of up to 208 products
# Columns of the Q tile in so many pieces, of V's, semaphores a Q tile, columns that the tensors have
TILES = pytest.mark.parametrize(
    ("block_m", "cols", "pieces", "cols_v", "semaphores", "width"),
    [
        (128, 64, 1, 64, 1, 64),
        (64, 128, 1, 128, 1, 96),
        (64, 64, 3, 128, 2, 128),
        (64, 64, 3, 64, 2, 48),
        (64, 256, 1, 256, 2, 208),
    ],
)


@TILES
def test_dq_leaves_its_flat_layout(
    block_m: int, cols: int, pieces: int, cols_v: int, semaphores: int, width: int
) -> None:
    """And a Q tile that nothing was added to is zeros, whatever memory held."""
    wide = min(pieces * cols, width + 64 * (pieces - 1))
    case = {"block_m": block_m, "cols": cols, "pieces": pieces, "semaphores": semaphores}
    answer = ask({"what": "flat", "width": wide, **case})
    assert answer == {"equal": True}


@pytest.mark.parametrize("folded", [False, True])
@TILES
def test_what_the_main_kernel_reads_is_ready(
    block_m: int, cols: int, pieces: int, cols_v: int, semaphores: int, width: int, folded: bool
) -> None:
    """Columns past the tensors' own, which hold NaN, count for nothing; all pieces and semaphores are cleared."""
    case = {
        "block_m": block_m,
        "cols": cols,
        "pieces": pieces,
        "semaphores": semaphores,
        "folded": folded,
    }
    answer = ask({"what": "prepare", "cols_v": cols_v, "width": width, **case})
    assert "raised" not in answer, answer
    assert answer.pop("error") < NOISE
    assert answer == {"past_the_end": True, "lse": True, "cleared": True}
