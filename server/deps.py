"""What every router gets: the store, its snapshots, the settings, and the default GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fastapi.responses import JSONResponse

from dash_kernels.device import GPUS
from dashboard.snapshot import Snapshots
from server.errors import ApiError, invalid
from server.settings import Settings
from tuner.export import rfc3339
from tuner.results.store import Store


@dataclass(frozen=True)
class Context:
    """The dependencies of the routers, made once by ``create_app``."""

    store: Store
    snapshots: Snapshots
    settings: Settings

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
        if asked not in GPUS and asked not in self.store.gpus():
            raise invalid(
                "gpu", f"gpu is {asked[:60]!r}, which is not known; known: {', '.join(GPUS)}"
            )
        return asked


class Answers:
    """Rendered answers, kept until the database changes. A row or a release makes every one of them old."""

    LARGEST = 1024

    def __init__(self) -> None:
        self._held: tuple[tuple[int, int], dict[str, bytes]] = ((-1, -1), {})

    def get(self, state: tuple[int, int], query: str, compute: Callable[[], Any]) -> bytes:
        """The answer to ``query``, computed unless it is held for this state. Failures are not kept."""
        of, answers = self._held
        if of != state or len(answers) >= self.LARGEST:
            answers = {}
            self._held = state, answers  # one assignment: no thread sees another state's answers
        if query not in answers:
            answers[query] = strict_json(compute())
        return answers[query]


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
