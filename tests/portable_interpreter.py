"""The portable kernels, and the Hopper backward's passes before and after its main one, under Triton's interpreter, a program of its own: TRITON_INTERPRET counts only at import.

Reads cases as JSON lines, prints one JSON line a case. The interpreter runs one CTA after another and knows no
assembly, so the turnstile is replaced by three functions of the same meaning: here a turn that has not come is an error.
"""

from __future__ import annotations

import json
import math
import sys
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl

import dash_kernels.kernels.cast_flat as flat_kernels
from dash_kernels.kernels import backward_portable as portable
from dash_kernels.kernels import forward_portable, runtime
from dash_kernels.kernels import portable_kernels as kernels
from dash_kernels.kernels import sequences as sequence_kernels
from dash_kernels.kernels.hopper_shared import (
    HEADER_WORDS,
    ORDERED,
    flat_order,
    half_order,
    unfolded_order,
)
from dash_kernels.kernels.sequences import Sequences, plan_sequences
from dash_kernels.problem import Config
from dash_kernels.schedules import Launch, TileGrid, default_launch

NAN = float("nan")
DTYPE = torch.float16
FLOAT32_NOISE = 2e-5  # of dP - delta, where the exact gradient is 0


def peek_turn(semaphore: Any) -> Any:
    return tl.load(semaphore)


def signal_turn(semaphore: Any, seen: Any, turn: Any) -> Any:
    tl.store(semaphore, tl.load(semaphore) + 1)
    return seen == turn


def wait_for_turn(came: Any, semaphore: Any, turn: Any, workspace: Any, bound_ns: Any) -> None:
    seen = int(tl.load(semaphore).handle.data.item())
    if seen != int(turn.handle.data.item()):
        raise RuntimeError(
            f"turn {int(turn.handle.data.item())} has not come: {seen} contributions"
        )


def replace_turnstile() -> None:
    for replacement in (peek_turn, signal_turn, wait_for_turn):
        setattr(kernels, replacement.__name__, replacement)


def replace_gluon() -> None:
    """What cast_flat takes from Gluon's compiler, by functions of the same meaning."""
    flat_kernels.permute_axes = lambda value, order: tl.permute(value, order)
    flat_kernels.bits = lambda count: [2] * count


def odd_strides(x: torch.Tensor) -> torch.Tensor:
    """``x`` inside a larger tensor whose other elements, those past its last row too, are NaN."""
    batch, length, heads, dim = x.shape
    room = torch.full((batch, length + 3, heads * 2, dim + 16), NAN, dtype=x.dtype)
    view = room[:, :length, ::2, :dim]
    view.copy_(x)
    return view


def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.empty as a hostile allocator fills it."""
    made = torch.zeros(*args, **kwargs)
    return made.fill_(NAN if made.is_floating_point() else 7)


def hidden_pairs(seq_len: int, seq_len_kv: int, causal: bool, window: list[int]) -> torch.Tensor:
    """(Sq, Sk): true where a query must not see a key; masks are aligned bottom-right."""
    left, right = window[0], 0 if causal else window[1]
    ahead = torch.arange(seq_len_kv)[None] - torch.arange(seq_len)[:, None] - (seq_len_kv - seq_len)
    return ((right >= 0) & (ahead > right)) | ((left >= 0) & (-ahead > left))


def gradients(
    q: Any, k: Any, v: Any, dout: Any, dlse: Any, case: dict[str, Any], dtype: torch.dtype
) -> Any:
    """out, LSE and the gradients in float64, with out, P, dS and the results rounded to ``dtype`` on the way."""
    scale, softcap = 1 / math.sqrt(q.shape[3]), case.get("softcap", 0.0)
    group = q.shape[2] // k.shape[2]
    q, k, v, dout = (x.double().permute(0, 2, 1, 3) for x in (q, k, v, dout))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores, slope = q @ k.mT * scale, 1.0
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
        slope = 1 - (scores / softcap) ** 2
    hidden = hidden_pairs(q.shape[2], k.shape[2], case["causal"], case.get("window", [-1, -1]))
    scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, -1)
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    p = torch.exp(scores - lse[..., None])
    out = p @ v
    delta = (out.to(dtype).double() * dout).sum(-1, keepdim=True) - dlse.double()[..., None]
    ds = p * (dout @ v.mT - delta) * slope
    p16, ds16 = p.to(dtype).double(), ds.to(dtype).double()
    found = [ds16 @ k * scale, ds16.mT @ q * scale, p16.mT @ dout]
    found[1:] = (x.unflatten(1, (-1, group)).sum(2) for x in found[1:])
    return out.permute(0, 2, 1, 3), lse, [x.permute(0, 2, 1, 3).to(dtype).double() for x in found]


def inputs(case: dict[str, Any]) -> tuple[list[torch.Tensor], Any]:
    """q, k, v, dout and dlse of a case, and its (q lengths, k lengths), one of each without packed sequences."""
    heads, dim = case.get("heads", 2), case.get("dim", 64)
    heads_kv, dim_v = case.get("heads_kv", heads), case.get("dim_v", dim)
    lengths = case.get("lengths", [case["seq_lens"]] if "seq_lens" in case else [])
    batch, rows, keys = case.get("batch", 1), sum(x for x, _ in lengths), sum(x for _, x in lengths)
    shapes = (batch, rows, heads, dim), (batch, keys, heads_kv, dim), (batch, keys, heads_kv, dim_v)
    tensors = [torch.randn(shape).to(DTYPE) for shape in (*shapes, (batch, rows, heads, dim_v))]
    dlse = torch.randn(batch, heads, rows) * bool(case.get("dlse"))
    return [*tensors, dlse], list(zip(*lengths, strict=True))


def each_sequence(
    tensors: list[torch.Tensor], lengths: Any, case: dict[str, Any], dtype: Any
) -> Any:
    """:func:`gradients` of each sequence, put together again."""
    found = []
    q, k, v, dout, dlse = tensors
    for q_end, k_end, rows, keys in zip(*map(accumulate, lengths), *lengths, strict=True):
        at, of = slice(q_end - rows, q_end), slice(k_end - keys, k_end)
        parts = q[:, at], k[:, of], v[:, of], dout[:, at], dlse[:, :, at]
        out, lse, grads = gradients(*parts, case, dtype)
        found.append((out, lse, *grads))
    out, lse, *grads = zip(*found, strict=True)
    return torch.cat(out, 1), torch.cat(lse, 2), [torch.cat(grad, 1) for grad in grads]


def backward(case: dict[str, Any]) -> dict[str, Any]:
    """Errors of dQ, dK and dV against float64, their budgets, their largest values, and the bytes of dQ.

    ``apart`` also runs every sample, or packed sequence, alone, and says whether its gradients have the same bits.
    """
    tensors, lengths = inputs(case)
    if "dout" in case:
        tensors[3].fill_(case["dout"])
    out, lse, exact = each_sequence(tensors, lengths, case, torch.float64)
    _, _, rounded = each_sequence(tensors, lengths, case, DTYPE)
    whole = [*tensors, out.to(DTYPE), lse.float()]
    found = launch(case, whole, lengths if "lengths" in case else None)
    answer = judged(found, exact, rounded)
    answer["largest"] = [x.abs().max().item() if x.numel() else 0.0 for x in found]
    answer["dq"] = found[0].numpy().tobytes().hex()
    if case.get("apart"):
        answer["same_bits"] = all(
            torch.equal(mine, alone)
            for sample in samples(whole, found, lengths)
            for mine, alone in zip(sample[1], launch(case, sample[0], None), strict=True)
        )
    return answer


def samples(whole: list[torch.Tensor], found: Any, lengths: Any) -> Any:
    """(inputs, gradients) of each sample of a batch, or of each packed sequence that has rows and keys."""
    q, k, v, dout, dlse, out, lse = whole
    dq, dk, dv = found
    for b in range(q.shape[0]):
        for q_end, k_end, rows, keys in zip(*map(accumulate, lengths), *lengths, strict=True):
            at = slice(b, b + 1), slice(q_end - rows, q_end)
            of = slice(b, b + 1), slice(k_end - keys, k_end)
            head_rows = at[0], slice(None), at[1]
            if rows and keys:
                given = q[at], k[of], v[of], dout[at], dlse[head_rows], out[at], lse[head_rows]
                yield given, (dq[at], dk[of], dv[of])


def launch(case: dict[str, Any], tensors: Any, lengths: Any) -> Any:
    """dQ, dK and dV by the portable kernels; ``lengths`` of packed sequences, or None."""
    q, k, v, dout, dlse, out, lse = tensors
    config = Config(
        backend="portable",
        schedule=case["schedule"],
        policy=case["policy"],
        signal="plain",
        block_m=case["tile"][0],
        block_n=case["tile"][1],
    )
    window = tuple(case.get("window", (-1, -1)))
    longest = [max(*x, 1) for x in lengths] if lengths else (q.shape[1], k.shape[1])
    grid = TileGrid(*longest, *case["tile"], case["causal"], *window)
    launch = Launch(default_launch(config.schedule).order, case.get("interleaved", 1))
    arrays = runtime.device_arrays(config.schedule, 1, grid, launch, torch.device("cpu"))
    if case.get("wrong_turn"):
        arrays.tensor[-1] += 1
    kv_heads = k.shape[0] * k.shape[2]
    tickets = arrays.num_items * kv_heads
    persistent = case.get("persistent", False)
    plan = SimpleNamespace(  # what launch_portable reads of a runtime.Plan, which wants a GPU
        config=config, grid=grid, arrays=arrays, interleaved=launch.interleaved(kv_heads),
        ctas=min(3, tickets) if persistent else tickets, cooperative=persistent,
    )  # fmt: skip
    return portable.launch_portable(
        plan, *(odd_strides(x) for x in (dout, q, k, v, out)), lse.contiguous(), 1 / math.sqrt(q.shape[3]), 10**10,
        window=window, softcap=case.get("softcap", 0.0), sequences=sequences_of(lengths) if lengths else None,
        dlse=dlse.contiguous() if case.get("dlse") else None,
    )  # fmt: skip


def forward(case: dict[str, Any]) -> dict[str, Any]:
    """Errors of out and LSE against float64 and their budgets; LSE must be +inf exactly where it has to be."""
    tensors, lengths = inputs(case)
    out, lse, _ = each_sequence(tensors, lengths, case, torch.float64)
    forward_portable.forward_tiles = lambda head_dim, capability: forward_portable.ForwardTiles(
        *case["tile"], 4, 2
    )
    options = {
        "causal": case["causal"],
        "scale": 1 / math.sqrt(tensors[0].shape[3]),
        "window": tuple(case.get("window", (-1, -1))),
        "softcap": case.get("softcap", 0.0),
    }
    run = forward_portable.forward_portable
    packed = sequences_of(lengths) if "lengths" in case else None
    found, found_lse = run(*map(odd_strides, tensors[:3]), **options, sequences=packed)
    none = lse == math.inf
    if not torch.equal(none, found_lse == math.inf):
        raise AssertionError("LSE is +inf for other rows than those that see no key")
    lse, found_lse = (x.masked_fill(none, 0.0) for x in (lse, found_lse))
    rounded = out.to(DTYPE).double(), lse.to(DTYPE).double()
    answer = judged((found, found_lse), (out, lse), rounded)
    if case.get("apart"):
        grads = found, *tensors[1:3]  # samples() cuts three: out, and two that are not looked at
        answer["same_bits"] = all(
            torch.equal(mine, run(*map(odd_strides, given[:3]), **options)[0])
            for given, (mine, _, _) in samples([*tensors, out, lse], grads, lengths)
        )
    return answer


def sequences_of(lengths: Any) -> Sequences:
    starts = [torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in lengths]
    return Sequences(*starts, *(max(x, default=0) for x in lengths))


def judged(found: Any, exact: Any, rounded: Any) -> dict[str, Any]:
    """Errors against float64, and their budgets: twice what rounding to DTYPE on the way costs, an ulp, and float32's noise."""
    errors, budgets = [], []
    for mine, wanted, reference in zip(found, exact, rounded, strict=True):
        errors.append((mine.double() - wanted).abs().max().item() if mine.numel() else 0.0)
        size = wanted.abs().max().item() if mine.numel() else 0.0
        off = (reference - wanted).abs().max().item() if mine.numel() else 0.0
        budgets.append(2 * off + torch.finfo(DTYPE).eps * size + FLOAT32_NOISE)
    return {"errors": errors, "budgets": budgets}


def plan(case: dict[str, Any]) -> dict[str, Any]:
    """The tiles of packed sequences as the device finds them."""
    sequence_kernels.CHUNK = case.get(
        "chunk", 32
    )  # of the kernel's 512: more is a matter of time here
    sequences = sequences_of(list(zip(*case["lengths"], strict=True)))
    totals = [int(starts[-1]) for starts in sequences[:2]]
    found = plan_sequences(
        sequences, *totals, block_m=case["tile"][0], block_n=case["tile"][1], causal=case["causal"],
        window=tuple(case["window"]), descending=case["descending"],
    )  # fmt: skip
    kv_tiles, q_tiles, *rest = found.counts.tolist()
    return {
        "kv_tiles": found.kv_tiles[:kv_tiles].tolist(),
        "q_tiles": found.q_tiles[:q_tiles].tolist(),
        "rest": rest,
        "bounds": [found.max_kv_tiles, found.max_q_tiles],
    }


def flat(case: dict[str, Any]) -> dict[str, Any]:
    """Whether cast_flat gives dQ of a flat accumulator, zeros where a Q tile's first semaphore counts nothing."""
    m, cols, pieces = case["block_m"], case["cols"], case["pieces"]
    batch, heads, seq_len, width = 2, 2, 2 * m - 20, case["width"]
    tiles = batch * heads * 2
    order = half_order(cols) if pieces > 1 else flat_order(m, cols)
    rows = torch.randn(tiles, m, pieces, cols)
    axes = [1 + axis for axis in order]
    cut = [rows[:, :, i].reshape(tiles, *[2] * len(axes)).permute(0, *axes) for i in range(pieces)]
    accumulated = torch.stack([piece.reshape(tiles, m * cols) for piece in cut], 1)
    counted = torch.ones(tiles, case["semaphores"], dtype=torch.int32)
    counted[1, 0] = 0
    accumulated[1], rows[1] = NAN, 0.0
    header = torch.zeros(HEADER_WORDS.value, dtype=torch.int32)
    dq = poisoned(batch, seq_len, heads, width, dtype=DTYPE)
    flat_kernels.cast_flat[(tiles,)](
        accumulated, dq, torch.cat([header, counted.flatten()]), None, None, heads, 2, seq_len, 0.5,
        POLICY=ORDERED.value, BLOCK_M=m, HEAD_DIM=cols, PIECES=pieces, WIDTH=width, SEMAPHORES=case["semaphores"],
    )  # fmt: skip
    wanted = (rows * 0.5).reshape(batch, heads, 2 * m, pieces * cols).transpose(1, 2)
    return {"equal": torch.equal(dq, wanted[:, :seq_len, :, :width].to(DTYPE))}


def unfolded(rows: torch.Tensor, m: int) -> torch.Tensor:
    """What a kernel makes of folded rows once it has loaded them."""
    count = m.bit_length() - 1
    order = [0, *(1 + axis for axis in unfolded_order(m))]
    return rows.reshape(-1, *[2] * count).permute(order).reshape(rows.shape)


def prepare(case: dict[str, Any]) -> dict[str, Any]:
    """What prepare_tiles leaves for the Hopper kernel: error of delta, and whether LSE, dQ and semaphores are as they must be."""
    m, width, heads, num_m = case["block_m"], case["width"], 2, 2
    seq_len, tiles = 2 * m - 20, heads * num_m
    out, dout = (odd_strides(torch.randn(1, seq_len, heads, width).to(DTYPE)) for _ in range(2))
    lse = torch.randn(1, heads, seq_len)
    lse2, delta = (poisoned(heads, num_m * m, dtype=torch.float32) for _ in range(2))
    dq = poisoned(tiles, case["pieces"], m * case["cols"], dtype=torch.float32)
    words = poisoned(HEADER_WORDS.value + tiles * case["semaphores"], dtype=torch.int32)
    kernels.prepare_tiles[(tiles,)](
        out, dout, lse, lse2, delta, dq, words, *out.stride()[:3], *dout.stride()[:3], heads, num_m, seq_len,
        ZERO_DQ=True, BLOCK_M=m, HEAD_DIM=case["cols"], HEAD_DIM_V=case["cols_v"], WIDTH=width,
        SEMAPHORES=case["semaphores"], PIECES=case["pieces"], FOLDED=case["folded"],
    )  # fmt: skip
    if case["folded"]:
        lse2, delta = unfolded(lse2, m), unfolded(delta, m)
    wanted = (out.double() * dout.double()).sum(-1)[0].T
    return {
        "error": (delta[:, :seq_len].double() - wanted).abs().max().item(),
        "past_the_end": torch.equal(lse2[:, seq_len:], torch.full((heads, 20), math.inf)),
        "lse": torch.allclose(lse2[:, :seq_len], lse[0] / math.log(2)),
        "cleared": not dq.any() and not words[HEADER_WORDS.value :].any(),
    }


def main() -> None:
    replace_turnstile()
    replace_gluon()
    torch.empty = poisoned
    for line in sys.stdin:
        torch.manual_seed(0)
        case = json.loads(line)
        try:
            asked = {
                "backward": backward,
                "forward": forward,
                "plan": plan,
                "flat": flat,
                "prepare": prepare,
            }
            answer = asked[case.get("what", "backward")](case)
        except Exception as error:  # whatever the interpreter makes of it, the test reads it
            answer = {"raised": repr(error) + repr(error.__cause__)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
