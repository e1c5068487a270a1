"""Tables of the results database: runs, results (append-only), releases (immutable), claims (who works on what)."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    String,
    Text,
    false,
)
from sqlalchemy import UniqueConstraint as Unique
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """A time with a zone; kept in UTC, answered in UTC. SQLite has no zones, so it holds the UTC time bare."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"time {value.isoformat()} has no zone")
        value = value.astimezone(timezone.utc)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return (
            value.replace(tzinfo=timezone.utc)
            if value.tzinfo is None
            else value.astimezone(timezone.utc)
        )


BigInt = BigInteger().with_variant(Integer(), "sqlite")
Json = JSON(none_as_null=True)


class Base(DeclarativeBase):
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: UtcDateTime(),
        str: Text(),
        float: Double(),
    }


class Run(Base):
    """One command that wrote rows, with the whole environment that it ran in."""

    __tablename__ = "dash_runs"
    __table_args__ = (
        Unique("uuid", name="dash_runs_uuid"),
        Index("dash_runs_sweep", "gpu", "environment_key", "policy_key"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(BigInt, primary_key=True)
    uuid: Mapped[str] = mapped_column(String(36))
    gpu: Mapped[str] = mapped_column(String(64))
    source: Mapped[str] = mapped_column(String(16))
    command: Mapped[str]
    environment: Mapped[dict[str, Any]] = mapped_column(Json)
    environment_key: Mapped[str] = mapped_column(String(16))
    measurement_policy: Mapped[dict[str, Any]] = mapped_column(Json)
    policy_key: Mapped[str] = mapped_column(String(16))
    started: Mapped[datetime]
    finished: Mapped[datetime | None]


class Result(Base):
    """What became of one config in one run. Never updated."""

    __tablename__ = "dash_results"
    __table_args__ = (
        Unique("run_id", "config_hash", name="dash_results_run_config"),
        Index(
            "dash_results_cell", "gpu", "source", "status", "mask", "head_dim", "dtype", "seq_len"
        ),
        Index("dash_results_created", "created_at"),
        Index("dash_results_gpu", "gpu", "id"),
        Index("dash_results_status", "status", "id"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(BigInt, primary_key=True)
    run_id: Mapped[int] = mapped_column(BigInt, ForeignKey("dash_runs.id"))
    config_hash: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime]

    gpu: Mapped[str] = mapped_column(String(64))
    source: Mapped[str] = mapped_column(String(16))
    direction: Mapped[str] = mapped_column(String(16))
    mask: Mapped[str] = mapped_column(String(32))
    head_dim: Mapped[int]
    dtype: Mapped[str] = mapped_column(String(16))
    seq_len: Mapped[int]
    seq_len_kv: Mapped[int]
    batch: Mapped[int]
    heads: Mapped[int]
    heads_kv: Mapped[int]
    head_group: Mapped[int]
    window_left: Mapped[int] = mapped_column(server_default="-1")
    window_right: Mapped[int] = mapped_column(server_default="-1")
    head_dim_v: Mapped[int] = mapped_column(server_default="0")
    softcap: Mapped[bool] = mapped_column(server_default=false())
    varlen: Mapped[bool] = mapped_column(server_default=false())

    backend: Mapped[str] = mapped_column(String(32))
    schedule: Mapped[str] = mapped_column(String(64))
    group_size: Mapped[int]
    policy: Mapped[str] = mapped_column(String(32))
    block_m: Mapped[int]
    block_n: Mapped[int]
    config: Mapped[dict[str, Any]] = mapped_column(Json)

    status: Mapped[str] = mapped_column(String(32))
    error: Mapped[str | None]
    tflops: Mapped[float | None]
    ms: Mapped[float | None]
    ms_low: Mapped[float | None]
    ms_high: Mapped[float | None]
    samples: Mapped[list[Any] | None] = mapped_column(Json)
    speedup_vs_baseline: Mapped[float | None]
    registers: Mapped[int | None]
    spill_bytes: Mapped[int | None] = mapped_column(BigInt)
    shared_bytes: Mapped[int | None] = mapped_column(BigInt)
    required_bytes: Mapped[int | None] = mapped_column(BigInt)
    limit_bytes: Mapped[int | None] = mapped_column(BigInt)
    max_abs_error: Mapped[float | None]
    rel_error: Mapped[float | None]
    budget: Mapped[float | None]
    bits_equal: Mapped[bool | None]
    runs_compared: Mapped[int | None]
    min_resident: Mapped[int | None]
    numerics_key: Mapped[str | None] = mapped_column(String(64))
    telemetry: Mapped[dict[str, Any] | None] = mapped_column(Json)
    predicted: Mapped[float | None]
    above_peak: Mapped[bool]


class ReleaseTable(Base):
    """A frozen lookup table. Never updated."""

    __tablename__ = "dash_releases"
    __table_args__ = (
        Unique("gpu", "name", name="dash_releases_gpu_name"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(BigInt, primary_key=True)
    gpu: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(128))
    digest: Mapped[str] = mapped_column(String(64))
    table: Mapped[str]
    overall: Mapped[list[Any]] = mapped_column(Json)
    notes: Mapped[str]
    last_result_id: Mapped[int] = mapped_column(BigInt)
    created_at: Mapped[datetime]


class ClaimTable(Base):
    """Who works on a config of a sweep (``tuner.results.claims``). The only rows that change."""

    __tablename__ = "dash_claims"
    __table_args__ = (
        Unique("scope", "config_hash", name="dash_claims_scope_config"),
        Index("dash_claims_owner", "owner"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(BigInt, primary_key=True)
    scope: Mapped[str] = mapped_column(String(200))
    config_hash: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(8))
    token: Mapped[int] = mapped_column(BigInt)
    owner: Mapped[str | None]
    expires: Mapped[datetime | None]
