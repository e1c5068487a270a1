"""exp2 of a tensor in registers where the special-function units, 16 values a cycle and SM, are what a kernel waits for."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

VALUES = gl.constexpr(
    8
)  # of these the last is worked out by the FMA units, the others by the special-function units

SPECIAL = "ex2.approx.ftz.f32 ${out}, ${x};"
# 2**x = 2**n * 2**r with n the nearest integer: r is at most a half, and a polynomial of degree 4 (minimax, 1 at 0) is off by
# 2.9e-6 of it at most. x is at least -127, whose power is made 0, and at most 128, whose power is
# infinite; NaN stays NaN.
POLYNOMIAL = """{{ .reg .f32 x, n, r, p; .reg .b32 e;
max.NaN.f32 x, ${x}, 0fC2FE0000;
min.NaN.f32 x, x, 0f43000000;
add.rn.f32 n, x, 0f4B400000;
sub.rn.f32 r, n, 0f4B400000;
sub.rn.f32 r, x, r;
fma.rn.f32 p, r, 0f3C1D0166, 0f3D64FE23;
fma.rn.f32 p, p, r, 0f3E7601BC;
fma.rn.f32 p, p, r, 0f3F317096;
fma.rn.f32 p, p, r, 0f3F800000;
mov.b32 e, n;
shl.b32 e, e, 23;
add.s32 e, e, 0x3F800000;
mov.b32 n, e;
mul.rn.f32 ${out}, p, n; }}"""


@gluon.constexpr_function
def exp2_asm():
    count = VALUES.value
    kinds = [SPECIAL] * (count - 1) + [POLYNOMIAL]
    return "\n".join(kind.format(out=i, x=count + i) for i, kind in enumerate(kinds))


@gluon.constexpr_function
def exp2_registers():
    return ",".join(["=f"] * VALUES.value + ["f"] * VALUES.value)


@gluon.jit
def spread_exp2(x):
    """2**x, an eighth of it in the FMA units."""
    ASM: gl.constexpr = exp2_asm()
    REGISTERS: gl.constexpr = exp2_registers()
    return gl.inline_asm_elementwise(
        ASM, REGISTERS, [x], dtype=gl.float32, is_pure=True, pack=VALUES
    )
