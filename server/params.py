"""Query parameters: one strict model a call. Unknown, wrong or repeated ones are 422 naming the parameter.

``d`` is ``head_dim`` and ``s`` is ``seq_len``: the same parameter under two names, so giving both is a repeat.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from dash_kernels.device import resolve_gpu
from dash_kernels.problem import BACKENDS, DTYPES, LAUNCH_ORDERS, MASKS, POLICIES
from dash_kernels.schedules import SCHEDULES
from server.errors import invalid
from tuner.results.rows import DIRECTIONS, SOURCES, STATUSES

ALIASES = {"d": "head_dim", "s": "seq_len"}
LARGEST = 2**31 - 1
LARGEST_ID = 2**63 - 1


def one_of(*allowed: str) -> Any:
    """Metadata of a word out of ``allowed``: the check, whose message lists them."""

    def check(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"choose one of {', '.join(allowed)}")
        return value

    return AfterValidator(check)


def enum(*allowed: str) -> Any:
    """Metadata that shows ``allowed`` in the schema."""
    return Field(json_schema_extra={"enum": list(allowed)})


def digits(value: Any) -> Any:
    """Only ASCII digits make a number: no spaces, signs, underscores, points or exponents."""
    wrong = isinstance(value, str) and not (value.isascii() and value.isdecimal())
    if wrong or isinstance(value, bool):
        raise ValueError("it must be a whole number")
    return value


Count = Annotated[int, Field(ge=1, le=LARGEST), BeforeValidator(digits)]
RowId = Annotated[int, Field(ge=0, le=LARGEST_ID), BeforeValidator(digits)]


def _gpu_key(value: str) -> str:
    """The key of a known GPU, or a slug as the tuner makes one for a GPU without a key; judged by the caller."""
    try:
        return resolve_gpu(value).name
    except ValueError:
        return value


def without_nul(value: str) -> str:
    """Text that every database can hold."""
    if "\0" in value:
        raise ValueError("it has a NUL character")
    return value


def _stored_key(value: str) -> str:
    """Names of GPUs become names of files: lookup tables."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", value):
        raise ValueError(
            "it must be a GPU that is known, or lower-case letters, digits and hyphens such as h20"
        )
    return value


GpuName = Annotated[
    str,
    AfterValidator(without_nul),
    AfterValidator(_gpu_key),
    Field(min_length=1, max_length=64),
]
StoredGpu = Annotated[GpuName, AfterValidator(_stored_key)]


def _zoned(value: Any) -> Any:
    """A time in UTC out of RFC 3339 text."""
    if not isinstance(value, str):
        raise ValueError("it must be an RFC 3339 time such as 2026-01-01T21:00:00Z")
    try:
        # A '+' in a query string that was not escaped arrives as a space.
        time = datetime.fromisoformat(value.upper().replace("Z", "+00:00").replace(" ", "+"))
    except ValueError:
        raise ValueError("it must be an RFC 3339 time such as 2026-01-01T21:00:00Z") from None
    if time.tzinfo is None:
        raise ValueError(
            "it has no time zone; write it with Z or an offset, such as 2026-01-01T21:00:00Z"
        )
    try:
        return time.astimezone(timezone.utc)
    except OverflowError:
        raise ValueError("it is out of range") from None


Time = Annotated[datetime, BeforeValidator(_zoned)]
Mask = Annotated[str, one_of(*MASKS), enum(*MASKS)]
Dtype = Annotated[str, one_of(*DTYPES), enum(*DTYPES)]
Direction = Annotated[str, one_of(*DIRECTIONS), enum(*DIRECTIONS)]
Source = Annotated[str, one_of(*SOURCES), enum(*SOURCES)]
Status = Annotated[str, one_of(*STATUSES), enum(*STATUSES)]
Backend = Annotated[str, one_of(*BACKENDS), enum(*BACKENDS)]
ScheduleName = Annotated[str, one_of(*SCHEDULES), enum(*SCHEDULES)]
Policy = Annotated[str, one_of(*POLICIES), enum(*POLICIES)]
Order = Annotated[str, one_of(*LAUNCH_ORDERS), enum(*LAUNCH_ORDERS)]


class Strict(BaseModel):
    """Refuses a parameter that it does not list."""

    model_config = ConfigDict(extra="forbid")


class HeadDim(Strict):
    head_dim: Count | None = Field(None, description="Also `d`.", examples=[128])
    d: Count | None = Field(None, description="The same as `head_dim`.")

    @property
    def dim(self) -> int | None:
        return self.head_dim if self.head_dim is not None else self.d


class Shape(HeadDim):
    seq_len: Count | None = Field(
        None, description="Also `s`. Without it: all measured lengths.", examples=[4096]
    )
    s: Count | None = Field(None, description="The same as `seq_len`.")

    @property
    def length(self) -> int | None:
        return self.seq_len if self.seq_len is not None else self.s


def _flag(value: Any) -> Any:
    """true or false, nothing else: pydantic alone would take "on", "y" and "1" as well."""
    if isinstance(value, str):
        if value not in ("true", "false"):
            raise ValueError("it must be true or false")
        return value == "true"
    return value


Flag = Annotated[bool, BeforeValidator(_flag)]


def _edge(value: Any) -> Any:
    """A window's edge: -1, or a whole number."""
    return -1 if value == "-1" else digits(value)


Edge = Annotated[int, Field(ge=-1, le=LARGEST), BeforeValidator(_edge)]
Triton = Annotated[str, Field(pattern=r"^\d{1,4}(\.\d{1,6}){0,3}$", examples=["3.6.0"])]


class Options(Shape):
    """What a problem has beside its shape; a cell answers only where all of them agree."""

    window_left: Edge = Field(-1, description="Keys that a query sees to its left; -1: all.")
    window_right: Edge = Field(-1, description="And to its right; with mask causal always 0.")
    head_dim_v: Count | None = Field(None, description="Where V's differs from `head_dim`.")
    softcap: Flag = False
    varlen: Flag = Field(False, description="Packed sequences; `seq_len` is the longest.")


class BestQuery(Options):
    mask: Mask = Field(examples=["causal"])
    gpu: GpuName | None = Field(
        None,
        description="Default: the server's default GPU; the answer names it.",
        examples=["h200"],
    )
    dtype: Dtype = "bfloat16"
    batch: Count | None = None
    heads: Count | None = None
    heads_kv: Count | None = Field(
        None, description="Needs `heads`; their ratio is the head group."
    )
    direction: Direction = "backward"
    release: str | None = Field(
        None,
        max_length=128,
        min_length=1,
        description="Number or name; `draft` for the rows as they are now, which never answer by default. Default: the newest.",
    )
    source: Source = "measured"
    triton: Triton | None = Field(
        None,
        description="The asker's Triton: a release tuned with another major version of it does not answer.",
    )
    allow_compiler: Flag = Field(False, description="Let it answer nevertheless.")
    allow_family: Flag = Field(
        False, description="Let a GPU of the same family answer where this one has nothing."
    )
    allow_default: Flag = Field(
        False,
        description="Let the default rule answer where nothing was measured; needs `seq_len`.",
    )


class TableQuery(Strict):
    gpu: GpuName | None = None
    release: str | None = Field(
        None, max_length=128, min_length=1, description="Number or name. Default: the newest."
    )


class DiffQuery(Strict):
    gpu: GpuName | None = None
    old: str | None = Field(
        None,
        max_length=128,
        min_length=1,
        description="Number or name. Default: the release before `new`.",
    )
    new: str = Field(
        "draft",
        max_length=128,
        min_length=1,
        description="Number, name, or `draft` for the rows as they are now.",
    )


class CurvesQuery(HeadDim):
    mask: Mask = Field(examples=["causal"])
    gpu: GpuName | None = None
    dtype: Dtype = "bfloat16"
    head_group: Count = 1
    direction: Direction = "backward"
    source: Source = "measured"


class ResultsQuery(Shape):
    window_left: Edge | None = None
    window_right: Edge | None = None
    head_dim_v: Count | None = None
    softcap: Flag | None = None
    varlen: Flag | None = None
    numerics_key: Annotated[str, AfterValidator(without_nul), Field(max_length=64)] | None = None
    gpu: GpuName | None = None
    mask: Mask | None = None
    dtype: Dtype | None = None
    seq_len_kv: Count | None = None
    batch: Count | None = None
    heads: Count | None = None
    heads_kv: Count | None = None
    head_group: Count | None = None
    direction: Direction | None = None
    backend: Backend | None = None
    schedule: ScheduleName | None = None
    policy: Policy | None = None
    status: Status | None = None
    source: Source | None = None
    run_id: RowId | None = None
    since: Time | None = Field(
        None, description="Rows stored at or after this time (RFC 3339 with a zone)."
    )
    until: Time | None = Field(None, description="Rows stored at or before this time.")
    cursor: RowId = Field(0, description="`next_cursor` of the page before.", examples=[0])
    limit: Annotated[int, Field(ge=1, le=1000), BeforeValidator(digits)] = 100
    format: Literal["json", "csv", "parquet"] = "json"


class GpuQuery(Strict):
    gpu: GpuName | None = None


class ScheduleQuery(Strict):
    mask: Mask = "causal"
    seq_len: Count = 1024
    seq_len_kv: Count | None = None
    block_m: Count = 64
    block_n: Count = 128
    group: Count = 1
    slots: Annotated[int, Field(ge=1, le=4096), BeforeValidator(digits)] = 132
    heads: Annotated[int, Field(ge=1, le=256), BeforeValidator(digits)] = 1
    c: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 1.0
    r: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.3
    l: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0  # noqa: E741  (the paper's letter)
    launch_order: Order | None = None
    heads_interleaved: Annotated[int, Field(ge=0, le=256), BeforeValidator(digits)] = 1


class NoQuery(Strict):
    pass


async def refuse_repeats(request: Request) -> None:
    """Dependency of every call: a parameter given twice, also under its other name, is refused.

    Async, since a plain function would cost a hop to a thread.
    """
    seen: dict[str, str] = {}
    for name, _ in request.query_params.multi_items():
        own = ALIASES.get(name, name)
        if own in seen:
            both = "twice" if seen[own] == name else f"as {seen[own]} and as {name}"
            raise invalid(name, f"{own} is given {both}; give it once")
        seen[own] = name
