"""Alembic's entry: migrates the connection that ``tuner.results.migrate`` hands over, in its transaction."""

from __future__ import annotations

from alembic import context

from tuner.results.migrate import VERSION_TABLE
from tuner.results.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
