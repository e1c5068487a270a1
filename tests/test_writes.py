"""Who may write to the service, what is refused, and what a refusal leaves behind. Every number here is FAKE."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from service import TOKEN, body_of, row_body

from server import tokens
from server.app import create_app
from server.security import TokenFileError, Tokens, hash_of, parse
from server.settings import Settings
from tuner.results.store import Store


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "empty.db") as opened:
        yield opened


@pytest.fixture
def writable(empty: Store) -> TestClient:
    return TestClient(create_app(empty, Settings(token="fake-token")))


@pytest.mark.parametrize(
    ("token", "headers", "status"),
    [
        (None, TOKEN, 403),
        ("", TOKEN, 403),
        ("fake-token", {}, 401),
        ("fake-token", {"Authorization": "Bearer "}, 401),
        ("fake-token", {"Authorization": "Bearer wrong"}, 401),
        ("fake-token", {"Authorization": "Basic fake-token"}, 401),
        ("fake-token", {"Authorization": b"Bearer \xff\xfe"}, 401),
    ],
)
@pytest.mark.parametrize("path", ["/results", "/releases"])
def test_writes_need_the_token(
    empty: Store, token: str | None, headers: dict[str, Any], status: int, path: str
) -> None:
    client = TestClient(create_app(empty, Settings(token=token)))
    body = body_of(row_body()) if path == "/results" else {"gpu": "h200"}
    answer = client.post(path, json=body, headers=headers)
    assert answer.status_code == status
    assert ("www-authenticate" in answer.headers) == (status == 401)
    assert empty.last_result_id() == 0


def test_bad_rows_write_nothing(writable: TestClient, empty: Store) -> None:
    bad = [
        (
            row_body(problem={"mask": "causal", "head_dim": 128, "seq_len": 0}),
            "results.0.problem.seq_len",
        ),
        (row_body(config={"policy": "random"}), "results.0"),
        (row_body(config={"schedule": "zigzag"}), "results.0"),
        (row_body(status="fine"), "results.0.status"),
        (row_body(colour="red"), "results.0.colour"),
        (row_body(ms=True), "results.0.ms"),
        (row_body(ms="1.0"), "results.0.ms"),
        (row_body(samples=[1.0, False]), "results.0.samples.1"),
        (row_body(registers=True), "results.0.registers"),
        (row_body(above_peak=0), "results.0.above_peak"),
    ]
    for row, parameter in bad:
        answer = writable.post("/results", json=body_of(row), headers=TOKEN)
        assert answer.status_code == 422
        assert answer.json()["parameter"] == parameter
    for content in (b"{", b"\xff\xfe", b""):
        broken = writable.post(
            "/results", content=content, headers={**TOKEN, "Content-Type": "application/json"}
        )
        assert broken.status_code == 422
        assert "body" in broken.json()["parameter"]
    assert empty.last_result_id() == 0
    assert empty.runs() == []


def test_a_large_body_is_refused(empty: Store) -> None:
    client = TestClient(create_app(empty, Settings(token="fake-token", max_body_bytes=2000)))
    big = json.dumps(body_of(row_body(error="x" * 3000))).encode()
    answer = client.post("/results", content=big, headers=TOKEN)
    assert answer.status_code == 413
    assert "fewer rows a call" in answer.json()["detail"]

    def chunks() -> Iterator[bytes]:
        yield from (big[i : i + 500] for i in range(0, len(big), 500))

    assert client.post("/results", content=chunks(), headers=TOKEN).status_code == 413


@pytest.mark.parametrize("body", [b"[]", b"a=b", b"3"])
def test_a_body_that_is_no_object_is_said(writable: TestClient, body: bytes) -> None:
    answer = writable.post("/results", content=body, headers=TOKEN)
    assert answer.status_code == 422
    assert "the body is not" in answer.json()["detail"]


@pytest.mark.parametrize("gpu", ["../../tables/h200", "h200\0", "NVIDIA H21", "<b>h200</b>"])
def test_a_gpu_that_is_no_file_name_is_refused(writable: TestClient, gpu: str) -> None:
    answer = writable.post("/results", json=body_of(row_body(), gpu=gpu), headers=TOKEN)
    assert (answer.status_code, answer.json()["parameter"]) == (422, "run.gpu")


def test_notes_that_no_database_can_hold_are_refused(writable: TestClient) -> None:
    answer = writable.post("/releases", json={"gpu": "h200", "notes": "a\0b"}, headers=TOKEN)
    assert "it has a NUL character" in answer.json()["detail"]


def test_a_name_is_refused_in_words(writable: TestClient) -> None:
    answer = writable.post("/releases", json={"gpu": "h200", "name": "a b"}, headers=TOKEN)
    assert "name is 'a b': it must be letters, digits" in answer.json()["detail"]


def test_a_body_that_is_deep_or_odd_is_named_and_not_a_failure(writable: TestClient) -> None:
    deep = '{"run":{"gpu":"h200","environment":' + '{"a":' * 5000 + "1" + "}" * 5000
    for content in ("[" * 100_000, deep + '},"results":[]}', "1" * 5000, '"text"', "null"):
        answer = writable.post(
            "/results", content=content, headers={**TOKEN, "Content-Type": "application/json"}
        )
        assert answer.status_code == 422, content[:20]
        assert answer.json()["parameter"] is not None


def test_a_run_of_another_gpu_is_refused_by_name(writable: TestClient) -> None:
    uuid = "0" * 32
    assert (
        writable.post("/results", json=body_of(row_body(), uuid=uuid), headers=TOKEN).status_code
        == 201
    )
    other = writable.post(
        "/results", json=body_of(row_body(), gpu="h100", uuid=uuid), headers=TOKEN
    )
    assert (other.status_code, other.json()["parameter"]) == (422, "run.gpu")


def test_no_answer_shows_where_the_database_is(
    empty: Store, writable: TestClient, tmp_path: Path
) -> None:
    with empty.transaction() as connection:
        connection.exec_driver_sql("DROP TABLE dash_releases")
    for answer in (
        writable.get("/releases"),
        writable.get("/best?mask=causal&d=128"),
        writable.post("/releases", json={"gpu": "h200"}, headers=TOKEN),
        writable.get("/"),
    ):
        assert answer.status_code in (422, 503), answer.text
        for secret in (str(tmp_path), "empty.db", "SELECT", "dash_releases", "Traceback"):
            assert secret not in answer.text


# -- tokens ---------------------------------------------------------------------------------------------------------


def test_named_tokens_come_from_a_file_that_holds_no_token(
    empty: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    assert tokens.main(["ci-h200"]) == 0
    said = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    token, line = said["token, shown this once"], said["line for DASH_TOKENS_FILE"]
    assert token not in line
    path = tmp_path / "tokens"
    path.write_text(f"# writers\n\n{line}\nsomebody {hash_of('other')}\n")
    client = TestClient(create_app(empty, Settings(tokens_file=str(path), token="by-environment")))

    def post(secret: str) -> int:
        headers = {"Authorization": f"Bearer {secret}"}
        return client.post("/results", json=body_of(row_body()), headers=headers).status_code

    caplog.set_level(logging.INFO, "dash.access")
    assert [post(s) for s in (token, "other", "by-environment", "wrong", hash_of("other"))] == [
        201, 201, 201, 401, 401,
    ]  # fmt: skip
    writers = [r.writer for r in caplog.records if hasattr(r, "writer")]
    assert writers == ["ci-h200", "somebody", "DASH_TOKEN"]
    path.write_text(f"somebody {hash_of('other')}\n")
    assert [post(token), post("other")] == [401, 201]
    path.write_text("somebody without a hash\n")
    assert post("other") == 201, "a broken file leaves the last good one in force"
    os.unlink(path)
    assert post("other") == 201


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ci", "line 1: write NAME"),
        (f"ci {'0' * 63}", "line 1"),
        (f"ci {'0' * 64}\nci {'1' * 64}", "line 2: the name ci is there already"),
        (f"c/i {'0' * 64}", "line 1"),
    ],
)
def test_a_file_of_tokens_that_cannot_be_used_is_named(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(TokenFileError, match=says):
        parse(text.splitlines(), "tokens")
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(TokenFileError, match=says):
        Tokens("", str(tmp_path / "tokens"))
    with pytest.raises(TokenFileError, match="cannot be read"):
        Tokens("", str(tmp_path / "absent"))


def test_every_token_is_compared_in_constant_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import secrets

    path = tmp_path / "tokens"
    path.write_text("".join(f"holder{i} {hash_of(str(i))}\n" for i in range(5)))
    known = Tokens("own", str(path))
    compared: list[str] = []
    real = secrets.compare_digest

    def counted(one: str, two: str) -> bool:
        compared.append(two)
        return real(one, two)

    monkeypatch.setattr("server.security.secrets.compare_digest", counted)
    assert known.holder("0") == "holder0"
    assert len(compared) == 6
