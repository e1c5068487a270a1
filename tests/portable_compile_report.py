"""Compiles portable kernels in this interpreter's Triton and prints as JSON what the compiler made of them."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dash_kernels.kernels.backward_portable import KernelSpec, compile_specs
from dash_kernels.kernels.compile import compile_spec
from dash_kernels.problem import Config

INNERMOST_LOOP = re.compile(r"scf\.for(?:(?!scf\.for).)*?scf\.yield", re.DOTALL)


def loops(ttgir: str) -> list[dict[str, Any]]:
    """The loops with matmuls: what is copied ahead, how many copies may be in flight across a step, what else is there."""
    found = []
    for loop in INNERMOST_LOOP.findall(ttgir):
        if re.search(r"(warp_group_dot|tt\.dot|tc_gen5_mma) ", loop):
            found.append(
                {
                    "copies": len(re.findall(r"async_copy_global_to_local|async_tma_copy", loop)),
                    "in_flight": max(
                        map(int, re.findall(r"async_wait .*?num = (\d+)", loop)), default=0
                    ),
                    "assembly": loop.count("tt.elementwise_inline_asm"),
                    "additions": loop.count("tt.atomic_rmw fadd"),
                }
            )
    return found


def report(spec: KernelSpec, capability: tuple[int, int]) -> dict[str, Any]:
    resources = compile_spec(spec, capability)
    source = ASTSource(spec.kernel, spec.signature, spec.constexprs, spec.attrs)
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    compiled = triton.compile(source, target=target, options=spec.options)
    return {
        "kernel": spec.kernel.__name__,
        "registers": resources.registers,
        "spill_bytes": resources.spill_bytes,
        "shared_bytes": resources.shared_bytes,
        "tensor_memory": getattr(compiled.metadata, "tmem_size", None) or 0,
        "loops": loops(compiled.asm["ttgir"]),
        "wide_additions": len(re.findall(r"\.add\.v4\.f32|\.v4\.f32\.add", compiled.asm["ptx"])),
    }


def main() -> None:
    reports = {}
    for name, request in json.loads(sys.argv[1]).items():
        config = Config(backend="portable", signal="plain", num_stages=3, **request["config"])
        capability = tuple(request["capability"])
        specs = compile_specs(
            config, request["head_dim"], "float16", request["causal"], capability=capability
        )
        wanted = request.get("kernels", ["kv_tiles"])
        reports[name] = [
            report(spec, capability) for spec in specs if spec.kernel.__name__ in wanted
        ]
    print(
        json.dumps(
            {"torch": "torch" in sys.modules, "triton": triton.__version__, "reports": reports}
        )
    )


if __name__ == "__main__":
    main()
