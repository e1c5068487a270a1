"""Compile kernels without a GPU and without torch, and read what the compiler says of them.

``python -m dash_kernels.kernels.compile --head-dim 128 --mask causal`` prints one JSON line a config;
``--shipped`` compiles every shipped winner into Triton's cache, ahead of the first training step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dash_kernels.device import kernel_hash
from dash_kernels.problem import Config, hopper_dims, padded_head_dim


class KernelCompileError(RuntimeError):
    """A kernel did not compile. ``log`` holds the compiler's own words."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What ptxas reports of a backward's main kernel.

    ``registers`` is the allocation at entry: the Hopper kernel's warp roles then trade registers (consumers run with
    232). ``spill_bytes`` counts spill stores, ``shared_bytes`` dynamic shared memory; ``warnings`` holds ptxas lines
    that cost speed, such as C75xx (serialised wgmma), and hardware barriers that Triton and the kernel both use.
    ``carried`` counts the values that its for loops carry: a Triton that counts fewer than another has dropped some.
    """

    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    warnings: tuple[str, ...]
    ptxas_version: str
    triton_version: str
    kernel_hash: str
    carried: int


class KernelSpec(NamedTuple):
    """One kernel specialised as a launch on aligned tensors specialises it."""

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, Any]
    attrs: dict[tuple[int], list[list[Any]]]


def hopper_spec(
    config: Config, head_dim: int, dtype: str, causal: bool, *, head_dim_v: int = 0, tail: bool = False,
    cooperative: bool = False, windowed: bool = False, softcap: bool = False, grouped: bool = False, packed: bool = False,
) -> KernelSpec:  # fmt: skip
    """The Hopper main kernel. ``tail``: a full mask whose last KV tile is cut; ``cooperative``: min_resident > 1."""
    from dash_kernels.kernels import backward_hopper as module
    from dash_kernels.kernels import hopper_shared as shared
    from dash_kernels.kernels.descriptors import outer_axes, tile_layout
    from dash_kernels.kernels.launch import (
        CONSUMER_WARPS,
        FLAT_LAYOUT,
        GLUON_DTYPES,
        POLICIES,
        VECTOR_LAYOUT,
    )

    m, n = config.block_m, config.block_n
    d, d_v = hopper_dims(head_dim, head_dim_v or head_dim)
    parts, halves = shared.pieces(d), 2 if shared.is_wide(d) else 1
    element = {"bfloat16": "bf16", "float16": "fp16"}[dtype]

    def descriptor(kind: str, block: list[int], layout: Any) -> str:
        return f"tensordesc<{kind}{block},{layout!r}>"

    outer = outer_axes(packed)
    tiles = {
        "q_desc": (m, d // parts), "k_desc": (n, d // parts), "v_desc": (n, d_v), "do_desc": (m, d_v),
        "dk_desc": (n, d // parts // halves), "dv_desc": (n, d_v // halves),
    }  # fmt: skip
    types = {
        name: descriptor(element, [*outer, rows, cols], tile_layout(rows, cols, GLUON_DTYPES[f"torch.{dtype}"], packed))
        for name, (rows, cols) in tiles.items()
    }  # fmt: skip
    types |= dict.fromkeys(("lse_desc", "delta_desc"), descriptor("fp32", [m], VECTOR_LAYOUT))
    types |= {"dq_desc": descriptor("fp32", [m * d // 256 // shared.dq_boxes(d), 256], FLAT_LAYOUT)}
    types |= dict.fromkeys(("workspace", "arrays", "counts", "record"), "*i32")
    types |= dict.fromkeys(("scale", "scale_log2", "cap_log2"), "fp32")
    if windowed:
        mask = shared.WINDOW_MASK
    elif causal:
        mask = shared.CAUSAL_MASK
    else:
        mask = shared.TAIL_MASK if tail or packed else shared.NO_MASK
    constexprs: dict[str, Any] = {
        "MASK": mask.value, "SOFTCAP": softcap, "GROUPED": grouped, "PACKED": packed,
        "DESCENDING": config.schedule == "shortest_first" and packed, "M": m, "N": n, "D": d, "DV": d_v,
        "STAGES": config.num_stages, "DQ_STAGES": config.dq_stages, "POLICY": POLICIES[config.policy],
        "ORDER_OF_START": cooperative,
    }  # fmt: skip
    if not packed:
        constexprs["counts"] = None
    names = module.backward_hopper.arg_names
    signature = {
        name: "constexpr" if name in constexprs else types.get(name, "i32") for name in names
    }
    attrs = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] == "*"
    }
    options = {
        "num_warps": CONSUMER_WARPS,
        "enable_fp_fusion": True,
        "launch_cooperative_grid": cooperative,
    }
    return KernelSpec(module.backward_hopper, signature, constexprs, options, attrs)


def main_spec(
    config: Config, head_dim: int, dtype: str, causal: bool, *, head_dim_v: int = 0,
    capability: tuple[int, int] = (9, 0), cooperative: bool = False,
) -> Any:  # fmt: skip
    """The main kernel of a backward on either backend, for lengths that fill their tiles; ``head_dim_v`` 0: the same."""
    if config.backend == "hopper":
        return hopper_spec(
            config, head_dim, dtype, causal, head_dim_v=head_dim_v, cooperative=cooperative
        )
    from dash_kernels.kernels.backward_portable import compile_specs

    dim, dim_v = padded_head_dim(head_dim), padded_head_dim(head_dim_v or head_dim)
    return compile_specs(
        config, dim, dtype, causal, head_dim_v=dim_v, persistent=cooperative, capability=capability
    )[0]


def compile_spec(spec: Any, capability: tuple[int, int]) -> KernelResources:
    """Compile one kernel for a chip and read its resources. Raises KernelCompileError naming compiler and chip."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from dash_kernels.kernels.hopper_shared import Q_EMPTY

    number = capability[0] * 10 + capability[1]
    arch = sm_arch_from_capability(number)
    ptxas_version = _ptxas_version(get_ptxas, number, arch, triton.__version__)
    names = list(spec.signature)
    constexprs = {(names.index(name),): value for name, value in spec.constexprs.items()}
    source_type = GluonASTSource if spec.kernel.is_gluon() else ASTSource
    source = source_type(
        spec.kernel, dict(spec.signature), constexprs=constexprs, attrs=dict(spec.attrs)
    )
    where = f"{spec.kernel.__name__} for {arch} with Triton {triton.__version__}"
    try:
        compiled = triton.compile(
            source, target=GPUTarget("cuda", number, 32), options=dict(spec.options)
        )
    except Exception as error:  # Triton raises its own types, MLIR's RuntimeError and ptxas's, all of which mean this
        raise KernelCompileError(
            f"could not compile {where}: {type(error).__name__}", str(error)
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(compiled.asm["ptx"])
        fused = [] if spec.options.get("enable_fp_fusion", True) else ["--fmad=false"]
        command = [
            get_ptxas(number).path,
            "-v",
            *fused,
            f"--gpu-name={arch}",
            str(ptx),
            "-o",
            str(ptx) + ".o",
        ]
        report = subprocess.run(command, capture_output=True, text=True, check=False)
    log = report.stdout + report.stderr
    registers, spills = (
        re.search(r"Used (\d+) registers", log),
        re.search(r"(\d+) bytes spill stores", log),
    )
    if report.returncode or not registers or not spills:
        raise KernelCompileError(f"ptxas gave no resource report of {where}", log)
    slow = [
        line.strip()
        for line in log.splitlines()
        if re.search(r"C7\d{3}|Potential Performance Loss", line)
    ]
    return KernelResources(
        spec.kernel.__name__, int(registers[1]), int(spills[1]), compiled.metadata.shared,
        (*slow, *shared_barriers(compiled.asm["ptx"], Q_EMPTY.value)), ptxas_version, triton.__version__, kernel_hash(),
        sum(loop.count("=") for loop in re.findall(r"scf\.for .*?iter_args\((.*?)\) ->", compiled.asm["ttgir"])),
    )  # fmt: skip


def shared_barriers(ptx: str, first: int) -> list[str]:
    """A line for each hardware barrier that Triton uses and the kernel too, which names its own, from ``first``, in registers."""
    if not re.search(r"bar\.(sync|arrive)\s+%r", ptx):
        return []
    numbers = re.findall(r"\bbar(?:rier)?\.(?:cta\.)?(?:sync|arrive)(?:\.aligned)?\s+(\d+)", ptx)
    taken = sorted({int(number) for number in numbers if int(number) >= first})
    return [f"hardware barrier {number} is the kernel's own and Triton's" for number in taken]


def _ptxas_version(get_ptxas: Any, number: int, arch: str, triton_version: str) -> str:
    """The version of the ptxas that Triton will run; KernelCompileError with the remedy where there is none."""
    remedy = f"Triton {triton_version} cannot compile for {arch}: unset TRITON_PTXAS_PATH or point it to CUDA's ptxas"
    try:
        path = get_ptxas(number).path
        printed = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (RuntimeError, AttributeError, OSError, subprocess.SubprocessError) as error:
        raise KernelCompileError(f"ptxas does not run; {remedy}", str(error)) from error
    version = re.search(r"release (\S+), V(\S+)", printed.stdout)
    if printed.returncode or not version:
        raise KernelCompileError(f"{path} is no ptxas; {remedy}", printed.stdout + printed.stderr)
    return version[2]


def compile_backward(
    config: Config, *, head_dim: int, head_dim_v: int = 0, dtype: str = "bfloat16", causal: bool,
    capability: tuple[int, int] = (9, 0), cooperative: bool = False,
) -> KernelResources:  # fmt: skip
    """Resources of the main kernel that ``config`` runs. Raises KernelCompileError.

    ``head_dim_v`` 0 is ``head_dim``; ``cooperative`` is the form in which a kind with min_resident > 1 runs.
    """
    spec = main_spec(
        config, head_dim, dtype, causal, head_dim_v=head_dim_v, capability=capability, cooperative=cooperative
    )  # fmt: skip
    return compile_spec(spec, capability)


class Wanted(NamedTuple):
    """One main kernel to build."""

    gpu: str
    capability: tuple[int, int]
    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    config: Config
    cooperative: bool


def shipped_winners(max_head_dim: int = sys.maxsize) -> list[Wanted]:
    """Main kernels of the winners in the shipped tables, served and best of all, each once.

    Kinds and launches share a kernel, so a config stands here with the kind of its table entry that came first.
    """
    from dash_kernels.device import resolve_gpu
    from dash_kernels.lookup import TABLES, LookupTable, shipped_gpus

    found: dict[Any, Wanted] = {}
    for gpu in shipped_gpus():
        table, capability = LookupTable.load(TABLES / f"{gpu}.json"), resolve_gpu(gpu).capability
        for cell in table.cells:
            p = cell.problem
            if p.head_dim > max_head_dim or cell.direction != "backward":
                continue
            for entry in (cell.served, cell.best):
                if entry is None:
                    continue
                cooperative = not entry.servable
                wanted = Wanted(
                    gpu, capability, p.dtype, p.head_dim, p.head_dim_v, p.mask, entry.config, cooperative
                )  # fmt: skip
                plain = entry.config.with_(
                    schedule="ascending", group=1, launch_order="ascending", heads_interleaved=1
                )
                found.setdefault(wanted._replace(config=plain), wanted)
    return list(found.values())


def _line(wanted: Wanted) -> str:
    found = compile_backward(
        wanted.config, head_dim=wanted.head_dim, head_dim_v=wanted.head_dim_v, dtype=wanted.dtype,
        causal=wanted.mask == "causal", capability=wanted.capability, cooperative=wanted.cooperative,
    )  # fmt: skip
    return json.dumps({**wanted._asdict(), "config": wanted.config.to_dict(), **asdict(found)})


def _lines(work: list[Wanted]) -> Iterator[str]:
    """A JSON line each, in order; several are compiled at once, a process a core."""
    processes = min(len(work), os.cpu_count() or 1)
    if processes == 1:
        yield from map(_line, work)
        return
    # Spawned: Triton's own threads do not survive a fork.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_line, work)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dash_kernels.kernels.compile", description=__doc__
    )
    parser.add_argument(
        "--shipped", action="store_true", help="every shipped winner instead of one config"
    )
    parser.add_argument("--max-head-dim", type=int, default=128)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--head-dim-v", type=int, default=0, help="default: that of --head-dim")
    parser.add_argument("--mask", choices=("full", "causal"), default="causal")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--capability", default="9.0", help="compute capability, for instance 9.0")
    parser.add_argument("--config", default="{}", help="JSON fields that differ from Config()")
    parser.add_argument("--cooperative", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if options.shipped:
            work = shipped_winners(options.max_head_dim)
            if not work:
                dims = ", ".join(str(d) for d in sorted({w.head_dim for w in shipped_winners()}))
                few = f"no shipped winner has a head_dim of {options.max_head_dim} or less"
                raise ValueError(f"{few}; choose --max-head-dim (MAX_HEAD_DIM) from {dims}")
        else:
            major, minor = (int(part) for part in options.capability.split("."))
            config = Config.from_dict(json.loads(options.config))
            work = [
                Wanted(
                    "", (major, minor), options.dtype, options.head_dim, options.head_dim_v or options.head_dim, options.mask,
                    config, options.cooperative,
                )
            ]  # fmt: skip
        for line in _lines(work):
            print(line, flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KernelCompileError as error:
        print(f"error: {error}\n{error.log[-2000:]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
