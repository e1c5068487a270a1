"""The figures in README are those of the stored run that it names."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README[README.index("## Performance") : README.index("## Development")]


def stored() -> dict[tuple[int, str, int], dict[str, float]]:
    """TFLOPS of the run that README links, by head_dim, mask and seq_len."""
    (link,) = re.findall(r"\((benchmarks/results/peers-\S+\.json)\)", SECTION)
    rows = json.loads((ROOT / link).read_text())["rows"]
    return {
        (row["head_dim"], row["mask"], row["seq_len"]): {
            name: peer["tflops"] for name, peer in row["peers"].items()
        }
        for row in rows
    }


COLUMNS = ("dash_served", "dash_best", "dash_unordered", "dash_ascending", "fa4_det", "fa4_nondet")


def test_the_table_is_the_stored_run() -> None:
    lines = re.findall(r"^\| (\d+) \| (full|causal) \| (\d+) \| (.*) \|$", SECTION, re.MULTILINE)
    runs = stored()
    assert {(int(d), mask, int(seq)) for d, mask, seq, _ in lines} == set(runs)
    for d, mask, seq, figures in lines:
        run = runs[int(d), mask, int(seq)]
        assert figures.split(" | ") == [f"{run[name]:.0f}" for name in COLUMNS]


TOGETHER = "Forward and backward together"
PEERS = {
    "unordered": "dash_unordered",
    "ascending": "dash_ascending",
    "flash-attn-4": "fa4_det",
}
"""What README calls each peer that it gives a ratio over."""


def test_the_ratios_are_those_of_the_stored_run() -> None:
    """Each ratio is the geometric mean over the shapes that its words name: all, or those of a mask and a head_dim."""
    runs = stored()
    backwards, _ = SECTION.split(TOGETHER)
    said = re.findall(r"(\d\.\d\d)x ((?:[^,.]|\.\d)+)", " ".join(backwards.split()))
    found = set()
    for figure, words in said:
        (peer,) = (name for word, name in PEERS.items() if word in words)
        masks = [mask for mask in ("causal", "full") if mask in words] or ["causal", "full"]
        dims = {int(d) for d in re.findall(r"head_dim (\d+)", words)} or {d for d, *_ in runs}
        ratios = [
            run["dash_best"] / run[peer]
            for (head_dim, mask, _), run in runs.items()
            if head_dim in dims and mask in masks
        ]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        assert figure == f"{mean:.2f}", words
        found.add(peer)
    assert found == set(PEERS.values())
    ahead = sum(r["dash_best"] >= r["fa4_det"] for r in runs.values())
    assert f"in {ahead} of {len(runs)} shapes" in SECTION


def test_the_ratios_of_whole_steps_are_those_of_the_stored_runs() -> None:
    _, steps = SECTION.split(TOGETHER)
    said = re.findall(r"(\d\.\d\d)x", steps)
    day = re.findall(r"peers-(h200-[\d-]+)\.json", SECTION)[0]
    for figure, dims in zip(said, (("64", "128"), ("192-128",), ("256",)), strict=True):
        ratios = [
            row["training_step"]["dash"] / row["training_step"]["fa4_det"]
            for dim in dims
            for row in json.loads(
                (ROOT / "benchmarks" / "results" / f"forward-{dim}-{day}.json").read_text()
            )["rows"]
        ]
        assert figure == f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}", dims
