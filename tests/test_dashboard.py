"""The pages without a browser: figures, filters, the page model, what the HTML holds. All numbers are FAKE."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_rows import LENGTHS, fake_modelled, fake_problem, fake_row, fake_rows, fill
from fastapi.testclient import TestClient

from dash_kernels.critical_path import simulate
from dash_kernels.problem import Config
from dash_kernels.schedules import SCHEDULES, TileGrid, build
from dashboard import figures, views
from dashboard.filters import Filters, gantt_kinds, of_slice, options, read, settle
from dashboard.gantt import gantt_figure, mix
from dashboard.model import strips
from dashboard.palette import DARK, LIGHT, MARKS, mark_of
from dashboard.points import fastest_by_kind, geometric_mean
from dashboard.snapshot import Snapshot, Snapshots, one_a_length, take
from server.app import create_app
from server.settings import Settings
from tuner.export import freeze
from tuner.results.rows import RunInfo
from tuner.results.store import Store
from tuner.winners import Confidence, winners

SLICE = Filters(
    gpu="h200",
    mask="causal",
    head_dim=128,
    dtype="bfloat16",
    head_group=1,
    options="plain",
    direction="backward",
)


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return take("h200", "measured", 1, [(row, "fake") for row in fake_rows()])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(tmp_path_factory.mktemp("pages") / "fake.db") as opened:
        fill(opened)
        yield opened


@pytest.fixture(scope="module")
def client(store: Store) -> TestClient:
    return TestClient(create_app(store, Settings()))


# -- points and figures ---------------------------------------------------------------------------------------------


def test_the_fastest_row_of_a_kind_is_drawn(snapshot: Snapshot) -> None:
    drawn = of_slice(snapshot.points, SLICE)
    kinds = {p.kind for p in drawn}
    assert kinds == {"ascending", "descending", "shortest_first", "symmetric_shift", "unordered"}
    assert len(drawn) == len(kinds) * len(LENGTHS)
    assert all(
        p.config["num_stages"] == 2 for p in drawn
    )  # three stages are slower in the fake rows
    assert all(p.speedup == 1.0 for p in drawn if p.kind == "ascending")


def test_a_final_round_decides_what_is_drawn() -> None:
    problem = fake_problem("causal", 128, 1024)
    plain = Config(schedule="ascending", launch_order="ascending")
    first = Config(schedule="shortest_first")
    final = {"telemetry": {"round": "final"}}
    rows = [
        replace(row, id=number)
        for number, row in enumerate(
            (
                fake_row(problem, plain, 200.0),
                fake_row(problem, first, 410.0),
                fake_row(problem, Config(schedule="descending"), 300.0, speedup_vs_baseline=1.45),
                fake_row(problem, plain, 210.0, **final),
                fake_row(problem, first, 399.0, **final),
            ),
            start=1,
        )
    ]
    candidates = [(row, "fake") for row in rows]
    drawn = {p.kind: p for p in fastest_by_kind(candidates, winners(candidates))}
    assert drawn["shortest_first"].tflops == 399.0
    assert drawn["shortest_first"].speedup == pytest.approx(399 / 210)
    assert drawn["ascending"].speedup == 1.0
    assert drawn["descending"].speedup == 1.45  # as measured, beside the baseline of its own minute


def test_rows_above_the_peak_are_not_drawn() -> None:
    problem = fake_problem("causal", 128, 1024)
    plain = Config(schedule="ascending", launch_order="ascending")
    rows = [
        fake_row(problem, plain, 200.0),
        fake_row(problem, plain.with_(num_stages=3), 9000.0, above_peak=True),
    ]
    candidates = [(row, "fake") for row in rows]
    points = fastest_by_kind(candidates, winners(candidates))
    assert [p.tflops for p in points] == [200.0]


def test_speedup_figure_has_a_line_a_kind(snapshot: Snapshot) -> None:
    figure = figures.speedup_figure(of_slice(snapshot.points, SLICE))
    lines = {trace.name: trace for trace in figure.data}
    assert set(lines) == {
        "shortest_first",
        "descending",
        "symmetric_shift",
        "ascending",
        "unordered",
    }
    assert list(lines["shortest_first"].x) == list(LENGTHS)
    assert lines["shortest_first"].y[0] == pytest.approx(0.92 / 0.45, rel=1e-3)
    assert lines["unordered"].line.dash == "dot"
    ends = [a.text for a in figure.layout.annotations if a.name == "line-end"]
    assert sorted(ends) == sorted(lines)


def test_predictions_are_dashed() -> None:
    rows = [(row, "fake") for row in fake_modelled()]
    points = fastest_by_kind(rows, winners(rows))
    assert {p.source for p in points} == {"modelled"}
    figure = figures.tflops_figure(points)
    assert {trace.line.dash for trace in figure.data} == {"dash"}
    assert all(trace.name.endswith("(predicted)") for trace in figure.data)
    ends = [f"{a.text} (predicted)" for a in figure.layout.annotations if a.name == "line-end"]
    assert sorted(ends) == sorted(trace.name for trace in figure.data)
    best = next(p for p in points if p.kind == "shortest_first" and p.seq_len == 512)
    assert best.speedup == pytest.approx(0.92 / 0.45, rel=1e-3)


def test_a_ceiling_is_drawn_only_where_one_was_measured(snapshot: Snapshot) -> None:
    points = of_slice(snapshot.points, SLICE)
    assert snapshot.ceiling is None
    assert len(figures.tflops_figure(points).layout.shapes) == 0
    assert figures.tflops_figure(points, 700.0).layout.shapes[0].y0 == 700.0
    rows = [replace(row, telemetry={"matmul_tflops": 700.0}) for row in fake_rows()[:3]]
    assert take("h200", "measured", 1, [(row, "fake") for row in rows]).ceiling == 700.0


def test_spills_are_marked_and_unknown_registers_left_out(snapshot: Snapshot) -> None:
    shown = [p for p in snapshot.compiled if p.mask == "causal" and p.head_dim == 128]
    figure = figures.registers_figure([*shown, replace(shown[0], kind="unknown", registers=None)])
    spilled = next(t for t in figure.data if t.name == "spills")
    assert set(spilled.y) == {"symmetric_shift"}
    assert [text for text in spilled.text if text] == ["16 B"], "one label a spot"
    assert set(spilled.marker.color) == {LIGHT.alarm}
    assert "unknown" not in {y for t in figure.data for y in t.y}


def test_marks_on_one_spot_share_a_label(snapshot: Snapshot) -> None:
    point = snapshot.compiled[0]
    spilled = [replace(point, registers=255, spill_bytes=b, tile=str(b)) for b in (48, 296, 256)]
    texts = figures.registers_figure(spilled).data[0].text
    assert [text for text in texts if text] == ["48 to 296 B"]


def test_the_portable_kernel_has_register_rows_of_its_own(snapshot: Snapshot) -> None:
    """Its spills are not the Hopper kernel's, which runs the same kind."""
    own = next(p for p in snapshot.compiled if p.config["backend"] == "hopper")
    other = replace(own, spill_bytes=64, config={**own.config, "backend": "portable"})
    clean, spilled = figures.registers_figure([own, other]).data
    assert (list(clean.y), list(spilled.y)) == ([own.kind], [f"{own.kind}<br>portable"])
    assert list(figures.registers_figure([other]).data[0].y) == [own.kind]


@pytest.mark.parametrize(
    ("confidence", "shown"),
    [
        (Confidence(0.02, 0.01, 0.03), "2.0 % ± 1.0"),
        (Confidence(0.001, -0.002, 0.004), "tie"),
        (Confidence(-0.004, -0.007, -0.001), "tie"),
        (Confidence(0.02, None, None), "2.0 %"),
        (None, "–"),
    ],
)
def test_a_lead_that_may_be_none_is_called_a_tie(confidence: Any, shown: str) -> None:
    assert views._lead(confidence)[0] == shown


def test_failures_by_class() -> None:
    figure = figures.failures_figure({"ok": 9, "timeout": 2, "compile": 0, "correctness": 1})
    assert list(figure.data[0].y) == ["ok", "timeout", "correctness"]
    assert list(figure.data[0].x) == [9, 2, 1]


@pytest.mark.parametrize(
    "build_figure", [figures.speedup_figure, figures.tflops_figure, figures.registers_figure]
)
def test_an_empty_figure_says_why(build_figure: object) -> None:
    figure = build_figure([])  # type: ignore[operator]
    assert len(figure.data) == 0
    assert len(figure.layout.annotations[0].text) > 10


def test_labels_are_spread_and_stay_near() -> None:
    assert figures.spread_labels([1.0, 5.0], 1.0) == [1.0, 5.0]
    places = figures.spread_labels([2.0, 2.1, 2.05, 9.0], 1.0)
    assert places[3] == 9.0
    close = sorted(places[:3])
    assert close[1] - close[0] == pytest.approx(1.0)
    assert sum(close) / 3 == pytest.approx(2.05)
    assert places[0] < places[2] < places[1]


def test_gantt_shows_every_tile_and_leaves_waits_empty() -> None:
    schedule = build("ascending", TileGrid(256, 256, 64, 64, causal=True))
    run = simulate(schedule, slots=4, c=1.0, r=0.5)
    compute, reduce = gantt_figure("ascending", run, 1.0).data
    assert len(compute.x) == len(reduce.x) == 10
    assert set(compute.x) == {1.0}
    waits = [b - (a + 1.0) for a, b in zip(compute.base, reduce.base, strict=True)]
    assert sum(waits) == pytest.approx(sum(run.stalls))
    assert max(waits) > 0


def test_every_kind_has_its_own_mark_in_both_themes() -> None:
    marks = [mark_of(name) for name in SCHEDULES]
    for theme in (LIGHT, DARK):
        assert len({mark.color(theme) for mark in marks}) == len(marks)
    assert mark_of("grouped_shift(4)") is MARKS["grouped_shift"]
    assert mark_of("zigzag").color(LIGHT).startswith("#")
    assert mix("#ff0000", "#0000ff", 0.5) == "#800080"


def test_the_style_sheet_has_the_palette(client: TestClient) -> None:
    """One palette in Python for figures, one in CSS for tables: they must not drift apart."""
    css = client.get("/static/app.css").text
    light, dark = css.split("@media (prefers-color-scheme: dark)")[0].split(
        ':root[data-theme="dark"]'
    )
    for name, mark in MARKS.items():
        assert f"--{name}: {mark.light};" in light
        assert f"--{name}: {mark.dark};" in dark
    for theme, text in ((LIGHT, light), (DARK, dark)):
        for part in ("ink", "soft", "rule", "paper", "accent", "alarm"):
            assert f"--{part}: {getattr(theme, part)};" in text


# -- filters and the page model -------------------------------------------------------------------------------------


def test_filters_live_in_the_url() -> None:
    filters, notices = read([("mask", "full"), ("d", "64"), ("predicted", "1"), ("theme", "dark")])
    assert (filters.mask, filters.head_dim, filters.predicted, notices) == ("full", 64, 1, [])
    assert filters.url(mask="causal") == "?mask=causal&head_dim=64&predicted=1"
    again, _ = read([tuple(pair.split("=")) for pair in filters.url()[1:].split("&")])  # type: ignore[misc]
    assert again == filters


@pytest.mark.parametrize(
    ("pair", "word"),
    [
        (("colour", "red"), "colour"),
        (("d", "many"), "head_dim"),
        (("tiles", "5000"), "tiles"),
        (("slots", "0"), "slots"),
        (("r", "nan"), "r is nan"),
    ],
)
def test_a_filter_that_cannot_be_used_is_said(pair: tuple[str, str], word: str) -> None:
    filters, notices = read([pair])
    assert filters == Filters()
    assert word in notices[0]


def test_open_filters_take_what_there_is(snapshot: Snapshot) -> None:
    available = options(snapshot.cells)
    settled, notices = settle(Filters(), available, snapshot.cells)
    assert (settled.mask, settled.head_dim, settled.dtype, notices) == (
        "causal",
        128,
        "bfloat16",
        [],
    )
    settled, notices = settle(Filters(head_dim=96), available, snapshot.cells)
    assert settled.head_dim == 128
    assert "96" in notices[0]
    assert "64" in notices[0]


def test_the_answer_in_one_sentence(snapshot: Snapshot) -> None:
    cells = one_a_length(of_slice(snapshot.cells, SLICE))
    said = views.hero("h200", SLICE, cells, "measured")
    assert said["kind"] == "shortest_first"
    assert "".join(text for text, _ in said["sentence"]).endswith("head_dim 128 on H200.")
    assert "6 of 6" in said["sub"]
    assert "2.0 % against atomics" in said["sub"]  # the fake atomics are 2 % faster
    assert said["stats"][0]["value"] == f"{0.92 / 0.45:.2f}×"
    full = replace(SLICE, mask="full")
    other = views.hero("h200", full, one_a_length(of_slice(snapshot.cells, full)), "measured")
    assert "shift reaches" in other["sub"]
    assert "allow_resident" in other["sub"]
    assert (
        "No speed has been measured" in views.hero("h200", SLICE, [], "measured")["sentence"][0][0]
    )


def test_one_shape_stands_for_a_length() -> None:
    small = replace(fake_problem("causal", 128, 1024), batch=1)
    rows = [
        fake_row(problem, Config(schedule="shortest_first"), 400.0)
        for problem in (small, fake_problem("causal", 128, 1024))
    ]
    cells = winners([(row, "fake") for row in rows])
    assert [cell.batch for cell in one_a_length(cells)] == [16]


def test_numbers_as_they_are_printed() -> None:
    assert views.percent(-0.0123) == "−1.2 %"
    assert views.percent(-0.00001) == "0.0 %"
    assert views.percent(None) == views.times(None) == "–"
    assert (views.length(512), views.length(16384), views.length(1500)) == ("512", "16k", "1500")
    assert geometric_mean([1.0, 4.0, None, float("nan")]) == 2.0
    assert geometric_mean([]) is None


def test_strips_share_one_scale() -> None:
    interleaved = strips("ascending_interleaved", "full", "ascending", 4)[1]
    assert interleaved.label == "ascending, 4 heads interleaved"
    ascending, winner = strips("shortest_first", "causal")
    ends = [max(x + width for x, _, width, _ in s.reduce) for s in (ascending, winner)]
    assert ends[0] == pytest.approx(1000, abs=0.5)
    assert ends[1] < 800
    assert len(strips("two_pass", "causal")) == 1


# -- over HTTP ------------------------------------------------------------------------------------------------------


def test_the_page_holds_the_numbers_without_script(client: TestClient) -> None:
    page = client.get("/").text
    assert "<title>DASH: shortest_first, causal, d 128, h200</title>" in page
    assert page.count('<tr><td class="num">') == len(LENGTHS)
    assert "2.04×" in page
    assert "Config(backend=&#39;hopper&#39;, schedule=&#39;shortest_first&#39;" in page


def test_the_page_says_which_release_answers_and_what_is_newer(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with Store.open(tmp_path_factory.mktemp("released") / "fake.db") as store:
        fill(store)
        client = TestClient(create_app(store, Settings()))
        assert "None yet: dash-tune release --gpu h200" in client.get("/").text
        assert "release=draft" in client.get("/").text
        freeze(store, "h200", "<b>first</b>", "fake-1")
        time.sleep(0.08)  # past the state that the server goes by
        page = client.get("/").text.split('id="releases"')[1]
        assert "answer from release 1, fake-1: the winners shown here" in page
        assert "&lt;b&gt;first&lt;/b&gt;" in page
        run = store.start_run(RunInfo("h200", {"note": "FAKE"}, {"version": 9}))
        store.add(run, fake_row(fake_problem("causal", 128, 4096), Config(num_stages=1), 900.0))
        time.sleep(0.08)
        page = client.get("/").text.split('id="releases"')[1]
        assert "they would change 1 cell, in 1 of them also bits" in page
        freeze(store, "h200", name="fake-2")
        time.sleep(0.08)
        page = client.get("/").text.split('id="releases"')[1]
        assert "23 cells as before, 1 with another config; 1 changes bits" in page


def test_no_inline_script_and_nothing_from_elsewhere(client: TestClient) -> None:
    for path in ("/", "/docs", "/?mask=full&predicted=1&kind=shift"):
        page = client.get(path).text
        for script in re.findall(r"<script[^>]*>", page):
            assert "src=" in script
        assert re.search(r"<script[^>]*>[^<]", page) is None
        assert re.search(r"\son\w+=", page) is None
        assert "style=" not in page
        links = re.findall(r'(?:src|href|action|data-figure|data-path)="([^"]*)"', page)
        assert links
        assert not [link for link in links if re.match(r"(https?:)?//", link)]


def test_every_link_carries_the_prefix(store: Store) -> None:
    client = TestClient(create_app(store, Settings(root_path="/dash")))
    for path in ("/", "/docs"):
        page = client.get(path).text
        links = re.findall(r'(?:src|href|action|data-path)="([^"#?][^"]*)"', page)
        own = [link for link in links if not link.startswith("/dash/")]
        assert all(link.split("?")[0] in ("best", "table", "results") for link in own), own
    assert client.get("/openapi.json").json()["servers"] == [{"url": "/dash"}]


def test_stored_text_is_inert(client: TestClient) -> None:
    page = client.get("/").text
    assert "&lt;b&gt;registers&lt;/b&gt;" in page
    assert "<b>registers" not in page
    hostile = client.get("/", params={"mask": "<script>alert(1)</script>"}).text
    assert "<script>alert" not in hostile
    assert "&lt;script&gt;" in hostile


@pytest.mark.parametrize("name", ["speedup", "tflops", "registers", "gantt", "failures"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_figures_are_strict_json_in_both_themes(client: TestClient, name: str, theme: str) -> None:
    answer = client.get(f"/figures/{name}", params={"theme": theme, "predicted": 1})
    assert answer.status_code == 200

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    figure = json.loads(answer.text, parse_constant=refuse)
    assert figure["data"]
    assert figure["layout"]["font"]["color"] == (DARK if theme == "dark" else LIGHT).ink


def test_every_kind_can_be_drawn_or_says_why_not(client: TestClient) -> None:
    for kind in gantt_kinds():
        for mask in ("causal", "full"):
            answer = client.get("/figures/gantt", params={"kind": kind, "gantt_mask": mask})
            drawn = answer.status_code == 200 and answer.json()["data"]
            assert drawn or mask in answer.json()["detail"], (kind, mask)
    stuck = client.get("/figures/gantt?kind=shift&gantt_mask=full&slots=4")
    assert stuck.status_code == 422
    assert "never ends" in stuck.json()["detail"]
    assert "never ends" in client.get("/?kind=shift&gantt_mask=full&slots=4").text
    unknown = client.get("/?kind=zigzag")
    assert unknown.status_code == 200
    assert "shortest_first" in unknown.text.split('id="schedule"')[1]


def test_an_empty_database_says_what_to_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Store.open(tmp_path_factory.mktemp("empty") / "empty.db") as empty:
        client = TestClient(create_app(empty, Settings()))
        page = client.get("/")
        assert page.status_code == 200
        assert "dash-tune --gpu auto" in page.text
        assert client.get("/figures/speedup").status_code == 404


def test_predictions_alone_make_a_page(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Store.open(tmp_path_factory.mktemp("model") / "model.db") as store:
        run = store.start_run(RunInfo("h800", {"note": "FAKE"}, source="modelled"))
        store.add_many(run, fake_modelled("h800"))
        page = TestClient(create_app(store, Settings())).get("/").text
        assert "should be the fastest" in page
        assert "nothing has been measured" in page
        assert "Predicted winner at every shape" in page


def test_what_was_only_compiled_has_no_winner(tmp_path_factory: pytest.TempPathFactory) -> None:
    unknown = dict.fromkeys(("tflops", "ms", "ms_low", "ms_high", "samples", "bits_equal"))
    row = fake_row(
        fake_problem("causal", 128, 1024), Config(), 1.0, "h800", source="compiled", **unknown
    )
    with Store.open(tmp_path_factory.mktemp("compiled") / "compiled.db") as store:
        store.add(store.start_run(RunInfo("h800", {"note": "FAKE"}, source="compiled")), row)
        client = TestClient(create_app(store, Settings()))
        page = client.get("/").text
        assert "No speed has been measured" in page
        assert 'id="winners"' not in page
        assert 'id="configs"' not in page
        assert client.get("/figures/registers?theme=light").json()["data"]
        assert client.get("/best?mask=causal&d=128").status_code == 404


def test_a_snapshot_is_kept_until_a_row_comes(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Store.open(tmp_path_factory.mktemp("kept") / "kept.db") as store:
        run = store.start_run(RunInfo("h200", {"note": "FAKE"}))
        store.add(run, fake_rows()[0])
        snapshots = Snapshots(store)
        first = snapshots.of("h200")
        assert snapshots.of("h200") is first
        store.add(run, fake_rows()[1])
        assert snapshots.of("h200") is not first
