"""Shapes of answers and bodies, as OpenAPI shows them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool

from dash_kernels.problem import Config
from server.params import (
    Count,
    Direction,
    Dtype,
    Edge,
    GpuName,
    Mask,
    RowId,
    Source,
    Status,
    StoredGpu,
    Time,
    without_nul,
)
from tuner.export import RELEASE_NAME

Text = Annotated[str, Field(max_length=16_000)]
Number = Annotated[float, Field(strict=True)]
"""A number in JSON: neither true nor text."""


class Differs(BaseModel):
    """A field in which the question differs from what there is."""

    field: str = Field(examples=["seq_len"])
    asked: Any = Field(examples=[5000])
    has: list[Any] = Field(examples=[[4096]])


class Rung(BaseModel):
    """A step of the ladder, from the top: whether it answered, and why it did or did not."""

    rung: Literal["exact", "nearest", "family", "default"]
    answered: bool
    why: str = Field(examples=["seq_len: asked 5000, there is 4096"])
    differs: list[Differs]


class Problem(BaseModel):
    """RFC 9457 problem document. ``parameter`` names the input at fault."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    parameter: str | None = None
    request_id: str | None = Field(None, description="As in the X-Request-ID header and the log.")
    ladder: list[Rung] | None = Field(None, description="Where /best has no answer: why.")


class Confidence(BaseModel):
    """The winner's lead over the runner-up (0.02: 2 % faster), with its 95 % interval where samples were stored."""

    lead: float
    low: float | None
    high: float | None


class Standing(BaseModel):
    """A configuration and what it reached. ``tflops`` of several lengths is their geometric mean."""

    model_config = ConfigDict(extra="allow")
    config: dict[str, Any]
    tflops: float | None
    ms: float | None
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int | None
    min_resident: int | None
    numerics_key: str | None
    confidence: Confidence | None
    speedup_vs_baseline: float | None = Field(
        description="Against ascending order in the same sweep."
    )


class Best(Standing):
    gpu: str
    release: str | None
    matched: Literal["exact", "nearest", "family", "default"]


class AtLength(Best):
    seq_len: int
    seq_len_kv: int
    batch: int
    heads: int
    fastest: Standing | None = Field(description="Faster still, but only with allow_resident=True.")


class Unreleased(BaseModel):
    """What measurements since the release would change."""

    cells: int = Field(description="Cells that would be served otherwise, or anew.")
    bits_change: int = Field(description="Of these, cells whose gradients get other bits.")
    newest: str | None = Field(description="When the newest winner was measured.")
    how: str = Field(examples=["dash-tune release --gpu h200 freezes them"])


class BestAnswer(BaseModel):
    """Every config here is safe with any number of free SMs, except under ``fastest``. Options that are off go unsaid."""

    model_config = ConfigDict(extra="allow")
    gpu: str
    mask: str
    head_dim: int
    dtype: str
    head_group: int
    direction: str
    source: str
    release: str | None = Field(
        description="Name of the release that answered; null: the rows as they are now."
    )
    release_id: int | None
    digest: str | None = Field(description="Of the release's lookup table.")
    measured_on: str | None = Field(description="The GPU whose measurements answer.")
    matched: Literal["exact", "nearest", "family", "default"] | None
    ladder: list[Rung]
    unreleased: Unreleased | None = Field(
        description="Newer measurements of this GPU that no release has; null: none that change anything."
    )
    best: Best | None
    by_seq_len: dict[str, AtLength]


class Row(BaseModel):
    """One configuration of one run, flat; times in ms, sizes in bytes."""

    model_config = ConfigDict(extra="allow")
    id: int
    run_id: int
    status: str
    gpu: str


class Page(BaseModel):
    results: list[Row]
    next_cursor: int | None = Field(description="Null on the last page.")


class Series(BaseModel):
    schedule: str
    source: str
    seq_len: list[int]
    speedup: list[float | None]
    tflops: list[float | None]
    registers: list[int | None]
    spill_bytes: list[int | None]


class Curves(BaseModel):
    gpu: str
    mask: str
    head_dim: int
    dtype: str
    head_group: int
    direction: str
    matmul_tflops: float | None = Field(
        description="The chip's measured matmul rate, where a row stores it."
    )
    series: list[Series]


class Gpu(BaseModel):
    gpu: str
    name: str | None
    capability: str | None
    sms: int | None
    peak_tflops: float | None
    family: str | None
    rows: int
    release: str | None


class Kind(BaseModel):
    name: str
    summary: str
    masks: list[str]
    takes_group: bool
    launch_order: str


class ReleaseInfo(BaseModel):
    id: int
    gpu: str
    name: str
    digest: str
    notes: str
    cells: int
    created_at: str
    served: bool = Field(description="Whether it answers where no release is named.")
    changes: str | None = Field(
        description="Against the release before it; null for a GPU's first.",
        examples=["22 cells as before, 2 with another config; 1 changes bits"],
    )
    table: str = Field(description="Where the frozen table is.")


class Moved(BaseModel):
    """What a cell serves on one side of a diff."""

    config: dict[str, Any]
    tflops: float | None
    numerics_key: str | None


class CellChange(BaseModel):
    """A cell that is not served as before."""

    model_config = ConfigDict(extra="allow")
    mask: str
    head_dim: int
    dtype: str
    seq_len: int
    change: Literal["added", "removed", "config", "bits"]
    bits_change: bool = Field(description="Whether gradients get other bits.")
    gain: float | None = Field(description="New speed over old, minus one.", examples=[0.021])
    before: Moved | None
    after: Moved | None


class Counts(BaseModel):
    same: int
    added: int
    removed: int
    config: int
    bits: int
    bits_change: int


class Side(BaseModel):
    id: int | None
    name: str
    digest: str


class ReleaseDiff(BaseModel):
    gpu: str
    old: Side | None
    new: Side
    summary: str = Field(examples=["22 cells as before, 2 with another config; 1 changes bits"])
    cells: Counts
    changes: list[CellChange]


class Health(BaseModel):
    status: Literal["ok"]
    schema_version: str
    version: str


class ProblemBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mask: Mask = Field(examples=["causal"])
    head_dim: Count = Field(examples=[128])
    seq_len: Count = Field(examples=[4096])
    dtype: Dtype = "bfloat16"
    batch: Count = 1
    heads: Count = 1
    heads_kv: Count | None = None
    seq_len_kv: Count | None = None
    window_left: Edge | None = None
    window_right: Edge | None = None
    head_dim_v: Count | None = None
    softcap: StrictBool | None = None
    varlen: StrictBool | None = None


class RunBody(BaseModel):
    """The command that made the rows. A ``uuid`` sent again continues the same run."""

    model_config = ConfigDict(extra="forbid")
    gpu: StoredGpu = Field(examples=["h200"])
    environment: dict[str, Any] = Field(examples=[{"gpu": "h200", "triton": "3.6.0"}])
    measurement_policy: dict[str, Any] = Field(default_factory=dict)
    command: Text = ""
    source: Source = "measured"
    uuid: Annotated[str, Field(pattern=r"^[0-9a-fA-F-]{32,36}$")] | None = None
    started: Time | None = None
    finished: Time | None = None


class RowBody(BaseModel):
    """One configuration: its problem, its config, what became of it."""

    model_config = ConfigDict(extra="forbid")
    problem: ProblemBody
    config: dict[str, Any] = Field(examples=[Config().to_dict()])
    status: Status = "ok"
    direction: Direction = "backward"
    error: Text | None = None
    tflops: Number | None = None
    ms: Number | None = None
    ms_low: Number | None = None
    ms_high: Number | None = None
    samples: Annotated[list[Number | None], Field(max_length=10_000)] | None = None
    speedup_vs_baseline: Number | None = None
    registers: RowId | None = None
    spill_bytes: RowId | None = None
    shared_bytes: RowId | None = None
    required_bytes: RowId | None = None
    limit_bytes: RowId | None = None
    max_abs_error: Number | None = None
    rel_error: Number | None = None
    budget: Number | None = None
    bits_equal: StrictBool | None = None
    runs_compared: RowId | None = None
    min_resident: RowId | None = None
    numerics_key: Annotated[str, Field(max_length=64)] | None = None
    telemetry: dict[str, Any] | None = None
    predicted: Number | None = None
    above_peak: StrictBool = False
    created_at: Time | None = None


class ResultsBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    run: RunBody
    results: Annotated[list[RowBody], Field(min_length=1, max_length=1000)]


class Stored(BaseModel):
    run_id: int
    ids: list[int]


class ReleaseBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    gpu: GpuName = Field(examples=["h200"])
    notes: Annotated[Text, AfterValidator(without_nul)] = ""
    name: Annotated[str, Field(pattern=f"^{RELEASE_NAME.pattern}$")] | None = None
