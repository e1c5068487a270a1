"""Windows, head_dim of V, softcap and packed sequences as columns; the class of failure is named nondeterministic."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name, kind, default in (
        ("window_left", sa.Integer(), "-1"),
        ("window_right", sa.Integer(), "-1"),
        ("head_dim_v", sa.Integer(), "0"),
        ("softcap", sa.Boolean(), sa.false()),
        ("varlen", sa.Boolean(), sa.false()),
    ):
        op.add_column("dash_results", sa.Column(name, kind, nullable=False, server_default=default))
    op.execute("UPDATE dash_results SET head_dim_v = head_dim")
    op.execute(
        "UPDATE dash_results SET status = 'nondeterministic' WHERE status = 'nondeterminism'"
    )
