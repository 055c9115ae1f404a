"""Backends reduce only at the call sites in docs/call-sites.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
REDUCES = re.compile(r"(all_?reduce(_coalesced)?|reduce|reduce_scatter\w*)_?")
# Objects whose reductions are the backend's; others of these names are meshplan's own.
BACKENDS = ("dist", "_ops", "funcol", "distributed", "c10d", "_c10d_functional", "pg", "group")


def sites(source: str) -> list[str]:
    """Names of the backend's reductions that the source calls or passes on."""
    found: list[str] = []
    # A file without the word has no such call, and to parse it takes long.
    if "reduce" not in source:
        return found
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if name in BACKENDS and REDUCES.fullmatch(node.attr):
            found.append(node.attr)
    return found


def test_backends_reduce_only_at_the_listed_call_sites() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "meshplan").rglob("*.py")
        if sites(path.read_text())
    }
    page = (ROOT / "docs" / "call-sites.md").read_text()
    assert found == set(re.findall(r"^\| `(meshplan/[\w/]+\.py)`", page, re.M))


def test_reduction_call_is_detected() -> None:
    for call in (
        "dist.all_reduce(x)",
        "torch.distributed.reduce_scatter_tensor(a, b)",
        "torch.ops._c10d_functional.all_reduce_(x, 'sum', 'g')",
        "funcol.reduce_scatter_single(x)",
        "self.group.reduce(x)",
    ):
        assert sites(call), call
    assert not sites("functools.reduce(f, x); torch.ops.meshplan.all_reduce(x); dist.all_gather(x)")
