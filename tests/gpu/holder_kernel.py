"""A kernel whose CTAs stay on their SMs until a flag in memory is set, or a bound has passed."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def hold(flag, started, timed_out, bound_ns):
    tl.atomic_add(started, 1)
    begin = globaltimer()
    released = tl.atomic_add(flag, 0)
    waited = begin - begin
    while (released == 0) & (waited < bound_ns):
        released = tl.atomic_add(flag, 0)
        waited = globaltimer() - begin
    if released == 0:
        tl.atomic_add(timed_out, 1)
