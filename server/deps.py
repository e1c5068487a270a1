"""What every router gets: the store, its snapshots, the settings, and the default GPU."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fastapi.responses import JSONResponse

from dash_kernels.device import GPUS
from dashboard.snapshot import Snapshots
from server.errors import ApiError, invalid
from server.fresh import Fresh
from server.security import Tokens
from server.settings import Settings
from tuner.export import rfc3339
from tuner.results.rows import Release
from tuner.results.store import Store

NAMED = 5
"""Releases that an error lists."""


class NoRelease(ApiError, LookupError):
    """A release that is named, in the call or the settings, does not exist."""


@dataclass(frozen=True)
class Context:
    """The dependencies of the routers, made once by ``create_app``."""

    store: Store
    snapshots: Snapshots
    settings: Settings
    fresh: Fresh
    tokens: Tokens

    async def answering(self) -> None:
        """Dependency of every call that reads the database: 503 where it is away, also where its file is gone."""
        await self.fresh.current()

    def default_gpu(self) -> str:
        """The setting, else :meth:`Snapshots.default_gpu`. 404 where nothing is stored."""
        found = self.settings.default_gpu or self.snapshots.default_gpu()
        if found is None:
            raise ApiError(
                404,
                "nothing is measured yet; run dash-tune --gpu auto on a GPU machine, or import rows",
            )
        return found

    def gpu(self, asked: str | None) -> str:
        """The GPU that is meant. 422 for a name that neither the package nor the database knows."""
        if asked is None:
            return self.default_gpu()
        if asked not in GPUS and asked not in (stored := self.snapshots.gpus()):
            known = ", ".join(dict.fromkeys([*GPUS, *stored]))
            raise invalid("gpu", f"gpu is {asked[:60]!r}, which is not known; known: {known}")
        return asked

    def release(self, gpu: str, asked: str | None = None) -> Release | None:
        """The release that answers for ``gpu``: the one asked for, else the pinned, else the newest; None for none.

        Raises NoRelease (404) for one that does not exist.
        """
        wanted: str | int | None = asked
        if wanted is None:
            wanted = self.settings.serve_release.get(gpu)
        if wanted is None:
            return self.store.get_release(gpu=gpu)
        known = self.store.releases(gpu)
        by_name = {r.name: r for r in known} | {str(r.id): r for r in known}
        found = by_name.get(str(wanted))
        if found is None:
            why = "" if asked is not None else ", to which DASH_SERVE_RELEASE pins this server,"
            names = ", ".join(f"{r.id} ({r.name})" for r in known[:NAMED]) or "none"
            more = f" and {len(known) - NAMED} older" if len(known) > NAMED else ""
            line = (
                f"release {str(wanted)[:60]} of {gpu}{why} does not exist; there is {names}{more}"
            )
            raise NoRelease(404, f"{line}: GET /releases?gpu={gpu} lists them")
        return found

    def answering_release(self, gpu: str) -> Release | None:
        """The release that answers for ``gpu`` where none is named; None also where the pinned one does not exist."""
        try:
            return self.release(gpu)
        except NoRelease:
            return None


def plain(value: Any) -> Any:
    """JSON-ready: times as RFC 3339 in UTC, NaN and infinity as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime):
        return rfc3339(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def strict_json(content: Any) -> bytes:
    """JSON without NaN or infinity, ever."""
    text = json.dumps(plain(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


class StrictJson(JSONResponse):
    """An answer in strict JSON."""

    def render(self, content: Any) -> bytes:
        return strict_json(content)
