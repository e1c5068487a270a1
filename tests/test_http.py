"""How the service answers: tags, packing, versions, headers, ids, the ladder of /best. Every number here is FAKE."""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_rows import fake_problem, fake_row, fill
from fastapi.testclient import TestClient

from dash_kernels.problem import Config
from server import logs
from server.app import create_app
from server.settings import Settings
from tuner.export import freeze
from tuner.results.rows import RunInfo
from tuner.results.store import Store

BEST = "/best?mask=causal&d=128"
LIVE = (BEST, "/curves?mask=causal&d=128", "/results?limit=50", "/releases", "/gpus", "/", "/table")
FIXED = ("/schedules", "/schedules/shift?mask=full&seq_len=512", "/openapi.json", "/docs")
IDENTITY = {"Accept-Encoding": "identity"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(tmp_path_factory.mktemp("http") / "fake.db") as opened:
        fill(opened)
        freeze(opened, "h200", "FAKE", "fake-1")
        yield opened


@pytest.fixture(scope="module")
def client(store: Store) -> TestClient:
    return TestClient(create_app(store, Settings(log_requests=True)))


# -- wording --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [BEST, "/table", "/releases/diff?new=99", BEST + "&release=99"])
def test_a_release_that_does_not_exist_is_named_with_those_that_do(store: Store, path: str) -> None:
    client = TestClient(create_app(store, Settings(serve_release={"NVIDIA H200": 99})))
    answer = client.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    said = answer.json()["detail"]
    for word in ("release 99 of h200", "1 (fake-1)", "GET /releases?gpu=h200"):
        assert word in said
    assert ("DASH_SERVE_RELEASE" in said) == ("99" not in path)


def test_releases_are_listed_and_pages_shown_though_the_pinned_one_does_not_exist(
    store: Store,
) -> None:
    client = TestClient(create_app(store, Settings(serve_release={"h200": 99})))
    assert [r["served"] for r in client.get("/releases").json()] == [False]
    page = client.get("/").text
    assert "/best answers nothing for h200: release 99 of h200" in page
    assert "None of them answers /best here" in page
    assert "not released yet" not in page


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/releases/x", "release_id is 'x': it must be a whole number"),
        ("/best?mask=causal&d=128&gpu=", "gpu is '': it is empty"),
        ("/best?mask=causal&d=128&triton=abc", "such as 3.6.0"),
        ("/gpus?colour=1", "unknown parameter 'colour'; /docs lists"),
        ("/results?numerics_key=%00", "it has a NUL character"),
        ("/results?gpu=h200%00", "it has a NUL character"),
        ("/figures/gantt?kind=grouped_shift(x)", "schedule 'grouped_shift(x)' is not one of"),
        ("/figures/pie", "there is no figure 'pie'; there are speedup"),
    ],
)
def test_an_error_says_what_would_do(client: TestClient, path: str, said: str) -> None:
    assert said in client.get(path).json()["detail"]


# -- caches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*LIVE, *FIXED, "/releases/1/table.json", "/static/app.css"])
def test_a_tag_names_the_bytes(client: TestClient, path: str) -> None:
    plain = client.get(path, headers=IDENTITY)
    packed = client.get(path, headers={"Accept-Encoding": "gzip"})
    assert plain.status_code == packed.status_code == 200
    assert re.fullmatch(r'"[0-9a-f]{32,64}"', plain.headers["etag"])
    assert plain.headers["vary"] == packed.headers["vary"] == "Accept-Encoding"
    assert plain.content == packed.content
    if "content-encoding" in packed.headers:
        assert packed.headers["etag"] == "W/" + plain.headers["etag"]
    else:
        assert packed.headers["etag"] == plain.headers["etag"]
    for encoding in ("identity", "gzip"):
        for tag in (plain.headers["etag"], packed.headers["etag"], '"other", W/"x", *'[-1:]):
            again = client.get(path, headers={"Accept-Encoding": encoding, "If-None-Match": tag})
            assert (again.status_code, again.content) == (304, b""), (path, tag)
            assert again.headers["cache-control"] == plain.headers["cache-control"]
            assert again.headers["vary"] == "Accept-Encoding"
            assert "etag" in again.headers
    other = client.get(path, headers={"If-None-Match": '"other"'})
    assert other.status_code == 200


@pytest.mark.parametrize(
    ("paths", "cache"),
    [
        (LIVE, "no-cache"),
        (FIXED[:2], "public, max-age=3600"),
        (("/releases/1/table.json",), "public, max-age=31536000, immutable"),
        (("/healthz", "/metrics", "/nowhere", "/best", "/releases/99"), "no-store"),
    ],
)
def test_each_kind_of_answer_says_how_long_it_holds(
    client: TestClient, paths: tuple[str, ...], cache: str
) -> None:
    for path in paths:
        assert client.get(path).headers["cache-control"] == cache, path


def test_static_files_hold_for_ever_under_their_version_only(client: TestClient) -> None:
    page = client.get("/").text
    for address in re.findall(r'(?:src|href)="(static/[^"]+)"', page):
        forever = client.get(f"/{address}").headers["cache-control"]
        assert forever == (
            "public, max-age=31536000, immutable" if "?v=" in address else "no-cache"
        ), address
    for stale in ("/static/app.js", "/static/app.js?v=0123456789"):
        assert client.get(stale).headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [
        ("gzip", True),
        ("br, gzip;q=0.5", True),
        ("*", True),
        ("gzip;q=0", False),
        ("br", False),
        ("", False),
    ],
)
def test_gzip_only_where_it_is_taken(client: TestClient, accepted: str, packed: bool) -> None:
    with client.stream("GET", BEST, headers={"Accept-Encoding": accepted}) as answer:
        raw = b"".join(answer.iter_raw())
    assert (answer.headers.get("content-encoding") == "gzip") is packed
    assert int(answer.headers["content-length"]) == len(raw)
    assert json.loads(gzip.decompress(raw) if packed else raw)["gpu"] == "h200"


def test_a_tag_changes_with_the_answer(client: TestClient, store: Store) -> None:
    before = client.get("/results?limit=1000").headers["etag"]
    run = store.start_run(RunInfo("h200", {"note": "FAKE"}, {"version": 0}, "one row more"))
    row = fake_row(fake_problem("causal", 64, 512), Config(num_stages=4), 1.0)
    store.add(run, row)
    assert client.get("/results?limit=1000").headers["etag"] != before


def test_head_is_get_without_a_body(client: TestClient) -> None:
    for path in (BEST, "/", "/healthz", "/releases/1/table.json"):
        whole, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        for name in ("content-type", "cache-control", "content-length"):
            if path != "/healthz":
                assert head.headers[name] == whole.headers[name], (path, name)
    assert client.head("/nowhere").status_code == 404


# -- versions and errors --------------------------------------------------------------------------------------------


def test_every_call_is_under_v1_too(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    short = {path for path in paths if not path.startswith("/v1/")}
    assert {"/best", "/table", "/results", "/curves", "/gpus", "/schedules", "/releases"} <= short
    for path in short - {"/healthz", "/metrics"}:
        assert f"/v1{path}" in paths
        assert set(paths[path]) == set(paths[f"/v1{path}"])
    assert client.get(f"/v1{BEST}").content == client.get(BEST).content
    located = client.get("/v1/table", headers=IDENTITY).headers["content-location"]
    assert client.get(f"/v1/{located}").json()["release"] == "fake-1"


def test_the_document_is_whole(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    identifiers = [op["operationId"] for item in document["paths"].values() for op in item.values()]
    assert len(set(identifiers)) == len(identifiers)
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert operation["description"], path
            for status, answer in operation["responses"].items():
                assert answer["description"], (path, method, status)
                if status >= "400":
                    assert list(answer["content"]) == ["application/problem+json"]
            for parameter in operation.get("parameters", []):
                shown = parameter["schema"]
                assert parameter.get("description") or shown, (path, parameter["name"])


def test_an_error_carries_the_id_of_its_request(client: TestClient) -> None:
    given = client.get("/best", headers={"X-Request-ID": "proxy-17"})
    assert given.headers["x-request-id"] == given.json()["request_id"] == "proxy-17"
    for odd in ("x" * 65, "a b", "<script>", ""):
        made = client.get("/best", headers={"X-Request-ID": odd})
        assert re.fullmatch(r"[0-9a-f]{16}", made.headers["x-request-id"])


def test_a_long_query_is_refused(client: TestClient) -> None:
    answer = client.get("/best?mask=" + "x" * 9000)
    assert (answer.status_code, answer.headers["content-type"]) == (414, "application/problem+json")


def test_security_headers_stand_on_every_answer(client: TestClient) -> None:
    for path in ("/", BEST, "/nowhere", "/static/app.js", "/best?mask=" + "x" * 9000, "/healthz"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


def test_other_sites_may_read_only_where_that_is_set(store: Store) -> None:
    client = TestClient(create_app(store, Settings(cors_origins=["https://plots.example"])))
    asked = client.get(BEST, headers={"Origin": "https://plots.example"})
    assert asked.headers["access-control-allow-origin"] == "https://plots.example"
    other = client.get(BEST, headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    before = client.options(
        "/results",
        headers={"Origin": "https://plots.example", "Access-Control-Request-Method": "POST"},
    )
    assert before.status_code == 400


# -- log lines ------------------------------------------------------------------------------------------------------


def test_a_log_line_is_json_with_the_request(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "dash.access"):
        client.get(BEST, headers={"X-Request-ID": "proxy-18"})
    (record,) = [r for r in caplog.records if r.name == "dash.access"]
    known = logs.REQUEST_ID.set("proxy-18")
    try:
        line = json.loads(logs.JsonLines().format(record))
        text = logs.TextLines().format(record)
    finally:
        logs.REQUEST_ID.reset(known)
    assert (line["method"], line["route"], line["status"]) == ("GET", "/best", 200)
    assert (line["request_id"], line["level"]) == ("proxy-18", "info")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert line["ms"] >= 0
    assert "proxy-18" in text


# -- the ladder of /best --------------------------------------------------------------------------------------------


def rungs(answer: dict[str, Any]) -> list[tuple[str, bool]]:
    return [(rung["rung"], rung["answered"]) for rung in answer["ladder"]]


def test_the_ladder_says_what_missed(client: TestClient) -> None:
    exact = client.get(BEST + "&s=4096").json()
    assert rungs(exact) == [("exact", True)]
    nearest = client.get(BEST + "&s=5000").json()
    assert rungs(nearest) == [("exact", False), ("nearest", True)]
    assert nearest["ladder"][0]["differs"] == [{"field": "seq_len", "asked": 5000, "has": [4096]}]
    assert rungs(client.get(BEST).json()) == [("exact", True)]


@pytest.mark.parametrize(
    ("more", "field", "asked", "has"),
    [
        ("&d=96", "head_dim", 96, [64, 128]),
        ("&d=128&dtype=float16", "dtype", "float16", ["bfloat16"]),
        ("&d=128&heads=8&heads_kv=2", "head_group", 4, [1]),
        ("&d=128&direction=forward", "direction", "forward", ["backward"]),
        ("&d=128&window_left=512", "window_left", 512, [-1]),
        ("&d=128&softcap=true", "softcap", True, [False]),
        ("&d=128&varlen=true", "varlen", True, [False]),
        ("&d=64&head_dim_v=32", "head_dim_v", 32, [64]),
        ("&d=128&triton=4.0.0", "triton", "4.0.0", ["3.6.0"]),
    ],
)
def test_an_answer_never_crosses_a_field_and_names_it(
    store: Store,
    client: TestClient,
    more: str,
    field: str,
    asked: Any,
    has: list[Any],
    tmp_path: Path,
) -> None:
    if field == "triton":
        with Store.open(tmp_path / "triton.db") as other:
            run = other.start_run(RunInfo("h200", {"triton": "3.6.0"}, {}, "FAKE"))
            other.add(run, fake_row(fake_problem("causal", 128, 4096), Config(), 500.0))
            freeze(other, "h200")
            said = TestClient(create_app(other, Settings()))
            answer = said.get("/best?mask=causal" + more)
            assert said.get(BEST + "&triton=3.9.0").status_code == 200
            assert said.get(BEST + "&triton=4.0&allow_compiler=true").status_code == 200
    else:
        answer = client.get("/best?mask=causal" + more)
    assert answer.status_code == 404
    ladder = answer.json()["ladder"]
    assert [rung["rung"] for rung in ladder] == ["exact", "nearest", "family", "default"]
    differs = {d["field"]: d for d in ladder[0]["differs"]}
    assert differs[field] == {"field": field, "asked": asked, "has": has}


def test_family_and_default_answer_only_who_asks(client: TestClient) -> None:
    plain = client.get(BEST + "&gpu=h800")
    assert plain.status_code == 404
    assert "allow_family=true" in plain.json()["ladder"][2]["why"]
    family = client.get(BEST + "&gpu=h800&s=4096&allow_family=true").json()
    assert (family["gpu"], family["measured_on"], family["matched"]) == ("h800", "h200", "family")
    assert rungs(family) == [("exact", False), ("nearest", False), ("family", True)]
    assert family["best"]["matched"] == "family"
    assert client.get(BEST + "&gpu=a100&allow_family=true").status_code == 404
    unlike = client.get("/best?mask=causal&d=96&allow_default=true")
    assert (unlike.status_code, unlike.json()["parameter"]) == (422, "seq_len")
    default = client.get("/best?mask=causal&d=96&s=4096&allow_default=true").json()
    assert (default["matched"], default["release"], default["best"]["tflops"]) == (
        "default",
        "default-3",
        None,
    )
    assert default["best"]["config"]["backend"] == "hopper"
    assert rungs(default)[-1] == ("default", True)
    wide = client.get("/best?mask=causal&d=160&s=4096&allow_default=true").json()
    assert wide["matched"] == "default"
    assert (wide["best"]["config"]["backend"], wide["best"]["config"]["block_n"]) == ("hopper", 64)


@pytest.mark.parametrize(
    ("more", "parameter"),
    [
        ("&allow_family=yes", "allow_family"),
        ("&window_left=-2", "window_left"),
        ("&window_left=1e3", "window_left"),
        ("&triton=three", "triton"),
        ("&softcap=1", "softcap"),
        ("&window_left=1&window_left=2", "window_left"),
    ],
)
def test_new_parameters_are_refused_by_name(client: TestClient, more: str, parameter: str) -> None:
    answer = client.get(BEST + more)
    assert (answer.status_code, answer.json()["parameter"]) == (422, parameter)
    right = client.get("/best?mask=full&d=128&window_right=0")
    assert (right.status_code, right.json()["parameter"]) == (422, "window_right")
