"""This process's share of a sweep that others may be working on too: claims are taken before work and end with its row."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from uuid import uuid4

from tuner.plan import Item, SweepSettings
from tuner.results import ResultRow, RunInfo, Store, StoreUnavailable
from tuner.results.claims import Claim, ClaimLost, Claims

ASKED_AT_ONCE = 16  # candidates that one claim may choose from
REFRESH_S = 2.0
OUTAGE_S = 120.0
LOOK_S = 0.1
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class News:
    """Items that got their row in another process, with its status, and those that wait here again."""

    done: list[tuple[Item, str]] = field(default_factory=list)
    back: list[Item] = field(default_factory=list)


class Share:
    """Claims of one process on the items of its sweep.

    An item that another process has in hand is ``elsewhere`` until it has its row there, and waits here again when its
    claim has returned.
    """

    def __init__(
        self, store: Store, settings: SweepSettings, run: RunInfo, interrupted: Callable[[], bool]
    ) -> None:
        self.store, self.settings, self.run, self.interrupted = store, settings, run, interrupted
        scope = f"{settings.gpu}:{run.sweep}:{settings.source}"
        if settings.fresh:  # what is measured anew is shared with those who were told so only
            scope += f":{settings.share or uuid4().hex}"
        self.claims = Claims(store, scope, lease_s=settings.lease_s)
        self._items: Sequence[Item] = ()
        self._elsewhere: dict[str, Item] = {}
        self._refreshed = time.monotonic()

    def offer(self, items: Sequence[Item]) -> None:
        """Put up for taking what has no row yet, and with ``--retry`` what is to be done again."""
        self._items = items
        hashes = {item.hash for item in items}
        reopen: set[str] = set()
        if self.settings.retry:
            reopen = hashes & self.store.done_hashes(
                self.settings.gpu,
                self.run.environment_key,
                self.settings.source,
                policy_key=self.run.policy_key,
            )
        self.claims.offer(hashes, reopen)

    def take(self, items: Sequence[Item]) -> Item | None:
        """Claim the first of these that is free; those before it that are not become ``elsewhere``.

        None where the first few are all taken; the caller asks again with what still waits.
        """
        asked = items[:ASKED_AT_ONCE]
        claims = self.patiently(lambda: self.claims.take([item.hash for item in asked]))
        for item in asked:
            if claims and item.hash == claims[0].config_hash:
                return item
            self._give_up(item)
        self._look_around()
        return None

    def patiently(self, call: Callable[[], T]) -> T:
        """``call()``, again for up to OUTAGE_S while the database does not answer: it restarts, or fails over.

        Says so once, and gives up once the sweep is interrupted.
        """
        until, pause, said = time.monotonic() + OUTAGE_S, 0.5, False
        while True:
            try:
                return call()
            except StoreUnavailable as error:
                if time.monotonic() + pause > until:
                    raise
                if not said:
                    log.warning("%s: asking again for %.0f s", error, OUTAGE_S)
                    said = True
                again = time.monotonic() + pause
                while time.monotonic() < again:
                    if self.interrupted():
                        raise
                    time.sleep(LOOK_S)
            pause = min(2 * pause, 10.0)

    def _look_around(self) -> None:
        """Others have been faster: learn at once what is left, instead of asking for one after the other."""
        waiting = {item.hash: item for item in self._items if item.state == "waiting"}
        standing = self.patiently(lambda: self.claims.standing(waiting))
        for name in standing.done | standing.taken:
            self._give_up(waiting[name])

    def take_work(self, name: str) -> Claim | None:
        """Claim work that is not a candidate, once and for all processes."""
        self.claims.offer([name])
        return next(iter(self.claims.take([name])), None)

    def write(
        self, item: Item, run_id: int, row: ResultRow, also: Sequence[tuple[int, ResultRow]] = ()
    ) -> bool:
        """Store the item's row, once for all processes; False where another one has the item."""
        claim = self.claims.held.get(item.hash)
        if claim is None and self.take([item]) is None:
            return False
        written = self.write_rows(self.claims.held[item.hash], run_id, [row], also)
        if not written:
            self._give_up(item)
        return written

    def write_rows(
        self,
        claim: Claim,
        run_id: int,
        rows: Sequence[ResultRow],
        also: Sequence[tuple[int, ResultRow]] = (),
    ) -> bool:
        """Store rows together with the end of their claim; False, and nothing stored, where it was lost."""
        try:
            self.patiently(lambda: self.store.add_many(run_id, rows, claim, also))
        except ClaimLost:
            return False
        finally:
            self.claims.written(claim)
        return True

    def _give_up(self, item: Item) -> None:
        item.state = "elsewhere"
        self._elsewhere[item.hash] = item

    def beat(self) -> None:
        self.claims.beat()

    def refresh(self, *, idle: bool) -> News:
        """What the others have done since the last call; asks the database now and then only."""
        news = News()
        since = time.monotonic() - self._refreshed
        if not self._elsewhere or since < REFRESH_S / (2 if idle else 1):
            return news
        self._refreshed = time.monotonic()
        standing = self.patiently(lambda: self.claims.standing(self._elsewhere))
        statuses = self.patiently(lambda: self.store.statuses(self.run, standing.done))
        for name, item in list(self._elsewhere.items()):
            if name in standing.taken:
                continue
            del self._elsewhere[name]
            if name in standing.done:
                item.state = "done"
                news.done.append((item, statuses.get(name, "ok")))
            else:
                item.state = "waiting"
                news.back.append(item)
        return news

    def end(self) -> None:
        """Give back what was begun and not finished."""
        self.claims.release()
