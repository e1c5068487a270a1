"""Runs, results and releases of release 0.1."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BigInt = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Json = sa.JSON(none_as_null=True)
Time = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "dash_runs",
        sa.Column("id", BigInt, primary_key=True),
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("gpu", sa.String(64), nullable=False),
        sa.Column("source", sa.String(16), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("environment", Json, nullable=False),
        sa.Column("environment_key", sa.String(16), nullable=False),
        sa.Column("measurement_policy", Json, nullable=False),
        sa.Column("policy_key", sa.String(16), nullable=False),
        sa.Column("started", Time, nullable=False),
        sa.Column("finished", Time),
        sa.UniqueConstraint("uuid", name="dash_runs_uuid"),
        sqlite_autoincrement=True,
    )
    op.create_index("dash_runs_sweep", "dash_runs", ["gpu", "environment_key", "policy_key"])
    op.create_table(
        "dash_results",
        sa.Column("id", BigInt, primary_key=True),
        sa.Column("run_id", BigInt, sa.ForeignKey("dash_runs.id"), nullable=False),
        sa.Column("config_hash", sa.String(16), nullable=False),
        sa.Column("created_at", Time, nullable=False),
        sa.Column("gpu", sa.String(64), nullable=False),
        sa.Column("source", sa.String(16), nullable=False),
        sa.Column("direction", sa.String(16), nullable=False),
        sa.Column("mask", sa.String(32), nullable=False),
        sa.Column("head_dim", sa.Integer(), nullable=False),
        sa.Column("dtype", sa.String(16), nullable=False),
        sa.Column("seq_len", sa.Integer(), nullable=False),
        sa.Column("seq_len_kv", sa.Integer(), nullable=False),
        sa.Column("batch", sa.Integer(), nullable=False),
        sa.Column("heads", sa.Integer(), nullable=False),
        sa.Column("heads_kv", sa.Integer(), nullable=False),
        sa.Column("head_group", sa.Integer(), nullable=False),
        sa.Column("backend", sa.String(32), nullable=False),
        sa.Column("schedule", sa.String(64), nullable=False),
        sa.Column("group_size", sa.Integer(), nullable=False),
        sa.Column("policy", sa.String(32), nullable=False),
        sa.Column("block_m", sa.Integer(), nullable=False),
        sa.Column("block_n", sa.Integer(), nullable=False),
        sa.Column("config", Json, nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("error", sa.Text()),
        sa.Column("tflops", sa.Double()),
        sa.Column("ms", sa.Double()),
        sa.Column("ms_low", sa.Double()),
        sa.Column("ms_high", sa.Double()),
        sa.Column("samples", Json),
        sa.Column("speedup_vs_baseline", sa.Double()),
        sa.Column("registers", sa.Integer()),
        sa.Column("spill_bytes", BigInt),
        sa.Column("shared_bytes", BigInt),
        sa.Column("required_bytes", BigInt),
        sa.Column("limit_bytes", BigInt),
        sa.Column("max_abs_error", sa.Double()),
        sa.Column("rel_error", sa.Double()),
        sa.Column("budget", sa.Double()),
        sa.Column("bits_equal", sa.Boolean()),
        sa.Column("runs_compared", sa.Integer()),
        sa.Column("min_resident", sa.Integer()),
        sa.Column("numerics_key", sa.String(64)),
        sa.Column("telemetry", Json),
        sa.Column("predicted", sa.Double()),
        sa.Column("above_peak", sa.Boolean(), nullable=False),
        sa.UniqueConstraint("run_id", "config_hash", name="dash_results_run_config"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "dash_results_cell",
        "dash_results",
        ["gpu", "source", "status", "mask", "head_dim", "dtype", "seq_len"],
    )
    op.create_index("dash_results_created", "dash_results", ["created_at"])
    op.create_table(
        "dash_releases",
        sa.Column("id", BigInt, primary_key=True),
        sa.Column("gpu", sa.String(64), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("table", sa.Text(), nullable=False),
        sa.Column("overall", Json, nullable=False),
        sa.Column("notes", sa.Text(), nullable=False),
        sa.Column("last_result_id", BigInt, nullable=False),
        sa.Column("created_at", Time, nullable=False),
        sa.UniqueConstraint("gpu", "name", name="dash_releases_gpu_name"),
        sqlite_autoincrement=True,
    )
