"""No kernel carries a value round a loop only to bound loops inside it.

Triton 3.6 and 3.7 drop such a value in their canonicalization (its uses as bounds do not count as uses), so that each
iteration sees the first one's: a Hopper backward with grouped heads hung for it. Triton 3.9 keeps what hung. Not seen here is
what reaches a bound through another variable, a function or a ``while``, nor a value that only dead code or a later value of its
name reads: for that tests/test_hopper_compile.py counts what the kernel carries with both.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).resolve().parent.parent / "dash_kernels" / "kernels"


def names(nodes: list[ast.expr] | list[ast.stmt], context: type[ast.expr_context]) -> set[str]:
    found = (x for node in nodes for x in ast.walk(node))
    return {x.id for x in found if isinstance(x, ast.Name) and isinstance(x.ctx, context)}


def bounds(loop: ast.For) -> list[ast.expr]:
    return list(loop.iter.args) if isinstance(loop.iter, ast.Call) else [loop.iter]


def reads(nodes: list[ast.stmt], name: str) -> Iterator[ast.Name]:
    """Where ``name`` is read but for bounds of for loops and its own updates."""
    for node in nodes:
        stored = isinstance(node, ast.Assign | ast.AugAssign) and name in names([node], ast.Store)
        if stored:
            continue
        if isinstance(node, ast.For):
            yield from reads(node.body, name)
            continue
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield node
        yield from reads(children, name)  # type: ignore[arg-type]


def dropped(function: ast.FunctionDef) -> list[str]:
    """Names that Triton would drop from a loop of ``function``, with the loop's line."""
    found = []
    for loop in (x for x in ast.walk(function) if isinstance(x, ast.For)):
        inner = [x for node in loop.body for x in ast.walk(node) if isinstance(x, ast.For)]
        as_bounds = names([x for each in inner for x in bounds(each)], ast.Load)
        before = [x for x in ast.walk(function) if getattr(x, "lineno", loop.lineno) < loop.lineno]
        known = names([x for x in before if isinstance(x, ast.Name)], ast.Store)
        known |= {x.arg for x in ast.walk(function.args) if isinstance(x, ast.arg)}
        after = [x for x in ast.walk(function) if getattr(x, "lineno", 0) > (loop.end_lineno or 0)]
        used_after = names([x for x in after if isinstance(x, ast.Name)], ast.Load)
        for name in sorted(as_bounds & known & names(loop.body, ast.Store) - used_after):
            if not any(reads(loop.body, name)):
                found.append(f"{name} in the loop of line {loop.lineno}")
    return found


def jit_functions(source: str) -> list[ast.FunctionDef]:
    functions = (x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef))
    return [x for x in functions if any("jit" in ast.unparse(d) for d in x.decorator_list)]


def test_no_kernel_carries_a_value_only_to_bound_inner_loops() -> None:
    checked = 0
    for path in sorted(KERNELS.glob("*.py")):
        for function in jit_functions(path.read_text(encoding="utf-8")):
            assert dropped(function) == [], f"{path.name}: {function.name}"
            checked += 1
    assert checked > 50


HUNG = """
@gluon.jit
def consumer(words, first, group):
    begin = first
    for head in range(group):
        for step in range(begin, begin + 4):
            one_step(step)
        begin += read_word(words)
"""


def test_the_check_finds_what_hung_and_lets_other_uses_be() -> None:
    (function,) = jit_functions(HUNG)
    assert dropped(function) == ["begin in the loop of line 5"]
    (parameter,) = jit_functions(HUNG.replace("first", "begin").replace("begin = begin", "pass"))
    assert dropped(parameter) == ["begin in the loop of line 5"]
    for allowed in (
        HUNG.replace("one_step(step)", "one_step(begin)"),
        HUNG + "    write_word(begin)\n",
        HUNG.replace("        begin += read_word(words)\n", ""),
    ):
        (function,) = jit_functions(allowed)
        assert dropped(function) == []
