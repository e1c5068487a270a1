"""One name for each Gluon builtin whose name or signature differs between Triton 3.6 and 3.9."""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# 3.6: thread_barrier, later: barrier.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
# 3.6 to 3.8: async_copy_*, 3.9: async_load and async_store (the old names raise there).
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = (
    tma.store_wait
)  # waits until the sources have been read, not until the writes are visible


@builtin
def tma_reduce_add(tensor_desc, coord, src, _semantic=None):
    """Add a shared-memory tile to global memory through the copy engine (``cp.reduce.async.bulk.tensor``, fp32)."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle
    )


@builtin
def permute_axes(value, order, _semantic=None):
    """``value.permute(order)`` for an order that a constexpr function computed."""
    return _semantic.permute(
        value, [_unwrap_if_constexpr(axis) for axis in _unwrap_if_constexpr(order)]
    )


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The same bytes of shared memory as another dtype, shape and layout (a private method up to 3.8, public in 3.9)."""
    arguments = [_unwrap_if_constexpr(value) for value in (dtype, shape, layout)]
    return _semantic.memdesc_reinterpret(
        memory, arguments[0], [_unwrap_if_constexpr(n) for n in arguments[1]], arguments[2]
    )
