"""``python -m tuner.results upgrade [--db URL]``: migrate a results database to this release's schema."""

from __future__ import annotations

import argparse
import sys

from tuner.results import database, migrate
from tuner.results.rows import StoreError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tuner.results", description=__doc__)
    parser.add_argument("action", choices=["upgrade"])
    parser.add_argument("--db", help="path or URL; default: DASH_DB, else the user's own database")
    options = parser.parse_args(arguments)
    try:
        where = database.upgrade(options.db)
    except StoreError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"database {where} has schema {migrate.HEAD}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
