"""Whole blocks: every variant computes the same block, and without a GPU the command says so."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tuner.blocks import BLOCKS, Bench, Block, Inputs, _line, variants
from tuner.cli import main
from tuner.policy import MeasurementPolicy

SMALL = Block(64, 4, 2, 16, 96, True)


@pytest.mark.parametrize("block", [SMALL, Block(64, 4, 4, 16, 96, False)])
def test_every_variant_computes_the_same_block(block: Block) -> None:
    inputs = Inputs(torch, block, 2, 24, "cpu", "float32")
    attentions = variants(block)
    mine = attentions.pop("dash")

    def half(*tensors: Any) -> Any:
        return mine(*(x.bfloat16() for x in tensors)).float()

    ours = inputs.step(half)()
    assert [grad.shape for grad in ours] == [leaf.shape for leaf in inputs.leaves]
    for attention in attentions.values():
        for theirs, grad in zip(inputs.step(attention)(), ours, strict=True):
            assert (theirs - grad).norm() <= 0.02 * theirs.norm()


def test_the_deterministic_mode_is_left_as_it_was() -> None:
    inputs = Inputs(torch, SMALL, 1, 8, "cpu", "float32")
    inputs.step(variants(SMALL)["sdpa_flash_deterministic"])()
    assert not torch.are_deterministic_algorithms_enabled()


def test_blocks_are_measured_in_turn_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[int] = []

    def run(runs: list[Any]) -> Any:
        sampled.append(len(runs))
        samples = [[1.0 + place] * 3 for place in range(len(runs))]
        return SimpleNamespace(samples=samples, telemetry={})

    bench: Any = object.__new__(Bench)
    bench.torch, bench.gpu = torch, SimpleNamespace(name="h200")
    bench.sampler = SimpleNamespace(run=run, policy=MeasurementPolicy())
    monkeypatch.setitem(BLOCKS, "small", SMALL)
    monkeypatch.setattr("tuner.blocks.TOKENS", 32)
    monkeypatch.setattr(Inputs.__init__, "__defaults__", ("cpu", "bfloat16"))
    found = bench.measure("small", 16)
    assert sampled == [3]
    assert {kind: entry["ms"] for kind, entry in found["variants"].items()} == {
        "dash": 1.0,
        "sdpa_flash": 2.0,
        "sdpa_flash_deterministic": 3.0,
    }
    assert found["variants"]["dash"]["bits_equal"]
    assert "small seq_len=16 batch=2: dash 1.00 ms (1.000x), sdpa_flash 2.00 ms" in _line(found)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "gpt"], "unknown model 'gpt'; choose from llama3-8b"),
        ([], "blocks runs on a GPU"),
    ],
)
def test_what_cannot_run_is_one_line(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if torch.cuda.is_available() and not arguments:
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(sys, "argv", ["dash-tune", "blocks", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1
