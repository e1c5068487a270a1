"""Gradients within the error budget: every kind, backend, mask and head_dim, ragged lengths, both dtypes."""

from __future__ import annotations

import pytest
from gpu_cases import (
    BACKENDS,
    KINDS,
    LENGTHS,
    MASKS,
    NAN_WORD,
    NARROWER,
    WIDE,
    config_for,
    exact_and_budgets,
    exact_gradients,
    skip_unless_supported,
    torch,
)

from dash_kernels import Config, Problem, attention, choose, verify
from dash_kernels.default_rule import default_config
from dash_kernels.device import current_gpu
from dash_kernels.testing import (
    GRADIENTS,
    error_budget,
    error_of,
    gradients,
    make_inputs,
    poisoned_outputs,
    torch_flash_gradients,
)


def assert_within_budget(problem: Problem, config: Config | None) -> None:
    exact, budgets = exact_and_budgets(problem)
    dout, q, k, v = make_inputs(problem)
    with poisoned_outputs():
        grads = gradients(dout, q, k, v, causal=problem.causal, config=config, allow_resident=True,
                          deterministic=config is None or config.deterministic)  # fmt: skip
    for name, grad in zip(GRADIENTS, grads, strict=True):
        error = error_of(grad, exact[name])
        assert error.within(budgets[name]), (
            f"{problem} {config}: {name} {error}, budget {budgets[name]}"
        )


def problems(mask: str, head_dim: int, dtype: str, head_dim_v: int = 0) -> list[Problem]:
    return [
        Problem(
            mask, head_dim, seq_len, dtype, batch=2, heads=3, seq_len_kv=seq_len_kv, head_dim_v=head_dim_v
        )
        for seq_len, seq_len_kv in LENGTHS
    ]  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_bf16(kind: str, backend: str, mask: str, head_dim: int) -> None:
    config = config_for(kind, backend, head_dim)
    for problem in problems(mask, head_dim, "bfloat16"):
        skip_unless_supported(config, problem)
        assert_within_budget(problem, config)


@pytest.mark.parametrize(("mask", "head_dim"), [("causal", 64), ("full", 128)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_fp16(kind: str, backend: str, mask: str, head_dim: int) -> None:
    config = config_for(kind, backend, head_dim)
    for problem in problems(mask, head_dim, "float16")[1:3]:
        skip_unless_supported(config, problem)
        assert_within_budget(problem, config)


@pytest.mark.parametrize(("mask", "head_dim"), [("full", 64), ("causal", 128)])
@pytest.mark.parametrize("policy", ["unordered", "two_pass"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_other_policies(backend: str, policy: str, mask: str, head_dim: int) -> None:
    config = config_for("ascending", backend, head_dim, policy)
    for problem in problems(mask, head_dim, "bfloat16"):
        skip_unless_supported(config, problem)
        assert_within_budget(problem, config)


@pytest.mark.parametrize("head_dims", WIDE, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_above_head_dim_128(kind: str, mask: str, head_dims: tuple[int, int]) -> None:
    config = config_for(kind, "hopper", head_dims[0], head_dim_v=head_dims[1])
    for problem in problems(mask, head_dims[0], "bfloat16", head_dims[1]):
        skip_unless_supported(config, problem)
        assert_within_budget(problem, config)


@pytest.mark.parametrize("head_dims", WIDE, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_unordered_above_head_dim_128(mask: str, head_dims: tuple[int, int]) -> None:
    config = config_for("ascending", "hopper", head_dims[0], "unordered", head_dims[1])
    for problem in problems(mask, head_dims[0], "bfloat16", head_dims[1]):
        skip_unless_supported(config, problem)
        assert_within_budget(problem, config)


@pytest.mark.parametrize("head_dims", [*WIDE, *NARROWER], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_the_default_config_of_head_dims_between_and_unlike(
    mask: str, head_dims: tuple[int, int]
) -> None:
    """Rows that the kernel's tiles are wider than, grouped heads, lengths that fill no tile."""
    dim, dim_v = head_dims
    problem = Problem(
        mask, dim, 333, batch=2, heads=4, heads_kv=2, seq_len_kv=300, head_dim_v=dim_v
    )
    assert_within_budget(problem, default_config(problem, current_gpu().capability))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [8, 40, 104])
def test_other_head_dims_are_padded(head_dim: int, mask: str) -> None:
    assert_within_budget(Problem(mask, head_dim, 200, batch=1, heads=2), None)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("heads", "heads_kv"), [(16, 2), (6, 3), (5, 1)])
def test_grouped_heads(heads: int, heads_kv: int, mask: str) -> None:
    assert_within_budget(Problem(mask, 128, 260, batch=2, heads=heads, heads_kv=heads_kv), None)


def test_what_choose_answers_is_verified() -> None:
    problem = Problem("causal", 128, 1024, batch=2, heads=8)
    answer = verify(problem, runs=20)
    assert answer.config == choose(problem).config
    assert answer.ok, answer


def test_verify_tells_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from dash_kernels.kernels import launch

    right = launch.backward

    def wrong(*args: object, **options: object) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = right(*args, **options)
        return dq, dk * 1.1, dv

    monkeypatch.setattr(launch, "backward", wrong)
    answer = verify(Problem("causal", 64, 256), runs=2)
    assert answer.bits_equal
    assert not answer.within_budget


def test_case_5_rows_that_see_no_key() -> None:
    q = torch.randn(1, 76, 1, 32, device="cuda", dtype=torch.float16).mul(3).requires_grad_()
    k, v = (
        torch.randn(1, 1, 1, 32, device="cuda", dtype=torch.float16).mul(3).requires_grad_()
        for _ in range(2)
    )
    out = attention(q, k, v, causal=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not out[:, :75].any()
    assert not dq.any()
    assert not dk.any()
    assert (dv == 1).all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_case_5_exactly_the_rows_that_see_no_key_have_zero_dq(head_dim: int) -> None:
    problem = Problem("causal", head_dim, 1024, batch=1, heads=2, seq_len_kv=256)
    dout, q, k, v = make_inputs(problem)
    with poisoned_outputs():
        dq, dk, dv = gradients(dout, q, k, v, causal=True)
    assert not dq[:, :768].any()
    assert (
        dq[:, 769:].abs().amax((0, 2, 3)).all()
    )  # row 768 sees one key only: its dQ is 0 but for rounding
    assert dk.isfinite().all()
    assert dv.isfinite().all()


def test_case_6_one_row() -> None:
    q, k, v = (
        torch.randn(1, 1, 1, 16, device="cuda", dtype=torch.float16).mul(3).requires_grad_()
        for _ in range(3)
    )
    out = attention(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert (dv == 1).all()
    assert max(dq.abs().max().item(), dk.abs().max().item()) <= 1e-3


@pytest.mark.parametrize(("batch", "seq_len", "seq_len_kv"), [(1, 0, 128), (0, 64, 64), (1, 64, 0)])
def test_case_6_empty_sizes(batch: int, seq_len: int, seq_len_kv: int) -> None:
    q = torch.zeros(batch, seq_len, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.zeros(
            batch, seq_len_kv, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        for _ in range(2)
    )
    out = attention(q, k, v, causal=True)
    for grad, x in zip(
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out)), (q, k, v), strict=True
    ):
        assert grad.shape == x.shape
        assert not grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seq_len", [77, 127, 129, 1023])
def test_case_7_memory_past_the_end_is_never_read(seq_len: int, backend: str) -> None:
    config = config_for("ascending", backend, 64)
    skip_unless_supported(config, Problem("full", 64, seq_len))
    generator = torch.Generator("cuda").manual_seed(seq_len)

    def surrounded() -> torch.Tensor:
        whole = torch.full((1, seq_len + 512, 2, 64), NAN_WORD, device="cuda", dtype=torch.int32)
        whole = whole.view(torch.bfloat16)[..., :64].contiguous()
        inner = whole[:, 256 : 256 + seq_len]
        inner.copy_(
            torch.randn(inner.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        )
        return inner

    dout, q, k, v = (surrounded() for _ in range(4))
    q.mul_(5)
    k.mul_(5)
    exact = exact_gradients(dout, q, k, v, causal=False)
    peer = torch_flash_gradients(dout, q, k, v, causal=False, scale=0.125)
    for x in (q, k, v):
        x.requires_grad_()
    grads = gradients(dout, q, k, v, config=config)
    for name, grad, truth, theirs in zip(GRADIENTS, grads, exact, peer, strict=True):
        assert error_of(grad, truth).within(error_budget(truth, theirs)), name


@pytest.mark.parametrize(("mask", "head_dim"), [("causal", 128), ("full", 64)])
def test_case_8_strides_change_no_bit(mask: str, head_dim: int) -> None:
    problem = Problem(mask, head_dim, 300, batch=2, heads=4)
    dout, q, k, v = (x.detach() for x in make_inputs(problem))

    def run(dout: torch.Tensor, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients(dout, *(x.detach().requires_grad_() for x in qkv), causal=problem.causal)

    def same(inputs: tuple[torch.Tensor, ...]) -> None:
        got, expected = run(*inputs), run(*(x.contiguous() for x in inputs))
        for name, x, y in zip(GRADIENTS, got, expected, strict=True):
            assert torch.equal(x, y), name

    same(
        (torch.ones((), device="cuda", dtype=q.dtype).expand(q.shape), q, k, v)
    )  # out.sum().backward()
    same((torch.cat([dout, dout], dim=-1)[..., :head_dim], q, k, v))
    same((torch.cat([dout, dout], dim=0)[1:3], q, k, v))
    same((dout.transpose(1, 2).contiguous().transpose(1, 2), q, k, v))  # dO in (B, H, S, D)
    same((dout, q, k.transpose(2, 3).contiguous().transpose(2, 3), v))
    same((dout, q, k, v[:, :, :1].expand(v.shape)))
    qkv = torch.stack([q, k, v], dim=2)
    same((dout, *qkv.unbind(2)))
    wide = torch.cat([q, q], dim=-1).flatten(0, 2)
    odd = torch.empty(wide.numel() + 1, device="cuda", dtype=q.dtype)[1:].view_as(wide).copy_(wide)
    same((dout, odd.view(*q.shape[:3], -1)[..., :head_dim], k, v))  # base not on 16 bytes
