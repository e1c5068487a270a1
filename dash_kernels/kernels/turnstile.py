"""The turnstile: how a CTA waits for its turn on a Q tile and lets the next one through.

Each primitive is one inline-assembly block executed by one whole warp. Lane 0 touches memory and the others get its
answer, because 32 lanes that poll apart can read different values and part ways around a warp barrier.

Order of memory: lane 0's ``ld.acquire`` meets the predecessor's ``red.release``; ``bar.warp.sync`` hands that order
on to whichever lane issues the copy-engine reduce; ``fence.proxy.async`` orders the acquired (generic-proxy) view
before that (async-proxy) reduce. On the way out ``cp.async.bulk.wait_group`` (not ``.read``) makes the reduce's
writes performed for the issuing lane, ``bar.warp.sync`` orders them before lane 0's ``red.release``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def draw_ticket(counter):
    """Next launch index of this launch: the order of drawing is the order of start."""
    return gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .u32 lane, t;
        mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.u32 t, 0;
        bar.warp.sync 0xffffffff;
        @p atom.relaxed.gpu.global.add.u32 t, [$1], 1;
        shfl.sync.idx.b32 $0, t, 0, 31, 0xffffffff; }""",
        "=r,l,~{memory}",
        [counter],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def await_turn(semaphore, turn, workspace, bound_us):
    """Spin until the semaphore reads ``turn``; return what was read last.

    Gives up, returning another value, once about ``bound_us`` microseconds have passed or another wait has given up.
    """
    return gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .u32 lane, v, n, a, start, now, waited;
        mov.u32 lane, %laneid; mov.u32 v, $2; mov.u32 n, 0;
        setp.ne.u32 p, lane, 0;
        @p bra DONE;
        mov.u32 start, %globaltimer_lo;
        mov.u32 waited, 0;
        SPIN:
        ld.acquire.gpu.global.b32 v, [$1];
        setp.eq.u32 p, v, $2;
        @p bra DONE;
        add.u32 n, n, 1;
        and.b32 a, n, 255;
        setp.ne.u32 p, a, 0;
        @p bra SPIN;
        ld.relaxed.gpu.global.b32 a, [$3+4];
        setp.ne.u32 p, a, 0;
        @p bra DONE;
        mov.u32 now, %globaltimer_lo;
        sub.u32 a, now, start; mov.u32 start, now;
        shr.u32 a, a, 10; add.u32 waited, waited, a;
        setp.lt.u32 p, waited, $4;
        @p bra SPIN;
        DONE:
        bar.warp.sync 0xffffffff;
        shfl.sync.idx.b32 $0, v, 0, 31, 0xffffffff; }""",
        "=r,l,r,l,r,~{memory}",
        [semaphore, turn, workspace, bound_us],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def report_timeout(workspace, record, head, m_block, turn, seen):
    """Note the first failure of a launch in ``record``, host memory: 1, head, Q tile, turn, and contributions seen.

    The flag in the workspace's header ends every other wait of the launch at once and makes the cast pass write NaN.
    """
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .u32 lane, old;
        mov.u32 lane, %laneid; setp.ne.u32 p, lane, 0;
        @p bra DONE;
        atom.relaxed.gpu.global.cas.b32 old, [$1+4], 0, 1;
        setp.ne.u32 p, old, 0;
        @p bra DONE;
        st.relaxed.sys.global.b32 [$2+4], $3;
        st.relaxed.sys.global.b32 [$2+8], $4;
        st.relaxed.sys.global.b32 [$2+12], $5;
        st.relaxed.sys.global.b32 [$2+16], $6;
        st.release.sys.global.b32 [$2], 1;
        DONE:
        bar.warp.sync 0xffffffff; mov.u32 $0, 0; }""",
        "=r,l,l,r,r,r,r,~{memory}",
        [workspace, record, head, m_block, turn, seen],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def fence_acquired():
    """Order what was acquired before the copy engine's next access to global memory."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;",
        "=r,~{memory}",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_reduced():
    """Wait until this warp's bulk operations are performed (not merely read)."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;",
        "=r,~{memory}",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def signal_turn(semaphore):
    """Let the next contribution through."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .u32 lane;
        mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0;
        bar.warp.sync 0xffffffff;
        @p red.release.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0; }""",
        "=r,l,~{memory}",
        [semaphore],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
