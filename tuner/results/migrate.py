"""Schema version and migrations, run in one transaction by the process that opens the database.

SQLite is migrated at open, after a backup beside the file. PostgreSQL is created when empty; an older schema is
migrated only by ``python -m tuner.results upgrade --db URL``, because other hosts may be using it.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from tuner.results.rows import StoreError

VERSION_TABLE = "dash_schema_version"
REVISIONS = ("0001", "0002", "0003", "0004")  # oldest first; a test holds them to the scripts
HEAD = REVISIONS[-1]
SCRIPTS = Path(__file__).parent / "migrations"


def current_version(connection: Connection) -> str | None:
    """The schema's revision, or None where there is none yet."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    version: str | None = connection.execute(
        text(f"SELECT version_num FROM {VERSION_TABLE}")
    ).scalar()
    return version


def check_known(version: str | None, where: str) -> None:
    """Refuse a schema that this release has never heard of."""
    if version is not None and version not in REVISIONS:
        raise StoreError(
            f"{where} has schema {version}, made by a newer release of dash (this one knows up to {HEAD}); "
            "upgrade dash, or choose another database with --db"
        )


def upgrade(connection: Connection) -> None:
    """Bring the schema to HEAD inside the caller's transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, HEAD)
