"""Small backwards for compute-sanitizer: full, causal and windowed masks on both backends.

``compute-sanitizer --tool memcheck python benchmarks/sanitize.py``; racecheck and synccheck likewise (``make sanitize``).
Prints one line a form, with whether its gradients are finite; a form that takes ten minutes has hung and ends the process.
"""

from __future__ import annotations

import faulthandler

import torch

from dash_kernels import Config, attention

FORMS = {
    "full": {},
    "causal, grouped heads": {"causal": True, "heads": 4},
    "window, ragged": {"window_size": (70, 30), "seq_len": 300},
}


def main() -> None:
    torch.manual_seed(0)
    for backend in ("hopper", "portable"):
        for head_dim in (64, 128):
            for name, options in FORMS.items():
                faulthandler.dump_traceback_later(600, exit=True)
                how = dict(options)
                seq_len, heads = how.pop("seq_len", 256), how.pop("heads", 2)
                tile = (128, 128) if (backend, head_dim) == ("hopper", 64) else (64, 128)
                config = Config(
                    backend=backend,
                    block_m=tile[0],
                    block_n=tile[1],
                    num_stages=2,
                )
                shape = (1, seq_len, heads, head_dim), (1, seq_len, 2, head_dim)
                q, k, v = (
                    torch.randn(shape[i > 0], device="cuda", dtype=torch.bfloat16).requires_grad_()
                    for i in range(3)
                )
                out = attention(q, k, v, config=config, **how)
                out.sum().backward()
                torch.cuda.synchronize()
                finite = all(bool(x.grad.isfinite().all()) for x in (q, k, v))
                faulthandler.cancel_dump_traceback_later()
                print(
                    f"{backend} head_dim {head_dim} {name}: {'finite' if finite else 'NOT FINITE'}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
