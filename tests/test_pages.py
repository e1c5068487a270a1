"""The pages in a real browser, headless and without a network beyond this machine. All numbers are FAKE."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from fake_rows import fake_modelled, fill

from server.app import create_app
from server.settings import Settings
from tuner.export import freeze
from tuner.results.rows import RunInfo
from tuner.results.store import Store

DRAWN = "[data-figure]:not([data-drawn])"


def chromium_path() -> str:
    named = (
        os.environ.get("DASH_CHROMIUM")
        or shutil.which("chromium")
        or shutil.which("chromium-browser")
    )
    if not named:
        pytest.skip("no Chromium here: apt-get install chromium, or name one in DASH_CHROMIUM")
    return named


class StripPrefix:
    """A proxy that offers an application under /dash and takes the prefix off, as nginx would."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif not scope["path"].startswith("/dash/"):
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b"outside of the prefix"})
        else:
            path = scope["path"].removeprefix("/dash")
            await self.app({**scope, "path": path, "raw_path": path.encode()}, receive, send)


def serving(app: Any) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        for _ in range(200):
            if server.started:
                break
            threading.Event().wait(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(tmp_path_factory.mktemp("browser") / "fake.db") as opened:
        fill(opened)
        freeze(opened, "h200", "FAKE", "fake-1")
        predicted = opened.start_run(RunInfo("h800", {"note": "FAKE"}, {}, source="modelled"))
        opened.add_many(predicted, fake_modelled("h800"))
        yield opened


@pytest.fixture(scope="module")
def address(store: Store) -> Iterator[str]:
    yield from serving(create_app(store, Settings()))


@pytest.fixture(scope="module")
def behind_proxy(store: Store) -> Iterator[str]:
    yield from serving(StripPrefix(create_app(store, Settings(root_path="/dash"))))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium_path()
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield opened
        opened.close()


class Visit:
    """A page with what it asked for and what it complained about."""

    def __init__(self, browser: Any, address: str, **context: Any) -> None:
        self.address = address
        self.context = browser.new_context(
            **{"viewport": {"width": 1366, "height": 900}, **context}
        )
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on(
            "console", lambda m: self.complaints.append(m.text) if m.type == "error" else None
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "requestfailed", lambda request: self.complaints.append(f"failed {request.url}")
        )

    def go(self, path: str) -> Any:
        self.page.goto(self.address + path)
        return self.settled()

    def settled(self) -> Any:
        self.page.wait_for_selector(DRAWN, state="detached", timeout=30_000)
        return self.page

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


def test_the_dashboard_draws_everything(browser: Any, address: str) -> None:
    with Visit(browser, address) as visit:
        page = visit.go("/")
        assert "shortest_first is the fastest" in page.inner_text("h1")
        assert page.locator("[data-figure] .main-svg").count() >= 5
        lines = page.locator('[data-figure*="speedup"] .scatterlayer .trace')
        assert lines.count() == 5
        assert visit.complaints == []
        assert all(url.startswith(address) for url in visit.requests)


def test_a_filter_changes_url_and_figures_without_a_reload(browser: Any, address: str) -> None:
    with Visit(browser, address) as visit:
        page = visit.go("/")
        page.focus("#mask-full")
        page.keyboard.press("Enter")
        page.wait_for_url("**/?*mask=full*")
        visit.settled()
        assert "for full attention" in page.inner_text("h1")
        assert page.evaluate("document.activeElement.id") == "mask-full"
        assert sum("plotly.min.js" in url for url in visit.requests) == 1
        page.go_back()
        page.wait_for_selector("h1:has-text('causal')")
        visit.settled()
        assert visit.complaints == []


def test_a_schedule_is_drawn_from_the_form(browser: Any, address: str) -> None:
    with Visit(browser, address) as visit:
        page = visit.go("/")
        page.select_option("select[name=kind]", "shift")
        page.select_option("select[name=gantt_mask]", "full")
        page.fill("input[name=tiles]", "4")
        page.fill("input[name=slots]", "4")
        page.click("text=Draw")
        page.wait_for_url("**kind=shift**")
        visit.settled()
        assert "100" in page.inner_text("#schedule .stats")
        bars = page.locator('[data-figure^="figures/gantt"] .bars .point')
        assert bars.count() == 2 * 2 * 16
        assert visit.complaints == []


def test_the_theme_follows_the_system_and_the_switch(browser: Any, address: str) -> None:
    with Visit(browser, address, color_scheme="dark") as visit:
        page = visit.go("/")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 18, 16)"
        page.click("[data-theme-switch]")
        page.wait_for_selector('[data-figure*="speedup"][data-drawn=light]')
        assert (
            page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(244, 241, 232)"
        )
        page.reload(wait_until="commit")
        page.wait_for_selector("html[data-theme=light]", state="attached")


def test_nothing_is_wider_than_a_phone(browser: Any, address: str) -> None:
    with Visit(browser, address, viewport={"width": 390, "height": 844}) as visit:
        for path in ("/", "/docs"):
            page = visit.go(path)
            assert page.evaluate("document.documentElement.scrollWidth") == 390, path
        assert visit.complaints == []


ROOM = """() => { const box = document.querySelector('[data-figure*="figures/speedup"]');
    return box.querySelector('.legend').getBoundingClientRect().top
        - box.querySelector('.xtitle').getBoundingClientRect().bottom; }"""
RIGHT_EDGE = """(left) => { const table = document.querySelector('#configs .scroll'); table.scrollLeft = left;
    const box = table.getBoundingClientRect(); return [box.right - 2, box.top + 4]; }"""


def test_a_phone_shows_legends_in_full_and_where_a_table_goes_on(
    browser: Any, address: str
) -> None:
    with Visit(browser, address, viewport={"width": 390, "height": 844}) as visit:
        assert visit.go("/?gpu=h800").evaluate(ROOM) > 4  # nothing but predictions
        page = visit.go("/?gpu=h200")
        assert page.evaluate(ROOM) > 4
        page.locator("#configs").scroll_into_view_if_needed()
        shades = []
        for left in (0, 9999):  # the table goes on to the right; here it ends
            x, y = page.evaluate(RIGHT_EDGE, left)
            clip = {"x": x, "y": y, "width": 1, "height": 1}
            shades.append(page.screenshot(clip=clip))
        assert shades[0] != shades[1]


def test_behind_a_proxy_that_strips_a_prefix(browser: Any, behind_proxy: str) -> None:
    with Visit(browser, behind_proxy) as visit:
        page = visit.go("/dash/")
        page.click("#mask-full")
        page.wait_for_url("**/dash/?*mask=full*")
        visit.settled()
        page.click("nav >> text=API")
        page.wait_for_selector("#get-best")
        page.click("#get-best >> text=Send")
        page.wait_for_selector("#get-best output pre:has-text('200')")
        assert "shortest_first" in page.inner_text("#get-best output")
        assert visit.complaints == []
        assert all(url.startswith(f"{behind_proxy}/dash/") for url in visit.requests)
