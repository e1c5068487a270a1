"""The answer to /best with its ladder: which rung answered, and field by field why the ones above did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dash_kernels.default_rule import DEFAULT_RULE, default_config
from dash_kernels.device import GPUS
from dash_kernels.dispatch import compiler_difference
from dash_kernels.lookup import Difference, Rung, differences
from dash_kernels.problem import Problem
from dashboard.releases import unreleased
from server.deps import Context
from server.errors import ApiError
from tuner.results.queries import DRAFT, NotMeasured, Question, answer

ABOVE = {"exact": (), "nearest": ("exact",), "family": ("exact", "nearest")}


class Missed(Exception):
    """One GPU's release or rows do not answer: one line, and the fields in which they differ from the question."""

    def __init__(self, line: str, differs: tuple[Difference, ...] = ()) -> None:
        super().__init__(line)
        self.line, self.differs = line, differs


def climb(
    context: Context,
    question: Question,
    *,
    triton: str | None = None,
    allow_family: bool = False,
    allow_compiler: bool = False,
    allow_default: bool = False,
) -> dict[str, Any]:
    """The body of /best. Raises ApiError 404, which has the ladder too, where no rung that was asked for answers."""
    compiler = None if allow_compiler else triton
    rungs: list[Rung] = []
    try:
        body = _of_gpu(context, question, compiler)
        return body | {"ladder": [rung.to_dict() for rung in _rungs(body, question)]}
    except Missed as error:
        missed = error
        rungs += [Rung(name, False, missed.line, missed.differs) for name in ("exact", "nearest")]
    kin, why = _of_family(context, question, compiler, allow_family)
    if kin is not None:
        other = (Difference("gpu", question.gpu, (kin["measured_on"],)),)
        where = f"measured on {kin['measured_on']}, of the same family"
        rungs.append(Rung("family", True, where, other))
        return kin | {"ladder": [rung.to_dict() for rung in rungs]}
    rungs.append(Rung("family", False, why))
    if allow_default:
        body = _default(question)
        rungs.append(Rung("default", True, f"{DEFAULT_RULE}: {missed.line}"))
        return body | {"ladder": [rung.to_dict() for rung in rungs]}
    rungs.append(Rung("default", False, "ask for it with allow_default=true and seq_len"))
    raise ApiError(404, missed.line, ladder=[rung.to_dict() for rung in rungs])


def _of_gpu(context: Context, q: Question, triton: str | None) -> dict[str, Any]:
    """What the release of the question's GPU, or its rows where a draft is asked for, answer. Raises Missed."""
    release = None
    if q.release != DRAFT and q.source == "measured":
        release = context.release(q.gpu, None if q.release is None else str(q.release))
        if release is None:
            raise Missed(_unreleased(context, q.gpu))
    if release is not None and triton is not None:
        environment = release.to_dict()["environment"]
        if differs := compiler_difference(triton, environment):
            line = (
                f"release {release.name} of {q.gpu} was tuned with another major version of Triton ({differs[0]}); "
                "allow_compiler=true lets it answer"
            )
            raise Missed(line, differs)
    live = () if release else context.snapshots.of(q.gpu, q.source).cells
    try:
        body = answer(q, release, live)
    except NotMeasured as error:
        names = tuple(q.kind)
        raise Missed(str(error), differences(q.kind, error.kinds, names)) from None
    return body | {
        "measured_on": q.gpu,
        "digest": release.digest if release else None,
        "unreleased": (
            unreleased(context.store, context.snapshots.of(q.gpu), release) if release else None
        ),
    }


def _unreleased(context: Context, gpu: str) -> str:
    """One line for a GPU without a release: a draft answers only who asks for it."""
    cells = context.snapshots.of(gpu).cells
    if cells:
        return (
            f"{gpu} has {len(cells)} measured cells but no release; freeze them with dash-tune release --gpu {gpu}, "
            "or ask the rows as they are with release=draft"
        )
    has = sorted({release.gpu for release in context.store.releases()})
    return (
        f"{gpu} has no measured winner and no release; released: {', '.join(has) or 'nothing yet'}; "
        "dash-tune --gpu auto measures the GPU of a machine"
    )


def _of_family(
    context: Context, q: Question, triton: str | None, allowed: bool
) -> tuple[dict[str, Any] | None, str]:
    """The answer of another GPU of the family, or why there is none."""
    spec = GPUS.get(q.gpu)
    kin = [gpu.name for gpu in GPUS.values() if spec and gpu.family == spec.family != ""]
    kin = [name for name in kin if name != q.gpu and context.store.get_release(gpu=name)]
    if not kin:
        return None, f"no other GPU of {q.gpu}'s family has a release"
    if not allowed:
        return None, f"{', '.join(kin)} is of the same family: allow_family=true lets it answer"
    if q.release is not None:
        return None, "a release that is named is of one GPU"
    line = ""
    for name in kin:
        try:
            body = _of_gpu(context, replace(q, gpu=name), triton)
        except Missed as error:
            line = error.line
            continue
        entries = [body["best"], *body["by_seq_len"].values()]
        for entry in entries:
            if entry is not None:
                entry["matched"] = "family"
        return body | {"gpu": q.gpu, "measured_on": name, "matched": "family"}, ""
    return None, line


def _rungs(body: dict[str, Any], q: Question) -> Sequence[Rung]:
    matched = body["matched"] or "exact"
    best = body["best"] or {}
    where = f"measured on {body['measured_on']}"
    if q.seq_len is None:
        return (Rung(matched, True, f"{where}, over every seq_len it was measured at"),)
    asked = {"seq_len": q.seq_len, "batch": q.batch, "heads": q.heads}
    off = tuple(
        Difference(name, value, (best[name],))
        for name, value in asked.items()
        if value is not None and best.get(name) != value
    )
    where += f" at seq_len {best.get('seq_len')}"
    above = [Rung(name, False, "; ".join(map(str, off)), off) for name in ABOVE[matched]]
    return (*above, Rung(matched, True, where, off))


def _default(q: Question) -> dict[str, Any]:
    """The default rule as an answer: a config that runs, with no speed, because nothing was measured."""
    if q.seq_len is None:
        raise ApiError(422, "seq_len is missing; the default rule looks at it", parameter="seq_len")
    if q.gpu not in GPUS:
        raise ApiError(
            404, f"{q.gpu} is not a GPU whose compute capability is known; run dash-tune on it"
        )
    options = {name: q.kind[name] for name in ("window_left", "window_right", "softcap", "varlen")}
    try:
        problem = Problem(
            q.mask,
            q.head_dim,
            q.seq_len,
            dtype=q.dtype,
            batch=q.batch or 1,
            heads=q.heads or 1,
            heads_kv=q.heads_kv or 0,
            head_dim_v=q.head_dim_v,
            **options,
        )
        config = default_config(problem, GPUS[q.gpu].capability)
    except ValueError as error:
        raise ApiError(404, str(error)) from None
    unknown = dict.fromkeys(
        ("tflops", "ms", "registers", "spill_bytes", "shared_bytes", "numerics_key", "confidence")
    )
    best = {
        "gpu": q.gpu,
        "release": DEFAULT_RULE,
        "matched": "default",
        "config": config.to_dict(),
        "min_resident": 1,
        "speedup_vs_baseline": None,
        **unknown,
    }
    return {
        "gpu": q.gpu,
        "release": DEFAULT_RULE,
        "release_id": None,
        "mask": q.mask,
        "head_dim": q.head_dim,
        "dtype": q.dtype,
        "head_group": q.head_group,
        "direction": q.direction,
        **problem.options(),
        "source": q.source,
        "measured_on": None,
        "digest": None,
        "unreleased": None,
        "matched": "default",
        "best": best,
        "by_seq_len": {},
    }
