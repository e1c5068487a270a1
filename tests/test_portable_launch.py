"""What the portable launcher refuses and prepares before anything runs on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dash_kernels.problem import Config
from dash_kernels.schedules import Launch, TileGrid, build, pack

runtime: Any = None
torch: Any = None
SHIFT = Config(backend="portable", schedule="shift", signal="plain", launch_order="ascending")


@pytest.fixture(autouse=True)
def _modules() -> None:
    global runtime, torch
    torch = pytest.importorskip("torch")
    from dash_kernels.kernels import runtime


def test_waiting_on_later_ctas_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match="schedule shift .* needs 32 of them resident.*allow_resident=True"
    ):
        runtime.cooperative_grid(SHIFT, 32, 64, 132, 0, allow_resident=False)


@pytest.mark.parametrize(("sm_margin", "ctas"), [(0, 64), (80, 52)])
def test_a_cooperative_grid_leaves_the_margin(sm_margin: int, ctas: int) -> None:
    assert runtime.cooperative_grid(SHIFT, 32, 64, 132, sm_margin, allow_resident=True) == ctas


@pytest.mark.parametrize(
    ("sm_margin", "message"),
    [
        (101, "needs 32 resident CTAs, but 132 SMs less sm_margin=101 hold 31"),
        (-1, "sm_margin is -1"),
    ],
)
def test_a_grid_too_small_is_refused(sm_margin: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runtime.cooperative_grid(SHIFT, 32, 64, 132, sm_margin, allow_resident=True)


@pytest.mark.parametrize(
    ("schedule", "causal", "seq_len_kv", "capability", "loops"),
    [
        ("ascending", False, 512, (9, 0), 4),
        ("ascending", False, 500, (9, 0), 6),
        ("shortest_first", True, 512, (9, 0), 6),
        ("descending", True, 512, (8, 0), 3),
        ("descending", True, 512, (10, 0), 10),
        ("ascending", False, 512, (10, 0), 4),
    ],
)
def test_only_the_loops_with_steps_are_built(
    schedule: str, causal: bool, seq_len_kv: int, capability: tuple[int, int], loops: int
) -> None:
    grid = TileGrid(512, seq_len_kv, 64, 128, causal)
    packed = pack(build(schedule, grid), Launch())
    assert runtime.sections(packed, capability) == loops


def test_arrays_follow_one_another_as_the_kernel_cuts_them() -> None:
    grid = TileGrid(256, 256, 64, 128, True)
    launch = Launch("descending")
    arrays = runtime.device_arrays("shortest_first", 1, grid, launch, torch.device("cpu"))
    packed = pack(build("shortest_first", grid), launch)
    flat = arrays.tensor.tolist()
    assert (arrays.num_items, arrays.num_tiles, arrays.num_steps) == (2, 2, 6)
    assert flat[:2] == list(packed.item_order)
    assert flat[-12:] == [*packed.visit, *packed.turn]
    assert len(flat) == 2 + 3 + 5 * 2 + 2 * 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"v": (1, 8, 2, 128)}, "v is .1, 8, 2, 128."),
        ({"k": (1, 8, 3, 64)}, "k is .1, 8, 3, 64."),
        ({"lse": (1, 8, 2)}, "lse is .1, 8, 2.; it must be .1, 2, 8."),
        ({"dlse": (1, 2, 9)}, "dlse is .1, 2, 9.; it must be .1, 2, 8."),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    wrong: dict[str, tuple[int, ...]], message: str
) -> None:
    fitting = dict.fromkeys(("q", "k", "v", "dout", "out"), (1, 8, 2, 64))
    fitting |= dict.fromkeys(("lse", "dlse"), (1, 2, 8))
    plan = SimpleNamespace(config=Config(backend="portable", signal="plain"), shapes=fitting)
    tensors = {
        name: torch.zeros(shape, dtype=torch.float32 if "lse" in name else torch.float16)
        for name, shape in (fitting | wrong).items()
    }
    with pytest.raises(ValueError, match=message):
        runtime.check_tensors(plan, **tensors)
