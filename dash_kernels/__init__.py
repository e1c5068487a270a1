"""Deterministic attention backward for LLM training: schedules as data, kernels that run them, and a tuned lookup.

Importing this package imports neither PyTorch nor Triton and touches no GPU; each public name is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Problem": "problem",
    "Config": "problem",
    "supports": "problem",
    "SCHEDULES": "schedules",
    "Schedule": "schedules",
    "build": "schedules",
    "check": "schedules",
    "simulate": "critical_path",
    "attention": "ops",
    "flash_attn_func": "flash_attn",
    "flash_attn_varlen_func": "flash_attn",
    "flash_attn_qkvpacked_func": "flash_attn",
    "flash_attn_kvpacked_func": "flash_attn",
    "flash_attn_varlen_qkvpacked_func": "flash_attn",
    "flash_attn_varlen_kvpacked_func": "flash_attn",
    "Choice": "dispatch",
    "choose": "dispatch",
    "use_table": "dispatch",
    "numerics_key": "numerics",
    "require_numerics": "numerics",
    "check_ranks": "numerics",
    "verify": "testing",
}
_MODULES = ("flash_attn_interface",)
__all__ = ["__version__", *_EXPORTS, *_MODULES]

if TYPE_CHECKING:
    from dash_kernels.critical_path import simulate as simulate
    from dash_kernels.dispatch import Choice as Choice
    from dash_kernels.dispatch import choose as choose
    from dash_kernels.dispatch import use_table as use_table
    from dash_kernels.flash_attn import flash_attn_func as flash_attn_func
    from dash_kernels.flash_attn import flash_attn_kvpacked_func as flash_attn_kvpacked_func
    from dash_kernels.flash_attn import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
    from dash_kernels.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
    from dash_kernels.flash_attn import (
        flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func,
    )
    from dash_kernels.flash_attn import (
        flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func,
    )
    from dash_kernels.numerics import check_ranks as check_ranks
    from dash_kernels.numerics import numerics_key as numerics_key
    from dash_kernels.numerics import require_numerics as require_numerics
    from dash_kernels.ops import attention as attention
    from dash_kernels.problem import Config as Config
    from dash_kernels.problem import Problem as Problem
    from dash_kernels.problem import supports as supports
    from dash_kernels.schedules import SCHEDULES as SCHEDULES
    from dash_kernels.schedules import Schedule as Schedule
    from dash_kernels.schedules import build as build
    from dash_kernels.schedules import check as check
    from dash_kernels.testing import verify as verify


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"{__name__}.{name} needs PyTorch, which is not installed here: pip install torch"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
