"""Shapes of answers and bodies, as OpenAPI shows them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from server.params import Count, Direction, Dtype, GpuName, Mask, RowId, Source, Status, Time

Text = Annotated[str, Field(max_length=16_000)]


class Problem(BaseModel):
    """RFC 9457 problem document. ``parameter`` names the input at fault."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    parameter: str | None = None


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
    matched: Literal["exact", "nearest"]


class AtLength(Best):
    seq_len: int
    seq_len_kv: int
    batch: int
    heads: int
    fastest: Standing | None = Field(description="Faster still, but only with allow_resident=True.")


class BestAnswer(BaseModel):
    """Every config here is safe with any number of free SMs, except under ``fastest``."""

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
    matched: Literal["exact", "nearest"] | None
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
    table: str = Field(description="Where the frozen table is.")


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


class RunBody(BaseModel):
    """The command that made the rows. A ``uuid`` sent again continues the same run."""

    model_config = ConfigDict(extra="forbid")
    gpu: GpuName = Field(examples=["h200"])
    environment: dict[str, Any]
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
    config: dict[str, Any]
    status: Status = "ok"
    direction: Direction = "backward"
    error: Text | None = None
    tflops: float | None = None
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    samples: Annotated[list[float | None], Field(max_length=10_000)] | None = None
    speedup_vs_baseline: float | None = None
    registers: RowId | None = None
    spill_bytes: RowId | None = None
    shared_bytes: RowId | None = None
    required_bytes: RowId | None = None
    limit_bytes: RowId | None = None
    max_abs_error: float | None = None
    rel_error: float | None = None
    budget: float | None = None
    bits_equal: bool | None = None
    runs_compared: RowId | None = None
    min_resident: RowId | None = None
    numerics_key: Annotated[str, Field(max_length=64)] | None = None
    telemetry: dict[str, Any] | None = None
    predicted: float | None = None
    above_peak: bool = False
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
    notes: Text = ""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None
