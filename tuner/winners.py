"""Which config wins: a pure function of stored rows, so that the same rows always give the same winners.

- A **cell** is one shape: gpu, mask, head_dim, dtype, head_group, options (window, head_dim_v, softcap, varlen), seq_len,
  seq_len_kv, batch, heads, direction. A **slice** is the same for every length, batch and number of heads.
- Rows are compared within one **sweep**: the runs that share environment and measurement policy, so that a sweep
  resumed over several commands is one, and a baseline comes from any of its runs. Each cell uses its newest sweep that
  has a config to serve. Within a sweep the newest row of a config stands. Newest is by the time a row was made, so that
  rows loaded later, shipped or imported ones, do not come before newer ones of this machine.
- May win: status ok, a reduction policy that is deterministic, a finite cost, not above the chip's peak, and no row of
  the same config in the sweep that failed the correctness or the determinism gate.
- ``best`` is the fastest of these, ``served`` the fastest that needs one resident CTA only: ``best`` itself if it does.
- Where a cell had a final round (its leaders sampled in turn), only its rows, and newer ones, compete: times taken
  minutes apart saw other clocks.
- Ties go by a fixed rule. A config ties with the fastest when it is within NOISE. Among those: fewest resident CTAs,
  fewest stages, then the config's key.
- The default rule's config (``dash_kernels.default_rule``) wins unless the winner beats it outside the noise: by more than
  NOISE, and where there are samples with a 95 % interval of the lead above zero.
- Baselines: ``ascending`` is the ordered ascending kind as FA3 launches it (heads in turn, ascending), its best tile;
  ``unordered`` the fastest with atomics.

Cost is the inverse of TFLOPS for measured rows, the model's predicted time for modelled ones, and spill bytes, then
registers, for compiled ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from statistics import NormalDist, median, stdev
from typing import Any

from dash_kernels.default_rule import default_config
from dash_kernels.device import GPUS
from dash_kernels.problem import OPTION_FIELDS, retired
from tuner.results.rows import ResultRow, canonical

NOISE = 0.01  # smaller leads change from sweep to sweep: two-gpus-h200-2026-11-30.json
SLICE_FIELDS = ("gpu", "mask", "head_dim", "dtype", "head_group", *OPTION_FIELDS, "direction")
CELL_FIELDS = (*SLICE_FIELDS[:-1], "seq_len", "seq_len_kv", "batch", "heads", "direction")
NEVER = datetime.min.replace(tzinfo=timezone.utc)
FAILED_CHECKS = ("correctness", "nondeterministic")
MEDIAN_TO_MEAN_ERROR = math.sqrt(
    math.pi / 2
)  # standard error of a median over that of a mean, normal samples
MAD_TO_DEVIATION = 1 / NormalDist().inv_cdf(0.75)  # of a median absolute deviation, normal samples


@dataclass(frozen=True, slots=True)
class Confidence:
    """The winner's lead in speed over the runner-up (0.02: 2 % faster) and its 95 % interval, None without samples."""

    lead: float
    low: float | None
    high: float | None

    @property
    def tie(self) -> bool:
        """Whether a lead with samples, which a model's has not, is within the noise or perhaps none."""
        return self.low is not None and (self.lead <= NOISE or self.low <= 0)

    def to_dict(self) -> dict[str, float | None]:
        return {"lead": self.lead, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Winner:
    """A row with its standing. ``speedup_vs_baseline`` is against the ascending baseline of the same sweep."""

    row: ResultRow
    confidence: Confidence | None
    speedup_vs_baseline: float | None

    def to_dict(self) -> dict[str, Any]:
        """ENTRY of the lookup table."""
        row = self.row
        return {
            "config": dict(row.config),
            "tflops": row.tflops,
            "ms": row.ms,
            "registers": row.registers,
            "spill_bytes": row.spill_bytes,
            "shared_bytes": row.shared_bytes,
            "min_resident": resident(row),
            "numerics_key": row.numerics_key,
            "confidence": self.confidence.to_dict() if self.confidence else None,
            "speedup_vs_baseline": self.speedup_vs_baseline,
        }


@dataclass(frozen=True, slots=True)
class Cell:
    """The winners of one shape. ``servable`` holds every row that competed for ``served``."""

    gpu: str
    mask: str
    head_dim: int
    dtype: str
    head_group: int
    seq_len: int
    seq_len_kv: int
    batch: int
    heads: int
    direction: str
    window_left: int
    window_right: int
    head_dim_v: int
    softcap: bool
    varlen: bool
    sweep: str
    best: Winner
    served: Winner | None
    baselines: dict[str, Winner]
    servable: tuple[ResultRow, ...] = field(default=(), repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """One cell of the lookup table, without its gpu."""
        return {
            **_said(self, [name for name in CELL_FIELDS if name != "gpu"]),
            "served": self.served.to_dict() if self.served else None,
            "best": self.best.to_dict(),
            "baselines": {name: winner.to_dict() for name, winner in self.baselines.items()},
        }


@dataclass(frozen=True, slots=True)
class Overall:
    """The one servable config with the highest geometric mean over the measured seq lens of a slice.

    Of the configs measured at the most seq lens; ``rows`` has its row at each of them.
    """

    config: dict[str, Any]
    rows: tuple[ResultRow, ...]
    confidence: Confidence | None
    speedup_vs_baseline: float | None

    def to_dict(self) -> dict[str, Any]:
        """The slice, the seq lens, and ENTRY with geometric means, and the largest of registers and bytes."""
        first = self.rows[0]
        keys = {row.numerics_key for row in self.rows}
        return {
            **_said(first, SLICE_FIELDS),
            "seq_lens": [row.seq_len for row in self.rows],
            "config": dict(self.config),
            "tflops": _mean(row.tflops for row in self.rows),
            "ms": _mean(row.ms for row in self.rows),
            "registers": _largest(row.registers for row in self.rows),
            "spill_bytes": _largest(row.spill_bytes for row in self.rows),
            "shared_bytes": _largest(row.shared_bytes for row in self.rows),
            "min_resident": 1,
            "numerics_key": keys.pop() if len(keys) == 1 else None,
            "confidence": self.confidence.to_dict() if self.confidence else None,
            "speedup_vs_baseline": self.speedup_vs_baseline,
        }


def _said(cell: Cell | ResultRow, names: Sequence[str]) -> dict[str, Any]:
    """The fields that name a cell, without the options that are off, as lookup tables write them."""
    row = cell if isinstance(cell, ResultRow) else cell.best.row
    off = set(OPTION_FIELDS) - set(row.to_problem().options())
    return {name: getattr(cell, name) for name in names if name not in off}


def winners(candidates: Iterable[tuple[ResultRow, str]]) -> list[Cell]:
    """Winners by cell, sorted. ``candidates`` are (row, name of its sweep), oldest first (:func:`age`)."""
    sweeps: dict[tuple[Any, ...], dict[str, list[ResultRow]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row, sweep in candidates:
        by_sweep = sweeps[tuple(getattr(row, name) for name in CELL_FIELDS)]
        by_sweep[sweep].append(row)
        by_sweep[sweep] = by_sweep.pop(sweep)  # the sweep with the newest row stands last
    cells = (_cell(by_sweep) for by_sweep in sweeps.values())
    return sorted(
        (cell for cell in cells if cell), key=lambda c: tuple(getattr(c, n) for n in CELL_FIELDS)
    )


def _cell(by_sweep: dict[str, list[ResultRow]]) -> Cell | None:
    unserved = None
    for sweep in reversed(by_sweep):
        rows = _standing(by_sweep[sweep])
        eligible = [
            row for row in rows if row.policy != "unordered" and not retired(row.to_config())
        ]
        if not eligible:
            continue
        servable = tuple(row for row in eligible if resident(row) == 1)
        baselines = _baselines(rows)
        baseline = baselines.get("ascending")
        first = eligible[0]
        best = _win(_comparable(eligible), baseline)
        fixed = best.row if resident(best.row) == 1 else None
        cell = Cell(
            **{name: getattr(first, name) for name in CELL_FIELDS},
            sweep=sweep,
            best=best,
            served=_win(_comparable(servable), baseline, fixed) if servable else None,
            baselines={name: _standing_of(row, baseline) for name, row in baselines.items()},
            servable=servable,
        )
        if servable:
            return cell
        unserved = unserved or cell
    return unserved


def age(row: ResultRow) -> tuple[datetime, int]:
    """Sort key, oldest first: when the row was made, then its place in the database."""
    return row.created_at or NEVER, row.id or 0


def is_final(row: ResultRow) -> bool:
    """Whether the row comes from a final round."""
    return (row.telemetry or {}).get("round") == "final"


def is_plain(row: ResultRow) -> bool:
    """Whether heads are launched one after another, ascending, as the baseline is."""
    launch = row.config.get("launch_order"), row.config.get("heads_interleaved")
    return launch == ("ascending", 1)


def _comparable(rows: Sequence[ResultRow]) -> Sequence[ResultRow]:
    """The rows of the cell's newest final round and any since, where there is one: earlier ones saw other clocks."""
    final = [row for row in rows if is_final(row)]
    if not final:
        return rows
    newest = max(final, key=age).run_id
    start = min(age(row) for row in final if row.run_id == newest)
    return [row for row in rows if age(row) >= start]


def _standing(rows: list[ResultRow]) -> list[ResultRow]:
    failed = {
        row.config_hash for row in rows if row.status in FAILED_CHECKS or row.bits_equal is False
    }
    newest = {row.config_hash: row for row in rows if row.status == "ok"}
    return [
        row
        for row in newest.values()
        if not row.above_peak
        and cost(row) is not None
        and (row.policy == "unordered" or row.config_hash not in failed)
    ]


def _baselines(rows: list[ResultRow]) -> dict[str, ResultRow]:
    ascending = [row for row in rows if row.schedule == "ascending" and row.policy == "ordered"]
    plain = [row for row in ascending if is_plain(row)]
    unordered = [row for row in rows if row.policy == "unordered"]
    found = {"ascending": plain or ascending, "unordered": unordered}
    # A winner of the final round stands against baselines of that round, where it has them.
    same_clocks = {id(row) for row in _comparable(rows)}
    return {
        name: pick([row for row in group if id(row) in same_clocks] or group)
        for name, group in found.items()
        if group
    }


def _win(
    rows: Sequence[ResultRow], baseline: ResultRow | None, winner: ResultRow | None = None
) -> Winner:
    winner = winner or _unless_default(pick(rows), rows)
    others = [row for row in rows if row is not winner]
    lead = _confidence([(winner, min(others, key=_cost))]) if others else None
    return Winner(winner, lead, _speedup(winner, baseline))


def _standing_of(row: ResultRow, baseline: ResultRow | None) -> Winner:
    return Winner(row, None, _speedup(row, baseline))


def pick(rows: Sequence[ResultRow]) -> ResultRow:
    """The fastest row, ties going by the fixed rule of this module."""
    fastest = min(rows, key=_cost)
    return min((row for row in rows if _ties([(fastest, row)])), key=_simplicity)


def _unless_default(winner: ResultRow, rows: Sequence[ResultRow]) -> ResultRow:
    """The winner, or the default rule's row where the winner does not beat it for sure."""
    default = default_of(winner)
    row = next((row for row in rows if row.config == default), winner)
    return winner if row is winner or _beats([(winner, row)]) else row


def default_of(row: ResultRow) -> dict[str, Any] | None:
    """The default rule's config for a measured row's problem; None on a chip whose capability is not known."""
    gpu = GPUS.get(row.gpu)
    if gpu is None or row.source != "measured":
        return None
    try:
        return default_config(row.to_problem(), gpu.capability).to_dict()
    except ValueError:
        return None


def _beats(pairs: Sequence[tuple[ResultRow, ResultRow]]) -> bool:
    lead = _confidence(pairs)
    return lead.lead > NOISE and (lead.low is None or lead.low > 0)


def _ties(pairs: Sequence[tuple[ResultRow, ResultRow]]) -> bool:
    if any(row.source != "measured" for pair in pairs for row in pair):
        return all(_cost(fast) == _cost(slow) for fast, slow in pairs)
    return math.expm1(_log_lead(pairs)) <= NOISE


def _simplicity(row: ResultRow) -> tuple[Any, ...]:
    config = row.config
    key = row.to_config().key()
    return resident(row) or math.inf, config.get("num_stages", 0), config.get("dq_stages", 0), key


def cost(row: ResultRow) -> float | None:
    """What a winner has least of, None when unknown: see the module's head."""
    if row.source == "measured":
        return 1 / row.tflops if row.tflops and row.tflops > 0 else None
    if row.source == "modelled":
        return row.predicted if row.predicted and row.predicted > 0 else None
    if row.registers is None or row.spill_bytes is None:
        return None
    return row.spill_bytes * 256.0 + row.registers


def _cost(row: ResultRow) -> float:
    value = cost(row)
    return math.inf if value is None else value


def resident(row: ResultRow) -> int | None:
    """CTAs that must be resident at once; two_pass waits for none."""
    return 1 if row.policy == "two_pass" else row.min_resident


def _speedup(row: ResultRow, baseline: ResultRow | None) -> float | None:
    if baseline is None or row.source == "compiled":
        return None
    return _cost(baseline) / _cost(row)


def _confidence(pairs: Sequence[tuple[ResultRow, ResultRow]]) -> Confidence:
    """Lead of the first of each pair over the second, in the geometric mean over pairs, with its 95 % interval.

    Where the two were sampled in turn, under the same clocks, the lead is the median ratio of neighbouring samples, and
    its error comes from the median absolute deviation of their logarithms: at its power cap a chip changes its clock
    between two samples, and one such pair among twelve must not hide what the other eleven show. Else the lead is the
    ratio of the medians, and its error comes from the variance of each one's logarithms (Welch).
    """
    lead = _log_lead(pairs)
    parts = [part for fast, slow in pairs for part in _squared_errors(fast, slow)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return Confidence(math.expm1(lead), None, None)
    total = sum(square for square, _ in known)
    spread = sum(square**2 / freedom for square, freedom in known)
    error = math.sqrt(total) / len(pairs) * MEDIAN_TO_MEAN_ERROR
    reach = student_t(total**2 / spread) * error if spread > 0 else 0.0
    return Confidence(math.expm1(lead), math.expm1(lead - reach), math.expm1(lead + reach))


def _log_lead(pairs: Sequence[tuple[ResultRow, ResultRow]]) -> float:
    """Mean over pairs of the logarithm of (cost of the second / cost of the first)."""
    return sum(_log_ratio(fast, slow) for fast, slow in pairs) / len(pairs)


def _log_ratio(fast: ResultRow, slow: ResultRow) -> float:
    if (ratios := _neighbours(fast, slow)) is not None:
        return -median(ratios)
    costs = _cost(slow), _cost(fast)
    return math.log(costs[0] / costs[1]) if min(costs) > 0 else 0.0


def _squared_errors(fast: ResultRow, slow: ResultRow) -> list[tuple[float, int] | None]:
    """What the samples of two rows contribute to the squared error of the lead, with its degrees of freedom."""
    if (ratios := _neighbours(fast, slow)) is not None:
        return [_squared_error(ratios, _steady_deviation)]
    return [_squared_error(_logs(row), stdev) for row in (fast, slow)]


def _neighbours(fast: ResultRow, slow: ResultRow) -> list[float] | None:
    """Logarithms of (time of the first / time of the second) of samples taken one after the other: in one final round."""
    one, other = fast.samples or (), slow.samples or ()
    in_turn = is_final(fast) and is_final(slow) and fast.run_id == slow.run_id
    if not in_turn or len(one) != len(other):
        return None
    pairs = ((x, y) for x, y in zip(one, other, strict=True) if _is_time(x) and _is_time(y))
    return [math.log(x) - math.log(y) for x, y in pairs] or None


def _logs(row: ResultRow) -> list[float]:
    return [math.log(x) for x in row.samples or () if _is_time(x)]


def _is_time(sample: Any) -> bool:
    return isinstance(sample, (int, float)) and 0 < sample < math.inf


def _squared_error(
    logs: Sequence[float], deviation: Callable[[Sequence[float]], float]
) -> tuple[float, int] | None:
    """Squared standard error of the mean of some logarithms, and its degrees of freedom."""
    return (deviation(logs) ** 2 / len(logs), len(logs) - 1) if len(logs) > 1 else None


def _steady_deviation(logs: Sequence[float]) -> float:
    """Standard deviation of normal samples, from the median absolute one, which a few strange ones hardly move.

    Short kernels, whose times are few different ticks of the timer, may have none: then the ordinary one.
    """
    middle = median(logs)
    return MAD_TO_DEVIATION * median(abs(x - middle) for x in logs) or stdev(logs)


def student_t(freedom: float, probability: float = 0.975) -> float:
    """Quantile of Student's t (Abramowitz and Stegun 26.7.5), within 1 % from three degrees of freedom on."""
    z, v = NormalDist().inv_cdf(probability), max(freedom, 1.0)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


def overall(cells: Sequence[Cell], prefer: Callable[[Cell], Any] | None = None) -> list[Overall]:
    """The best single config of each slice.

    Where a seq len was measured with several batches or heads, the cell with the least ``prefer`` counts, by default
    the one with the most work.
    """
    slices: dict[tuple[Any, ...], dict[int, Cell]] = defaultdict(dict)
    for cell in sorted(cells, key=prefer or most_work):
        if cell.servable:
            slices[tuple(getattr(cell, name) for name in SLICE_FIELDS)].setdefault(
                cell.seq_len, cell
            )
    return [_overall([by_seq[s] for s in sorted(by_seq)]) for by_seq in slices.values()]


def most_work(cell: Cell) -> tuple[int, ...]:
    """Sort key that puts the cell with the most work of a seq len first."""
    return (-cell.batch * cell.heads * cell.seq_len_kv, -cell.heads, -cell.seq_len_kv)


def _overall(cells: list[Cell]) -> Overall:
    rows: dict[str, list[ResultRow]] = defaultdict(list)
    for cell in cells:
        for row in cell.servable:
            rows[canonical(row.config)].append(row)
    covered = max(map(len, rows.values()))
    complete = [found for found in rows.values() if len(found) == covered]
    fastest = min(complete, key=_log_cost)
    same = [row.seq_len for row in fastest]
    rivals = [found for found in complete if [row.seq_len for row in found] == same]
    tied = [found for found in rivals if _ties(list(zip(fastest, found, strict=True)))]
    winner = min(tied, key=lambda found: _simplicity(found[0]))
    defaults = [default_of(row) for row in winner]
    default = next((r for r in rivals if [row.config for row in r] == defaults), winner)
    if default is not winner and not _beats(list(zip(winner, default, strict=True))):
        winner = default
    others = [found for found in rivals if found is not winner]
    confidence = None
    if others:
        runner_up = min(others, key=_log_cost)
        confidence = _confidence(list(zip(winner, runner_up, strict=True)))
    baselines = {cell.seq_len: cell.baselines.get("ascending") for cell in cells}
    speedups = [
        _speedup(row, base.row) if (base := baselines[row.seq_len]) is not None else None
        for row in winner
    ]
    return Overall(winner[0].config, tuple(winner), confidence, _mean(speedups))


def _log_cost(rows: list[ResultRow]) -> float:
    return sum(math.log(_cost(row) + (row.source == "compiled")) for row in rows)


def _mean(values: Iterable[float | None]) -> float | None:
    """Geometric mean, None when a value is unknown."""
    known = list(values)
    if not known or any(value is None or value <= 0 for value in known):
        return None
    return math.exp(sum(math.log(value) for value in known if value) / len(known))


def _largest(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return (
        None
        if any(value is None for value in known)
        else max(value for value in known if value is not None)
    )
