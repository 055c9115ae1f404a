"""No module of meshplan but its one room knows a private name of torch; the room has each once."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import TestCase
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard

import meshplan._torch as room
from meshplan._torch import (
    NAMES,
    TESTING_NAMES,
    find_moved,
)
from meshplan._torch._entry import Entry
from meshplan.dtensor._install import check_seam
from meshplan.errors import UnsupportedTorchError
from tests.private_names import defined_in, find_reads, imports_of, is_private

assert fully_shard, "FSDP2 is imported, so that what watches it is checked as well"

ROOT = Path(__file__).parents[1]
ROOM = ROOT / "meshplan" / "_torch"
# Other libraries whose private names meshplan reads.
LIBRARIES = ("spmd_types",)
ALL = NAMES | TESTING_NAMES


OF_GROUPS = {"_set_group_desc", "_set_group_name"}
"""Of torch's process groups, which those of the backend have as well."""


def private_names_of(kind: Any) -> set[str]:
    """What a class or a module of torch has, and what its methods set on ``self``."""
    file = sys.modules[getattr(kind, "__module__", kind.__name__)].__file__
    on_self = re.findall(r"self\.(_\w+)", Path(str(file)).read_text(encoding="utf-8"))
    return {name for name in (*dir(kind), *on_self) if is_private(name)}


THEIRS = {
    part
    for entry in ALL.values()
    for text in (entry.module, entry.path, *entry.parts, *entry.stores)
    for part in text.split(".")
    if is_private(part)
}.union(*map(private_names_of, (DeviceMesh, DTensor, Shard, FSDPParamGroup, c10d)))


def texts() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in (ROOT / "meshplan").rglob("*.py")}


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(text) for path, text in texts().items()}


@pytest.fixture(scope="module")
def own(trees: dict[Path, ast.Module]) -> set[str]:
    # The actions of a parser are argparse's.
    return {"_actions", *OF_GROUPS}.union(*(defined_in(tree) for tree in trees.values()))


def test_no_other_module_reads_a_private_name(trees: dict[Path, ast.Module], own: set[str]) -> None:
    outside = {path: tree for path, tree in trees.items() if ROOM not in path.parents}
    assert len(outside) > 200
    for path, tree in outside.items():
        # The linter has no objects of torch, and names of files that it reads.
        theirs = set() if "lint" in path.parts else THEIRS
        assert find_reads(tree, own, theirs, LIBRARIES) == [], path


HEAD = """
import sys
import threading
from collections import namedtuple
from typing import Any
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard
from meshplan.dtensor._partial import PlannedPartial

class Own:
    _grid: int = 0

    def read(self, other: "Own", mesh: DeviceMesh, x: Any) -> Any:
        made = Own()
"""


@pytest.mark.parametrize(
    "line",
    [
        "from torch._guards import TracingContext",
        "from torch.distributed import _functional_collectives as funcol",
        "from torch.distributed.tensor.placement_types import _MaskPartial",
        "import torch._dynamo",
        "import torch.utils._pytree as tree",
        "torch.ops._c10d_functional.wait_tensor(x)",
        "torch._C._get_tracing_state()",
        "dist._functional_collectives",
        "c10d._world.pg_map",
        "c10d._get_default_store()",
        "mesh._layout",
        "mesh._get_all_submeshes('a')",
        "x._spec",
        "x.y._local_tensor",
        "x()._flatten_mapping",
        "x[0]._comm_type_key()",
        "self._rank_map",
        "self.mesh._layout",
        "made.mesh._layout",
        "other._spec",
        "PlannedPartial._local_tensor",
        "x._unsafe_view = None",
        "del x._spec",
        "getattr(mesh, '_layout')",
        "getattr(mesh, '_layout', None)",
        "hasattr(x, '_fsdp_param_group')",
        "setattr(x, '_all_reduce_hook', None)",
        "object.__setattr__(x, '_spec', None)",
        "vars(x)['_spec']",
        "x.__dict__['_spec']",
        "names = ('_reduce_scatter_comm', '_all_reduce_hook')",
        "name = '_coalescing_manager'",
        "name = 'torch.distributed._local_tensor'",
        "name = f'{x}._fsdp_param_group'",
        "name = 'DeviceMesh._flatten_mapping'",
        "__import__('torch.testing._internal')",
        "sys.modules.get('torch._dynamo.guards')",
        "raise ValueError('set torch._dynamo.config.verbose')",
        "class Mine(Shard):\n            def _to_replicate_tensor(self): ...",
        "class Mine(PlannedPartial):\n            _reduce_value = None",
    ],
)
def test_private_name_of_torch_is_found(line: str, own: set[str]) -> None:
    tree = ast.parse(f"{HEAD}        {line}\n")
    assert find_reads(tree, own, THEIRS)


def test_each_name_has_one_entry() -> None:
    found = Counter(str(entry) for names in (NAMES, TESTING_NAMES) for entry in names.values())
    assert [name for name, count in found.items() if count > 1] == []
    assert len(ALL) == len(found)


def test_each_name_is_used_or_has_parts_that_are(trees: dict[Path, ast.Module]) -> None:
    imported = {
        name.rpartition(".")[2]
        for tree in trees.values()
        for name in imports_of(tree).values()
        if name.startswith("meshplan._torch.")
    }
    whole = "".join(texts().values())
    by_check = {name for name in ALL if f'NAMES["{name}"]' in whole}
    unused = set(ALL) - imported - by_check
    assert [name for name in unused if not (ALL[name].parts or ALL[name].stores)] == []


def test_each_name_has_a_type() -> None:
    """That of the same name in torch, where torch has types for it."""
    tree = ast.parse((ROOM / "__init__.py").read_text(encoding="utf-8"))
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    block = ast.Module(typed.body, [])
    imported = imports_of(block)
    for name, origin in imported.items():
        if name in ALL and ALL[name].path:
            assert origin.rpartition(".")[2] == ALL[name].path, name
    annotated = {node.target.id for node in typed.body if isinstance(node, ast.AnnAssign)}
    of_types = {one for one in imported if one not in ALL}
    assert of_types == {
        "Callable",
        "Mapping",
        "Sequence",
        "timedelta",
        "Tensor",
        "device",
        "DeviceMesh",
        "DTensor",
    }
    checked_only = {name for name in ALL if ALL[name].parts or ALL[name].stores}
    assert annotated <= set(ALL)
    assert set(ALL) - annotated - set(imported) <= checked_only


def test_nothing_has_moved_in_this_torch() -> None:
    assert list(find_moved(ALL)) == []
    check_seam()


def break_entry(entry: Entry) -> Entry:
    if entry.source:
        return replace(entry, source=r"^this is in no file of torch's$")
    if not entry.path:
        return replace(entry, module=f"{entry.module}_gone")
    return replace(entry, path=f"{entry.path}_gone")


@pytest.mark.parametrize("name", ALL)
def test_missing_name_is_reported(name: str) -> None:
    entry = break_entry(ALL[name])
    found = list(find_moved({name: entry}))
    if entry.optional:
        assert found == []
    else:
        assert found
        assert all(one.startswith(f"{entry}") and one.endswith(": not found") for one in found)


@pytest.mark.parametrize(
    "part", sorted(f"{n} {p}" for n, e in ALL.items() for p in e.parts + e.stores)
)
def test_missing_part_is_reported(part: str) -> None:
    name, part = part.split()
    entry = ALL[name]
    parts = tuple(f"{one}_gone" if one == part else one for one in entry.parts)
    stored = tuple(f"{one}_gone" if one == part else one for one in entry.stores)
    changed = replace(entry, parts=parts, stores=stored)
    assert list(find_moved({name: changed})) == [f"{entry}.{part}_gone ({entry.use}): not found"]


@pytest.mark.parametrize("name", [name for name, entry in ALL.items() if entry.parameters])
def test_changed_signature_is_reported(name: str) -> None:
    entry = ALL[name]
    changed = replace(entry, parameters=("another", *entry.parameters[1:]))
    (found,) = find_moved({name: changed})
    assert f"instead of another, {', '.join(entry.parameters[1:])}" in found


def test_install_checks_the_table() -> None:
    name = next(reversed(NAMES))
    with (
        mock.patch.dict(NAMES, {name: break_entry(NAMES[name])}),
        pytest.raises(UnsupportedTorchError, match="not found"),
    ):
        check_seam()


def test_torch_is_imported_with_the_first_name() -> None:
    line = "import sys, meshplan._torch as room; print('torch' in sys.modules);"
    line += "print(room.SEAM, 'torch' in sys.modules);"
    line += "from meshplan._torch import Store; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", NAMES["SEAM"].name, "False", "False"]


def test_a_name_is_looked_up_once() -> None:
    found = room.AsyncCollectiveTensor
    with mock.patch.object(Entry, "given", side_effect=AssertionError):
        assert room.AsyncCollectiveTensor is found
    assert not is_private("__version__")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        room.nothing  # noqa: B018


class TestMessages(TestCase):
    maxDiff = None

    def test_use_of_a_missing_name_is_an_error(self) -> None:
        for use in (
            lambda absent: absent(),
            lambda absent: absent.attribute,
            lambda absent: isinstance(1, absent),
        ):
            with pytest.raises(UnsupportedTorchError) as caught:
                use(break_entry(NAMES["LocalTensor"]).given())
        self.assertExpectedInline(
            str(caught.value).replace(torch.__version__, "VERSION"),
            """MP602: torch VERSION does not have torch.distributed._local_tensor.LocalTensor_gone; install torch 2.11 to 2.15, which meshplan is tested with""",
        )

    def test_call_of_a_missing_name_is_an_error(self) -> None:
        store = break_entry(NAMES["default_store"]).given()
        with pytest.raises(UnsupportedTorchError) as caught:
            store()
        self.assertExpectedInline(
            str(caught.value).replace(torch.__version__, "VERSION"),
            """MP602: torch VERSION does not have torch.distributed.distributed_c10d._get_default_store_gone; install torch 2.11 to 2.15, which meshplan is tested with""",
        )
