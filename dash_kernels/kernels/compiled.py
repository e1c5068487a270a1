"""Launches of kernels that are compiled already, at little cost to the host."""

from __future__ import annotations

from typing import Any

import triton
from triton import knobs


class Address:
    """A place in an allocation, which Triton takes for a tensor of ``dtype``: views cost the host more than they tell it."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: Any) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


def current_stream(device: Any) -> int:
    """The handle of the stream that launches on ``device`` go to."""
    return int(triton.runtime.driver.active.get_current_stream(device.index))


def run_compiled(
    compiled: dict[Any, Any], kernel: Any, grid: int, stream: int, arguments: tuple[Any, ...], constexprs: dict[str, Any],
    options: dict[str, Any], *, special: Any = None,
) -> None:  # fmt: skip
    """Launch ``kernel`` on ``grid`` CTAs of ``stream``, which is current, past Triton's look-up by arguments once
    ``compiled`` has it.

    ``constexprs`` are the kernel's last parameters, in their order. ``special`` is all else that Triton compiles for:
    which pointers are 16-byte aligned, which integers are 1 or multiples of 16. Everything else (constexprs, options,
    dtypes, device) must be one and the same for all uses of ``compiled``.
    """
    key = kernel, special
    found = compiled.get(key)
    if found is None:
        compiled[key] = kernel[(grid,)](*arguments, **constexprs, **options)
        return
    hooks, everything = knobs.runtime, (*arguments, *constexprs.values())
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    told = None if enter is None else found.launch_metadata((grid, 1, 1), stream, *everything)
    found.run(
        grid, 1, 1, stream, found.function, found.packed_metadata, told, enter, leave, *everything
    )
