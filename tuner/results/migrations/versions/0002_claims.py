"""Claims: which process works on which config of a sweep."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BigInt = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Time = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "dash_claims",
        sa.Column("id", BigInt, primary_key=True),
        sa.Column("scope", sa.String(200), nullable=False),
        sa.Column("config_hash", sa.String(16), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("token", BigInt, nullable=False),
        sa.Column("owner", sa.Text()),
        sa.Column("expires", Time),
        sa.UniqueConstraint("scope", "config_hash", name="dash_claims_scope_config"),
        sqlite_autoincrement=True,
    )
    op.create_index("dash_claims_owner", "dash_claims", ["owner"])
