"""Compiles portable kernels in this interpreter's Triton and prints as JSON what the compiler made of them.

``portable_compile_report.py REQUESTS`` answers tests. ``portable_compile_report.py --record`` compiles every option for
every capability with the default rule's tiles, a quarter of an hour on two cores: benchmarks/results/portable-triton-*.json.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dash_kernels.default_rule import default_config
from dash_kernels.kernels.backward_portable import KernelSpec, compile_specs
from dash_kernels.kernels.compile import KernelCompileError, compile_spec
from dash_kernels.kernels.forward_portable import compile_spec_of, forward_tiles
from dash_kernels.problem import SHARED_MEMORY_LIMIT, Config, Problem

NVDISASM = str(Path(triton.backends.nvidia.__path__[0], "bin", "nvdisasm"))
INNERMOST_LOOP = re.compile(r"scf\.for(?:(?!scf\.for).)*?scf\.yield", re.DOTALL)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {},
    "causal, grouped": {"grouped": True},
    "causal, window": {"window": (256, 0)},
    "causal, softcap": {"softcap": True},
    "causal, packed": {"varlen": True},
    "causal, all at once": {
        "grouped": True, "window": (256, 0), "softcap": True, "varlen": True, "dlse": True,
    },
}  # fmt: skip
ALWAYS = ("full", "causal", "causal, all at once")
BACKWARD_ONLY = ("grouped", "dlse")
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (256, 128))
CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
ON_HOPPER = {"backend": "portable", "signal": "plain", "block_m": 64, "block_n": 128}


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


def machine_loops(cubin: bytes) -> list[dict[str, int]]:
    """The innermost loops with matmuls as the chip runs them: matmul instructions a warp, accesses to spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [NVDISASM, "-c", file.name], capture_output=True, text=True, check=True
        )
    lines = listing.stdout.splitlines()
    labels = {line.strip()[:-1]: n for n, line in enumerate(lines) if line.startswith(".L_x")}
    branches = ((re.search(r"BRA.*`\((\.L_x_\d+)\)", line), n) for n, line in enumerate(lines))
    spans = [
        (labels[found[1]], n) for found, n in branches if found and labels.get(found[1], n) < n
    ]
    bodies = {span: lines[slice(*span)] for span in spans}
    matmuls = {span: _count(body, r"\b(HMMA|HGMMA|UTC[A-Z]*MMA)") for span, body in bodies.items()}
    whole = [span for span in spans if matmuls[span]]
    innermost = [
        a for a in whole if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in whole)
    ]
    return [
        {"matmuls": matmuls[span], "spilled": _count(bodies[span], r"\b(LDL|STL)\b")}
        for span in sorted(innermost)
    ]


def _count(lines: list[str], instruction: str) -> int:
    return sum(re.search(instruction, line) is not None for line in lines)


def report(spec: KernelSpec, capability: tuple[int, int]) -> dict[str, Any]:
    """``trap``: Triton compiled no kernel but an instruction that faults, since tensor memory was not enough."""
    resources = compile_spec(spec, capability)
    source = ASTSource(spec.kernel, spec.signature, spec.constexprs, spec.attrs)
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    compiled = triton.compile(source, target=target, options=spec.options)
    return {
        "kernel": spec.kernel.__name__,
        "registers": resources.registers,
        "spill_bytes": resources.spill_bytes,
        "shared_bytes": resources.shared_bytes,
        "shared_limit": SHARED_MEMORY_LIMIT[capability],
        "tensor_memory": getattr(compiled.metadata, "tmem_size", None) or 0,
        "trap": "trap;" in compiled.asm["ptx"],
        "machine_loops": machine_loops(compiled.asm["cubin"]),
        "loops": loops(compiled.asm["ttgir"]),
        "wide_additions": len(re.findall(r"\.add\.v4\.f32|\.v4\.f32\.add", compiled.asm["ptx"])),
    }


def specs_of(request: dict[str, Any]) -> list[KernelSpec]:
    """The kernels of a request: those of a backward, or without "config" of a forward."""
    capability, options = tuple(request["capability"]), dict(request.get("options", {}))
    if "window" in options:
        options["window"] = tuple(options["window"])
    common = request["head_dim"], request.get("dtype", "float16"), request["causal"]
    if "config" not in request:
        return [compile_spec_of(*common, capability=capability, **options)]
    fields = {"backend": "portable", "signal": "plain", "num_stages": 3, **request["config"]}
    specs = compile_specs(Config(**fields), *common, capability=capability, **options)
    wanted = request.get("kernels", ["kv_tiles"])
    return [spec for spec in specs if spec.kernel.__name__ in wanted]


def portable_config(
    dims: tuple[int, int], causal: bool, seq_len: int, capability: tuple[int, int]
) -> dict[str, Any]:
    """What the default rule runs on the portable backend; where it would take the Hopper kernel, the largest tile."""
    problem = Problem(
        "causal" if causal else "full", dims[0], seq_len, head_dim_v=dims[1] % dims[0]
    )
    config = default_config(problem, capability)
    if config.backend != "portable":
        config = config.with_(**ON_HOPPER, num_stages=3)
    return config.to_dict()


def record_requests() -> list[dict[str, Any]]:
    """Every option on every capability at 4096 rows, and 1024 where that differs.

    Options one by one up to head_dim 128, and all at once.
    """
    requests: list[dict[str, Any]] = []
    for capability in CAPABILITIES:
        for dims in HEAD_DIMS:
            for name, named in OPTIONS.items():
                causal, options = name != "full", {**named, "head_dim_v": dims[1]}
                request: dict[str, Any] = {
                    "option": name, "capability": capability, "head_dim": dims[0], "dtype": "bfloat16",
                    "causal": causal, "options": options,
                }  # fmt: skip
                config = portable_config(dims, causal, 4096, capability)
                if name in ALWAYS or dims[0] <= 128:
                    requests.append({**request, "config": config})
                short = portable_config(dims, causal, 1024, capability)
                if name in ALWAYS[1:] and short != config:
                    requests.append({**request, "config": short})
                if name not in ALWAYS[1:]:
                    continue
                forward = {key: value for key, value in options.items() if key not in BACKWARD_ONLY}
                requests.append({**request, "options": forward})
                two_pass = {**config, "policy": "two_pass"}
                requests.append({**request, "kernels": ["dq_tiles"], "config": two_pass})
                if name == ALWAYS[-1]:
                    others = {"kernels": ["prepare_tiles", "cast_tiles"], "config": config}
                    requests.append({**request, **others})
    return requests


def record_rows(request: dict[str, Any]) -> list[dict[str, Any]]:
    capability, dim_v = tuple(request["capability"]), request["options"]["head_dim_v"]
    if "config" in request:
        names = "block_m", "block_n", "num_warps", "num_stages"
        tiles = {name: request["config"][name] for name in names}
    else:
        tiles = forward_tiles(max(request["head_dim"], dim_v), capability)._asdict()
    what = {name: request[name] for name in ("option", "capability", "head_dim")}
    rows = []
    for spec in specs_of(request):
        found: dict[str, Any] = {"kernel": spec.kernel.__name__}
        try:
            found = report(spec, capability)
            del found["loops"], found["wide_additions"]
        except KernelCompileError as error:
            found["error"] = str(error)
        rows.append({**what, "head_dim_v": dim_v, **tiles, **found})
    return rows


def record() -> None:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = [row for found in pool.map(record_rows, record_requests()) for row in found]
    what = "the portable kernels, bfloat16; python tests/portable_compile_report.py --record"
    lines = ",\n  ".join(map(json.dumps, rows))
    print(f'{{"what": "{what}", "triton": "{triton.__version__}", "rows": [\n  {lines}\n]}}')


def main() -> None:
    if sys.argv[1] == "--record":
        return record()
    reports = {
        name: [report(spec, tuple(request["capability"])) for spec in specs_of(request)]
        for name, request in json.loads(sys.argv[1]).items()
    }
    answer = {"torch": "torch" in sys.modules, "triton": triton.__version__, "reports": reports}
    print(json.dumps(answer))
    return None


if __name__ == "__main__":
    main()
