"""``dash-tune blocks``: a whole transformer block, forward and backward, with this attention and with PyTorch's own.

What a faster attention backward is worth to a training step is what it is worth inside a block, beside projections and
MLP. Every variant computes the same block on the same weights; they are sampled in turn.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tuner.command import UsageError

TOKENS = 16384
SEQ_LENS = (4096,)


@dataclass(frozen=True, slots=True)
class Block:
    """Sizes of one layer of a model: pre-norm attention and a gated MLP of width ``mlp``."""

    hidden: int
    heads: int
    heads_kv: int
    head_dim: int
    mlp: int
    causal: bool


BLOCKS = {
    "llama3-8b": Block(4096, 32, 8, 128, 14336, True),
    "qwen2.5-7b": Block(3584, 28, 4, 128, 18944, True),
    "sd3.5-large": Block(2432, 38, 38, 64, 9728, False),
}


def run_blocks(models: Sequence[str], seq_lens: Sequence[int], rounds: int, as_json: bool) -> int:
    """Measure and print a line for each model and length. Raises UsageError for an unknown model and without a GPU."""
    from dash_kernels.device import NoGpuError, current_gpu

    unknown = [name for name in models if name not in BLOCKS]
    if unknown:
        raise UsageError(f"unknown model {unknown[0]!r}; choose from {', '.join(BLOCKS)}")
    try:
        gpu = current_gpu(0)
    except NoGpuError as error:
        raise UsageError(f"blocks runs on a GPU: {error}") from None
    bench = Bench(gpu, rounds)
    for name in models or BLOCKS:
        for seq_len in seq_lens or SEQ_LENS:
            found = bench.measure(name, seq_len)
            print(json.dumps(found) if as_json else _line(found), flush=True)
    return 0


class Bench:
    """Samples the variants of a block in turn on the current GPU."""

    def __init__(self, gpu: Any, rounds: int) -> None:
        from dataclasses import replace

        import torch

        from tuner.nvml import Monitor, visible_gpus
        from tuner.policy import MeasurementPolicy
        from tuner.sampling import Sampler, flush_buffer

        self.torch, self.gpu = torch, gpu
        policy = replace(MeasurementPolicy(), min_samples=rounds, max_samples=rounds)
        monitor = Monitor(visible_gpus()[0].uuid)
        self.sampler = Sampler(torch, policy, monitor, flush_buffer(torch, gpu.l2_bytes))

    def measure(self, name: str, seq_len: int) -> dict[str, Any]:
        """Milliseconds of forward and backward of each variant, and whether its gradients repeat to the bit."""
        from tuner.stats import median_interval

        block = BLOCKS[name]
        batch = max(1, TOKENS // seq_len)
        inputs = Inputs(self.torch, block, batch, seq_len)
        runs = {kind: inputs.step(attention) for kind, attention in variants(block).items()}
        equal = {kind: _repeats(self.torch, run) for kind, run in runs.items()}
        timing = self.sampler.run(list(runs.values()))
        found: dict[str, Any] = {}
        for (kind, samples), same in zip(zip(runs, timing.samples, strict=True), equal.values(), strict=True):  # fmt: skip
            middle, low, high = median_interval(samples)
            found[kind] = {"ms": middle, "ms_low": low, "ms_high": high, "bits_equal": same}
        shape = {"model": name, "seq_len": seq_len, "batch": batch, "gpu": self.gpu.name}
        return {**shape, **asdict(block), "variants": found, "telemetry": timing.telemetry}


class Inputs:
    """Weights and activations of one block; the same for every variant."""

    def __init__(
        self, torch: Any, block: Block, batch: int, seq_len: int, device: str = "cuda", dtype: str = "bfloat16"
    ) -> None:  # fmt: skip
        self.torch, self.block = torch, block
        self.shape = batch, seq_len
        self.how = {"device": device, "dtype": getattr(torch, dtype)}
        width = (block.heads + 2 * block.heads_kv) * block.head_dim
        inner = block.heads * block.head_dim
        self.qkv = self._weight(width, block.hidden)
        self.project = self._weight(block.hidden, inner)
        self.gate_up = self._weight(2 * block.mlp, block.hidden)
        self.down = self._weight(block.hidden, block.mlp)
        self.norms = [self._ones(block.hidden) for _ in range(2)]
        self.x = torch.randn(batch, seq_len, block.hidden, **self.how).requires_grad_()
        self.dout = torch.randn(batch, seq_len, block.hidden, **self.how)

    def _weight(self, rows: int, columns: int) -> Any:
        made = self.torch.randn(rows, columns, **self.how) * columns**-0.5
        return made.requires_grad_()

    def _ones(self, size: int) -> Any:
        return self.torch.ones(size, **self.how).requires_grad_()

    @property
    def leaves(self) -> list[Any]:
        return [self.x, self.qkv, self.project, self.gate_up, self.down, *self.norms]

    def forward(self, attention: Callable[..., Any]) -> Any:
        """One block: x + attention(norm(x)), then the gated MLP in the same way."""
        functional, block = self.torch.nn.functional, self.block
        sizes = [heads * block.head_dim for heads in (block.heads, block.heads_kv, block.heads_kv)]
        normed = functional.rms_norm(self.x, (block.hidden,), self.norms[0])
        parts = functional.linear(normed, self.qkv).split(sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, block.head_dim)) for part in parts)
        attended = attention(q, k, v).reshape(*self.shape, -1)
        x = self.x + functional.linear(attended, self.project)
        normed = functional.rms_norm(x, (block.hidden,), self.norms[1])
        gate, up = functional.linear(normed, self.gate_up).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * up, self.down)

    def step(self, attention: Callable[..., Any]) -> Callable[[], tuple[Any, ...]]:
        """A call that runs forward and backward once and answers the gradients of input and weights."""

        def run() -> tuple[Any, ...]:
            grads: tuple[Any, ...] = self.torch.autograd.grad(
                self.forward(attention), self.leaves, self.dout
            )
            return grads

        return run


def variants(block: Block) -> dict[str, Callable[..., Any]]:
    """Attentions over (B, S, H, D) by name: this one, and PyTorch's flash attention in both of its modes."""
    from dash_kernels import attention

    return {
        "dash": lambda q, k, v: attention(q, k, v, causal=block.causal),
        "sdpa_flash": lambda q, k, v: sdpa(block, q, k, v),
        "sdpa_flash_deterministic": lambda q, k, v: sdpa_deterministic(block, q, k, v),
    }


def sdpa(block: Block, q: Any, k: Any, v: Any) -> Any:
    """PyTorch's attention on the same layout; KV heads are repeated, since its flash backward takes no groups."""
    from torch.nn.functional import scaled_dot_product_attention

    group = block.heads // block.heads_kv
    k, v = (x.repeat_interleave(group, dim=2) if group > 1 else x for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=block.causal).transpose(1, 2)


def sdpa_deterministic(block: Block, q: Any, k: Any, v: Any) -> Any:
    """The same with its deterministic backward, which PyTorch is asked for process-wide: only while that runs."""
    import torch

    class Asked(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch.enable_grad():
                ctx.inputs = [x.detach().requires_grad_() for x in inputs]
                ctx.out = sdpa(block, *ctx.inputs)
            return ctx.out.detach()

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            with deterministic(torch):
                return torch.autograd.grad(ctx.out, ctx.inputs, dout)

    return Asked.apply(q, k, v)


@contextlib.contextmanager
def deterministic(torch: Any) -> Iterator[None]:
    """PyTorch's deterministic kernels while open; uninitialised memory is not filled, which would cost time."""
    mode, filled = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic
    fill = filled.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    filled.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode)
        filled.fill_uninitialized_memory = fill


def _repeats(torch: Any, run: Callable[[], tuple[Any, ...]]) -> bool:
    first, again = run(), run()
    return all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def _line(found: dict[str, Any]) -> str:
    """One model and length for a person: ms, and how the others compare with ours."""
    ours = found["variants"]["dash"]["ms"]
    parts = [
        f"{kind} {entry['ms']:.2f} ms ({entry['ms'] / ours:.3f}x){'' if entry['bits_equal'] else '~'}"
        for kind, entry in found["variants"].items()
    ]
    head = f"{found['model']} seq_len={found['seq_len']} batch={found['batch']}"
    return f"{head}: " + ", ".join(parts) + " (~ = bits differed on rerun)"
