"""Claims: who may write a config's row, on SQLite and on a real PostgreSQL, and what happens when a worker dies."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dash_kernels.problem import Config, Problem
from tuner.engines.share import Share
from tuner.results import ResultRow, RunInfo, Store, StoreUnavailable
from tuner.results.claims import Claim, ClaimLost, Claims, Owner

PROBLEM = Problem("causal", 128, 4096, batch=4, heads=16)
RUN = RunInfo("h200", {"gpu": "h200"}, {"zeroing": True})
SCOPE = "h200:test"
ELSEWHERE = Owner("another-host", 7, "1", "another-kernel", "x")


def row(number: int) -> ResultRow:
    return ResultRow.of(replace(PROBLEM, batch=number + 1), Config(), gpu="h200", tflops=500.0)


ROWS = [row(number) for number in range(6)]
HASHES = [one.config_hash for one in ROWS]


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


def claims(store: Store, owner: Owner | None = None, lease_s: float = 60.0) -> Claims:
    return Claims(store, SCOPE, owner=owner, lease_s=lease_s)


def here(name: str) -> Owner:
    return replace(Owner.here(), unique=name)


def test_claims_come_in_the_order_asked_for_and_nobody_gets_another_ones(store: Store) -> None:
    first, second = claims(store, here("a")), claims(store, here("b"))
    first.offer(HASHES)
    second.offer(HASHES)
    wanted = [HASHES[3], HASHES[1], HASHES[2]]
    (claim,) = first.take(wanted)
    assert (claim.config_hash, claim.token) == (HASHES[3], 1)
    assert [one.config_hash for one in second.take(wanted, limit=3)] == [HASHES[1], HASHES[2]]
    assert first.take(wanted) == []
    assert first.standing(HASHES).taken == {HASHES[1], HASHES[2]}
    assert first.take(["unknown"]) == []


def test_a_row_and_its_claim_are_settled_together_and_once(store: Store) -> None:
    mine, other = claims(store, here("a")), claims(store, here("b"))
    mine.offer(HASHES)
    (claim,) = mine.take(HASHES[:1])
    run_id = store.start_run(RUN)
    store.add(run_id, ROWS[0], claim)
    assert store.count() == 1
    assert other.standing(HASHES).done == {HASHES[0]}
    assert other.take(HASHES[:1]) == []
    with pytest.raises(ClaimLost, match="not written twice"):
        store.add(store.start_run(RUN), ROWS[0], claim)
    assert store.count() == 1
    mine.offer(HASHES)
    assert other.take(HASHES[:1]) == [], "what is done stays done"
    other.offer(HASHES, reopen=HASHES[:1])
    assert other.take(HASHES[:1])[0].token == 2, "unless it is asked for again"


def test_an_expired_claim_returns_and_its_old_holder_cannot_write(store: Store) -> None:
    silent = claims(store, ELSEWHERE, lease_s=0.3)
    silent.offer(HASHES)
    (old,) = silent.take(HASHES[:1])
    other = claims(store)
    assert other.take(HASHES[:1]) == []
    time.sleep(0.35)
    assert other.standing(HASHES).taken == frozenset()
    (new,) = other.take(HASHES[:1])
    assert new.token == old.token + 1
    run_id, late_run = store.start_run(RUN), store.start_run(RUN)
    with pytest.raises(ClaimLost):
        store.add_many(late_run, ROWS[:2], old)
    assert store.count() == 0, "nothing of the refused transaction stays"
    store.add(run_id, ROWS[0], new)
    with pytest.raises(ClaimLost):
        store.add(late_run, ROWS[0], old)
    assert [found.run_id for found in store.results()] == [run_id]


def test_a_late_worker_whose_claim_nobody_took_may_write(store: Store) -> None:
    slow = claims(store, ELSEWHERE, lease_s=0.05)
    slow.offer(HASHES)
    (claim,) = slow.take(HASHES[:1])
    time.sleep(0.1)
    store.add(store.start_run(RUN), ROWS[0], claim)
    assert store.count() == 1


def test_heartbeats_keep_a_claim(store: Store) -> None:
    mine, other = claims(store, ELSEWHERE, lease_s=0.6), claims(store)
    mine.offer(HASHES)
    mine.take(HASHES[:1])
    for _ in range(5):
        time.sleep(0.2)
        mine.beat()
        assert other.take(HASHES[:1]) == []
    time.sleep(0.7)
    assert len(other.take(HASHES[:1])) == 1


def test_what_is_given_back_is_free_at_once(store: Store) -> None:
    mine, other = claims(store, here("a")), claims(store, here("b"))
    mine.offer(HASHES)
    (claim,) = mine.take(HASHES[:1])
    mine.release()
    with pytest.raises(ClaimLost):
        store.add(store.start_run(RUN), ROWS[0], claim)
    assert len(other.take(HASHES[:1])) == 1


def test_scopes_do_not_meet(store: Store) -> None:
    mine, other = claims(store), Claims(store, "b200:test")
    mine.offer(HASHES)
    other.offer(HASHES)
    assert len(mine.take(HASHES[:1])) == len(other.take(HASHES[:1])) == 1


def test_a_process_that_died_on_this_machine_gives_its_claims_back_at_once(store: Store) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    fields = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()
    owner = replace(Owner.here(), pid=child.pid, started=fields[19], unique="dead")
    dead, other = claims(store, owner, lease_s=3600), claims(store)
    dead.offer(HASHES)
    (claim,) = dead.take(HASHES[:1])
    assert HASHES[0] in other.standing(HASHES).taken
    child.kill()
    child.wait()
    assert other.standing(HASHES).taken == frozenset()
    assert other.take(HASHES[:1])[0].token == claim.token + 1
    with pytest.raises(ClaimLost):
        store.add(store.start_run(RUN), ROWS[0], claim)


def test_owners_are_read_back_and_only_this_machine_is_judged() -> None:
    owner = Owner.here()
    assert Owner.parse(str(owner)) == owner
    assert not owner.is_gone()
    assert replace(owner, started="1").is_gone(), "the pid was given to a later process"
    assert not replace(owner, started="1", machine="another").is_gone()
    assert not replace(owner, started="-").is_gone()


def test_many_at_once_get_each_config_once(store: Store) -> None:
    claims(store).offer(HASHES)

    def work(number: int) -> list[Claim]:
        mine, got = claims(store, here(str(number))), []
        deadline = time.monotonic() + 20
        while len(mine.standing(HASHES).taken) + len(got) < len(HASHES):
            got += mine.take(HASHES)
            assert time.monotonic() < deadline
        return got

    with ThreadPoolExecutor(8) as pool:
        taken = [claim for found in pool.map(work, range(8)) for claim in found]
    assert sorted(claim.config_hash for claim in taken) == sorted(HASHES)
    assert {claim.token for claim in taken} == {1}


def test_a_claim_whose_answer_was_lost_is_taken_anew(store: Store) -> None:
    mine = claims(store)
    mine.offer(HASHES)
    (lost,) = mine.take(HASHES[:1])
    assert mine.take(HASHES[:1]) == [], "what is held is not taken twice"
    mine.written(lost)  # as if the answer had never come
    (again,) = mine.take(HASHES[:1])
    assert again.token == lost.token + 1


def test_an_interrupt_ends_the_wait_for_a_database_that_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two minutes of patience are for a database that comes back, and are said; Ctrl-C is obeyed."""
    share = object.__new__(Share)
    asked = []

    def call() -> None:
        asked.append(time.monotonic())
        raise StoreUnavailable("database results.db is gone; put it back")

    share.interrupted = lambda: len(asked) > 1
    with pytest.raises(StoreUnavailable):
        share.patiently(call)
    assert len(asked) == 2
    assert time.monotonic() - asked[1] < 0.5
    assert [record.message for record in caplog.records] == [
        "database results.db is gone; put it back: asking again for 120 s"
    ]
