"""A turn that never comes is an error that names head, tile and turn, and the next backward is right again."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from gpu_cases import BACKENDS, backward_call, config_for, skip_unless_supported, torch

from dash_kernels import Config, Problem
from dash_kernels.schedules import Launch, TileGrid
from dash_kernels.testing import GRADIENTS, assert_bits_equal

SECONDS = 0.3


@pytest.fixture(params=BACKENDS)
def planted(request: pytest.FixtureRequest) -> Iterator[Any]:
    """(call, plant): a backward with a short watchdog, and what spoils its last turn and returns (m_block, turn)."""
    from dash_kernels.kernels import runtime

    problem = Problem("causal", 64, 700, batch=1, heads=1)
    config: Config = config_for("ascending", request.param, 64)
    skip_unless_supported(config, problem)
    call = functools.partial(backward_call(problem, config), watchdog_seconds=SECONDS)
    call()
    arrays = runtime.device_arrays(
        config.schedule,
        config.group,
        TileGrid.for_config(problem, config),
        Launch.for_config(config),
        torch.device("cuda", torch.cuda.current_device()),
    )
    sound = arrays.tensor.clone()

    def plant() -> tuple[int, int]:
        arrays.tensor[-1] += 3
        return int(arrays.tensor[-1 - arrays.num_steps]), int(arrays.tensor[-1])

    yield call, plant, lambda: arrays.tensor.copy_(sound)
    arrays.tensor.copy_(sound)


def test_a_wrong_turn_is_named_by_the_next_call_and_only_once(planted: Any) -> None:
    from dash_kernels.kernels.launch import TurnTimeout

    call, plant, mend = planted
    right = call()
    m_block, turn = plant()
    dq, _, _ = call()
    torch.cuda.synchronize()
    assert dq.isnan().any()
    mend()
    with pytest.raises(TurnTimeout, match=rf"head 0, Q tile {m_block}: turn {turn} did not come"):
        call()
    for name, x, y in zip(GRADIENTS, call(), right, strict=True):
        assert_bits_equal(x, y, name)
