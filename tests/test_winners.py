"""Winners: who may win, who wins a tie, and which rows are read to find out."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from dash_kernels.default_rule import default_config
from dash_kernels.problem import Config, Problem
from tuner.finals import finalists
from tuner.results import ResultFilter, ResultRow, RunInfo, Store
from tuner.winners import overall, pick, student_t, winners

PROBLEM = Problem("causal", 128, 4096, batch=4, heads=16)
SERVED = Config()
ASCENDING = Config(schedule="ascending", launch_order="ascending")
INTERLEAVED = ASCENDING.with_(heads_interleaved=4)
SHIFT = Config(schedule="shift", launch_order="ascending")
UNORDERED = Config(policy="unordered")
TWO_PASS = Config(policy="two_pass")
RUN = RunInfo("h200", {"driver": "580"}, {"zeroing": True})
SAMPLES = 20


def measured(
    config: Config,
    speed: float,
    problem: Problem = PROBLEM,
    *,
    noise: float = 0.001,
    seed: int = 0,
    **values: Any,
) -> ResultRow:
    """A row as the tuner writes it: ``SAMPLES`` times whose median gives about ``speed`` TFLOPS."""
    ms = problem.flops() / speed * 1e-9
    generator = random.Random(f"{seed} {config}")
    samples = [ms * math.exp(generator.gauss(0, noise)) for _ in range(SAMPLES)]
    median = statistics.median(samples)
    defaults = {
        "tflops": problem.tflops(median),
        "ms": median,
        "samples": samples,
        "min_resident": 32 if config.schedule == "shift" else 1,
        "bits_equal": config.deterministic,
        "registers": 168,
        "spill_bytes": 0,
    }
    return ResultRow.of(problem, config, gpu="h200", **(defaults | values))


def cell_of(*rows: ResultRow) -> Any:
    (cell,) = winners((row, "sweep") for row in rows)
    return cell


# -- who may win ----------------------------------------------------------------------------------------------------


def test_best_of_all_served_and_baselines() -> None:
    cell = cell_of(
        measured(SERVED, 550), measured(SHIFT, 600), measured(ASCENDING, 275), measured(INTERLEAVED, 300),
        measured(UNORDERED, 700), measured(TWO_PASS, 400, min_resident=None),
    )  # fmt: skip
    assert cell.best.row.to_config() == SHIFT
    assert cell.served.row.to_config() == SERVED
    assert cell.baselines["ascending"].row.to_config() == ASCENDING
    assert cell.baselines["unordered"].row.to_config() == UNORDERED
    assert cell.best.speedup_vs_baseline == pytest.approx(600 / 275, rel=0.01)
    assert cell.baselines["ascending"].speedup_vs_baseline == 1
    assert {row.to_config() for row in cell.servable} == {SERVED, ASCENDING, INTERLEAVED, TWO_PASS}


def test_baselines_come_from_the_final_round_where_it_has_them() -> None:
    """An earlier sampling saw other clocks, so a faster one of another ascending tile is no baseline."""
    other_tile = ASCENDING.with_(num_stages=3)
    final = {"telemetry": {"round": "final"}, "run_id": 2}
    cell = cell_of(
        measured(other_tile, 290, run_id=1, id=1), measured(UNORDERED, 700, run_id=1, id=2),
        measured(ASCENDING, 275, id=3, **final), measured(SERVED, 550, id=4, **final),
    )  # fmt: skip
    assert cell.baselines["ascending"].row.to_config() == ASCENDING
    assert cell.served.speedup_vs_baseline == pytest.approx(2.0, rel=0.01)
    assert cell.baselines["unordered"].row.to_config() == UNORDERED  # the round sampled none


def test_the_best_of_all_is_served_where_it_needs_one_cta_only() -> None:
    """Each tie is judged against the fastest row, which need not be one that may be served."""
    other = SERVED.with_(heads_interleaved=5)
    speeds = ((SHIFT, 506.0), (INTERLEAVED, 502.0), (other, 498.5))
    rows = [measured(config, tflops, tflops=tflops, samples=None) for config, tflops in speeds]
    cell = cell_of(*rows)
    assert pick([row for row in rows if row.min_resident == 1]) is not cell.best.row
    assert cell.served.row is cell.best.row
    assert cell.served.row.to_config() == INTERLEAVED
    assert cell.served.confidence.lead == pytest.approx(502 / 498.5 - 1)


@pytest.mark.parametrize("gone", [{"dq_stages": 3}, {"signal": "deferred"}])
def test_what_these_kernels_refuse_wins_nothing(gone: dict[str, Any]) -> None:
    """Rows of earlier kernels stay; a table of their configs would serve nobody."""
    cell = cell_of(measured(SERVED.with_(**gone), 600), measured(SERVED, 500))
    assert cell.best.row.to_config() == cell.served.row.to_config() == SERVED


def test_two_pass_waits_for_no_cta_and_may_be_served() -> None:
    cell = cell_of(measured(TWO_PASS, 500, min_resident=None), measured(SHIFT, 400))
    assert cell.served.row.to_config() == TWO_PASS
    assert cell.served.to_dict()["min_resident"] == 1
    assert cell.served.speedup_vs_baseline is None
    assert cell.baselines == {}


@pytest.mark.parametrize(
    "flaw",
    [
        {"tflops": math.nan}, {"tflops": math.inf}, {"tflops": None}, {"tflops": 0.0}, {"tflops": -1.0},
        {"above_peak": True}, {"bits_equal": False}, {"status": "timeout"},
        {"status": "correctness"}, {"status": "nondeterministic"},
    ],
)  # fmt: skip
def test_a_flawed_row_never_wins(flaw: dict[str, Any]) -> None:
    bad = measured(SERVED.with_(num_stages=3), 10_000, **flaw)
    cell = cell_of(bad, measured(SERVED, 500))
    assert cell.best.row.to_config() == cell.served.row.to_config() == SERVED
    assert list(winners([(bad, "sweep")])) == []


def test_a_row_above_the_peak_of_its_chip_is_marked_and_never_wins() -> None:
    """990 TFLOPS is the data sheet's dense bf16 rate of an H200; no measured row is above it."""
    posted = measured(INTERLEAVED, 991.0, tflops=991.0, above_peak=False)
    assert posted.above_peak
    assert cell_of(posted, measured(SERVED, 400)).best.row.to_config() == SERVED
    assert not measured(INTERLEAVED, 980.0).above_peak


def test_a_config_that_failed_a_check_in_this_sweep_does_not_win_with_another_row() -> None:
    fast = measured(SERVED, 600)
    for status in ("correctness", "nondeterministic"):
        failed = measured(SERVED, 600, status=status)
        for rows in ((fast, failed), (failed, fast)):
            assert cell_of(*rows, measured(ASCENDING, 300)).best.row.to_config() == ASCENDING
    late = measured(SERVED, 600, status="timeout")
    assert cell_of(fast, late, measured(ASCENDING, 300)).best.row.to_config() == SERVED


def test_the_newest_row_of_a_config_stands() -> None:
    cell = cell_of(measured(SERVED, 600), measured(ASCENDING, 550), measured(SERVED, 500))
    assert cell.best.row.to_config() == ASCENDING


def test_a_cell_uses_its_newest_sweep_that_has_a_config_to_serve() -> None:
    old = [(measured(SERVED, 600), "old"), (measured(ASCENDING, 300), "old")]
    (cell,) = winners([*old, (measured(SERVED, 500), "new")])
    assert (cell.sweep, cell.best.speedup_vs_baseline) == ("new", None)
    (cell,) = winners([*old, (measured(SHIFT, 700), "new")])
    assert cell.sweep == "old"
    (cell,) = winners([(measured(SERVED, 500), "new"), *old])
    assert cell.sweep == "old"
    (cell,) = winners([(measured(SHIFT, 700), "only")])
    assert (cell.served, cell.best.row.to_config()) == (None, SHIFT)


def test_cells_are_apart_by_every_part_of_the_shape() -> None:
    problems = [
        PROBLEM, replace(PROBLEM, mask="full"), replace(PROBLEM, head_dim=64), replace(PROBLEM, dtype="float16"),
        replace(PROBLEM, seq_len=2048), replace(PROBLEM, seq_len_kv=2048), replace(PROBLEM, batch=2),
        replace(PROBLEM, heads=8, heads_kv=8), replace(PROBLEM, heads_kv=2),
    ]  # fmt: skip
    rows = [measured(SERVED, 500, problem) for problem in problems]
    rows.append(measured(SERVED, 500, direction="forward"))
    assert len(winners((row, "sweep") for row in rows)) == len(rows)


@pytest.mark.parametrize(
    ("source", "better", "worse"),
    [
        ("modelled", {"predicted": 1.0}, {"predicted": 2.0}),
        ("compiled", {"spill_bytes": 0, "registers": 255}, {"spill_bytes": 4, "registers": 32}),
        ("compiled", {"spill_bytes": 0, "registers": 128}, {"spill_bytes": 0, "registers": 168}),
    ],
)
def test_rows_that_were_not_timed_are_ranked_by_what_they_know(
    source: str, better: Any, worse: Any
) -> None:
    plain = {"source": source, "tflops": None, "ms": None, "samples": None}
    cell = cell_of(
        measured(SERVED, 1, **(plain | worse)),
        measured(SERVED.with_(num_stages=3), 1, **(plain | better)),
    )
    assert cell.best.row.to_config().num_stages == 3
    assert cell.best.row.tflops is None
    assert cell.best.confidence.low is None


# -- ties and confidence --------------------------------------------------------------------------------------------


def in_turn(speeds: dict[Config, float], seed: int = 0, drift: float = 0.03) -> list[ResultRow]:
    """Rows of one final round: clocks drift under all configs alike, each sample has a little noise of its own."""
    generator = random.Random(seed)
    clocks = [math.exp(generator.uniform(-drift, drift)) for _ in range(SAMPLES)]
    found = []
    for config, speed in speeds.items():
        ms = PROBLEM.flops() / speed * 1e-9
        samples = [ms * clock * math.exp(generator.gauss(0, 0.001)) for clock in clocks]
        median = statistics.median(samples)
        values = {"tflops": PROBLEM.tflops(median), "ms": median, "samples": samples}
        final = {"telemetry": {"round": "final"}, "run_id": seed, "id": len(found) + 1}
        found.append(measured(config, speed, **values, **final))
    return found


def test_a_winner_that_does_not_beat_the_default_outside_the_noise_is_the_default() -> None:
    assert default_config(PROBLEM, (9, 0)) == SERVED
    faster = SERVED.with_(heads_interleaved=4)
    noisy = [measured(SERVED, 490, noise=0.06), measured(faster, 500, noise=0.06)]
    assert pick(noisy) is noisy[1], "a lead of 2 % is outside the floor of the rule for ties"
    cell = cell_of(*noisy)
    assert cell.served.row.to_config() == cell.best.row.to_config() == SERVED
    assert cell.served.confidence.lead < 0
    clear = cell_of(measured(SERVED, 490), measured(faster, 500))
    assert clear.served.row.to_config() == faster
    assert clear.served.confidence.low > 0
    bare = [measured(c, v, tflops=v, samples=None) for c, v in ((SERVED, 500.0), (faster, 504.0))]
    assert cell_of(*bare).served.row.to_config() == SERVED
    unknown = [replace(row, gpu="b900", config_hash="") for row in noisy]
    assert cell_of(*unknown).served.row.to_config() == faster, "no default is known for this chip"


def test_the_default_takes_part_in_every_final_round() -> None:
    rivals = [SERVED.with_(heads_interleaved=heads) for heads in (2, 4, 8, 16, 32)]
    rows = [measured(config, 500.0 + i) for i, config in enumerate(rivals)]
    rows += [measured(ASCENDING, 230), measured(SERVED, 400)]
    configs = [row.to_config() for row in finalists(PROBLEM, rows)]
    assert configs[0] == ASCENDING
    assert configs[-1] == SERVED, "20 % slower in this pass, and yet what the winner has to beat"
    assert len(configs) == 1 + 4 + 1
    leading = [measured(SERVED, 600), *rows[:-1]]
    assert [row.to_config() for row in finalists(PROBLEM, leading)].count(SERVED) == 1


def test_samples_taken_in_turn_are_compared_one_by_one() -> None:
    """Clocks that drift by 6 % hide a lead of 1.5 %, but not from samples that saw the same clocks."""
    faster = SERVED.with_(heads_interleaved=4)
    rows = in_turn({SERVED: 500, faster: 507.5}, drift=0.06)
    assert cell_of(*rows).served.row.to_config() == faster
    apart = [replace(row, telemetry=None) for row in rows]
    assert cell_of(*apart).served.row.to_config() == SERVED


def test_one_sample_at_another_clock_hides_no_lead() -> None:
    """At its power cap a chip may change its clock between two neighbouring samples of a round."""
    faster = SERVED.with_(heads_interleaved=8)
    default, leader = in_turn({SERVED: 500, faster: 510})
    late = [*leader.samples[:2], leader.samples[2] * 1.08, *leader.samples[3:]]
    cell = cell_of(default, replace(leader, samples=late))
    assert cell.served.row.to_config() == faster
    assert 0.01 < cell.served.confidence.low < cell.served.confidence.high < 0.03


def test_a_lost_sample_leaves_the_others_in_pairs() -> None:
    rows = in_turn({SERVED: 500, SERVED.with_(heads_interleaved=4): 507.5}, drift=0.06)
    lost = [
        replace(row, samples=[*row.samples[:at], None, *row.samples[at + 1 :]])
        for row, at in zip(rows, (2, 7), strict=True)
    ]
    assert cell_of(*lost).served.row.to_config() == rows[1].to_config()


def test_times_of_a_few_ticks_are_no_exact_lead() -> None:
    """Seven ratios of twelve are the same there, and their median deviation is none."""
    ticks = [
        replace(row, samples=None)
        for row in in_turn({SERVED: 500, SERVED.with_(heads_interleaved=8): 510})
    ]
    default, leader = (
        replace(row, samples=samples)
        for row, samples in zip(ticks, ([41.0] * 7 + [40.0] * 5, [40.0] * 7 + [43.0] * 5), strict=True)
    )  # fmt: skip
    assert cell_of(default, leader).served.row.to_config() == SERVED


def test_one_cell_tuned_ten_times_from_cold_has_one_winner() -> None:
    speeds = {
        SERVED: 480.0,
        SERVED.with_(heads_interleaved=8): 499.0,
        SERVED.with_(heads_interleaved=4): 500.0,
        SERVED.with_(heads_interleaved=4, num_stages=3): 500.5,
        ASCENDING: 230.0,
    }
    cells = [cell_of(*in_turn(speeds, seed=seed)) for seed in range(10)]
    assert len({cell.served.row.config_hash for cell in cells}) == 1
    assert cells[0].served.row.config["num_stages"] == 2
    assert all(len(cell.served.row.samples) == SAMPLES for cell in cells), "the spread is stored"


def test_ten_tunings_of_equal_configs_agree() -> None:
    configs = [
        SERVED.with_(num_stages=stages, heads_interleaved=h) for stages in (2, 3) for h in (1, 2, 4)
    ]
    chosen = set()
    for seed in range(10):
        generator = random.Random(seed)
        rows = [
            measured(c, 500 * (1 + generator.uniform(-0.001, 0.001)), seed=seed) for c in configs
        ]
        generator.shuffle(rows)
        chosen.add(pick(rows).to_config())
    assert len(chosen) == 1
    assert chosen.pop().num_stages == 2


def test_a_tie_goes_to_the_config_that_needs_the_fewest_resident_ctas() -> None:
    cell = cell_of(measured(SERVED, 500), measured(SHIFT, 500.5))
    assert cell.best.row.to_config() == SERVED
    assert cell.best.confidence.lead < 0


def test_a_lead_outside_the_noise_wins_whatever_the_rule_prefers() -> None:
    slow, fast = measured(SERVED, 500), measured(SERVED.with_(num_stages=3), 506)
    assert cell_of(slow, fast).best.row is fast
    noisy = [
        measured(config, tflops, noise=0.05) for config, tflops in ((SERVED, 480), (SHIFT, 500))
    ]
    assert pick(noisy).tflops == max(row.tflops for row in noisy)


def test_the_interval_holds_the_true_lead_about_95_times_in_100() -> None:
    hits, trials = 0, 400
    for seed in range(trials):
        pair = [
            measured(SERVED, 505, noise=0.004, seed=seed),
            measured(ASCENDING, 480, noise=0.01, seed=seed),
        ]
        confidence = cell_of(*pair).best.confidence
        assert confidence.low < confidence.lead < confidence.high
        hits += confidence.low <= 505 / 480 - 1 <= confidence.high
    assert 0.91 <= hits / trials <= 0.99


def test_confidence_says_what_it_does_not_know() -> None:
    alone = cell_of(measured(SERVED, 500))
    assert alone.best.confidence is None
    bare = cell_of(
        measured(SERVED, 500, samples=None, tflops=500.0), measured(ASCENDING, 400, tflops=400.0)
    )
    assert bare.best.confidence.to_dict() == {
        "lead": pytest.approx(0.25),
        "low": None,
        "high": None,
    }


def test_student_t_agrees_with_the_printed_table() -> None:
    for freedom, value in (
        (3, 3.182),
        (4, 2.776),
        (5, 2.571),
        (10, 2.228),
        (30, 2.042),
        (1e6, 1.960),
    ):
        assert student_t(freedom) == pytest.approx(value, rel=0.01)


# -- over seq lens --------------------------------------------------------------------------------------------------

SPEEDS = {SERVED: (500, 560), TWO_PASS: (560, 510), ASCENDING: (250, 280), SHIFT: (600, 650)}
SEQ_LENS = (2048, 8192)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.open("sqlite://") as opened:
        yield two_lengths(opened)


def two_lengths(store: Store) -> Store:
    run = store.start_run(RUN)
    for config, speeds in SPEEDS.items():
        for seq_len, tflops in zip(SEQ_LENS, speeds, strict=True):
            store.add(run, measured(config, tflops, shape(seq_len)))
    return store


def shape(seq_len: int) -> Problem:
    return Problem("causal", 128, seq_len, batch=16384 // seq_len, heads=16)


def test_overall_is_one_servable_config_with_the_highest_geometric_mean(store: Store) -> None:
    half = SERVED.with_(num_stages=3)
    store.add(1, measured(half, 900, shape(8192)))
    (top,) = overall(store.winners("h200"))
    assert Config.from_dict(top.config) == TWO_PASS
    answer = top.to_dict()
    assert answer["seq_lens"] == [2048, 8192]
    assert answer["tflops"] == pytest.approx(math.sqrt(560 * 510), rel=0.01)
    assert answer["speedup_vs_baseline"] == pytest.approx(
        math.sqrt(560 / 250 * 510 / 280), rel=0.01
    )
    assert answer["confidence"]["lead"] == pytest.approx(
        math.sqrt(560 * 510 / 500 / 560) - 1, abs=0.003
    )
    assert answer["spill_bytes"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_winners_of_newest_sweeps_are_those_of_all_rows(store: Store, seed: int) -> None:
    """Rows of any age and fate in several sweeps: reading what may count gives what reading everything gives."""
    draw = random.Random(seed)
    runs = [
        store.start_run(replace(RUN, uuid=f"{seed}-{n}", environment={"driver": str(n)}))
        for n in range(3)
    ]
    for _ in range(60):
        config = draw.choice((SERVED, SHIFT, TWO_PASS, ASCENDING)).with_(
            num_stages=draw.choice((2, 3))
        )
        row = measured(config, draw.uniform(300, 600), shape(draw.choice((1024, 2048))))
        made = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=draw.randrange(50))
        status = draw.choice(("ok", "ok", "ok", "nondeterministic", "timeout"))
        key = draw.choice("ab")
        store.add(draw.choice(runs), replace(row, status=status, created_at=made, numerics_key=key))
    everything = store.candidates("h200")
    assert store.winners("h200") == winners(everything)
    half = ResultFilter(seq_len=2048)
    assert store.winners("h200", half) == winners(store.candidates("h200", half))
    kept = [p for p in everything if p[0].numerics_key == "a" or p[0].status == "nondeterministic"]
    assert store.winners("h200", ResultFilter(numerics_key="a")) == winners(kept)


def test_history_that_cannot_count_is_not_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = store.start_run(replace(RUN, uuid="later", environment={"driver": "later"}))
    store.add(later, measured(SERVED, 450, shape(8192)))
    read: list[ResultRow] = []
    stored = ResultRow.stored

    def noted(values: Mapping[str, Any]) -> ResultRow:
        read.append(stored(values))
        return read[-1]

    monkeypatch.setattr(ResultRow, "stored", noted)
    assert len(store.winners("h200")) == 2
    assert [row.run_uuid for row in read if row.seq_len == 8192] == ["later"]


def test_winners_are_computed_once_until_a_row_comes(store: Store) -> None:
    first = store.winners("h200")
    assert store.winners("h200") is first
    assert len(store.winners("h200", ResultFilter(seq_len=2048))) == 1
    store.add(1, measured(SERVED, 300, shape(1024)))
    assert len(store.winners("h200")) == 3
    assert len(store.winners("h200", until_id=len(SPEEDS) * 2)) == 2


def test_the_order_of_rows_within_a_sweep_does_not_matter() -> None:
    rows = [measured(config, speeds[0]) for config, speeds in SPEEDS.items()]
    answers = [cell_of(*order) for order in itertools.permutations(rows)]
    assert all(answer.to_dict() == answers[0].to_dict() for answer in answers)
