"""Who may write: holders of a token. Tokens have names, are kept as hashes and compared in constant time."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from server.errors import ApiError
from server.settings import Settings

log = logging.getLogger("dash.server")
bearer = HTTPBearer(auto_error=False, description="A token that this server knows.")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HASHED = re.compile(r"[0-9a-f]{64}")
FROM_ENVIRONMENT = "DASH_TOKEN"


class TokenFileError(ValueError):
    """The file of tokens cannot be used; the message names the line."""


def hash_of(token: str) -> str:
    """What is stored of a token. One of 256 random bits, as ``python -m server.tokens`` makes them, needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


def parse(lines: Iterable[str], path: str) -> dict[str, str]:
    """Name -> hash from lines of ``NAME SHA-256``; empty ones and ``#`` comments are skipped. Raises TokenFileError."""
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not NAME.fullmatch(words[0]) or not HASHED.fullmatch(words[1]):
            raise TokenFileError(
                f"{path}, line {number}: write NAME and the SHA-256 of its token in 64 hex digits; "
                "python -m server.tokens NAME makes both"
            )
        if words[0] in found:
            raise TokenFileError(f"{path}, line {number}: the name {words[0]} is there already")
        found[words[0]] = words[1]
    return found


class Tokens:
    """The tokens that may write: DASH_TOKEN's, and those of the file, which is read again when it changes."""

    def __init__(self, token: str, path: str | None) -> None:
        self._own = {FROM_ENVIRONMENT: hash_of(token)} if token else {}
        self._path = Path(path) if path else None
        self._held: tuple[tuple[int, int, int] | None, dict[str, str]] = (None, {})
        self._lock = threading.Lock()
        if self._path is not None:
            self._held = self._read()

    @classmethod
    def of(cls, settings: Settings) -> Tokens:
        token = settings.token.get_secret_value().strip() if settings.token else ""
        return cls(token, settings.tokens_file)

    def known(self) -> dict[str, str]:
        """Name -> hash of all there are now. A file that is broken or gone leaves the last good one in force."""
        if self._path is not None:
            with self._lock:
                try:
                    if self._stamp() != self._held[0]:
                        self._held = self._read()
                        log.info("tokens read again: %s", ", ".join(self._held[1]) or "none")
                except (OSError, TokenFileError) as error:
                    log.warning("the file of tokens stays as it was read before: %s", error)
        return {**self._held[1], **self._own}

    def holder(self, offered: str) -> str:
        """The name whose token this is, empty for none. Every token is compared, each in constant time."""
        asked = hash_of(offered)
        name = ""
        for known, stored in self.known().items():
            if secrets.compare_digest(asked, stored):
                name = known
        return name

    def _stamp(self) -> tuple[int, int, int]:
        found = os.stat(str(self._path))
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> tuple[tuple[int, int, int], dict[str, str]]:
        assert self._path is not None
        try:
            stamp = self._stamp()
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TokenFileError(f"{self._path} cannot be read: {error}") from None
        return stamp, parse(lines, str(self._path))


def writer(tokens: Tokens, read_only: bool) -> Callable[..., None]:
    """Dependency: 403 when the database or the configuration takes no writes, 401 for a missing or wrong token."""

    def check(
        request: Request,
        given: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)] = None,
    ) -> None:
        if read_only:
            raise ApiError(
                403, "this server takes no writes; its database is open for reading only"
            )
        if not tokens.known():
            raise ApiError(
                403,
                "this server takes no writes; set DASH_TOKEN or DASH_TOKENS_FILE where it runs to allow them",
            )
        name = tokens.holder(given.credentials if given else "")
        if not name:
            raise ApiError(
                401,
                "the token is missing or wrong; send Authorization: Bearer TOKEN",
                headers={"WWW-Authenticate": 'Bearer realm="dash"'},
            )
        request.scope.setdefault("state", {})["writer"] = name

    return check
