"""The measurement policy: what is timed and how. It is stored with every run; runs compare only within one policy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MeasurementPolicy:
    """How a config is measured. Times are ms of the whole backward; lengths of phases are ms of GPU or wall time.

    A sample is one whole backward between two CUDA events, with the L2 flushed before it, and each sample of a config
    is followed by one of the ``ascending`` baseline, so that both see the same clocks. Sampling goes on until half the
    width of the median's 95 % interval is below ``target_interval`` of it, or ``time_limit_ms`` or ``max_samples`` is
    reached. Samples under a thermal or hardware slowdown are thrown away and taken again after a pause, up to
    ``cool_down_s`` seconds of pauses, after which the config has failed and not been slow. The software power cap is
    these chips' normal state under load: it is recorded.
    """

    version: int = 2
    timed: str = (
        "whole backward: delta pass, main kernel, dQ cast, every zeroing, padding of head_dim"
    )
    timer: str = "CUDA events, launches queued ahead of the GPU"
    inputs: str = "fresh standard normal data for each cell and worker"
    baseline: str = "ascending, sampled alternately with each config"
    tflops: str = "2.5 * 4*B*H*S*S*D, halved for causal"
    l2_flush: str = "twice the L2 written before each sample"
    warmup_ms: float = 20.0
    min_samples: int = 12
    max_samples: int = 60
    time_limit_ms: float = 250.0
    target_interval: float = 0.005
    cool_down_s: float = 30.0
    runs_compared: int = 4
    reference_heads: int = 2

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MeasurementPolicy:
        return cls(**data)
