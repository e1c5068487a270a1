"""``dash-tune``: sweeps by default, and looks after what sweeps have stored."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

HELP = "Sweep attention backward configs on this machine's GPUs, or compile them without one."
app = typer.Typer(help=HELP, no_args_is_help=False, add_completion=False, rich_markup_mode=None)

Db = Annotated[
    str | None,
    typer.Option(
        help="Results database: a file or URL. Default: DASH_DB, else SQLite.",
        callback=lambda given: _db(given),
    ),
]
GpuName = Annotated[str, typer.Option("--gpu", help="GPU whose rows are meant, for instance h200.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for machines.")]
KeptBits = Annotated[
    str, typer.Option("--numerics-key", help="Winners among the configs of this numerics key.")
]
Values = list[str] | None
LARGEST = 2**31 - 1  # of an integer column of the database
DIGITS = 100  # more are no number: int() refuses thousands


def _print_version(wanted: bool) -> None:
    if wanted:
        from dash_kernels import __version__

        print(f"dash-tune {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def sweep(
    context: typer.Context,
    gpu: Annotated[str, typer.Option(help="h800, h200, ...; auto takes what is there.")] = "auto",
    mask: Annotated[
        Values, typer.Option(help="full, causal; repeat or separate by commas.")
    ] = None,
    head_dim: Annotated[
        Values, typer.Option(help="Head dimensions, 192/128 for another of V. Default: 64, 128.")
    ] = None,
    seq_len: Annotated[
        Values, typer.Option(help="Sequence lengths. Default: 512 to 16384.")
    ] = None,
    window: Annotated[
        Values, typer.Option(help="Sliding windows as left:right, -1 for all; or none.")
    ] = None,
    softcap: Annotated[Values, typer.Option(help="off (default), on: scores capped.")] = None,
    varlen: Annotated[Values, typer.Option(help="off (default), on: packed sequences.")] = None,
    head_group: Annotated[
        Values, typer.Option(help="Query heads per KV head. Default: 1 (MHA).")
    ] = None,
    dtype: Annotated[Values, typer.Option(help="bfloat16 (default), float16.")] = None,
    heads: Annotated[
        int, typer.Option(help="Heads. Default: hidden 2048 / head_dim.", max=LARGEST)
    ] = 0,
    schedule: Annotated[
        Values, typer.Option(help="Kinds of schedule. Default: every kind.")
    ] = None,
    backend: Annotated[
        Values, typer.Option(help="hopper, portable. Default: the chip's best.")
    ] = None,
    tile: Annotated[Values, typer.Option(help="Tiles as block_m x block_n: 64x128.")] = None,
    stages: Annotated[Values, typer.Option(help="Q/dO stages to try on each tile.")] = None,
    thorough: Annotated[
        bool, typer.Option(help="The whole product of kinds, tiles and launches.")
    ] = False,
    db: Db = None,
    budget: Annotated[str | None, typer.Option(help="Stop cleanly after 90s, 15m, 1h.")] = None,
    fresh: Annotated[bool, typer.Option(help="Do again what has a row. Default: resume.")] = False,
    retry: Annotated[bool, typer.Option(help="Do again what timed out or died.")] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds for one config. Default: 60.", min=1.0)
    ] = None,
    compile_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds for one compile. Default: --timeout, else 240.", min=1.0),
    ] = None,
    jobs: Annotated[
        int, typer.Option(help="Compile processes. Default: CPU cores less GPUs.", min=0, max=1024)
    ] = 0,
    engine: Annotated[
        str, typer.Option(help="local: the GPUs of this host; ray: those of a cluster.")
    ] = "local",
    numerics_key: Annotated[
        str, typer.Option(help="Only configs that keep the bits of this numerics key.")
    ] = "",
    compile_only: Annotated[
        bool, typer.Option(help="No GPU: registers, spills, shared memory.")
    ] = False,
    simulate: Annotated[
        bool, typer.Option(help="With --compile-only: the model's times too.")
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="List the configs and stop.")] = False,
    as_json: AsJson = False,
    serve: Annotated[bool, typer.Option(help="Start dash-serve beside the sweep.")] = False,
    host: Annotated[str, typer.Option(help="For --serve.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="For --serve.", min=1, max=65535)] = 8000,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print it and exit."
        ),
    ] = False,
) -> None:
    """Sweep attention backward configs on this machine's GPUs, or compile them without one.

    Exit codes: 0 all measured; 1 nothing usable; 2 bad usage; 3 some configs failed, each listed by class.
    """
    if context.invoked_subcommand is not None:
        _refuse_misplaced(context, context.invoked_subcommand)
        return
    from tuner.command import SweepRequest, parse_duration, run_sweep
    from tuner.space import SpaceFilter

    filters = SpaceFilter(
        masks=_words("mask", mask),
        head_dims=_head_dims(head_dim),
        seq_lens=_numbers("seq-len", seq_len),
        dtypes=_words("dtype", dtype),
        windows=_windows(window),
        softcaps=_switches("softcap", softcap),
        varlens=_switches("varlen", varlen),
        head_groups=_numbers("head-group", head_group),
        heads=heads,
        schedules=_words("schedule", schedule),
        backends=_words("backend", backend),
        tiles=_tiles(tile),
        stages=_numbers("stages", stages),
        thorough=thorough,
    )
    request = SweepRequest(
        gpu=gpu,
        filters=filters,
        db=db,
        budget_s=parse_duration(budget) if budget else 0.0,
        timeout_s=timeout or 60.0,
        compile_timeout_s=compile_timeout or timeout or 240.0,
        jobs=jobs,
        engine=engine,
        fresh=fresh,
        retry=retry,
        numerics_key=numerics_key,
        compile_only=compile_only,
        simulate=simulate,
        dry_run=dry_run,
        as_json=as_json,
        serve=serve,
        host=host,
        port=port,
        command=" ".join(["dash-tune", *sys.argv[1:]]),
    )
    try:
        code = run_sweep(request)
    except KeyboardInterrupt:
        print("dash-tune: interrupted; the same command goes on from here", file=sys.stderr)
        code = 130
    raise typer.Exit(code)


@app.command()
def show(
    gpu: GpuName = "",
    mask: Annotated[str | None, typer.Option()] = None,
    head_dim: Annotated[int | None, typer.Option()] = None,
    source: Annotated[str, typer.Option(help="measured, compiled or modelled.")] = "measured",
    numerics_key: KeptBits = "",
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Winners by shape: the best config safe to serve, the best of all, and the baselines."""
    from tuner import stored

    if head_dim is not None and not 0 < head_dim <= LARGEST:
        _fail(f"--head-dim is {head_dim}; give a positive integer that fits 32 bits")
    stored.show(db, gpu, mask, head_dim, source, as_json, numerics_key)


@app.command()
def export(
    output: Annotated[
        Path,
        typer.Argument(
            help="FILE.json (lookup table), .csv, .parquet, .t4.json (Kernel Tuner), .json.gz (all runs)."
        ),
    ],
    gpu: GpuName = "",
    db: Db = None,
    name: Annotated[
        str | None, typer.Option(help="Release name to write into a lookup table.")
    ] = None,
    numerics_key: KeptBits = "",
) -> None:
    """Write the lookup table or the rows of a GPU; the ending of the file tells the format."""
    from tuner import stored

    stored.export(db, gpu, output, name, numerics_key)


@app.command("import")
def import_(
    file: Annotated[
        str,
        typer.Argument(help="A file that export wrote, or another database: .sqlite, .db or URL."),
    ],
    db: Db = None,
) -> None:
    """Merge exported rows or another database; what is there already stays, and conflicts are listed.

    Exit codes: 0 merged; 1 the file is no export; 2 bad usage; 3 merged, with conflicts.
    """
    from tuner import stored

    raise typer.Exit(stored.import_rows(db, file))


@app.command()
def release(
    gpu: GpuName = "",
    name: Annotated[str | None, typer.Option(help="Default: the GPU and today's date.")] = None,
    notes: Annotated[str, typer.Option(help="A line on what changed.")] = "",
    db: Db = None,
) -> None:
    """Freeze the winners of now as a numbered, immutable lookup table."""
    from tuner import stored

    stored.release(db, gpu, name, notes)


@app.command()
def verify(
    mask: Annotated[Values, typer.Option()] = None,
    head_dim: Annotated[Values, typer.Option()] = None,
    seq_len: Annotated[Values, typer.Option(help="Default: 1024, 4096.")] = None,
    dtype: Annotated[Values, typer.Option()] = None,
    window: Annotated[Values, typer.Option(help="left:right, -1 for all; or none.")] = None,
    softcap: Annotated[Values, typer.Option(help="off (default), on.")] = None,
    varlen: Annotated[Values, typer.Option(help="off (default), on.")] = None,
    head_group: Annotated[Values, typer.Option(help="Query heads per KV head.")] = None,
    runs: Annotated[int, typer.Option(help="Runs whose bits are compared.", min=2)] = 100,
    as_json: AsJson = False,
) -> None:
    """Run the configs that the dispatcher would serve: bits equal, errors within the budget?"""
    from tuner import stored
    from tuner.space import SpaceFilter

    filters = SpaceFilter(
        masks=_words("mask", mask),
        head_dims=_head_dims(head_dim),
        seq_lens=_numbers("seq-len", seq_len) or (1024, 4096),
        dtypes=_words("dtype", dtype),
        windows=_windows(window),
        softcaps=_switches("softcap", softcap),
        varlens=_switches("varlen", varlen),
        head_groups=_numbers("head-group", head_group),
    )
    raise typer.Exit(stored.verify(filters, runs, as_json))


@app.command()
def peers(
    mask: Annotated[Values, typer.Option()] = None,
    head_dim: Annotated[Values, typer.Option()] = None,
    seq_len: Annotated[Values, typer.Option()] = None,
    window: Annotated[Values, typer.Option(help="left:right, -1 for all; or none.")] = None,
    softcap: Annotated[Values, typer.Option(help="off (default), on.")] = None,
    varlen: Annotated[Values, typer.Option(help="off (default), on.")] = None,
    head_group: Annotated[Values, typer.Option(help="Query heads per KV head.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Default: benchmarks/results/peers-GPU-DATE.json.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=3)] = 30,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Whole backwards side by side with the attention kernels that are installed, in one run, interleaved."""
    from tuner.peers import run_peers
    from tuner.space import SpaceFilter

    filters = SpaceFilter(
        masks=_words("mask", mask),
        head_dims=_head_dims(head_dim),
        seq_lens=_numbers("seq-len", seq_len),
        windows=_windows(window),
        softcaps=_switches("softcap", softcap),
        varlens=_switches("varlen", varlen),
        head_groups=_numbers("head-group", head_group),
    )
    raise typer.Exit(run_peers(filters, db, output, rounds, as_json))


@app.command()
def blocks(
    model: Annotated[Values, typer.Option(help="llama3-8b, qwen2.5-7b, sd3.5-large.")] = None,
    seq_len: Annotated[Values, typer.Option(help="Default: 4096.")] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=3)] = 20,
    as_json: AsJson = False,
) -> None:
    """Whole transformer blocks, forward and backward, with this attention and with PyTorch's, interleaved."""
    from tuner.blocks import run_blocks

    raise typer.Exit(
        run_blocks(_words("model", model), _numbers("seq-len", seq_len), rounds, as_json)
    )


@app.command()
def doctor(
    why: Annotated[
        str,
        typer.Option(help="A row's number, or a problem ('causal d=128 seq_len=4096'): explain."),
    ] = "",
    gpu: GpuName = "",
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """GPU, driver, compiler, clocks: what is there, what is missing, and the remedy; or why a lookup answers as it does."""
    import json
    from dataclasses import asdict

    from tuner.doctor import examine

    if why:
        from tuner import stored

        stored.explain(db, gpu, why, as_json)
        return

    checks = examine()
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        for check in checks:
            print(f"{check.state:8} {check.line}")
    raise typer.Exit(1 if any(check.state == "missing" for check in checks) else 0)


def _refuse_misplaced(context: typer.Context, command: str) -> None:
    """An option before a command belongs to the sweep, and ``--db`` left out would mean another database: refused."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            option = parameter.opts[0]
            _fail(
                f"{option} stands before {command}, where it would count for nothing; write dash-tune {command} {option}"
            )


def _db(given: str | None) -> str | None:
    """Refuses the empty name of a variable that is not set: the user's own database is not what was meant."""
    if given == "":
        _fail("--db names nothing; leave it out for DASH_DB or the user's own database")
    return given


def _words(option: str, values: Sequence[str] | None) -> tuple[str, ...]:
    """The words of a list; one that was given and names nothing, as of a variable that is not set, is refused."""
    words = tuple(
        word.strip() for value in values or () for word in value.split(",") if word.strip()
    )
    if values and not words:
        _fail(f"--{option} names nothing; leave it out for the default")
    return words


def _numbers(option: str, values: Sequence[str] | None) -> tuple[int, ...]:
    words = _words(option, values)
    for word in words:
        if not _is_number(word) or int(word) < 1:
            _fail(f"--{option} {word!r} is not a positive integer")
        if int(word) > LARGEST:
            _fail(f"--{option} {word} does not fit 32 bits; at most {LARGEST}")
    return tuple(int(word) for word in words)


def _head_dims(values: Sequence[str] | None) -> tuple[int | tuple[int, int], ...]:
    found: list[int | tuple[int, int]] = []
    for word in _words("head-dim", values):
        first, slash, second = word.partition("/")
        if slash and not (first and second):
            _fail(f"--head-dim {word!r} is not a head_dim and V's; write 192/128")
        dims = _numbers("head-dim", [first, second])
        if any(dim % 8 for dim in dims):
            _fail(f"--head-dim {word!r}: head_dims are multiples of 8")
        found.append((dims[0], dims[1]) if slash else dims[0])
    return tuple(found)


def _windows(values: Sequence[str] | None) -> tuple[tuple[int, int], ...]:
    found = []
    for word in _words("window", values):
        left, _, right = ("-1", "", "-1") if word == "none" else word.partition(":")
        if not all(_is_number(side) or side == "-1" for side in (left, right)):
            _fail(
                f"--window {word!r} is not left:right; write 1023:0, 512:512, -1 for all, or none"
            )
        _numbers("window", [side for side in (left, right) if side not in ("0", "-1")])
        found.append((int(left), int(right)))
    return tuple(found)


def _switches(option: str, values: Sequence[str] | None) -> tuple[bool, ...]:
    words = _words(option, values)
    for word in words:
        if word not in ("on", "off"):
            _fail(f"--{option} is {word!r}; choose on, off or both: on,off")
    return tuple(word == "on" for word in words)


def _tiles(values: Sequence[str] | None) -> tuple[tuple[int, int], ...]:
    found = []
    for word in _words("tile", values):
        block_m, _, block_n = word.partition("x")
        if not (_is_number(block_m) and _is_number(block_n)):
            _fail(f"--tile {word!r} is not block_m x block_n; write 64x128")
        sides = _numbers("tile", [block_m, block_n])
        found.append((sides[0], sides[1]))
    return tuple(found)


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= DIGITS


def _fail(message: str) -> Any:
    print(f"dash-tune: {message}", file=sys.stderr)
    raise typer.Exit(2)


def main() -> None:
    """Entry point: bad usage and an unusable database are one line on stderr and exit code 2."""
    from tuner.command import UsageError
    from tuner.results.rows import StoreError

    try:
        app()
    except (UsageError, StoreError) as error:
        print(f"dash-tune: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
