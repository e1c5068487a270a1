"""The forward on Hopper: which shapes the Gluon kernel runs, how it cuts them, and its launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dash_kernels.kernels.forward_hopper_kernel import (
    BAND,
    CAUSAL_MASK,
    NO_MASK,
    TAIL_MASK,
    forward_main,
)

if TYPE_CHECKING:
    from torch import Tensor

LOG2E = 1.4426950408889634
SECTION_BYTES = 32 << 20  # keys and values that Q tiles in flight share: well under L2
GLUON_DTYPES = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}


@dataclass(frozen=True)
class ForwardTile:
    """How a forward is cut: ``consumers`` bands of 64 query rows a CTA, KV tiles of ``block_n`` keys in ``stages``."""

    consumers: int
    block_n: int
    stages: int
    turns: bool = True

    @property
    def block_m(self) -> int:
        return self.consumers * BAND.value


TILES = {64: ForwardTile(2, 128, 4), 128: ForwardTile(2, 128, 2)}

_counters: dict[tuple[int, int], Tensor] = {}


def supports_forward(
    head_dim: int, head_dim_v: int, dtype: Any, capability: tuple[int, int],
    *, window: tuple[int, int] = (-1, -1), softcap: float = 0.0, packed: bool = False,
) -> str:  # fmt: skip
    """ "" when :func:`forward_hopper` runs such a forward, else the reason in a few words.

    It asks for nothing that differs between a sample alone and in a batch, so a sample's bits are the same in both.
    """
    if capability[0] != 9:
        return f"compute capability {capability[0]}.{capability[1]} is not 9.x"
    if head_dim not in TILES or head_dim_v != head_dim:
        return f"head_dim {head_dim} with head_dim_v {head_dim_v} is not 64 or 128 for both"
    if str(dtype) not in GLUON_DTYPES:
        return f"dtype {dtype} is not bf16 or fp16"
    if tuple(window) not in ((-1, -1), (-1, 0)):
        return f"window {tuple(window)} limits the past or shows the future"
    if softcap:
        return "it has no softcap"
    if packed:
        return "it has no packed sequences"
    return ""


def forward_hopper(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, sequences: Any = None, tile: ForwardTile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, Sq, H, D), contiguous, in q's dtype, and log-sum-exp (B, H, Sq), float32, natural log.

    q is (B, Sq, H, D), k and v (B, Sk, Hk, D) with H a multiple of Hk and D 64 or 128; CUDA, bf16 or fp16, no size
    zero, last dimension contiguous, rows 16-byte aligned; ``scale`` is positive. Causal is bottom-right aligned; a row
    that sees no key gives zeros and +inf. ``tile`` overrides the cut that head_dim decides.

    Raises ValueError for what it does not run (:func:`supports_forward`), before anything is launched.
    """
    import torch

    batch, seq_len, heads, head_dim = q.shape
    seq_len_kv, heads_kv = k.shape[1], k.shape[2]
    device = q.device
    capability, sms = _chip(device)
    reason = supports_forward(
        head_dim, v.shape[3], q.dtype, capability, window=window, softcap=softcap, packed=sequences is not None
    )  # fmt: skip
    if reason:
        raise ValueError(f"the Hopper forward cannot run this: {reason}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        strides = tensor.stride()
        if strides[3] != 1 or any(stride % 8 for stride in strides[:3]) or tensor.data_ptr() % 16:
            raise ValueError(
                f"{name} has strides {strides} or a base that is not 16-byte aligned: make it contiguous"
            )
    causal = causal or tuple(window) == (-1, 0)
    tile = tile or TILES[head_dim]
    band_layout, kv_layout = _layouts(tile.block_n, head_dim, GLUON_DTYPES[str(q.dtype)])
    mask = CAUSAL_MASK if causal else TAIL_MASK if seq_len_kv % tile.block_n else NO_MASK
    num_m = -(-seq_len // tile.block_m)
    total_heads, group = batch * heads, heads // heads_kv
    num_tiles = total_heads * num_m
    section = min(max(SECTION_BYTES // (seq_len_kv * head_dim * 4), 1) * group, total_heads)
    out = torch.empty((batch, seq_len, heads, head_dim), dtype=q.dtype, device=device)
    lse = torch.empty((batch, heads, seq_len), dtype=torch.float32, device=device)
    forward_main[(min(num_tiles, sms),)](
        _rows(q, BAND.value, band_layout), _rows(k, tile.block_n, kv_layout), _rows(v, tile.block_n, kv_layout),
        _rows(out, BAND.value, band_layout), lse, _counter(device),
        num_tiles, num_m, total_heads, heads, group, section, seq_len, seq_len_kv, scale * LOG2E,
        MASK=mask.value, CONSUMERS=tile.consumers, N=tile.block_n, D=head_dim, DV=head_dim, STAGES=tile.stages,
        TURNS=tile.turns, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out, lse


def forward_spec(head_dim: int, dtype: str, mask: str, tile: ForwardTile | None = None) -> Any:
    """The kernel as a launch on aligned tensors specialises it, for ``compile_spec``; mask full, causal or tail."""
    from dash_kernels.kernels.compile import KernelSpec

    tile = tile or TILES[head_dim]
    element = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    band_layout, kv_layout = _layouts(tile.block_n, head_dim, GLUON_DTYPES[f"torch.{dtype}"])
    band = f"tensordesc<{element}{[1, 1, BAND.value, head_dim]},{band_layout!r}>"
    kv = f"tensordesc<{element}{[1, 1, tile.block_n, head_dim]},{kv_layout!r}>"
    types = {
        "q_desc": band, "k_desc": kv, "v_desc": kv, "out_desc": band, "lse": "*fp32", "counter": "*i32",
        "scale_log2": "fp32",
    }  # fmt: skip
    masks = {"full": NO_MASK, "causal": CAUSAL_MASK, "tail": TAIL_MASK}
    constexprs = {
        "MASK": masks[mask].value, "CONSUMERS": tile.consumers, "N": tile.block_n, "D": head_dim, "DV": head_dim,
        "STAGES": tile.stages, "TURNS": tile.turns,
    }  # fmt: skip
    names = forward_main.arg_names
    signature = {
        name: "constexpr" if name in constexprs else types.get(name, "i32") for name in names
    }
    attrs = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] == "*"
    }
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return KernelSpec(forward_main, signature, constexprs, options, attrs)


@functools.cache
def _chip(device: Any) -> tuple[tuple[int, int], int]:
    import torch

    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


@functools.cache
def _layouts(block_n: int, head_dim: int, dtype: Any) -> tuple[Any, Any]:
    swizzled = gl.NVMMASharedLayout.get_default_for
    return swizzled([1, 1, BAND.value, head_dim], dtype), swizzled([1, 1, block_n, head_dim], dtype)


def _rows(tensor: Tensor, block: int, layout: Any) -> Any:
    """Descriptor of a (B, S, H, D) tensor in tiles of ``block`` rows of one head; rows past S read as zeros."""
    batch, seq_len, heads, head_dim = tensor.shape
    # A dimension of one entry may have any stride in torch; the copy engine wants a multiple of 16 bytes.
    strides = [tensor.stride(axis) if tensor.shape[axis] > 1 else head_dim for axis in (0, 2, 1)]
    return TensorDescriptor(
        tensor, [batch, heads, seq_len, head_dim], [*strides, 1], [1, 1, block, head_dim], layout
    )


def _counter(device: Any) -> Tensor:
    """The zero that a launch on the current stream draws its tiles from and leaves a zero.

    One a stream: launches on a stream follow each other. A captured graph gets its own, cleared by the graph, since it
    may be replayed on any stream.
    """
    import torch

    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return counter
