"""The turnstile of the portable kernels: how a CTA waits for its turn on a Q tile and lets the next one through.

How the order of addition is kept (policy ordered), hazard by hazard:

- *A predecessor's sum before mine.* Each contribution is followed by ``signal_turn``: its ``bar.sync`` puts the
  additions of all threads before thread 0, whose ``fence.acq_rel.gpu`` and ``red`` (a release) publish them. Before
  its own additions a CTA has acquired the turn with thread 0: either ``peek_turn`` has read it (relaxed) and the fence
  of ``signal_turn`` stands between, or ``wait_for_turn`` polls (``ld.acquire.gpu``). The ``bar.sync`` of
  ``wait_for_turn`` hands what thread 0 has acquired on to the other threads. So every addition of this CTA follows
  every addition of its predecessors.
- *A signal that waits.* A contribution is signalled in the next step, under that step's matmuls, when its additions
  have arrived and the fence is short, and together with the peek, for which the one fence serves too. It is never
  behind a wait: a step signals the one before, and only then waits for its own turn; the last one is signalled after
  the loop. So a wait depends on exactly what it depended on, were each contribution signalled at once.
- *Turn 0 and the uninitialised buffer.* Turn 0 stores and the others add, so the buffer needs no zeroing; the store
  comes before the additions by the same chain. A Q tile without any contribution is known by its semaphore's 0.
- *Stale caches.* Additions are atomics, performed in L2: no thread reads dQ through its L1 cache.
- *The software pipeliner.* The Q loop loads nothing that another CTA writes, so a load hoisted over a wait is
  harmless, and peek, signal and wait are one opaque operation each, so that the loop stays pipelined. (A branch
  around the store or the add fails to compile for Hopper: both are predicated instead.)
"""

from __future__ import annotations

import triton
import triton.language as tl

PEEK_TURN = tl.constexpr("""{
    .reg .pred p; .reg .b32 tid;
    mov.u32 $0, 0;
    mov.u32 tid, %tid.x;
    setp.eq.u32 p, tid, 0;
    @p ld.relaxed.gpu.global.b32 $0, [$1]; }""")

SIGNAL_TURN = tl.constexpr("""{
    .reg .pred p, came; .reg .b32 tid;
    mov.u32 tid, %tid.x;
    setp.eq.u32 p, tid, 0;
    setp.eq.u32 came, $2, $3;
    selp.u32 $0, 1, 0, came;
    bar.sync 0;
    @p fence.acq_rel.gpu;
    @p red.relaxed.gpu.global.add.u32 [$1], 1; }""")

WAIT_FOR_TURN = tl.constexpr("""{
    .reg .pred p; .reg .b32 tid, seen, flag; .reg .b64 start, now;
    mov.u32 $0, 0;
    mov.u32 tid, %tid.x;
    setp.ne.u32 p, tid, 0;
    @p bra DONE;
    setp.ne.u32 p, $5, 0;
    @p bra DONE;
    mov.u64 start, %globaltimer;
    POLL:
    ld.acquire.gpu.global.b32 seen, [$1];
    setp.eq.u32 p, seen, $2;
    @p bra DONE;
    ld.relaxed.gpu.global.b32 flag, [$3+4];
    setp.ne.u32 p, flag, 0;
    @p bra DONE;
    mov.u64 now, %globaltimer;
    sub.u64 now, now, start;
    setp.lt.u64 p, now, $4;
    @p bra POLL;
    atom.relaxed.gpu.global.cas.b32 flag, [$3+4], 0, 1;
    setp.ne.u32 p, flag, 0;
    @p bra DONE;
    sub.u64 now, $1, $3;
    shr.u64 now, now, 2;
    cvt.u32.u64 flag, now;
    sub.u32 flag, flag, 32;
    st.global.b32 [$3+8], flag;
    st.global.b32 [$3+12], $2;
    st.global.b32 [$3+16], seen;
    DONE:
    bar.sync 0; }""")


@triton.jit
def peek_turn(semaphore):
    """What ``semaphore`` reads now, of thread 0; no order follows from it before ``signal_turn``."""
    return tl.inline_asm_elementwise(
        PEEK_TURN, "=r,l,~{memory}", [semaphore], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def signal_turn(semaphore, peeked, turn):
    """Let the next contribution to ``semaphore`` through, after the additions of all threads of this CTA.

    Returns, of thread 0, whether it peeked ``turn`` before: this fence makes that an acquire.
    """
    return tl.inline_asm_elementwise(
        SIGNAL_TURN,
        "=r,l,r,r,~{memory}",
        [semaphore, peeked, turn],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_for_turn(came, semaphore, turn, workspace, bound_ns):
    """Return once ``semaphore`` reads ``turn``; give up once the launch is aborted or ``bound_ns`` nanoseconds passed.

    ``came``, of thread 0, says that it did when it was peeked. The first wait to give up by its bound aborts the launch
    and leaves in the header which tile was late (head * num_m + m_block), the turn that it waited for and the
    contributions that it saw.
    """
    tl.inline_asm_elementwise(
        WAIT_FOR_TURN,
        "=r,l,r,l,l,r,~{memory}",
        [semaphore, turn, workspace, tl.cast(bound_ns, tl.int64), came],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
