"""``python -m server.tokens NAME``: a new token for writing, and the line of DASH_TOKENS_FILE that lets it in."""

from __future__ import annotations

import argparse
import secrets
import sys

from server.security import NAME, hash_of


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m server.tokens", description=__doc__)
    parser.add_argument("name", help="who holds the token, for instance ci-h200")
    name = parser.parse_args(arguments).name
    if not NAME.fullmatch(name):
        print(
            f"name {name!r}: letters, digits, '.', '_' and '-', 64 at most, beginning with a letter or digit",
            file=sys.stderr,
        )
        return 2
    token = secrets.token_urlsafe(32)
    print(f"token, shown this once: {token}")
    print(f"line for DASH_TOKENS_FILE: {name} {hash_of(token)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
