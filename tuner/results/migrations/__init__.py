"""Alembic scripts, run by ``tuner.results.migrate``; shipped in the wheel."""
