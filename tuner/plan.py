"""What a sweep is made of: its settings, its items, what it reports to, and its summary."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from dash_kernels.problem import Config, Problem
from tuner.policy import MeasurementPolicy
from tuner.results import ResultRow
from tuner.results.rows import LEASE_S
from tuner.space import Candidate


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """``timeout_s`` bounds one candidate on the GPU, ``compile_timeout_s`` one compile; 0 budget is no limit.

    ``sms`` is 0 where only the GPU itself can tell. ``model``: predict times, to try first what promises most.
    ``asked``: the user named what to try, so a candidate that cannot run gets a row instead of being left out.
    ``share`` names the processes that do a fresh sweep together (one that resumes is shared by all); a claim of one that
    is silent for ``lease_s`` seconds returns to the others.
    """

    gpu: str
    capability: tuple[int, int]
    sms: int
    source: str = "measured"
    command: str = ""
    timeout_s: float = 60.0
    compile_timeout_s: float = 240.0
    budget_s: float = 0.0
    fresh: bool = False
    retry: bool = False
    simulate: bool = False
    model: bool = False
    asked: bool = False
    backend: str = ""
    share: str = ""
    lease_s: float = LEASE_S
    policy: MeasurementPolicy = field(default_factory=MeasurementPolicy)


class Reporter(Protocol):
    """Where progress goes: a live table, plain lines, or JSON lines."""

    def begin(self, total: int, resumed: int, budget_s: float = 0.0) -> None: ...

    def row(self, row: ResultRow) -> None: ...

    def elsewhere(self, count: int) -> None: ...

    def note(self, text: str) -> None: ...

    def tick(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Summary:
    """What a sweep did. ``resumed`` candidates had rows before, other processes gave ``elsewhere`` theirs meanwhile
    (``failed_before`` of both failures).

    ``left`` are those it did not come to, ``pruned`` those that cannot run on this chip and were not asked for,
    ``unsettled`` those whose median is known less exactly than the policy asks. ``gpu_busy`` is the share of the GPUs'
    time, from the first candidate on, that went into checking and timing.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[ResultRow] = field(default_factory=list)
    resumed: int = 0
    elsewhere: int = 0
    failed_before: int = 0
    usable: int = 0
    pruned: int = 0
    left: int = 0
    unsettled: int = 0
    stopped: str = ""
    seconds: float = 0.0
    gpu_busy: float | None = None

    @property
    def exit_code(self) -> int:
        """0 all measured, 1 nothing usable, 3 some failed: of what this sweep covers, earlier commands included."""
        if self.stopped == "interrupt":
            return 130
        if self.usable == 0:
            return 1
        return 3 if self.failures or self.failed_before else 0


@dataclass
class Item:
    """A candidate on its way: its proof and its kernel have to be there before it can run.

    Which kernel it is, is known once the proof has said whether it runs as a cooperative launch.
    """

    candidate: Candidate
    hash: str
    prove_key: str
    predict_key: str
    kernel_key: str = ""
    state: str = "waiting"  # waiting, running, elsewhere (another process has it), done

    @property
    def problem(self) -> Problem:
        return self.candidate.problem

    @property
    def config(self) -> Config:
        return self.candidate.config
