"""Equal numerics key, equal bits: what a key leaves out changes nothing."""

from __future__ import annotations

import pytest
from gpu_cases import (
    BACKENDS,
    NUMERICS_CASES,
    backward_call,
    config_for,
    numerics_case,
    same_key_configs,
    torch,
)

from dash_kernels.device import current_gpu, environment
from dash_kernels.numerics import config_key, numerics_key, require_numerics
from dash_kernels.problem import Problem, supports
from dash_kernels.testing import GRADIENTS, assert_bits_equal, first_difference


@pytest.mark.parametrize(("kind", "mask", "head_dim"), NUMERICS_CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_keys_give_equal_bits(backend: str, kind: str, mask: str, head_dim: int) -> None:
    problem, config = numerics_case(kind, mask, head_dim, backend)
    gpu, here = current_gpu(), environment()
    if not supports(config, problem, gpu.capability):
        pytest.skip(supports(config, problem, gpu.capability).reason)
    key = config_key(config, dtype=problem.dtype, head_dim=head_dim, environment=here)
    expected = backward_call(problem, config)()
    others = same_key_configs(config, problem)
    assert len(others) >= 5
    for other in others:
        assert config_key(other, dtype=problem.dtype, head_dim=head_dim, environment=here) == key
        call = backward_call(problem, other)
        for grads in (call(), call(sm_margin=gpu.sms // 4)):
            for name, x, y in zip(GRADIENTS, grads, expected, strict=True):
                assert_bits_equal(x, y, f"{other.label()} {name}")


def test_other_visits_or_tiles_are_another_key_and_other_bits() -> None:
    problem = Problem("causal", 64, 777, batch=1, heads=2)
    here = environment()
    one, other = (
        config_for("ascending", "portable", 64),
        config_for("shortest_first", "portable", 64),
    )
    keys = {config_key(c, dtype="bfloat16", head_dim=64, environment=here) for c in (one, other)}
    assert len(keys) == 2
    assert first_difference(backward_call(problem, one)()[0], backward_call(problem, other)()[0])


def test_a_process_keeps_its_key() -> None:
    key = numerics_key()
    require_numerics(key)
    with torch.cuda.device(0):
        assert numerics_key(0) == key
