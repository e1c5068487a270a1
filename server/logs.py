"""Log lines: JSON, one an event, each with the request's id where there is one; or plain text for a terminal."""

from __future__ import annotations

import contextvars
import json
import logging
import secrets
import string
import sys
from datetime import datetime, timezone

REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("dash_request_id", default="")
ALLOWED = frozenset(string.ascii_letters + string.digits + "-_.")
LONGEST_ID = 64
FIELDS = ("method", "path", "route", "status", "ms", "writer")
"""What a line about a request carries beside its message."""

access = logging.getLogger("dash.access")


def request_id(given: str) -> str:
    """The id that a proxy gave, where it is short and plain; else a new one."""
    if given and len(given) <= LONGEST_ID and ALLOWED.issuperset(given):
        return given
    return secrets.token_hex(8)


class JsonLines(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, request_id, and the request's fields."""

    def format(self, record: logging.LogRecord) -> str:
        time_ = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "time": time_.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if found := REQUEST_ID.get():
            line["request_id"] = found
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """``WARNING dash.server: what happened (request 0123)``."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{record.levelname} {record.name}: {record.getMessage()}"
        if found := REQUEST_ID.get():
            line += f" (request {found})"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(as_json: bool) -> None:
    """Send log lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("dash").setLevel(logging.INFO)


def answered(method: str, path: str, route: str, status: int, ms: float, writer: str) -> None:
    """One line about an answered request; a failure of ours is a warning."""
    fields: dict[str, object] = {
        "method": method,
        "path": path,
        "route": route,
        "status": status,
        "ms": round(ms, 2),
    }
    if writer:
        fields["writer"] = writer
    level = logging.WARNING if status >= 500 else logging.INFO
    access.log(level, "%s %s %d in %.2f ms", method, path, status, ms, extra=fields)
