"""Claims: several processes share one sweep, and no config of it gets two rows, whoever dies meanwhile.

A config on offer has one row in ``dash_claims``. Taking it raises its **token** by one and sets an owner and a time at
which it expires; the owner's heartbeat moves that time on. A claim that has expired, or whose process is known to be
dead on this machine, may be taken by another. A result is stored only together with its claim, in one transaction that
looks at the token first (fencing): a worker that was thought dead, and whose config another one has taken since, is
refused there.

PostgreSQL: one locked row at a time, locked ones are skipped (``FOR UPDATE SKIP LOCKED``), and the server's clock
counts. SQLite: the same under ``BEGIN IMMEDIATE`` and this machine's clock.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from sqlalchemy import Connection, DateTime, Update, and_, case, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from tuner.results.models import ClaimTable
from tuner.results.rows import LEASE_S, StoreError, StoreUnavailable, utc_now

if TYPE_CHECKING:
    from tuner.results.store import Store

BEATS_A_LEASE = 4
OPEN, TAKEN, DONE = "open", "taken", "done"
HASHES_A_QUERY = 400  # SQLite bounds the parameters of a statement


class ClaimLost(StoreError):
    """Another process has taken this config since, or has finished it: nothing was written."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write the row of one config; ``token`` grows with each taking."""

    scope: str
    config_hash: str
    token: int


@dataclass(frozen=True, slots=True)
class Standing:
    """Of the configs that were asked about, those that have their row and those that some other process has in hand."""

    done: frozenset[str]
    taken: frozenset[str]


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that holds claims. ``machine`` names kernel and process namespace: within it, pids can be compared."""

    host: str
    pid: int
    started: str
    machine: str
    unique: str

    @classmethod
    def here(cls) -> Owner:
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _started(pid) or "-", _machine(), uuid4().hex[:12])

    @classmethod
    def parse(cls, text: str) -> Owner:
        host, pid, started, machine, unique = text.rsplit(" ", 4)
        return cls(host, int(pid), started, machine, unique)

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.started} {self.machine} {self.unique}"

    def is_gone(self) -> bool:
        """Whether this process ran on this machine and does not any more; False where nothing can be said."""
        known = "-" not in (self.started, self.machine)
        return known and self.machine == _machine() and _started(self.pid) != self.started


class Claims:
    """What one process holds of the work named ``scope``. Not to be shared between threads."""

    def __init__(
        self, store: Store, scope: str, *, owner: Owner | None = None, lease_s: float = LEASE_S
    ) -> None:
        self.store, self.scope, self.lease_s = store, scope, lease_s
        self.owner = owner or Owner.here()
        self.held: dict[str, Claim] = {}
        self._beaten = utc_now()

    def offer(self, hashes: Iterable[str], reopen: Collection[str] = ()) -> None:
        """Put configs up for taking; those known keep their state, but for finished ones in ``reopen``."""
        names = sorted(
            set(hashes)
        )  # in one order for all: two that offer at once cannot block each other
        values = [
            {"scope": self.scope, "config_hash": name, "state": OPEN, "token": 0} for name in names
        ]
        insert = sqlite.insert if self.store.is_sqlite else postgresql.insert
        once = insert(ClaimTable).on_conflict_do_nothing(index_elements=["scope", "config_hash"])
        self._bury(self._owners())
        with self.store.transaction() as connection:
            if values:
                connection.execute(once, values)
            for chunk in _chunks(reopen):
                connection.execute(
                    update(ClaimTable)
                    .where(ClaimTable.scope == self.scope, ClaimTable.config_hash.in_(chunk))
                    .where(ClaimTable.state == DONE)
                    .values(state=OPEN)
                )

    def take(self, hashes: Sequence[str], limit: int = 1) -> list[Claim]:
        """Claim up to ``limit`` of these, in this order; those that others hold or have finished are passed over.

        One that the database gives to this process without its knowledge is taken anew: the answer to an earlier call
        was lost with its connection.
        """
        hashes = [name for name in hashes if name not in self.held]
        if not hashes:
            return []
        order = case(
            {name: place for place, name in enumerate(hashes)}, value=ClaimTable.config_hash
        )
        with self.store.transaction() as connection:
            query = (
                select(ClaimTable.id, ClaimTable.config_hash, ClaimTable.token)
                .where(ClaimTable.scope == self.scope, ClaimTable.config_hash.in_(hashes))
                .where(
                    or_(
                        ClaimTable.state == OPEN,
                        and_(
                            ClaimTable.state == TAKEN,
                            or_(
                                ClaimTable.expires < _after(connection),
                                ClaimTable.owner == str(self.owner),
                            ),
                        ),
                    )
                )
                .order_by(order)
                .limit(limit)
                .with_for_update(skip_locked=True)
            )
            found = connection.execute(query).all()
            if found:
                connection.execute(
                    update(ClaimTable)
                    .where(ClaimTable.id.in_([row.id for row in found]))
                    .values(
                        state=TAKEN,
                        token=ClaimTable.token + 1,
                        owner=str(self.owner),
                        expires=_after(connection, self.lease_s),
                    )
                )
        place = {name: number for number, name in enumerate(hashes)}
        ordered = sorted(found, key=lambda row: place[row.config_hash])
        claims = [Claim(self.scope, row.config_hash, row.token + 1) for row in ordered]
        self.held |= {claim.config_hash: claim for claim in claims}
        return claims

    def standing(self, hashes: Collection[str]) -> Standing:
        """How these configs stand with the others. Claims of processes that died on this machine return here at once."""
        done: set[str] = set()
        taken: dict[str, str] = {}
        with self.store.reading() as connection:
            live = ClaimTable.expires >= _after(connection)
            for chunk in _chunks(hashes):
                query = (
                    select(ClaimTable.config_hash, ClaimTable.state, ClaimTable.owner)
                    .where(ClaimTable.scope == self.scope, ClaimTable.config_hash.in_(chunk))
                    .where(or_(ClaimTable.state == DONE, and_(ClaimTable.state == TAKEN, live)))
                )
                for row in connection.execute(query):
                    if row.state == DONE:
                        done.add(row.config_hash)
                    elif row.owner != str(self.owner):
                        taken[row.config_hash] = row.owner
        gone = self._bury(set(taken.values()))
        return Standing(
            frozenset(done), frozenset(name for name in taken if taken[name] not in gone)
        )

    def beat(self) -> None:
        """Say that this process is alive, if it has not done so for a while. A database that is away now is asked later."""
        now = utc_now()
        if now - self._beaten < timedelta(seconds=self.lease_s / BEATS_A_LEASE) or not self.held:
            return
        self._beaten = now
        with suppress(StoreUnavailable), self.store.transaction() as connection:
            connection.execute(self._mine().values(expires=_after(connection, self.lease_s)))

    def release(self) -> None:
        """Give back what is held and not written, for another process or a later command."""
        if self.held:
            with self.store.transaction() as connection:
                connection.execute(self._mine().values(state=OPEN, owner=None, expires=None))
            self.held.clear()

    def written(self, claim: Claim) -> None:
        """Forget a claim that was settled or lost."""
        self.held.pop(claim.config_hash, None)

    def _mine(self) -> Update:
        return update(ClaimTable).where(
            ClaimTable.owner == str(self.owner), ClaimTable.state == TAKEN
        )

    def _owners(self) -> set[str]:
        query = select(ClaimTable.owner).distinct()
        query = query.where(ClaimTable.scope == self.scope, ClaimTable.state == TAKEN)
        with self.store.reading() as connection:
            return {owner for owner in connection.scalars(query) if owner is not None}

    def _bury(self, owners: Collection[str]) -> set[str]:
        """Return the claims of those owners that are known to have died, and name them."""
        gone = {owner for owner in owners if Owner.parse(owner).is_gone()}
        if gone:
            with self.store.transaction() as connection:
                connection.execute(
                    update(ClaimTable)
                    .where(ClaimTable.owner.in_(gone), ClaimTable.state == TAKEN)
                    .values(state=OPEN, owner=None, expires=None)
                )
        return gone


def settle(connection: Connection, claim: Claim) -> None:
    """Finish a claim in the transaction that stores its rows. Raises ClaimLost, which rolls the rows back."""
    here = (ClaimTable.scope == claim.scope, ClaimTable.config_hash == claim.config_hash)
    row = connection.execute(
        select(ClaimTable.token, ClaimTable.state).where(*here).with_for_update()
    ).first()
    if row is None or row.token != claim.token or row.state != TAKEN:
        raise ClaimLost(
            f"config {claim.config_hash} was taken by another process after this one was thought dead; "
            "its row is not written twice"
        )
    connection.execute(update(ClaimTable).where(*here).values(state=DONE, expires=None))


def _after(connection: Connection, seconds: float = 0.0) -> Any:
    """The time so many seconds from now, by the clock that claims go by: the server's, so that hosts need not agree."""
    pause = timedelta(seconds=seconds)
    if connection.dialect.name == "sqlite":
        return utc_now() + pause
    return func.clock_timestamp(type_=DateTime(timezone=True)) + pause


def _chunks(hashes: Collection[str]) -> Iterator[list[str]]:
    names = sorted(hashes)
    for start in range(0, len(names), HASHES_A_QUERY):
        yield names[start : start + HASHES_A_QUERY]


@cache
def _machine() -> str:
    """Names the running kernel and this process's pid namespace; - where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "-"


def _started(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks: tells it from a later one with its pid. None: not running."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if state == "Z" else rest[18]
