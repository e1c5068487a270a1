"""Tables by address: fetched once, checked, kept on disk, and what each kind of bad answer does."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_lookup import MONOTONE, cell, table

from dash_kernels import Problem, choose, dispatch, fetch, use_table
from dash_kernels.lookup import LookupTable, TableError, TableMissing

CONTENT = table(cell(4096))
NEWER = table(cell(4096, MONOTONE.with_(num_stages=1)), release="h200-newer")


class Site:
    """A server that says what it is told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.body = CONTENT.to_json().encode()
        self.status = 200
        self.announced: int | None = None
        self.etag = f'W/"{CONTENT.digest}"'
        self.asked: list[tuple[str, str]] = []
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                tag = self.headers.get("If-None-Match", "")
                site.asked.append((self.path, tag))
                same = bool(tag) and tag == site.etag and site.status == 200
                self.send_response(304 if same else site.status)
                self.send_header("ETag", site.etag)
                if not same:
                    self.send_header("Content-Length", str(site.announced or len(site.body)))
                self.end_headers()
                if not same:
                    self.wfile.write(site.body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.base = f"http://127.0.0.1:{self.server.server_port}"

    def serve(self, content: LookupTable) -> None:
        self.body, self.etag = content.to_json().encode(), f'"{content.digest}"'

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Site]:
    monkeypatch.setattr(dispatch, "_state", dispatch._State())
    monkeypatch.setenv("DASH_CACHE", str(tmp_path / "cache"))
    found = Site()
    yield found
    found.stop()


def test_a_release_is_fetched_once_a_live_table_is_asked_for_by_its_tag(site: Site) -> None:
    for _ in range(2):
        assert fetch.fetch_table(f"{site.base}/releases/3/table.json") == CONTENT
        assert fetch.fetch_table(f"{site.base}/table?gpu=h200") == CONTENT
    assert site.asked == [
        ("/releases/3/table.json", ""),
        ("/table?gpu=h200", ""),
        ("/table?gpu=h200", site.etag),
    ]
    site.serve(NEWER)
    assert fetch.fetch_table(f"{site.base}/table?gpu=h200") == NEWER
    assert fetch.fetch_table(f"{site.base}/releases/3/table.json") == CONTENT


def test_a_start_without_a_network_uses_the_copy(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{site.base}/table?gpu=h200"
    fetch.fetch_table(url)
    site.stop()
    assert fetch.fetch_table(url) == CONTENT
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "refused" in warned[0]
    with pytest.raises(TableMissing, match="refused"):
        fetch.fetch_table(f"{site.base}/table?gpu=h800")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("cut", "cut off|IncompleteRead"),
        ("page", "not JSON"),
        ("edited", "digest says"),
        ("swapped", "ETag says digest"),
        ("foreign", "format is None"),
    ],
)
@pytest.mark.parametrize("copied", [False, True])
def test_a_bad_answer_is_refused_by_name_and_never_kept(
    site: Site, fault: str, says: str, copied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{site.base}/table?gpu=h200"
    if copied:
        fetch.fetch_table(url)
    site.serve(NEWER)
    if fault == "cut":
        site.announced = len(site.body)
        site.body = site.body[:300]
    elif fault == "page":
        site.body, site.etag = b"<html>sign in to the network</html>", '"page"'
    elif fault == "edited":
        site.body, site.etag = site.body.replace(b"500.0", b"900.0"), '"edited"'
    elif fault == "swapped":
        site.etag = f'"{"0" * 64}"'
    else:
        site.body, site.etag = b'{"some": "other program"}', '"other"'
    if copied:
        assert fetch.fetch_table(url) == CONTENT
        assert url in caplog.text
    else:
        with pytest.raises(TableError, match=says):
            fetch.fetch_table(url)
    assert list(fetch.cached_tables()) == ([CONTENT] if copied else [])


def test_a_broken_answer_leaves_the_shipped_table_in_force(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "h200.json").write_text(table(cell(4096), release="shipped").to_json())
    monkeypatch.setattr("dash_kernels.lookup.TABLES", shipped)
    monkeypatch.setattr(dispatch, "TABLES", shipped)
    site.body, site.etag = b"{", ""
    use_table(f"{site.base}/table?gpu=h200")
    assert choose(Problem("causal", 128, 4096), "h200").release == "shipped"
    assert caplog.text.count("lookup table refused") == 1
    site.status = 503
    with pytest.raises(TableMissing, match="HTTP 503"):
        fetch.fetch_table(f"{site.base}/releases/9/table.json")


def test_a_server_that_drips_is_left_within_the_limit(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "ANSWER_SECONDS", 0.2)
    hang = threading.Event()
    original = site.server.RequestHandlerClass.do_GET  # type: ignore[attr-defined]

    def slow(handler: http.server.BaseHTTPRequestHandler) -> None:
        hang.wait(5)
        original(handler)

    monkeypatch.setattr(site.server.RequestHandlerClass, "do_GET", slow)
    with pytest.raises(TableMissing, match="timed out"):
        fetch.fetch_table(f"{site.base}/table?gpu=h200")
    hang.set()


def test_a_damaged_copy_is_fetched_again(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    url = f"{site.base}/releases/3/table.json"
    fetch.fetch_table(url)
    path = fetch._copy_path(url)
    assert path is not None
    path.write_bytes(path.read_bytes()[:-200])
    assert fetch.fetch_table(url) == CONTENT
    assert "damaged" in caplog.text
    assert [tag for _, tag in site.asked] == ["", ""]


def test_a_folder_that_cannot_be_written_costs_only_the_next_fetch(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DASH_CACHE", str(tmp_path / "file" / "cache"))
    assert fetch.fetch_table(f"{site.base}/releases/3/table.json") == CONTENT
    assert "cannot keep the lookup table" in caplog.text
