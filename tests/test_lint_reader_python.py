"""Python files that make device meshes."""

from __future__ import annotations

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import LayoutError
from meshplan.layout import Layout
from meshplan.lint._read_jobs import RankOptions, read_jobs
from tests.lint_inputs import changed_lines, damaged_texts, format_jobs, refusal

TRAIN = '''\
"""Calls init_device_mesh("cuda", (1, 2)) below."""
import os

import torch
import torch.distributed.device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh as make_mesh

DDP = 2 * 4
FSDP, TP = 5, 1
NAMES = ("ddp", "fsdp", "tp")
WORLD = int(os.environ["WORLD_SIZE"])


def main(args, rows=8):
    mesh = make_mesh("cuda", (DDP, FSDP, TP), mesh_dim_names=NAMES)  # the jagged one
    mesh["ddp", "fsdp"]._flatten("dp")
    torch.distributed.device_mesh.init_device_mesh(
        device_type="cuda",
        mesh_dim_names=["dp", "tp"],
        mesh_shape=[torch.distributed.get_world_size() // 8, 8],
    )
    make_mesh("cuda", (args.dp, 8))
    make_mesh("cuda", (rows,))
    make_mesh("cuda", (WORLD,))
    DeviceMesh("cuda", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
    DeviceMesh("cuda", torch.arange(40).view(8, 5), mesh_dim_names=("dp", "tp"))
    DeviceMesh("cuda", mesh=list(range(8)))
    DeviceMesh("cuda", torch.tensor([0, 1]))
    grid = torch.arange(6).reshape((2, 3))
    DeviceMesh("cuda", grid)
'''
TITAN = """\
from torchtitan.config import ParallelismConfig

def llama3_8b():
    return ParallelismConfig(
        data_parallel_shard_degree=8,
        tensor_parallel_degree=2,
    )

def small():
    ParallelismConfig()
    return ParallelDims(dp_replicate=2, dp_shard=-1, cp=1, tp=1, pp=1, ep=1, world_size=8)
"""
HSDP = """\
mesh = init_device_mesh("cuda", (4, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
data = mesh["replicate", "shard"]
data._flatten(mesh_dim_name="data")
SequenceParallel()
fully_shard(model, mesh=data)
"""


class TestPython(TestCase):
    def test_meshes_of_a_file_are_read(self) -> None:
        found = "".join(
            format_jobs(read_jobs("train.py", text, RankOptions(40)))
            for text in (TRAIN, TITAN, HSDP)
        )
        self.assertExpectedInline(
            found,
            """\
train.py:15 (ddp=8, fsdp=5, tp=1) replicate shard model: dtensor, flattened ddp+fsdp
train.py:17 (dp=5, tp=8) replicate model: dtensor
train.py:24 (axis0=40) unknown: dtensor
train.py:25 (dp=2, tp=2; ranks 0, 2, 1, 3) replicate model: dtensor
train.py:26 (dp=8, tp=5) replicate model: dtensor
train.py:27 (axis0=8) unknown: dtensor
train.py:28 (axis0=2) unknown: dtensor
train.py:30 (axis0=2, axis1=3) unknown unknown: dtensor
train.py:22: not judged: args.dp is not a constant; use --run, or give the mesh with --mesh
train.py:4 (dp_shard=8, tp=2) shard model: fsdp2, sequence parallel
train.py:11 (pp=1, dp_replicate=2, dp_shard=20, cp=1, tp=1) apart replicate shard shard model: fsdp2
train.py:1 (replicate=4, shard=2, tp=2) replicate shard model: fsdp2, flattened replicate+shard, sequence parallel
""",
        )

    def test_rewrite_changes_only_the_mesh(self) -> None:
        jobs = read_jobs("train.py", TRAIN, RankOptions(40)).jobs
        titan = read_jobs("conf.py", TITAN, RankOptions(40)).jobs
        (hsdp,) = read_jobs("hsdp.py", HSDP).jobs
        found = (
            changed_lines(TRAIN, jobs[0], ddp=5, fsdp=8, tp=1),
            changed_lines(TRAIN, jobs[0], fsdp=5, ddp=8, tp=1),
            changed_lines(TRAIN, jobs[0], ddp=8, tp=1, fsdp=5),
            changed_lines(TRAIN, jobs[1], tp=8, dp=5),
            changed_lines(TRAIN, jobs[3], tp=2, dp=2),
            changed_lines(TRAIN, jobs[4], tp=5, dp=10),
            changed_lines(TRAIN, jobs[5], axis0=16),
            changed_lines(TITAN, titan[0], dp_shard=4, cp=2, tp=2),
            changed_lines(TITAN, titan[1], dp_replicate=4, dp_shard=5),
            changed_lines(HSDP, hsdp, shard=2, replicate=4, tp=2),
            changed_lines(HSDP, hsdp, replicate=2, shard=4, tp=2),
        )
        self.assertExpectedInline(
            "--\n".join(found),
            """\
-DDP = 2 * 4
-FSDP, TP = 5, 1
+DDP = 5
+FSDP, TP = 8, 1
--
cannot be written
--
-NAMES = ("ddp", "fsdp", "tp")
+NAMES = ("ddp", "tp", "fsdp")
-    mesh = make_mesh("cuda", (DDP, FSDP, TP), mesh_dim_names=NAMES)  # the jagged one
+    mesh = make_mesh("cuda", (DDP, TP, FSDP), mesh_dim_names=NAMES)  # the jagged one
--
-        mesh_dim_names=["dp", "tp"],
-        mesh_shape=[torch.distributed.get_world_size() // 8, 8],
+        mesh_dim_names=["tp", "dp"],
+        mesh_shape=[8, torch.distributed.get_world_size() // 8],
--
-    DeviceMesh("cuda", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
+    DeviceMesh("cuda", [[0, 1], [2, 3]], mesh_dim_names=("tp", "dp"))
--
-    DeviceMesh("cuda", torch.arange(40).view(8, 5), mesh_dim_names=("dp", "tp"))
+    DeviceMesh("cuda", torch.arange(50).view(5, 10), mesh_dim_names=("tp", "dp"))
--
-    DeviceMesh("cuda", mesh=list(range(8)))
+    DeviceMesh("cuda", mesh=list(range(16)))
--
-        data_parallel_shard_degree=8,
-        tensor_parallel_degree=2,
+        data_parallel_shard_degree=4,
+        tensor_parallel_degree=2, context_parallel_degree=2,
--
cannot be written
--
cannot be written
--
-mesh = init_device_mesh("cuda", (4, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
+mesh = init_device_mesh("cuda", (2, 4, 2), mesh_dim_names=("replicate", "shard", "tp"))
""",
        )

    def test_invalid_mesh_is_refused_with_file_and_line(self) -> None:
        texts = (
            'x = 1\ninit_device_mesh("cuda", (0, 8))\n',
            'init_device_mesh("cuda", (8, 5), mesh_dim_names=("a",))\n',
            'init_device_mesh("cuda", (8, 5), mesh_dim_names=("a", "a"))\n',
            'init_device_mesh("cuda", ())\n',
            'init_device_mesh("cuda", (5000, 5000))\n',
            'DeviceMesh("cuda", [[0, 1], [2]])\n',
            'DeviceMesh("cuda", [[0, 1], [1, 2]])\n',
            'DeviceMesh("cuda", torch.arange(8).view(3, 3))\n',
            "ParallelDims(tp=0)\n",
            'init_device_mesh("cuda", (8,\n',
            "init_device_mesh\x00\n",
            "init_device_mesh(" + "-" * 9000 + "1)\n",
            "init_device_mesh(" + "1 + " * 9000 + "1)\n",
        )
        found = "".join(f"{refusal('train.py', text)}\n" for text in texts)
        self.assertExpectedInline(
            found,
            """\
MP111: train.py:2: a mesh needs axes of size 1 or more, got sizes [0, 8]; pass for example Layout.of(ddp=8, fsdp=5)
MP111: train.py:1: axis names must be unique and one for each of the 2 axes, got ['a']; pass one name per axis, or names=None
MP111: train.py:1: axis names must be unique and one for each of the 2 axes, got ['a', 'a']; pass one name per axis, or names=None
MP111: train.py:1: a mesh needs axes of size 1 or more, got sizes []; pass for example Layout.of(ddp=8, fsdp=5)
MP111: train.py:1: a mesh has at most 4194304 ranks, got axes of 5000 x 5000; is a size wrong?
MP111: train.py:1: lists of ranks on one level must have one length, got lengths 1, 2; use, for example, [[0, 2], [1, 3]]
MP111: train.py:1: a mesh of 4 coordinates needs 4 different ranks from 0 up, got 4: 0, 1, 1, 2; pass the global rank at each coordinate, row-major
MP111: train.py:1: 8 ranks do not fill the shape 3 x 3; use arange(9)
MP111: train.py:1: tp must be 1 or more, got 0
MP111: train.py:1: cannot be parsed as Python ('(' was never closed); is the file complete?
MP111: train.py: cannot be parsed as Python (source code string cannot contain null bytes); is the file complete?
MP111: train.py: cannot be parsed as Python: nested too deeply
MP111: train.py: cannot be parsed as Python: nested too deeply
""",
        )

    def test_name_without_single_value_is_skipped(self) -> None:
        texts = (
            "n = 1\nn = 2\ninit_device_mesh('cuda', (n, 2))\n",
            "n = 2\nn += 1\ninit_device_mesh('cuda', (n, 2))\n",
            "for n in (1, 2): init_device_mesh('cuda', (n, 2))\n",
            "def f(n): init_device_mesh('cuda', (n, 2))\n",
            "n = m\nm = n\ninit_device_mesh('cuda', (n, 2))\n",
            "class A:\n  n = 2\n  def f(self): init_device_mesh('cuda', (n, 2))\n",
            "n = 2\ndef f():\n  global n\n  n = 3\ninit_device_mesh('cuda', (n, 2))\n",
            "init_device_mesh('cuda', shape)\n",
            "init_device_mesh('cuda', (8, 1 // 0))\n",
            "init_device_mesh('cuda', (8, 2 ** 2 ** 2 ** 100))\n",
            "init_device_mesh('cuda', (8,), mesh_dim_names=names)\n",
            "init_device_mesh('cuda', (8,), mesh_dim_names=(f'a{1}',))\n",
            "init_device_mesh(*arguments)\n",
            "DeviceMesh('cuda', ranks)\n",
            "DeviceMesh('cuda', torch.arange(8).view(2, -1))\n",
            "DeviceMesh('cuda', [[0, n]])\n",
            "init_device_mesh('cuda', (dist.get_world_size() // 8, 8))\n",
            "ParallelismConfig(tensor_parallel_degree=n)\n",
        )
        found = "".join(format_jobs(read_jobs("train.py", text)) for text in texts)
        self.assertExpectedInline(
            found,
            """\
train.py:3 (axis0=2, axis1=2) unknown unknown: dtensor
train.py:3 (axis0=3, axis1=2) unknown unknown: dtensor
train.py:1: not judged: n is not a constant; use --run, or give the mesh with --mesh
train.py:1: not judged: n is not a constant; use --run, or give the mesh with --mesh
train.py:3: not judged: n is not a constant; use --run, or give the mesh with --mesh
train.py:3: not judged: n is not a constant; use --run, or give the mesh with --mesh
train.py:5: not judged: n is not a constant; use --run, or give the mesh with --mesh
train.py:1: not judged: the shape shape is not a constant; use --run, or give the mesh with --mesh
train.py:1: not judged: 1 // 0 is not a constant; use --run, or give the mesh with --mesh
train.py:1: not judged: 2 ** 2 ** 2 ** 100 is not a constant; use --run, or give the mesh with --mesh
train.py:1: not judged: mesh_dim_names=names is not a constant; use --run, or give the mesh with --mesh
train.py:1: not judged: f'a{1}' in mesh_dim_names is not a constant; give it with --mesh
train.py:1: not judged: init_device_mesh is called without its second argument here; use --run, or give the mesh with --mesh
train.py:1: not judged: the ranks ranks are not constants; use --run, or give the mesh with --mesh
train.py:1 (axis0=2, axis1=4) unknown unknown: dtensor
train.py:1: not judged: the ranks [[0, n]] are not constants; use --run, or give the mesh with --mesh
train.py:1: not judged: dist.get_world_size() // 8 is not a constant; pass --world-size, use --run, or give the mesh with --mesh
train.py:1: not judged: tensor_parallel_degree=n is not a constant; use --run, or give the mesh with --mesh
""",
        )


_SHAPE = "shape = [5, 8]\n"
_MESH = "init_device_mesh('cuda', shape)\n"
_RANKS = "ranks = [[0, 1], [2, 3]]\n"
_GRID = "DeviceMesh('cuda', ranks)\n"


@pytest.mark.parametrize(
    "text",
    [
        _SHAPE + "shape.reverse()\n" + _MESH,
        _SHAPE + "shape[1] = 5\n" + _MESH,
        _SHAPE + "shape += [2]\n" + _MESH,
        _SHAPE + "for shape[0] in (1, 2): pass\n" + _MESH,
        _SHAPE + "self.shape = shape\n" + _MESH,
        _SHAPE + "other = shape\nother.reverse()\n" + _MESH,
        _SHAPE + "def print(x): x.reverse()\nprint(shape)\n" + _MESH,
        "a, shape = 1, [5, 8]\nshape.reverse()\n" + _MESH,
        "dims = []\nfor d in (5, 8):\n  dims.append(d)\ninit_device_mesh('cuda', dims)\n",
        _RANKS + "ranks.reverse()\n" + _GRID,
        _RANKS + "ranks[0].reverse()\n" + _GRID,
        _RANKS + "for row in ranks: row.reverse()\n" + _GRID,
        _RANKS + "first, second = ranks\nfirst.reverse()\n" + _GRID,
        _RANKS + "list(ranks)[0].reverse()\n" + _GRID,
        "ranks = ([0, 1], [2, 3])\nranks[0].reverse()\n" + _GRID,
        "ranks = torch.arange(8)\nranks[0] = 8\n" + _GRID,
        "ranks = torch.arange(8)\ngrid = ranks.view(2, 4)\ngrid.t_()\n" + _GRID,
        "ranks = torch.arange(8)\nranks.view(2, 4)[0, 0] = 8\n" + _GRID,
        _SHAPE + "def g():\n  " + _MESH + "def f():\n  shape.reverse()\n",
        _SHAPE + "other = [shape]\nother[0].reverse()\n" + _MESH,
        "n = 5\ndef f():\n  init_device_mesh('cuda', (n, 8))\nn = 8\n",
        "class A:\n  def __init__(self):\n    self.n = 5\n"
        "  def f(self):\n    init_device_mesh('cuda', (self.n, 8))\n"
        "  def g(self):\n    self.n = 8\n",
        "X = 5\nexec(open('cfg.py').read())\ninit_device_mesh('cuda', (X, 8))\n",
        "@click.command()\ndef f(n=5):\n  init_device_mesh('cuda', (n, 8))\nf()\n",
        "class A:\n  n = 5\na = A()\nsetattr(a, k, v)\ninit_device_mesh('cuda', (a.n, 8))\n",
        "class A(Tap):\n  n = 5\na = A()\na.parse_args()\ninit_device_mesh('cuda', (a.n, 8))\n",
        "class A:\n  n = 5\na = A()\nload_yaml(a)\ninit_device_mesh('cuda', (a.n, 8))\n",
        "class A:\n  n = 5\nsetattr(A, k, v)\ninit_device_mesh('cuda', (A.n, 8))\n",
        "class A:\n  n = 5\na = A()\na.__dict__.update(x)\ninit_device_mesh('cuda', (a.n, 8))\n",
        "class A:\n  n = 5\nA.n = int(sys.argv[1])\ninit_device_mesh('cuda', (A.n, 8))\n",
        "n = 5\ntry:\n  n = int(x)\nexcept ValueError:\n  pass\ninit_device_mesh('cuda', (n, 8))\n",
        "class A(BaseSettings):\n  n: int = 5\ninit_device_mesh('cuda', (A(n=8).n, 8))\n",
        "for i in x:\n  n = 5\n  if i: break\n  n = 8\ninit_device_mesh('cuda', (n, 8))\n",
        "n = 8\ntry:\n  n = 5\n  f()\n  n = 8\nexcept E: pass\ninit_device_mesh('cuda', (n, 8))\n",
        "cfg.n = 5\nload(cfg)\ninit_device_mesh('cuda', (cfg.n, 8))\n",
        "X = 5\nfrom cfg import *\ninit_device_mesh('cuda', (X, 8))\n",
    ],
)
def test_value_changed_in_place_is_skipped(text: str) -> None:
    found = read_jobs("train.py", text)
    assert found.jobs == ()
    assert len(found.skipped) == 1


@pytest.mark.parametrize(
    "text",
    [
        _SHAPE + _MESH + "shape.append(2)\n",
        _SHAPE + "both = [shape]\n" + _MESH,
        _SHAPE + "def f():\n  shape.reverse()\n" + _MESH,
        _SHAPE + "def f():\n  return shape\n" + _MESH,
        _SHAPE + "print(shape, shape[0], len(shape), f'{shape}')\n" + _MESH,
        _SHAPE + "for i, n in enumerate(shape): print(i, n)\n" + _MESH,
        _SHAPE + "assert 8 in shape and math.prod(shape) == world\n" + _MESH,
        _SHAPE + "copy = list(shape)\ncopy.reverse()\n" + _MESH,
        _SHAPE + "f(*shape)\nn = [x * 2 for x in shape] + shape\n" + _MESH,
        _SHAPE + "def f(shape):\n  shape.reverse()\n" + _MESH,
        _SHAPE + _MESH.replace("shape", "tuple(shape)"),
        _SHAPE.replace("[5, 8]", "(5, 8)") + "f(shape)\nself.shape = shape\n" + _MESH,
        "n = 5\nf(n)\nm = [n]\nm.pop()\nshape = (n, 8)\n" + _MESH,
        "def f():\n  n = 5\n  init_device_mesh('cuda', (n, 8))\nfrom cfg import *\n",
        _RANKS + "print(ranks[0], len(ranks[1]))\ndist.new_group(ranks[0])\n" + _GRID,
        "ranks = torch.arange(8)\ngrid = ranks.view(2, 4)\nprint(grid.shape)\n" + _GRID,
        "ranks = list(range(8))\nfor rank in ranks: print(rank)\n" + _GRID,
    ],
)
def test_value_that_is_only_read_is_a_constant(text: str) -> None:
    assert len(read_jobs("train.py", text).jobs) == 1


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("before", ["", "\ufeff"])
def test_rewrite_counts_characters_not_bytes(before: str, end: str) -> None:
    text = (
        before
        + 'a = "\u00e9\u00e9"; m = init_device_mesh("\u00e9", (8, 5))  # \u00fc'
        + end
        + "b = 1"
        + end
    )
    (job,) = read_jobs("train.py", text).jobs
    assert job.rewrite is not None
    assert job.rewrite(Layout((5, 8))) == text.replace("(8, 5)", "(5, 8)")


def test_axes_without_names_are_not_reordered() -> None:
    (job,) = read_jobs("train.py", 'init_device_mesh("cuda", (8, 5))\n').jobs
    assert job.layout == Layout((8, 5))
    assert job.rewrite is not None
    assert job.rewrite(Layout.of(axis1=5, axis0=8)) is None


def test_file_is_not_executed(capsys: pytest.CaptureFixture[str]) -> None:
    text = "print('run')\nraise SystemExit(3)\ninit_device_mesh('cuda', (2,))\n"
    assert len(read_jobs("train.py", text).jobs) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("init_device_mesh('cuda', (get_world_size(),), mesh_dim_names=('dp',))", 0),
        ("init_device_mesh('cuda', (config.ranks,))", 0),
        ("DeviceMesh('cuda', list(range(config.ranks)))", 0),
        ("DeviceMesh('cuda', torch.arange(config.ranks))", 0),
        ("DeviceMesh('cuda', config.ranks)", 1),
        ("init_device_mesh('cuda', (*config.shape,))", 1),
        ("init_device_mesh('cuda', (config.ranks, 1))", 1),
        ("m = init_device_mesh('cuda', (n,))\nm._unflatten(0, (2, n // 2), ('a', 'b'))", 1),
    ],
)
def test_one_axis_of_any_size_is_not_skipped(text: str, count: int) -> None:
    found = read_jobs("train.py", text)
    assert (len(found.jobs), len(found.skipped), len(found.one_axis)) == (0, count, 1 - count)


@given(damaged_texts(TRAIN + TITAN + HSDP) | st.text(max_size=200))
def test_damaged_file_raises_one_line(text: str) -> None:
    refusal("train.py", text)
    refusal("train.py", 'init_device_mesh("cuda", (2, 2))\n' + text)


@given(st.lists(st.sampled_from(["(", ")", "[", "]", ",", "8", "n", "'a'", "=", "*", "\n", "init_device_mesh", "DeviceMesh", ".view", "_flatten", "mesh", "-"]), max_size=30))  # fmt: skip
def test_any_tokens_raise_one_line(tokens: list[str]) -> None:
    refusal("train.py", "init_device_mesh('cuda', (2, 2))\n" + "".join(tokens))


_FIELDS = "@dataclass\nclass C:\n    a: int = 4\n    b: int = 6\n"
_USE = "init_device_mesh('cuda', (c.a, c.b))\n"
_METHOD = "    def f(self):\n        init_device_mesh('cuda', (self.a, self.b))\n"
_MAKE = "def make(shape):\n    return init_device_mesh('cuda', shape)\n"


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (_FIELDS + "c = C()\n" + _USE, [(4, 6)]),
        (_FIELDS + "c = C(b=8)\n" + _USE, [(4, 8)]),
        (_FIELDS + "c = C(2, 8)\n" + _USE, [(2, 8)]),
        (
            _FIELDS + "    def __post_init__(self): self.b = 32 // self.a\nc = C(2)\n" + _USE,
            [(2, 16)],
        ),
        (
            "try:\n  from a import init_device_mesh as make\nexcept ImportError:\n"
            "  from b import init_device_mesh as make\nmake('cuda', (4, 6))\n",
            [(4, 6)],
        ),
        (_FIELDS + "c = dataclasses.replace(C(2), b=8)\n" + _USE, [(2, 8)]),
        (_FIELDS + "c = C(**given)\n" + _USE, []),
        (_FIELDS + "c = C()\nc.a = 8\n" + _USE, [(8, 6)]),
        (_FIELDS + "def f(c: C):\n    " + _USE, []),
        (_FIELDS + "def f(c: C):\n    " + _USE + "f(C(a=2))\nf(C(b=2))\n", [(2, 6), (4, 2)]),
        (_FIELDS + _METHOD + "C(a=2).f()\n", [(2, 6)]),
        (_FIELDS + _METHOD, []),
        (_FIELDS + _METHOD + "C(a=2).f()\nC(a=3).f()\n", [(2, 6), (3, 6)]),
        (_FIELDS.replace("@dataclass\n", "") + _METHOD, [(4, 6)]),
        (_FIELDS.replace("@dataclass\n", "") + _USE.replace("c.", "C."), [(4, 6)]),
        (_FIELDS + "class D(C):\n    d: int = 1\nc = D(2)\n" + _USE, []),
        (
            "n = 2\ndef f():\n  n = 4\n  init_device_mesh('cuda', (n,))\n"
            "class A:\n  n = 8\n  init_device_mesh('cuda', (n,))\n"
            "  def f(self): init_device_mesh('cuda', (n,))\n",
            [(4,), (8,), (2,)],
        ),
        ("c = SimpleNamespace(a=4, b=6)\n" + _USE, [(4, 6)]),
        ("c = SimpleNamespace(a=4, b=6)\nc.b += 1\n" + _USE, [(4, 7)]),
        ("c = {'a': 4, 'b': 6}\n" + _USE.replace("c.a, c.b", "c['a'], c['b']"), [(4, 6)]),
        (
            "c = {'a': 4, 'b': 6}\nc['a'] = 5\n" + _USE.replace("c.a, c.b", "c['a'], c['b']"),
            [(5, 6)],
        ),
        ("c = {'a': 4}\nc.update(a=5)\n" + _USE.replace("c.a, c.b", "c['a'], 6"), []),
        (_MAKE + "make((4, 6))\n", [(4, 6)]),
        (_MAKE + "make((4, 6))\nmake((2, 2))\n", [(4, 6), (2, 2)]),
        (_MAKE + "make((4, 6))\nmake((4, 6))\n", [(4, 6)]),
        (_MAKE + "make(shape=[4] + [6])\n", [(4, 6)]),
        (_MAKE + "sizes = [4, 6]\nmake(sizes)\n", [(4, 6)]),
        (_MAKE + "sizes = [4, 6]\nmake(sizes)\nsizes.append(1)\n", [(4, 6)]),
        (_MAKE + "make(*given)\n", []),
        ("def make(shape):\n    shape.reverse()\n    " + _MESH + "make([4, 6])\n", []),
        ("def make(shape):\n    shape = shape or 1\n    " + _MESH + "make((4, 6))\n", []),
        ("def make(shape=(4, 6)):\n    " + _MESH, []),
        ("def make(shape=(4, 6)):\n    " + _MESH + "make()\n", [(4, 6)]),
        ("def make(shape=(4, 6)):\n    " + _MESH + "make(**given)\n", []),
        ("def make(shape):\n    make(shape)\n    " + _MESH + "make((4, 6))\n", [(4, 6)]),
        ("def two():\n    return 4, 6\na, b = two()\ninit_device_mesh('cuda', (a, b))\n", [(4, 6)]),
        (
            "def n():\n    if x:\n        return 4\n    return 6\ninit_device_mesh('cuda', (n(), 2))\n",
            [],
        ),
    ],
)
def test_constants_are_followed_through_objects_and_calls(
    text: str, sizes: list[tuple[int, ...]]
) -> None:
    found = read_jobs("train.py", text)
    assert [job.layout.sizes for job in found.jobs] == sizes
    assert bool(found.skipped) == (not sizes)


INSTALLED = """\
import meshplan
from meshplan import Contract as Rule
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

ORDER = "exact"

def main():
    meshplan.install(contract=Rule(ORDER), strict=True)
    mesh = init_device_mesh("cuda", (8, 5), mesh_dim_names=("ddp", "fsdp"))
    DTensor.from_local(part, mesh, [Partial()] * 2).redistribute(placements=[Replicate()] * 2)
"""
BACKEND = """\
import torch.distributed as dist
from meshplan import BackendOptions, Contract
from torch.distributed.fsdp import fully_shard

options = BackendOptions(Contract(order="exact"), strict=True, inner="nccl")
dist.init_process_group("meshplan", pg_options=options)
mesh = dist.init_device_mesh("cuda", (8, 5), mesh_dim_names=("ddp", "fsdp"))
fully_shard(model, mesh=mesh)
"""


def is_exact(text: str) -> bool:
    (job,) = read_jobs("train.py", text).jobs
    return job.exact


def test_exact_contracts_are_read() -> None:
    assert is_exact(INSTALLED)
    assert is_exact(BACKEND)
    first = "meshplan.install(contract=Rule(order=ORDER), policy='deterministic', path='auto')\n"
    assert is_exact(
        _without(INSTALLED, "    meshplan.install").replace("def main", first + "def main")
    )
    assert is_exact(
        BACKEND.replace("pg_options=options", "timeout=week, **{'pg_options': options}")
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('ORDER = "exact"', 'ORDER = "tree"'),
        ('ORDER = "exact"', 'ORDER = "exact" if wide else "tree"'),
        ("import meshplan\n", "import meshplan, deepspeed\n"),
        ("contract=Rule(ORDER), ", ""),
        ("Rule(ORDER)", "Rule(*ORDER)"),
        ("strict=True", "**options"),
        ("strict=True", 'path="native"'),
        ("strict=True", "path=path"),
        ("strict=True", 'policy="consistent"'),
        ("strict=True", 'policy={"ddp": "fast"}'),
        ("    meshplan.install", "    if wide:\n        meshplan.install"),
        ("    meshplan.install", "    wide and meshplan.install"),
        ("    meshplan.install", "    for _ in steps: meshplan.install"),
        ("    mesh =", "    meshplan.uninstall()\n    mesh ="),
        ("    mesh =", "    meshplan.install()\n    mesh ="),
        ("    mesh =", "    undo = meshplan.uninstall\n    mesh ="),
        ("    mesh =", "    dist.all_reduce(loss)\n    mesh ="),
        ("    mesh =", "    with meshplan.installed():\n        train()\n    mesh ="),
        ("    DTensor.", "    fully_shard(model, mesh=mesh)\n    DTensor."),
        ("    DTensor.", "    train(model, dp_mesh=mesh)\n    DTensor."),
        ("    DTensor.from_local(part, mesh, ", "    train(part, "),
        ("    mesh =", "def other():\n    mesh ="),
        ("def main", "class Rule: ...\ndef main"),
        ("    meshplan.", "    meshplan = fake\n    meshplan."),
        ("    meshplan.install", "    self.install"),
    ],
)
def test_installed_contract_may_be_another(old: str, new: str) -> None:
    assert old in INSTALLED
    assert not is_exact(INSTALLED.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("strict=True", "strict=False"),
        ("strict=True, ", ""),
        ("strict=True", 'strict=True, policy="fast"'),
        ("strict=True", "strict=True, policy=policy"),
        ('"exact"', '"rank"'),
        ('"meshplan"', '"nccl"'),
        ('"meshplan"', "backend"),
        (", pg_options=options", ""),
        ("dist.init_process", "if wide: dist.init_process"),
        ("mesh = ", "options.strict = False\nmesh = "),
        ("mesh = ", 'dist.new_group(backend="nccl")\nmesh = '),
        ("mesh = ", "dist.init_process_group()\nmesh = "),
        ('("ddp", "fsdp")', '("ddp", "fsdp"), backend_override={0: "nccl"}'),
        ("import torch.distributed as dist", "import torch.distributed as dist, vllm"),
    ],
)
def test_options_of_the_backend_may_be_others(old: str, new: str) -> None:
    assert old in BACKEND
    assert not is_exact(BACKEND.replace(old, new, 1))


def _without(text: str, start: str) -> str:
    return "".join(line for line in text.splitlines(True) if not line.startswith(start))


def test_more_than_1024_mesh_calls_are_refused() -> None:
    """All calls count, though one axis of unknown size is no mesh to judge."""
    call = 'init_device_mesh("cuda", (n,))'
    assert read_jobs("train.py", "\n".join([call] * 1024)).jobs == ()
    with pytest.raises(LayoutError, match="more than 256 meshes in one file"):
        read_jobs("train.py", "\n".join([call] * 1025))


PROGRAM = """\
parser = argparse.ArgumentParser()
parser.add_argument("--dp", type=int, default=8)
parser.add_argument("--tp-size", "--tp", type=int, default=4)
args = parser.parse_args()
mesh = init_device_mesh("cuda", (args.dp, args.tp_size), mesh_dim_names=("dp", "tp"))
"""


@pytest.mark.parametrize(
    ("words", "mesh", "takes"),
    [
        ("", "(dp=8, tp=4)", False),
        ("--tp 5", "(dp=8, tp=5)", True),
        ("--tp-size=5 --dp 1", "(dp=1, tp=5)", True),
        ("--tp 2 --tp 5", "(dp=8, tp=5)", True),
        ("--tp 5 --steps 8", "(dp=8, tp=5)", False),
    ],
)
def test_arguments_of_a_program_replace_its_defaults(words: str, mesh: str, takes: bool) -> None:
    found = read_jobs("train.py", PROGRAM, RankOptions(arguments=tuple(words.split())))
    assert [str(job.layout) for job in found.jobs] == [mesh]
    assert found.takes_arguments is takes


def test_default_of_an_argument_is_rewritten() -> None:
    (job,) = read_jobs("train.py", PROGRAM).jobs
    assert changed_lines(PROGRAM, job, dp=8, tp=8) == (
        '-parser.add_argument("--tp-size", "--tp", type=int, default=4)\n'
        '+parser.add_argument("--tp-size", "--tp", type=int, default=8)\n'
    )
