"""Imports run one way, server -> dashboard -> tuner -> dash_kernels, and the light ones stay light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {
    "dash_kernels": {"tuner", "dashboard", "server"},
    "tuner": {"dashboard", "server"},
    "dashboard": {"server"},
    "server": set(),
}
HEAVY = {"torch", "triton", "numpy", "sqlalchemy", "alembic", "fastapi", "plotly", "rich", "typer"}

# Imports every module of a package; a module may lack only what a machine without kernels lacks.
IMPORT_ALL = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
imported = 0
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if module.name.rsplit(".", 1)[-1] == "__main__" or ".migrations." in module.name:
        continue
    try:
        importlib.import_module(module.name)
        imported += 1
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in {"torch", "triton", "ray", "flash_attn", "pynvml"}:
            raise
print(json.dumps([imported, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def fresh(code: str, *args: str) -> str:
    """Run code in an interpreter of its own, from the project's root; its stdout."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_packages(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_no_file_imports_a_package_above_it(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {
        str(path.relative_to(ROOT)): sorted(above)
        for path in files
        if (above := imported_packages(path) & FORBIDDEN[package])
    }
    assert not wrong


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_importing_all_of_a_package_loads_nothing_above_it(package: str) -> None:
    imported, loaded = json.loads(fresh(IMPORT_ALL, package).splitlines()[-1])
    assert imported > 0
    assert not FORBIDDEN[package] & set(loaded)


@pytest.mark.parametrize(
    "module",
    ["", ".problem", ".schedules", ".critical_path", ".device", ".lookup", ".dispatch"],
)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    code = "import sys, importlib; importlib.import_module(sys.argv[1]); print(*sys.modules)"
    loaded = {name.split(".")[0] for name in fresh(code, f"dash_kernels{module}").split()}
    assert "dash_kernels" in loaded
    assert not HEAVY & loaded


def test_import_is_quick() -> None:
    code = (
        "import time; t = time.perf_counter(); import dash_kernels; print(time.perf_counter() - t)"
    )
    seconds = min(float(fresh(code)) for _ in range(5))
    assert seconds < 0.2


def test_server_needs_neither_torch_nor_triton() -> None:
    """The server image has neither; it must still import, dashboard, store and export included."""
    code = """
import sys
for name in ("torch", "triton", "pynvml"):
    sys.modules[name] = None  # import of it raises ModuleNotFoundError
import server.app, server.cli, dashboard.figures, dashboard.router, tuner.results.store, tuner.export
import dash_kernels
try:
    dash_kernels.attention(None, None, None)
except Exception as error:
    print(type(error).__name__, error)
"""
    message = fresh(code)
    assert "torch" in message.lower(), "calling a kernel must say what is missing"
