"""Releases over HTTP: numbered, immutable, with a diff that says whose bits change. Every number here is FAKE."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from service import TOKEN, body_of, row_body
from test_lookup import MONOTONE, cell, table

from dash_kernels.lookup import LookupTable
from dash_kernels.problem import Config
from dash_kernels.table_diff import diff
from server.app import create_app
from server.settings import Settings
from tuner.export import freeze
from tuner.results.rows import StoreError
from tuner.results.store import Store

FASTER = {"config": Config(schedule="shortest_first").to_dict(), "ms": 0.5, "tflops": 600.0}


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "empty.db") as opened:
        yield opened


@pytest.fixture
def writable(empty: Store) -> TestClient:
    return TestClient(create_app(empty, Settings(token="fake-token")))


def test_releases_are_numbered_and_immutable(writable: TestClient) -> None:
    nothing = writable.post("/releases", json={"gpu": "h200"}, headers=TOKEN)
    assert nothing.status_code == 422
    writable.post("/results", json=body_of(row_body()), headers=TOKEN)
    made = writable.post("/releases", json={"gpu": "h200", "name": "first"}, headers=TOKEN)
    assert made.status_code == 201
    assert made.json()["cells"] == 1
    assert (
        writable.post("/releases", json={"gpu": "h200", "name": "first"}, headers=TOKEN).status_code
        == 409
    )
    table = writable.get(f"/{made.json()['table']}")
    parsed = LookupTable.from_json(table.content)
    assert (parsed.release, parsed.digest) == ("first", made.json()["digest"])
    assert "immutable" in table.headers["cache-control"]

    faster = row_body(config=Config(schedule="shortest_first").to_dict(), ms=0.5, tflops=600.0)
    writable.post("/results", json=body_of(faster), headers=TOKEN)
    assert writable.get(f"/{made.json()['table']}").content == table.content
    frozen = writable.get("/best?mask=causal&d=128").json()
    draft = writable.get("/best?mask=causal&d=128&release=draft").json()
    assert (frozen["release"], frozen["best"]["config"]["schedule"]) == ("first", "descending")
    assert (draft["release"], draft["best"]["config"]["schedule"]) == (None, "shortest_first")
    assert [r["name"] for r in writable.get("/releases").json()] == ["first"]
    assert writable.get("/releases/99/table.json").status_code == 404


def kept(client: TestClient, *rows: dict[str, Any], **run: Any) -> None:
    assert client.post("/results", json=body_of(*rows, **run), headers=TOKEN).status_code == 201


def released(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/releases", json={"gpu": "h200", **body}, headers=TOKEN)
    assert answer.status_code == 201, answer.text
    said: dict[str, Any] = answer.json()
    return said


def test_a_draft_answers_only_who_asks_for_it(writable: TestClient) -> None:
    kept(writable, row_body())
    unasked = writable.get("/best?mask=causal&d=128&gpu=h200")
    assert unasked.status_code == 404
    assert "1 measured cells but no release" in unasked.json()["detail"]
    assert "dash-tune release --gpu h200" in unasked.json()["detail"]
    asked = writable.get("/best?mask=causal&d=128&gpu=h200&release=draft").json()
    assert (asked["release"], asked["best"]["config"]["schedule"]) == (None, "descending")
    assert writable.get("/table?gpu=h200").json()["release"] != "draft", "the shipped table"


def test_an_answer_says_what_no_release_has_yet(writable: TestClient) -> None:
    kept(writable, row_body())
    released(writable, name="first")
    assert writable.get("/best?mask=causal&d=128").json()["unreleased"] is None
    kept(writable, row_body(**FASTER))
    said = writable.get("/best?mask=causal&d=128").json()
    assert said["best"]["config"]["schedule"] == "descending"
    assert said["unreleased"]["cells"] == said["unreleased"]["bits_change"] == 1
    assert "dash-tune release --gpu h200" in said["unreleased"]["how"]
    assert said["unreleased"]["newest"].endswith("Z")
    released(writable, name="second")
    after = writable.get("/best?mask=causal&d=128").json()
    assert (after["release"], after["unreleased"]) == ("second", None)


def test_a_release_says_what_it_changes(writable: TestClient) -> None:
    kept(writable, row_body())
    first = released(writable, name="first")
    assert (first["id"], first["changes"], first["served"]) == (1, None, True)
    kept(writable, row_body(**FASTER))
    draft = writable.get("/releases/diff?gpu=h200").json()
    assert (draft["old"]["name"], draft["new"]["name"]) == ("first", "draft")
    assert draft["cells"] == {
        "same": 0, "added": 0, "removed": 0, "config": 1, "bits": 0, "bits_change": 1,
    }  # fmt: skip
    (change,) = draft["changes"]
    assert (change["change"], change["bits_change"]) == ("config", True)
    assert change["gain"] == pytest.approx(1.0)
    assert change["before"]["config"]["schedule"] == "descending"
    assert change["after"]["config"]["schedule"] == "shortest_first"
    second = released(writable, notes="faster")
    assert second["changes"] == "0 cells as before, 1 with another config; 1 changes bits"
    assert writable.get("/releases/2").json() == second
    stored = writable.get("/releases/diff?gpu=h200&new=2").json()
    assert stored["changes"] == draft["changes"]
    back = writable.get("/releases/diff?gpu=h200&old=2&new=1").json()
    assert back["changes"][0]["gain"] == pytest.approx(-0.5)
    assert writable.get("/releases/diff?gpu=h200&new=9").status_code == 404
    listed = writable.get("/releases").json()
    assert [(r["id"], r["served"]) for r in listed] == [(2, True), (1, False)]


def test_rollback_is_an_older_number(writable: TestClient, empty: Store) -> None:
    kept(writable, row_body())
    released(writable, name="first")
    kept(writable, row_body(**FASTER))
    released(writable, name="second")

    def schedule(client: TestClient, more: str = "") -> str:
        said = client.get(f"/best?mask=causal&d=128{more}").json()
        name: str = said["best"]["config"]["schedule"]
        return name

    assert schedule(writable) == "shortest_first"
    assert schedule(writable, "&release=1") == schedule(writable, "&release=first") == "descending"
    assert writable.get("/table?gpu=h200&release=1").json()["release"] == "first"
    pinned = TestClient(create_app(empty, Settings(serve_release={"h200": 1})))
    assert schedule(pinned) == "descending"
    assert pinned.get("/table?gpu=h200").json()["release"] == "first"
    assert [(r["id"], r["served"]) for r in pinned.get("/releases").json()] == [
        (2, False),
        (1, True),
    ]
    lost = TestClient(create_app(empty, Settings(serve_release={"h200": 7})))
    answer = lost.get("/best?mask=causal&d=128")
    assert answer.status_code == 404
    assert "DASH_SERVE_RELEASE" in answer.json()["detail"]


def test_a_release_is_the_newest_though_the_clock_went_back(
    writable: TestClient, empty: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(writable, row_body())
    released(writable, name="first")
    past = datetime.now(timezone.utc) - timedelta(days=400)
    monkeypatch.setattr("tuner.export.utc_now", lambda: past)
    monkeypatch.setattr("tuner.results.store.utc_now", lambda: past)
    freeze(empty, "h200", name="second")
    writable.app.state.context.fresh.expire()  # type: ignore[attr-defined]
    assert writable.get("/best?mask=causal&d=128").json()["release"] == "second"
    kept(writable, row_body(**FASTER))
    assert len(writable.get("/results").json()["results"]) == 2


@pytest.mark.parametrize("name", ["draft", "3", "../x", "a b", "h200-9999-01-01"])
def test_a_name_that_means_something_else_is_refused(
    writable: TestClient, empty: Store, name: str
) -> None:
    kept(writable, row_body())
    answer = writable.post("/releases", json={"gpu": "h200", "name": name}, headers=TOKEN)
    assert (answer.status_code, answer.json()["parameter"]) == (422, "name")
    with pytest.raises(StoreError, match=name):
        freeze(empty, "h200", name=name)


# -- the diff itself ------------------------------------------------------------------------------------------------


def test_a_diff_tells_speed_from_bits() -> None:
    old = table(cell(1024), cell(2048), cell(4096), cell(8192))
    new = table(
        cell(1024),
        cell(2048, MONOTONE.with_(num_stages=3)),
        cell(4096, MONOTONE.with_(schedule="descending")),
        cell(16384),
        release="h200-next",
    )
    found = diff(old, new)
    assert found.same == 1
    assert {(c.cell["seq_len"], c.change, c.bits) for c in found.changes} == {
        (2048, "config", False),
        (4096, "config", True),
        (16384, "added", True),
        (8192, "removed", True),
    }
    assert found.summary() == (
        "1 cells as before, 2 with another config, 1 added, 1 removed; 3 change bits"
    )
    assert "same bits: shortest_first 64x128" in found.changes[0].line()


def test_the_same_config_from_another_kernel_changes_bits() -> None:
    old = table(cell(1024))
    new = LookupTable(**{**vars_of(old), "environment": {"kernel_hash": "other"}})
    (change,) = diff(old, new).changes
    assert (change.change, change.bits) == ("bits", True)
    assert diff(old, old).changes == ()


def vars_of(content: LookupTable) -> dict[str, Any]:
    return {name: getattr(content, name) for name in LookupTable.__dataclass_fields__}
