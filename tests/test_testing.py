"""Error budgets of options: what is compared with what, and that they tell a right gradient from a wrong one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dash_kernels import reference, testing
from dash_kernels.problem import Problem
from dash_kernels.schedules import TileGrid, build
from dash_kernels.testing import (
    GRADIENTS,
    budgets_of,
    error_of,
    make_inputs,
    packed_starts,
    problem_options,
    torch_flash_gradients,
    torch_flash_runs,
)

SHAPE: dict[str, Any] = {"mask": "causal", "head_dim": 32, "seq_len": 70, "heads": 2}


def within(grads: tuple[Any, ...], exact: dict[str, Any], budgets: dict[str, Any]) -> list[bool]:
    return [
        error_of(grad, exact[name]).within(budgets[name])
        for name, grad in zip(exact, grads, strict=True)
    ]


@pytest.mark.parametrize(
    ("changes", "forgotten"),
    [
        ({"window_left": 9}, "window"),
        ({"mask": "full", "window_left": 5, "window_right": 3, "seq_len_kv": 90}, "window"),
        ({"softcap": True, "head_dim_v": 16}, "softcap"),
        ({"varlen": True, "batch": 3, "heads_kv": 1}, "cu_seqlens"),
        ({"varlen": True, "batch": 2, "seq_len_kv": 40, "softcap": True}, "softcap"),
    ],
    ids=str,
)
def test_budgets_hold_roundings_and_no_forgotten_option(
    changes: dict[str, Any], forgotten: str
) -> None:
    problem = Problem(**SHAPE | changes)
    dout, q, k, v = (x.detach() for x in make_inputs(problem, device="cpu"))
    _, how = problem_options(problem, "cpu")
    exact, budgets = budgets_of(dout, q, k, v, **how)
    assert tuple(exact) == GRADIENTS
    rounded = tuple(x.to(q.dtype) for x in exact.values())
    assert within(rounded, exact, budgets) == [True] * 3
    without = {name: value for name, value in how.items() if name != forgotten}
    if forgotten == "cu_seqlens":  # all rows as one sequence
        wrong = [
            x[0]
            for x in reference.attention_backward(*(x[None] for x in (dout, q, k, v)), **without)
        ]
    elif problem.varlen:
        starts = without.pop("cu_seqlens")
        wrong = list(reference.packed_gradients(dout, q, k, v, *starts, **without)[:3])
    else:
        wrong = list(reference.attention_backward(dout, q, k, v, **without))
    assert within(tuple(wrong), exact, budgets) == [False] * 3


def test_sinks_and_gradients_through_lse_have_budgets() -> None:
    problem = Problem(**SHAPE | {"varlen": True, "batch": 3})
    dout, q, k, v = (x.detach() for x in make_inputs(problem, device="cpu"))
    _, how = problem_options(problem, "cpu")
    sink, dlse = torch.tensor([0.5, 2.0]), torch.randn(2, q.shape[0])
    exact, budgets = budgets_of(dout, q, k, v, sink=sink, dlse=dlse, **how)
    assert tuple(exact) == (*GRADIENTS, "dsink")
    rounded = tuple(x.to(q.dtype) for x in exact.values())
    assert within(rounded, exact, budgets) == [True] * 4
    plain, _ = budgets_of(dout, q, k, v, dlse=dlse, **how)
    assert within(tuple(plain.values()), {x: exact[x] for x in GRADIENTS}, budgets) == [False] * 3


def test_a_schedule_run_tile_by_tile_is_in_budget() -> None:
    """The stand-in peer rounds where a kernel does: twice its error is enough for one, and 8 times less is not."""
    grid = TileGrid(200, 200, 32, 32, True, 60)
    problem = Problem("causal", 64, 200, heads=2, heads_kv=1, window_left=60, softcap=True)
    dout, q, k, v = (x.detach() for x in make_inputs(problem, device="cpu"))
    _, how = problem_options(problem, "cpu")
    exact, budgets = budgets_of(dout, q, k, v, **how)
    grads = reference.run_schedule(
        build("shortest_first", grid), dout[0], q[0], k[0, :, 0], v[0, :, 0],
        scale=how["scale"], softcap=how["softcap"],
    )  # fmt: skip
    shaped = (grads[0][None], grads[1][None, :, None], grads[2][None, :, None])
    assert within(tuple(x.to(q.dtype) for x in shaped), exact, budgets) == [True] * 3
    for name, grad in zip(GRADIENTS, shaped, strict=True):
        assert error_of(grad, exact[name]).relative > budgets[name].relative / 8


def test_packed_starts_go_from_the_longest_down() -> None:
    starts_q, starts_k = packed_starts(
        Problem("full", 64, 100, batch=4, seq_len_kv=2, varlen=True), "cpu"
    )
    assert starts_q.tolist() == [0, 100, 175, 225, 250]
    assert starts_k.tolist() == [0, 2, 3, 4, 5]
    assert starts_q.dtype == torch.int32


class TestTorchFlash:
    def test_is_the_peer_of_what_it_computes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Windows and groups reach it; what it lacks, and the CPU, does not."""
        q, v = torch.empty(1, 8, 2, 64, device="meta"), torch.empty(1, 8, 1, 64, device="meta")
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: x.is_meta))
        assert torch_flash_runs(q, v, window=(3, 0), softcap=0.0)
        for lacking in ({"softcap": 2.0}, {"sink": q}, {"dlse": q}):
            assert not torch_flash_runs(q, v, **lacking)
        assert not torch_flash_runs(q, v[..., :32])
        assert not torch_flash_runs(torch.empty(1, 8, 2, 64), torch.empty(1, 8, 1, 64))
        asked = []

        def flash(*inputs: Any, **how: Any) -> tuple[Any, ...]:
            asked.append(how)
            return inputs[1:]

        monkeypatch.setattr(testing, "torch_flash_gradients", flash)
        testing.peer_gradients(q, q, v, v, causal=True, scale=1.0, window=(7, -1), softcap=0.0)
        assert asked == [{"causal": True, "scale": 1.0, "window": (7, -1)}]

    @pytest.mark.parametrize(
        ("causal", "window", "op", "sizes"),
        [
            (True, (-1, 0), "_scaled_dot_product_flash_attention", None),
            (False, (-1, -1), "_scaled_dot_product_flash_attention", None),
            (True, (7, 0), "_flash_attention_forward", (7, -1)),
            (False, (7, 3), "_flash_attention_forward", (7, 3)),
        ],
    )
    def test_calls_fit_the_operators(
        self, causal: bool, window: tuple[int, int], op: str, sizes: tuple[int, int] | None
    ) -> None:
        """On meta tensors the operators check their arguments and say the shapes of their results."""
        seen: dict[str, Any] = {}

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen[func._opname] = (args, kwargs)
                return func(*args, **(kwargs or {}))

        dout, q = (torch.empty(2, 40, 4, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
        k, v = (torch.empty(2, 50, 2, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
        with Watch():
            grads = torch_flash_gradients(dout, q, k, v, causal=causal, scale=0.125, window=window)
        assert [grad.shape for grad in grads] == [x.shape for x in (q, k, v)]
        if sizes is not None:
            for name in (op, "_flash_attention_backward"):
                how = seen[name][1]
                assert (how["window_size_left"], how["window_size_right"]) == sizes
                assert how["scale"] == 0.125
        assert op in seen
