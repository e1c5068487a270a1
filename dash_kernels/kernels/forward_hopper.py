"""The forward on Hopper: which shapes the Gluon kernel runs, how it cuts them, and its launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from triton.experimental.gluon import language as gl

from dash_kernels.kernels.compiled import current_stream, run_compiled
from dash_kernels.kernels.descriptors import filled, outer_axes, rows_template, tile_layout
from dash_kernels.kernels.forward_hopper_copy import BAND
from dash_kernels.kernels.forward_hopper_kernel import forward_main
from dash_kernels.kernels.hopper_shared import CAUSAL_MASK, NO_MASK, TAIL_MASK, WINDOW_MASK, pieces
from dash_kernels.kernels.runtime import LOG2E, on_device
from dash_kernels.kernels.sequences import Sequences, is_windowed, reaches
from dash_kernels.problem import hopper_dims

if TYPE_CHECKING:
    from torch import Tensor

SECTION_BYTES = 32 << 20  # keys and values that Q tiles in flight share: well under L2
GLUON_DTYPES = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}
MASKS = {"full": NO_MASK, "causal": CAUSAL_MASK, "tail": TAIL_MASK, "window": WINDOW_MASK}
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
LARGEST_HEAD_DIM = 256
MOST_STAGES = 4


@dataclass(frozen=True)
class ForwardTile:
    """How a forward is cut: ``consumers`` bands of 64 query rows a CTA, KV tiles of ``block_n`` keys in ``stages``."""

    consumers: int
    block_n: int
    stages: int

    @property
    def block_m(self) -> int:
        return self.consumers * BAND.value


LONG = 8192  # rows from which a causal walk is long
# By (columns of the kernel's Q tile, whether a Q tile's walk is long: all of K, or causal rows of a long sequence).
TILES = {
    (64, True): ForwardTile(3, 128, 3),
    (64, False): ForwardTile(2, 128, 4),
    (128, True): ForwardTile(2, 128, 2),
    (128, False): ForwardTile(2, 128, 2),
    (192, True): ForwardTile(2, 128, 2),
    (192, False): ForwardTile(2, 128, 2),
    (256, True): ForwardTile(2, 64, 2),
    (256, False): ForwardTile(2, 64, 2),
}


def supports_forward(
    head_dim: int, head_dim_v: int, dtype: Any, capability: tuple[int, int]
) -> str:  # fmt: skip
    """ "" when :func:`forward_hopper` runs such a forward, else the reason in a few words.

    It asks for nothing that differs between a sample alone and in a batch, so a sample's bits are the same in both.
    """
    if capability[0] != 9:
        return f"compute capability {capability[0]}.{capability[1]} is not 9.x"
    if max(head_dim, head_dim_v) > LARGEST_HEAD_DIM or head_dim % 8 or head_dim_v % 8:
        return f"head_dim {head_dim} with head_dim_v {head_dim_v} is not multiples of 8 up to {LARGEST_HEAD_DIM}"
    if str(dtype) not in GLUON_DTYPES:
        return f"dtype {dtype} is not bf16 or fp16"
    return ""


def forward_hopper(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, sequences: Sequences | None = None, tile: ForwardTile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, Sq, H, Dv), contiguous, in q's dtype, and log-sum-exp (B, H, Sq), float32, natural log.

    q is (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv) with H a multiple of Hk and D and Dv multiples of 8 up to
    256; CUDA, bf16 or fp16, no size zero, last dimension contiguous, no stride 0, rows 16-byte aligned; ``scale`` is
    positive. Causal and ``window`` (left, right), -1 for all, are bottom-right aligned; ``softcap`` caps scores at that
    by tanh, 0.0 not. A row that sees no key gives zeros and +inf. With ``sequences`` B is 1 and the rows are packed;
    rows that belong to no sequence are not written. ``tile`` overrides the cut that :data:`TILES` says.

    Raises ValueError for what it does not run (:func:`supports_forward`), before anything is launched.
    """
    import torch

    lengths = None
    if sequences is not None:
        lengths = sequences.cu_seqlens_q.shape[0] - 1, _power_of_two(sequences.max_seqlen_k)
    form = causal, window[0], window[1], softcap != 0, lengths, tile
    key = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, form
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(q, k, v, *form)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} has a base that is not 16-byte aligned: make it contiguous")
    device = q.device
    out = torch.empty(plan.out_shape, dtype=q.dtype, device=device)
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=device)
    starts, special = (None, None), None
    if sequences is not None:
        starts = sequences.cu_seqlens_q, sequences.cu_seqlens_k
        special = tuple(x.data_ptr() % 16 == 0 for x in starts)
    # With softcap, S' = cap tanh(x) with x = S scale / cap and tanh from exp2(2 x log2(e)).
    factors = (2 * LOG2E * scale / softcap, softcap * LOG2E) if softcap else (scale * LOG2E, 0.0)
    q_rows, k_rows, v_rows, out_rows = plan.templates
    with on_device(device):
        stream = current_stream(device)
        run_compiled(
            plan.compiled, forward_main, plan.ctas, stream,
            (
                filled(q_rows, q), filled(k_rows, k), filled(v_rows, v), filled(out_rows, out),
                lse, _counter(device, stream), *starts, *plan.numbers, *factors,
            ),
            plan.constexprs, OPTIONS, special=special,
        )  # fmt: skip
    return out, lse


@dataclass(frozen=True)
class _Plan:
    """All of a launch that does not depend on the tensors' contents or addresses."""

    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    templates: tuple[dict[str, Any], ...]  # of q, k, v and the output
    ctas: int
    numbers: tuple[int, ...]
    constexprs: dict[str, Any]
    compiled: dict[Any, Any] = field(default_factory=dict)


MOST_PLANS = 4096
_plans: dict[Any, _Plan] = {}


def _plan(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int, right: int, softcap: bool,
    lengths: tuple[int, int] | None, tile: ForwardTile | None,
) -> _Plan:  # fmt: skip
    """``lengths`` of packed sequences: how many there are, and the keys of the longest."""
    import torch

    batch, seq_len, heads, head_dim = q.shape
    seq_len_kv, heads_kv, head_dim_v = v.shape[1:]
    properties = torch.cuda.get_device_properties(q.device)
    reason = supports_forward(head_dim, head_dim_v, q.dtype, (properties.major, properties.minor))
    if not reason and k.shape != (batch, seq_len_kv, heads_kv, head_dim):
        reason = f"k is {tuple(k.shape)} with q {tuple(q.shape)} and v {tuple(v.shape)}"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        b, row, head, column = tensor.stride()
        if not reason and (column != 1 or (b | row | head) % 8):
            reason = f"{name} has strides {tensor.stride()}: make it contiguous"
    if reason:
        raise ValueError(f"the Hopper forward cannot run this: {reason}")
    packed, window = lengths is not None, (left, right)
    causal = causal or window == (-1, 0)
    if is_windowed(causal, window):
        mask = "window"
    else:
        mask = "causal" if causal else "full"
    cols, cols_v = hopper_dims(head_dim, head_dim_v)
    far = mask == "full" or (mask == "causal" and not packed and min(seq_len, seq_len_kv) >= LONG)
    tile = tile or TILES[cols, far]
    if tile.stages > MOST_STAGES:
        raise ValueError(
            f"the Hopper forward has barriers for {MOST_STAGES} stages; tile has {tile.stages}"
        )
    if mask == "full" and (packed or seq_len_kv % tile.block_n):
        mask = "tail"
    count, longest = lengths or (0, seq_len_kv)
    num_m = seq_len // tile.block_m + count if packed else -(-seq_len // tile.block_m)
    total_heads, group = batch * heads, heads // heads_kv
    section = min(max(SECTION_BYTES // (longest * (cols + cols_v) * 2), 1) * group, total_heads)
    dtype = GLUON_DTYPES[str(q.dtype)]

    def template(tensor: Tensor, rows: int, width: int) -> dict[str, Any]:
        return rows_template(tensor, rows, width, tile_layout(rows, width, dtype, packed), packed)

    out_shape = batch, seq_len, heads, head_dim_v
    out = torch.empty(out_shape, dtype=q.dtype, device=q.device)
    num_tiles = total_heads * num_m
    return _Plan(
        out_shape=out_shape,
        lse_shape=(batch, heads, seq_len),
        templates=(
            template(q, BAND.value, cols // pieces(cols)), template(k, tile.block_n, cols // pieces(cols)),
            template(v, tile.block_n, cols_v), template(out, BAND.value, cols_v),
        ),
        ctas=min(num_tiles, properties.multi_processor_count),
        numbers=(
            count, num_tiles, num_m, total_heads, heads, group, section, *reaches(causal, window), seq_len, seq_len_kv,
        ),
        constexprs=_constexprs(mask, softcap, packed, tile, cols, cols_v),
    )  # fmt: skip


def _power_of_two(length: int) -> int:
    """``length`` rounded up: packs of much the same lengths share a plan."""
    return 1 << max(length - 1, 0).bit_length()


def _constexprs(
    mask: str, softcap: bool, packed: bool, tile: ForwardTile, cols: int, cols_v: int
) -> dict[str, Any]:
    return {
        "MASK": MASKS[mask].value, "SOFTCAP": softcap, "PACKED": packed, "CONSUMERS": tile.consumers, "N": tile.block_n,
        "D": cols, "DV": cols_v, "STAGES": tile.stages,
    }  # fmt: skip


def forward_spec(
    head_dim: int, dtype: str, mask: str, *, head_dim_v: int = 0, softcap: bool = False, packed: bool = False,
    tile: ForwardTile | None = None,
) -> Any:  # fmt: skip
    """The kernel as a launch on aligned tensors specialises it, for ``compile_spec``.

    ``mask`` is full, causal, window, or (full, with a last KV tile that is cut) tail.
    """
    from dash_kernels.kernels.compile import KernelSpec

    cols, cols_v = hopper_dims(head_dim, head_dim_v or head_dim)
    tile = tile or TILES[cols, mask in ("full", "tail")]
    element = {"bfloat16": "bf16", "float16": "fp16"}[dtype]

    def rows_of(rows: int, width: int) -> str:
        layout = tile_layout(rows, width, GLUON_DTYPES[f"torch.{dtype}"], packed)
        return f"tensordesc<{element}{[*outer_axes(packed), rows, width]},{layout!r}>"

    types = {
        "q_desc": rows_of(BAND.value, cols // pieces(cols)), "k_desc": rows_of(tile.block_n, cols // pieces(cols)),
        "v_desc": rows_of(tile.block_n, cols_v), "out_desc": rows_of(BAND.value, cols_v), "lse": "*fp32", "counter": "*i32",
        "cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32", "scale_log2": "fp32", "cap_log2": "fp32",
    }  # fmt: skip
    constexprs = _constexprs(mask, softcap, packed, tile, cols, cols_v)
    if not packed:
        constexprs |= {"cu_seqlens_q": None, "cu_seqlens_k": None}
    names = forward_main.arg_names
    signature = {
        name: "constexpr" if name in constexprs else types.get(name, "i32") for name in names
    }
    attrs = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] == "*"
    }
    return KernelSpec(forward_main, signature, constexprs, OPTIONS, attrs)


_counters: dict[tuple[Any, int], Tensor] = {}


def _counter(device: Any, stream: int) -> Tensor:
    """The zero that a launch on ``stream``, which is current, draws its tiles from and leaves a zero.

    One a stream: launches on a stream follow each other. A captured graph gets its own, cleared by the graph, since it
    may be replayed on any stream.
    """
    import torch

    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device, stream
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return counter
