"""What is to be computed (Problem), how (Config), and the one predicate that says whether they go together.

Standard library only: the tuner, the server and the dispatcher all speak in these two frozen values.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

MASKS = ("full", "causal")
DTYPES = ("bfloat16", "float16")
BACKENDS = ("hopper", "portable")
POLICIES = ("ordered", "unordered", "two_pass")
SIGNALS = ("plain", "deferred")
LAUNCH_ORDERS = ("ascending", "descending")


def unmasked_pairs(
    seq_len: int, seq_len_kv: int, causal: bool = False, window: tuple[int, int] = (-1, -1)
) -> int:
    """Number of (query, key) pairs of one head that take part, bottom-right aligned.

    ``window = (left, right)`` counts neighbours on each side of a query's own position, -1 meaning all, as in
    flash-attn; ``causal`` is ``right = 0``.
    """
    left, right = window[0], 0 if causal else window[1]
    up_to_right = seq_len * seq_len_kv if right < 0 else _pairs_up_to(seq_len, seq_len_kv, right)
    beyond_left = 0 if left < 0 else _pairs_up_to(seq_len, seq_len_kv, -left - 1)
    return up_to_right - beyond_left


def _pairs_up_to(seq_len: int, seq_len_kv: int, ahead: int) -> int:
    """Pairs whose key is at most ``ahead`` positions after its query's own: a sum of clamped row lengths."""
    first = seq_len_kv - seq_len + ahead + 1  # keys of row 0, before clamping to 0 .. seq_len_kv

    def total(rows: int) -> int:
        """Clamped 1 + 2 + .. + rows."""
        ramp = min(max(rows, 0), seq_len_kv)
        return ramp * (ramp + 1) // 2 + max(rows - seq_len_kv, 0) * seq_len_kv

    return total(first + seq_len - 1) - total(first - 1)


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention backward: shapes, mask, options and dtype.

    Q is (batch, seq_len, heads, head_dim), K (batch, seq_len_kv, heads_kv, head_dim) and V the same with
    ``head_dim_v``. 0 for ``seq_len_kv``, ``heads_kv`` or ``head_dim_v`` means "as for Q" and is resolved at once, so
    that equal problems compare equal.

    ``window_left`` and ``window_right`` are the keys that a query sees on each side of its own position (bottom-right
    aligned), -1 for all. Mask causal is a right side of 0, whatever ``window_right`` says; with a left side, right 0
    makes the mask causal. ``softcap`` says whether scores are capped by tanh. ``varlen`` says that sequences are
    packed: ``batch`` is their number, ``seq_len`` and ``seq_len_kv`` are the longest of them.
    Raises ValueError naming the field for a value outside its range.
    """

    mask: str
    head_dim: int
    seq_len: int
    dtype: str = "bfloat16"
    batch: int = 1
    heads: int = 1
    heads_kv: int = 0
    seq_len_kv: int = 0
    window_left: int = -1
    window_right: int = -1
    head_dim_v: int = 0
    softcap: bool = False
    varlen: bool = False

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise ValueError(f"mask is {self.mask!r}; choose one of {', '.join(MASKS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        object.__setattr__(self, "heads_kv", self.heads_kv or self.heads)
        object.__setattr__(self, "seq_len_kv", self.seq_len_kv or self.seq_len)
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)
        for name in (
            "head_dim", "seq_len", "batch", "heads", "heads_kv", "seq_len_kv", "head_dim_v"
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a positive integer")
        if self.heads % self.heads_kv:
            raise ValueError(
                f"heads ({self.heads}) is not a multiple of heads_kv ({self.heads_kv})"
            )
        for name in ("softcap", "varlen"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        self._settle_window()

    def _settle_window(self) -> None:
        for name in ("window_left", "window_right"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < -1:
                raise ValueError(f"{name} is {value!r}; it must be a number of keys, or -1 for all")
        if self.window_right == 0 and not self.causal:
            if self.window_left < 0:
                raise ValueError("window_right is 0 with mask full: choose mask causal instead")
            object.__setattr__(self, "mask", "causal")
        if self.causal:
            object.__setattr__(self, "window_right", -1)

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def window(self) -> tuple[int, int]:
        """(left, right) that holds: right is 0 for mask causal, -1 is unlimited."""
        return self.window_left, 0 if self.causal else self.window_right

    @property
    def windowed(self) -> bool:
        """Whether the mask has an edge beside the causal diagonal."""
        return self.window_left >= 0 or self.window_right >= 0

    @property
    def head_group(self) -> int:
        """Query heads per KV head: 1 for MHA."""
        return self.heads // self.heads_kv

    def label(self) -> str:
        """Short name for messages and tables: ``causal d=128 seq_len=4096 bfloat16``, and the options that are on."""
        dims = f"{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"/{self.head_dim_v}"
        words = [self.mask, f"d={dims}", f"seq_len={self.seq_len}", self.dtype]
        if self.windowed:
            words.append("window={},{}".format(*self.window))
        words += [name for name in ("softcap", "varlen") if getattr(self, name)]
        return " ".join(words)

    def flops(self, convention: str = "square") -> float:
        """Floating-point operations of the backward: five matmuls, 2 * head_dim operations a pair each.

        S, dK and dQ run over head_dim, dP and dV over head_dim_v. ``square`` counts seq_len * seq_len_kv pairs, halved
        for causal: what flash-attn and peers print, and what every stored TFLOPS of this project means; with a
        window, for which peers have no such form, it too counts exactly. ``pairs`` counts the unmasked pairs.
        Packed sequences count as if each were as long as the longest.
        """
        if convention not in ("square", "pairs"):
            raise ValueError(f"convention is {convention!r}; choose square or pairs")
        pairs: float
        if convention == "pairs" or self.windowed:
            pairs = unmasked_pairs(self.seq_len, self.seq_len_kv, self.causal, self.window)
        else:
            pairs = self.seq_len * self.seq_len_kv / (2 if self.causal else 1)
        return 2.0 * (3 * self.head_dim + 2 * self.head_dim_v) * pairs * self.batch * self.heads

    def tflops(self, milliseconds: float, convention: str = "square") -> float:
        return self.flops(convention) / milliseconds * 1e-9

    def options(self) -> dict[str, Any]:
        """The fields after ``seq_len_kv`` that differ from their defaults."""
        return {name: value for name, value in self.to_dict().items() if name in OPTION_FIELDS}

    def to_dict(self) -> dict[str, Any]:
        """The fields in order, but no option at its default: rows and hashes keep their form as options are added."""
        values = asdict(self)
        defaults = {f.name: f.default for f in fields(self)} | {"head_dim_v": self.head_dim}
        for name in OPTION_FIELDS:
            if values[name] == defaults[name]:
                del values[name]
        return values

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Problem:
        return cls(**_known_fields(cls, data))


SHAPE_FIELDS = tuple(f.name for f in fields(Problem))[:8]
OPTION_FIELDS = tuple(f.name for f in fields(Problem))[8:]


@dataclass(frozen=True, slots=True)
class Config:
    """One way to run a backward. Every field is a choice that the tuner sweeps; none is found at run time.

    ``schedule`` and ``group`` name a kind in the registry (``group`` is grouped_shift's number of CTAs a head).
    ``launch_order`` is the order in which a head's items are handed to CTAs, ``heads_interleaved`` how many heads
    take turns in it (0: all of them); neither can change bits. ``num_stages`` counts Q/dO stages, ``dq_stages``
    the fp32 dQ stages of the Hopper kernel, which runs two. ``signal`` is plain: the turnstile is released after each
    reduce. Rows of an earlier kernel may say three stages, or deferred (after the next reduce was issued):
    :func:`retired`.
    """

    backend: str = "hopper"
    schedule: str = "shortest_first"
    group: int = 1
    policy: str = "ordered"
    block_m: int = 64
    block_n: int = 128
    num_stages: int = 2
    dq_stages: int = 2
    num_warps: int = 8
    signal: str = "plain"
    launch_order: str = "descending"
    heads_interleaved: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (
            ("backend", BACKENDS),
            ("policy", POLICIES),
            ("signal", SIGNALS),
            ("launch_order", LAUNCH_ORDERS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}"
                )
        for name in ("group", "block_m", "block_n", "num_stages", "dq_stages", "num_warps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a positive integer")
        if not isinstance(self.heads_interleaved, int) or self.heads_interleaved < 0:
            raise ValueError(
                f"heads_interleaved is {self.heads_interleaved!r}; it must be 0 (all) or more"
            )

    @property
    def deterministic(self) -> bool:
        return self.policy != "unordered"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Config:
        return cls(**_known_fields(cls, data))

    def key(self) -> str:
        """Sixteen hex digits that name this config in files, rows and caches."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def label(self) -> str:
        """Short name for tables and legends, for instance ``shortest_first 64x128 descending x4 heads``.

        What most configs share goes unsaid: backend hopper, two stages of each kind, heads one after another, signal
        plain.
        """
        kind = f"{self.schedule}({self.group})" if self.group > 1 else self.schedule
        if self.policy != "ordered":
            kind = self.policy
        heads = f"x{self.heads_interleaved}" if self.heads_interleaved else "all"
        interleave = "" if self.heads_interleaved == 1 else f" {heads} heads"
        rest = "" if self.num_stages == 2 else f" {self.num_stages} stages"
        if self.backend == "portable":
            rest += " portable"
        elif self.dq_stages != 2:
            rest += f" {self.dq_stages} dQ stages"
        signal = "" if self.signal == "plain" else f" {self.signal}"
        return f"{kind} {self.block_m}x{self.block_n} {self.launch_order}{interleave}{signal}{rest}"

    def with_(self, **changes: Any) -> Config:
        return replace(self, **changes)


def _known_fields(cls: type, data: dict[str, Any]) -> dict[str, Any]:
    known = {f.name for f in fields(cls)}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ValueError(
            f"unknown {cls.__name__} field {unknown[0]!r}; known: {', '.join(sorted(known))}"
        )
    return data


@dataclass(frozen=True, slots=True)
class Support:
    """Answer of :func:`supports`: true, or false with the reason. The bytes of shared memory are there either way."""

    ok: bool
    reason: str = ""
    required_bytes: int | None = None
    limit_bytes: int | None = None

    def __bool__(self) -> bool:
        return self.ok


# Columns of the kernel's Q tile (hopper_dims) -> (block_m, block_n)
HOPPER_TILES = {64: ((128, 128),), 128: ((64, 128),), 192: ((64, 128),), 256: ((64, 64),)}
PORTABLE_TILES = ((32, 64), (64, 64), (64, 128), (128, 64), (128, 128), (32, 128), (32, 32))
# On compute capability 10.x accumulators live in tensor memory. Padded head_dim -> the tiles whose accumulators fit in it:
# for any other Triton compiles, in place of the kernel, an instruction that faults.
TENSOR_MEMORY_TILES = {
    64: ((32, 64), (64, 64), (64, 128), (128, 64), (32, 128), (32, 32)),
    128: ((32, 64), (64, 64), (128, 64), (32, 128), (32, 32)),
    256: ((32, 64), (32, 32)),
}
DEFERRED = "the deferred signal belonged to an earlier Hopper kernel; use signal plain"
KERNEL_HEAD_DIMS = {"hopper": (64, 128, 256), "portable": (64, 128, 256)}
KV_TILES = 2048  # of a sample: with fewer, CTAs wait for the longest walk (docs/performance.md)
HEAD_DIM_STEP = 16  # rows that the Hopper kernel reads in place have so many elements or a multiple
SHARED_MEMORY_LIMIT = {
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (12, 0): 101376,
}


def padded_head_dim(head_dim: int) -> int:
    """The kernel's head_dim that serves ``head_dim``: 64, 128 or 256, the rest of a row being zeros."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def hopper_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Columns of the tiles of Q and K, and of V and dO, in the Hopper main kernel: (192, 128) or twice the same."""
    if 128 < head_dim <= 192 and head_dim_v <= 128:
        return 192, 128
    widest = _row_length(max(head_dim, head_dim_v))
    return widest, widest


def kernel_dims(problem: Problem, backend: str) -> tuple[int, int]:
    """(head_dim, head_dim_v) of the tensors that a backend's launch takes; rows are filled up with zeros to that."""
    dims = problem.head_dim, problem.head_dim_v
    if backend == "hopper":
        d, d_v = (-(-dim // HEAD_DIM_STEP) * HEAD_DIM_STEP for dim in dims)
    else:
        d, d_v = (padded_head_dim(dim) for dim in dims)
    return d, d_v


def head_splits(problem: Problem, config: Config) -> int:
    """CTAs that share the query heads of a KV tile on the Hopper backend, as neighbouring KV heads with the same K and V.

    Each rounds a dK and dV of its own, which are added up afterwards. As many as give a sample at least
    :data:`KV_TILES`; they depend on nothing outside the sample, whose bits are the same alone and in a batch.
    None where walks are equally long, since no CTA waits for the longest there.
    """
    if config.backend != "hopper" or problem.varlen or problem.windowed or not problem.causal:
        return 1
    tiles = problem.heads_kv * -(-problem.seq_len_kv // config.block_n)
    group = problem.head_group
    divisors = (splits for splits in range(1, group + 1) if group % splits == 0)
    return next((splits for splits in divisors if tiles * splits >= KV_TILES), group)


def walked_heads(problem: Problem, config: Config) -> tuple[int, int]:
    """(KV heads of all samples, query heads of each) as CTAs walk them: more KV heads where :func:`head_splits` says so."""
    splits = head_splits(problem, config)
    return problem.batch * problem.heads_kv * splits, problem.head_group // splits


def hopper_shared_bytes(config: Config, head_dim: int, head_dim_v: int = 0) -> int:
    """Shared memory of the Hopper main kernel: its buffers, and 1 KiB that holds barriers, records and captures.

    ``head_dim_v`` 0 is ``head_dim``.
    """
    d, d_v = hopper_dims(head_dim, head_dim_v or head_dim)
    m, n = config.block_m, config.block_n
    kv, q_do = n * (d + d_v) * 2, config.num_stages * (m * (d + d_v) * 2 + 2 * m * 4)
    ds = n * m * 2 * (1 if d == 192 else 2)
    # Above head_dim 128 all stages together are one dQ tile.
    ring = m * d * 4 * (1 if d > 128 else config.dq_stages)
    return kv + q_do + ds + ring + 1024


def portable_shared_bytes(config: Config, head_dim: int, head_dim_v: int = 0) -> int:
    """Least shared memory of the portable kernels with matmuls; ``head_dim_v`` 0 is ``head_dim``.

    The main kernel: K, V and the stages of Q and dO. The dQ pass of two_pass: the stages of K, which it reads until a
    step's end, those of V, one fewer, and dS.
    """
    m, n, stages = config.block_m, config.block_n, config.num_stages
    d, d_v = _row_length(head_dim), _row_length(head_dim_v or head_dim)
    main = (n + stages * m) * (d + d_v) * 2
    if config.policy != "two_pass":
        return main
    return max(main, n * (d * stages + d_v * (stages - 1)) * 2 + m * n * 2)


def _row_length(head_dim: int) -> int:
    """Elements of a row in shared memory; a power of two also above what this release runs, so that bytes are known."""
    return max(padded_head_dim(head_dim), 1 << (head_dim - 1).bit_length())


def supports(config: Config, problem: Problem, capability: tuple[int, int] = (9, 0)) -> Support:
    """Whether ``config`` can run ``problem`` on a GPU of this compute capability. The one validity predicate.

    It judges what is written in the three values; whether a kind may wait on later CTAs (min_resident > 1) is a
    permission of the caller and is judged at launch.
    """
    if config.backend == "hopper":
        required = hopper_shared_bytes(config, problem.head_dim, problem.head_dim_v)
        not_built = _not_on_hopper
    else:
        required = portable_shared_bytes(config, problem.head_dim, problem.head_dim_v)
        not_built = _not_portable
    limit = SHARED_MEMORY_LIMIT.get(capability, 101376)
    reason = (
        _wrong_schedule(config, problem)
        or _wrong_head_dim(config, problem)
        or not_built(config, problem, capability)
    )
    if not reason and required > limit:
        reason = f"needs {required} bytes of shared memory; the limit is {limit}: fewer stages or a smaller tile"
    return Support(not reason, reason, required, limit)


def _wrong_schedule(config: Config, problem: Problem) -> str:
    """Why this kind of schedule does not fit the problem, empty when it does."""
    from dash_kernels.schedules import CLOSED_FORMS, SCHEDULES

    kind = SCHEDULES.get(config.schedule)
    if kind is None:
        return f"schedule {config.schedule!r} is not one of {', '.join(sorted(SCHEDULES))}"
    if config.group > 1 and not kind.takes_group:
        return f"group is for grouped_shift; schedule is {config.schedule}"
    mask = "window" if problem.windowed else problem.mask
    if mask not in kind.masks:
        return kind.refusal(mask)
    if problem.varlen:
        if config.schedule not in CLOSED_FORMS:
            return (
                f"packed sequences need a kind with a closed form, {' or '.join(CLOSED_FORMS)}; "
                f"schedule is {config.schedule}"
            )
        if config.launch_order != kind.default_launch.order:
            return (
                f"packed sequences run {config.schedule} launched {kind.default_launch.order}, so that any number "
                f"of free SMs will do; launch_order is {config.launch_order}"
            )
    return ""


def _wrong_head_dim(config: Config, problem: Problem) -> str:
    widest = KERNEL_HEAD_DIMS[config.backend][-1]
    for name in ("head_dim", "head_dim_v"):
        if getattr(problem, name) > widest:
            return f"{name} {getattr(problem, name)} is above {widest}, the largest of backend {config.backend}"
    return ""


def _not_on_hopper(config: Config, problem: Problem, capability: tuple[int, int]) -> str:
    """Why the Hopper kernel does not run this; it runs every mask, head group and option up to head_dim 256."""
    dim = hopper_dims(problem.head_dim, problem.head_dim_v)[0]
    if capability[0] != 9:
        return (
            f"backend hopper needs compute capability 9.0; this is {capability[0]}.{capability[1]}"
        )
    if (config.block_m, config.block_n) not in HOPPER_TILES[dim]:
        tiles = ", ".join(f"{m}x{n}" for m, n in HOPPER_TILES[dim])
        return f"tile {config.block_m}x{config.block_n} is not built for head_dim {dim}: {tiles}"
    if config.num_warps != 8:
        return f"backend hopper runs 8 consumer warps; num_warps is {config.num_warps}"
    if config.num_stages > 4:
        return "backend hopper has barriers for 4 stages: num_stages goes up to 4"
    if gone := retired(config):
        return gone
    if config.policy == "two_pass":
        return "two_pass runs on backend portable: the Hopper kernel has no dQ pass"
    return ""


def retired(config: Config) -> str:
    """Why a config that earlier kernels ran is refused by these, whatever the problem; "" for any other."""
    if config.signal == "deferred":
        return DEFERRED
    if config.backend == "hopper" and config.dq_stages != 2:
        # Of three, a writer that is ahead could take what was handed to the other.
        return f"backend hopper has two dQ stages, one a writer; dq_stages is {config.dq_stages}"
    return ""


def _not_portable(config: Config, problem: Problem, capability: tuple[int, int]) -> str:
    """Why the portable kernel does not run this; it runs every mask, head group and option up to head_dim 256."""
    if capability < (8, 0):
        return f"backend portable needs compute capability 8.0; this is {capability[0]}.{capability[1]}"
    if (config.block_m, config.block_n) not in PORTABLE_TILES:
        tiles = ", ".join(f"{m}x{n}" for m, n in PORTABLE_TILES)
        return f"tile {config.block_m}x{config.block_n} is not one of {tiles}"
    if capability[0] == 10:
        dim = padded_head_dim(max(problem.head_dim, problem.head_dim_v))
        if (config.block_m, config.block_n) not in TENSOR_MEMORY_TILES[dim]:
            tiles = ", ".join(f"{m}x{n}" for m, n in TENSOR_MEMORY_TILES[dim])
            return (
                f"tile {config.block_m}x{config.block_n} overflows the tensor memory of compute capability 10.x at "
                f"head_dim {dim}: {tiles}"
            )
    return retired(config)
