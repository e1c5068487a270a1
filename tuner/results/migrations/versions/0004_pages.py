"""Indexes for pages of rows: of a GPU, and of a class of failure, in the order of ids."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("dash_results_gpu", "dash_results", ["gpu", "id"])
    op.create_index("dash_results_status", "dash_results", ["status", "id"])
