"""The space of a sweep: what is in it, in which order, and what a filter does to it."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from dash_kernels.device import GPUS
from dash_kernels.problem import Problem, hopper_dims, padded_head_dim, supports
from dash_kernels.schedules import CLOSED_FORMS, SCHEDULES
from tuner.compile import _specs, kernel_identity, predict_ms, prove, schedule_identity
from tuner.space import Candidate, SpaceFilter, baseline_config, candidates, problems, space

HOPPER, AMPERE = (9, 0), (8, 0)


def test_default_problems_are_the_24_cells_of_16384_tokens_and_hidden_2048() -> None:
    cells = problems(SpaceFilter())
    assert len(set(cells)) == len(cells) == 24
    assert {(p.mask, p.head_dim) for p in cells} == {
        (mask, dim) for mask in ("full", "causal") for dim in (64, 128)
    }
    assert {p.seq_len for p in cells} == {512, 1024, 2048, 4096, 8192, 16384}
    assert all(p.batch * p.seq_len == 16384 and p.heads * p.head_dim == 2048 for p in cells)


@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
def test_every_kind_is_in_every_cell_once_and_fits(capability: tuple[int, int]) -> None:
    for problem in problems(SpaceFilter()):
        found = candidates(problem, capability, SpaceFilter())
        configs = [candidate.config for candidate in found]
        assert len(set(configs)) == len(configs)
        kinds = {name for name, kind in SCHEDULES.items() if problem.mask in kind.masks}
        assert {config.schedule for config in configs} == kinds
        assert all(supports(config, problem, capability) for config in configs)
        assert {config.policy for config in configs} == {"ordered", "unordered", "two_pass"}


@pytest.mark.parametrize(
    ("dims", "tile", "stages"), [((256, 256), (64, 64), {1}), ((192, 128), (64, 128), {1, 2})]
)
def test_a_hopper_sweep_above_head_dim_128_has_the_kernels_own_tile(
    dims: tuple[int, int], tile: tuple[int, int], stages: set[int]
) -> None:
    (problem,) = problems(SpaceFilter(("causal",), (dims,), (4096,)))
    configs = [candidate.config for candidate in candidates(problem, HOPPER, SpaceFilter())]
    assert all(supports(config, problem, HOPPER) for config in configs)
    hopper = [config for config in configs if config.backend == "hopper"]
    assert {(config.block_m, config.block_n) for config in hopper} == {tile}
    assert {config.num_stages for config in hopper} == stages
    kinds = {name for name, kind in SCHEDULES.items() if "causal" in kind.masks}
    assert {config.schedule for config in hopper} == kinds
    assert {config.policy for config in configs} == {"ordered", "unordered", "two_pass"}


def test_tier_0_holds_the_baseline_the_default_and_the_yardstick_of_every_cell_first() -> None:
    order = space(HOPPER, SpaceFilter())
    assert [c.tier for c in order] == sorted(c.tier for c in order)
    first = [c for c in order if c.tier == 0]
    for problem in problems(SpaceFilter()):
        mine = [c.config for c in first if c.problem == problem]
        assert mine[0] == baseline_config(problem, HOPPER)
        assert any(config.policy == "unordered" for config in mine)
        assert any(config.policy == "ordered" and config != mine[0] for config in mine)


def test_no_two_configs_of_a_problem_have_one_label() -> None:
    """But for the unordered ones: there the kind only says how tiles are walked."""
    for mask, dim in itertools.product(("full", "causal"), (64, 128)):
        found = [
            c.config for c in candidates(Problem(mask, dim, 4096, heads=16), HOPPER, SpaceFilter())
        ]
        labels = [config.label() for config in found if config.deterministic]
        assert len(set(labels)) == len(labels), sorted(labels)


def test_problems_of_one_cell_stand_together_within_a_tier() -> None:
    order = [(c.tier, c.problem) for c in space(HOPPER, SpaceFilter())]
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes == len(set(order)) - 1


def test_filters_narrow_each_axis() -> None:
    filters = SpaceFilter(("causal",), (64,), (512, 2048), ("float16",), 4, ("shift",))
    found = space(HOPPER, filters)
    shapes = {c.problem for c in found}
    assert shapes == {
        Problem("causal", 64, s, "float16", batch=16384 // s, heads=4) for s in (512, 2048)
    }
    ordered = {c.config.schedule for c in found if c.config.policy == "ordered"}
    assert ordered == {"shift", "ascending"}, "the baseline stands beside what was asked for"


def test_a_value_given_twice_is_swept_once() -> None:
    twice = SpaceFilter(("full", "full"), (64, 64), (512, 512), ("float16", "float16"))
    assert problems(twice) == problems(SpaceFilter(("full",), (64,), (512,), ("float16",)))


def test_a_tile_that_does_not_fit_stays_with_its_reason_and_bytes() -> None:
    found = space(
        HOPPER, SpaceFilter(("full",), (128,), (4096,), tiles=((64, 128),), stages=(2, 6))
    )
    refused = [c for c in found if not c.runnable]
    assert {c.config.num_stages for c in refused} == {6}
    assert all(c.support.required_bytes > c.support.limit_bytes for c in refused)  # type: ignore[operator]
    assert any(c.runnable for c in found)


def test_tiles_of_which_none_fits_keep_their_candidates_to_say_why_and_nothing_beside_them() -> (
    None
):
    found = space(HOPPER, SpaceFilter(("full",), (256,), (4096,), tiles=((128, 256),), stages=(6,)))
    tiles = {(c.config.block_m, c.config.block_n, c.config.num_stages) for c in found}
    assert tiles == {(128, 256, 6)}
    assert not any(c.runnable for c in found)
    for candidate in found:
        assert candidate.support.reason
        assert candidate.support.limit_bytes == 232448
    stage = 2 * 128 * (512 + 4)  # Q and dO, LSE and delta
    expected = (
        2 * 256 * 512 + 6 * stage + 2 * 128 * 512 + 128 * 1024 + 1024
    )  # K, V; dS, dQ and words
    assert {c.support.required_bytes for c in found} == {expected}


def test_naming_the_default_stages_leaves_the_default_configs() -> None:
    found = space(HOPPER, SpaceFilter(("causal",), (128,), (4096,), stages=(2,)))
    assert {"ascending", "shortest_first"} <= {candidate.config.schedule for candidate in found}
    assert {candidate.config.num_stages for candidate in found} == {2}


OPTIONS = {
    "wide": (SpaceFilter(("causal",), (256,), (4096,)), "d=256 "),
    "V narrower": (SpaceFilter(("causal",), ((192, 128),), (4096,)), "d=192/128 "),
    "padded": (SpaceFilter(("causal",), (96,), (4096,)), "d=96 "),
    "window": (SpaceFilter(("full",), (128,), (4096,), windows=((511, 511),)), "window=511,511"),
    "softcap": (SpaceFilter(("causal",), (128,), (4096,), softcaps=(True,)), "softcap"),
    "packed": (SpaceFilter(("causal",), (128,), (4096,), varlens=(True,)), "varlen"),
}


@pytest.mark.parametrize(("filters", "word"), OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("capability", [HOPPER, (8, 0)])
def test_every_option_has_a_space_with_its_baseline_and_what_runs(
    filters: SpaceFilter, word: str, capability: tuple[int, int]
) -> None:
    found = space(capability, filters)
    (problem,) = {candidate.problem for candidate in found}
    assert word in problem.label()
    assert all(candidate.runnable for candidate in found)
    assert baseline_config(problem, capability) in {candidate.config for candidate in found}
    if problem.varlen:
        assert {candidate.config.schedule for candidate in found} <= set(CLOSED_FORMS)
    if problem.windowed:
        assert "shift" not in {candidate.config.schedule for candidate in found}


def test_head_groups_keep_the_number_of_heads_a_multiple() -> None:
    grouped = problems(SpaceFilter(("causal",), (128,), (512,), head_groups=(1, 3, 8)))
    assert [(p.heads, p.heads_kv) for p in grouped] == [(16, 16), (15, 5), (16, 2)]
    with pytest.raises(ValueError, match="head-group 3 does not divide --heads 16"):
        space(HOPPER, SpaceFilter(heads=16, head_groups=(3,)))


def test_a_causal_mask_and_its_full_window_are_one_problem() -> None:
    both = problems(SpaceFilter((), (128,), (512,), windows=((255, 0),)))
    assert [(p.mask, p.window) for p in both] == [("causal", (255, 0))]


@pytest.mark.parametrize(
    ("filters", "word"),
    [
        (SpaceFilter(masks=("diagonal",)), "mask 'diagonal'"),
        (SpaceFilter(schedules=("zigzag",)), "schedule 'zigzag'"),
        (SpaceFilter(dtypes=("float32",)), "dtype 'float32'"),
        (SpaceFilter(backends=("cutlass",)), "backend 'cutlass'"),
    ],
)
def test_unknown_names_are_refused_with_the_choices(filters: SpaceFilter, word: str) -> None:
    with pytest.raises(ValueError, match=f"unknown {word}; choose from "):
        space(HOPPER, filters)


def test_kinds_and_launches_share_one_kernel_but_masks_tiles_and_policies_do_not() -> None:
    problem = Problem("causal", 128, 4096, batch=4, heads=16)
    found = candidates(problem, HOPPER, SpaceFilter())
    config = found[0].config
    same = replace(config, schedule="shift", launch_order="descending", heads_interleaved=4)
    assert kernel_identity(problem, same) == kernel_identity(problem, config)
    assert schedule_identity(problem, same) != schedule_identity(problem, config)
    for other in (replace(config, policy="unordered"), replace(config, num_stages=3)):
        assert kernel_identity(problem, other) != kernel_identity(problem, config)
    assert kernel_identity(problem, config, cooperative=True) != kernel_identity(problem, config)
    full = replace(problem, mask="full")
    assert kernel_identity(full, config) != kernel_identity(problem, config)
    hopper = [c.config for c in found if c.config.backend == "hopper"]
    assert len({kernel_identity(problem, config) for config in hopper}) <= 4


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_model_keeps_the_order_that_was_measured_between_backends_and_policies(
    mask: str, dim: int
) -> None:
    """In the shipped rows of an H200 the Hopper kernel is ahead of the portable one in every cell."""
    problem = Problem(mask, dim, 2048, batch=2, heads=16)
    hopper = baseline_config(problem, HOPPER).with_(
        schedule="shortest_first", launch_order="descending"
    )
    portable = baseline_config(problem, HOPPER, "portable").with_(
        block_m=hopper.block_m, block_n=hopper.block_n
    )
    own = predict_ms(problem, hopper, GPUS["h800"])
    free = predict_ms(problem, portable.with_(policy="unordered"), GPUS["h800"])
    two_pass = predict_ms(problem, portable.with_(policy="two_pass"), GPUS["h800"])
    assert own < free < two_pass
    assert two_pass == pytest.approx(free * 7 / 5), "S and dP twice, no adding in order"
    assert predict_ms(problem, hopper.with_(policy="unordered"), GPUS["h800"]) < own


def test_thorough_is_a_superset() -> None:
    def configs(filters: SpaceFilter) -> set[Candidate]:
        return {replace(c, tier=0) for c in space(HOPPER, filters)}

    short = SpaceFilter(("causal",), (64,), (4096,))
    assert configs(short) < configs(replace(short, thorough=True))


def test_every_default_config_of_a_middle_cell_passes_the_proof() -> None:
    problem = Problem("causal", 128, 2048, batch=8, heads=16)
    for candidate in candidates(problem, HOPPER, SpaceFilter()):
        assert prove(problem, candidate.config) >= 1


def specs_of(
    monkeypatch: pytest.MonkeyPatch, problem: Problem, backend: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the sweep asks the kernels' own modules to compile."""
    calls: list[Any] = []
    for name, function in (("compile", "hopper_spec"), ("backward_portable", "compile_specs")):
        module: Any = ModuleType(f"dash_kernels.kernels.{name}")
        setattr(module, function, lambda *args, **how: calls.append((args, how)) or [None])
        monkeypatch.setitem(sys.modules, module.__name__, module)
    config = baseline_config(problem, HOPPER, backend)
    assert config.backend == backend
    _specs(problem, config, HOPPER, False)
    ((args, how),) = calls
    return args[1:], how


@pytest.mark.parametrize(
    ("options", "hopper", "portable"),
    [
        ({}, {}, {}),
        ({"window_left": 63}, {"windowed": True}, {"window": (63, 0)}),
        ({"softcap": True}, {"softcap": True}, {"softcap": True}),
        ({"varlen": True}, {"packed": True}, {"varlen": True}),
        ({"mask": "full", "heads": 4, "heads_kv": 2}, {"grouped": True}, {"grouped": True}),
        ({"heads": 4, "heads_kv": 2}, {}, {"grouped": True}),  # a CTA a query head: few KV tiles
        ({"head_dim_v": 64}, {}, {"head_dim_v": 64}),
        ({"head_dim": 160, "head_dim_v": 96}, {"head_dim_v": 128}, {"head_dim_v": 128}),
        ({"head_dim": 136}, {"head_dim_v": 256}, {}),
    ],
)
def test_kernels_are_compiled_in_the_form_that_the_options_run(
    options: dict[str, Any],
    hopper: dict[str, Any],
    portable: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem(**{"mask": "causal", "head_dim": 96, "seq_len": 1024, **options})
    args, how = specs_of(monkeypatch, problem, "hopper")
    columns, _ = hopper_dims(problem.head_dim, problem.head_dim_v)
    assert args == (columns, "bfloat16", problem.causal)
    assert how == {"head_dim_v": 128, "tail": False, "cooperative": False, **hopper}
    args, how = specs_of(monkeypatch, problem, "portable")
    assert args == (padded_head_dim(problem.head_dim), "bfloat16", problem.causal)
    asked = {"ragged": False, "persistent": False, "capability": HOPPER}
    assert how == {**asked, **portable}


def test_forms_that_differ_have_kernels_of_their_own() -> None:
    plain = Problem("causal", 128, 1024, heads=4)
    config = baseline_config(plain, HOPPER)
    forms = [
        plain,
        replace(plain, window_left=63),
        replace(plain, softcap=True),
        replace(plain, varlen=True),
        replace(plain, heads_kv=2, window_left=63),
        replace(plain, head_dim=192),
        replace(plain, head_dim=256, head_dim_v=256),
    ]
    assert len({kernel_identity(problem, config) for problem in forms}) == len(forms)
    narrow = replace(plain, head_dim=96, head_dim_v=64)
    assert kernel_identity(narrow, config) == kernel_identity(plain, config)
    portable = baseline_config(plain, HOPPER, "portable")
    assert kernel_identity(narrow, portable) != kernel_identity(plain, portable)
    packed = replace(plain, varlen=True)
    other = replace(config, schedule="shortest_first")
    assert kernel_identity(packed, config) != kernel_identity(packed, other)
    assert kernel_identity(plain, config) == kernel_identity(plain, other)
