"""No text takes the exponential or the quadratic time of its length to read.

Time is CPU time of the process. The bounds are far from the time that linear reading takes on a slow
machine, and further from what any other takes.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from importlib import import_module

import pytest

from meshplan.errors import MeshplanError
from meshplan.lint._read_jobs import MAX_CHARACTERS, read_jobs
from meshplan.lint._roles import find_role
from meshplan.topology._files import FORMATS
from tests.adversarial import fill, list_patterns, list_texts, stop_after

# A pattern may take the square of a length: each reader bounds the texts for it.
PATTERN_CHARACTERS, PATTERN_SECONDS = 600, 1.0
CHARACTERS, SECONDS = MAX_CHARACTERS // 2, 10.0
CLUSTER_CHARACTERS = 2 << 20

COMMAND = "torchrun --nproc-per-node 8 train.py --tensor-model-parallel-size 8\n"
MESH = (
    "from torch.distributed.device_mesh import init_device_mesh\n"
    "mesh = init_device_mesh('cuda', (4, 6), mesh_dim_names=('a', 'b'))\n"
)
DEGREES = "tensor_parallel_size: 8\n"
# Name of the file, beginning, repeated piece, end.
TEXTS = {
    "cases without an end": ("run.sh", COMMAND, "case x in\n", ""),
    "branches of one if": (
        "run.sh",
        COMMAND + "if [ $A -eq 1 ]; then\n",
        "elif [ $A ]; then\n",
        "fi\n",
    ),
    "alternatives of a case": (
        "run.sh",
        COMMAND + "A=8\ncase $A in\n",
        lambda i: f"*{i}|",
        "a)\nesac",
    ),
    "blanks in a case": ("run.sh", COMMAND + "A=8\ncase $A in\n", " ", "\nesac\n"),
    "a long condition": ("run.sh", COMMAND + "if [ ", "a==", " x y ]; then\nfi\n"),
    "options of one command": ("run.sh", COMMAND.strip(), lambda i: f" --a{i}=1", "\n"),
    "overrides of one command": ("run.sh", "python a.py", lambda i: f" a_parallel_{i}=1", "\n"),
    "assignments in one line": ("run.sh", COMMAND, lambda i: f" a_parallel_{i}=1", "\n"),
    "launchers' options": ("run.sh", "torchrun", " --nproc-per-node 8", " " + COMMAND),
    "part of a program's name": ("run.sh", COMMAND.strip() + " --a 1 ", "convert", "\n"),
    "variables of variables": ("run.sh", COMMAND, lambda i: f"A{i + 1}=$A{i}\n", "a --tp $A9\n"),
    "variables without an end": ("run.sh", COMMAND, "--a ${b:-", ""),
    "nested brackets in YAML": ("a.yaml", DEGREES + "a: ", "[", ""),
    "nested lists in YAML": ("a.yaml", DEGREES, "- ", ""),
    "keys of YAML": ("a.yaml", "", lambda i: f"a{i}:\n  tensor_parallel_size: 8\n", ""),
    "nested brackets in JSON": ("a.json", '{"tensor_parallel_size": ', "[", ""),
    "keys of JSON": ("a.json", '{"tp": 1', lambda i: f', "a{i}": {{"tp": 8}}', "}"),
    "nested brackets in TOML": ("a.toml", "tp = 8\na = ", "[", ""),
    "meshes in TOML": ("a.toml", "", '[[mesh]]\naxes = "ddp=8"\n', ""),
    "functions that call the next": (
        "a.py",
        MESH,
        lambda i: f"def f{i}(m):\n    f{i + 1}(m)\n",
        "f0(mesh)\n",
    ),
    "calls of one function": ("a.py", MESH + "def f(n):\n    return n\n", "f(mesh)\n", ""),
    "names of branches": ("a.py", MESH, lambda i: f"if a:\n    x{i} = {i}\n", ""),
    "names of loops": ("a.py", MESH, lambda i: f"for a{i} in b:\n    c{i} = 1\n", ""),
    "objects of many fields": (
        "a.py",
        MESH + "@dataclass\nclass C:\n" + "".join(f"    a{i}: int = 1\n" for i in range(3000)),
        "C()\n",
        "",
    ),
    "bases of bases": (
        "a.py",
        MESH + "class C0:\n    pass\n",
        lambda i: f"class C{i + 1}(C{i}, C{i}):\n    def f{i}(self):\n        pass\n",
        "",
    ),
    "lists of lists": ("a.py", MESH + "x = ()\n", "x = x, x\n", "load(x)\n"),
    "loops over a dict": (
        "a.py",
        MESH + "d = {" + ", ".join(f"'{i}': [{i}]" for i in range(6000)) + "}\n",
        "for k, v in d.items():\n    pass\n",
        "",
    ),
    "calls with a dict": (
        "a.py",
        "from vllm import LLM\nd = dict(" + "".join(f"a{i}=1, " for i in range(5000)) + ")\n",
        "LLM(m, **d)\n",
        "",
    ),
    "meshes in Python": ("a.py", "", MESH, ""),
    "nested parentheses in Python": ("a.py", MESH, "(", ""),
    "annotations in one line": ("a.py", "", "tp:", ""),
    "a long axis name": ("a.py", MESH.replace("'a'", "'a" + "1" * 100_000 + "_x'"), "#", ""),
}

MESHES = "".join(f"m{i}:\n  tensor_model_parallel_size: 8\n" for i in range(60))
OVERRIDES = " ".join(f"m{i}.tensor_model_parallel_size=8" for i in range(60))
# Interpolations and overrides of groups, which matter to each mesh of a file: of the longest text.
# Going over the settings again for each mesh, or over the text for each name, takes 6 s.
SETTINGS_SECONDS = 3.0
SETTINGS = {
    "interpolations in YAML": ("a.yaml", MESHES, lambda i: f"b{i}_size: ${{a.b}}\n"),
    "interpolations in a command": ("run.sh", f"a.py {OVERRIDES}", lambda i: f" a.b{i}=${{a.b}}"),
    "groups in a command": ("run.sh", f"a.py {OVERRIDES}", lambda i: f" g{i}@a.b=${{a.b}}"),
    "degrees that others name": (
        "a.yaml",
        "parallelism:\n  data_parallel_shard_degree: 4\n",
        lambda i: f"  a{i}_tp_size: 4\n  b{i}: ${{parallelism.a{i}_tp_size}}\n",
    ),
}


def test_no_pattern_takes_more_than_the_square_of_a_length() -> None:
    patterns = list_patterns()
    assert len(patterns) > 100

    def match(pattern: re.Pattern[str], text: str) -> None:
        pattern.fullmatch(text)
        pattern.findall(text)

    late = [
        f"{place}: {text[:20]!r}... {text[-3:]!r}"
        for pattern, place in patterns.items()
        for text in list_texts(pattern, PATTERN_CHARACTERS)
        if not stop_after(PATTERN_SECONDS, partial(match, pattern, text))
    ]
    assert late == []


@pytest.mark.parametrize("what", TEXTS)
def test_jobs_are_read_in_time(what: str) -> None:
    name, start, piece, end = TEXTS[what]
    text = start + fill(piece, CHARACTERS - len(start + end)) + end
    assert CHARACTERS - 200 < len(text) <= CHARACTERS
    assert stop_after(SECONDS, lambda: read_or_refuse(name, text))


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_are_read_once_for_all_meshes(what: str) -> None:
    name, start, piece = SETTINGS[what]
    text = start + fill(piece, MAX_CHARACTERS - len(start))
    assert stop_after(SETTINGS_SECONDS, lambda: read_or_refuse(name, text))


def read_or_refuse(name: str, text: str) -> None:
    with suppress(MeshplanError):
        read_jobs(name, text)


def test_sums_of_sums_are_bounded() -> None:
    sums = "".join(f"n{i + 1} = n{i} + n{i} + n{i}\n" for i in range(30))
    text = f"{MESH}n0 = (2,)\n{sums}init_device_mesh('cuda', n30)\n"
    assert stop_after(SECONDS, lambda: read_or_refuse("a.py", text))


def test_variables_are_followed_to_a_bounded_depth() -> None:
    text = "".join(f"A{i + 1}=$A{i}\n" for i in reversed(range(5000)))
    read_jobs("run.sh", f"{COMMAND}{text}train.py --tp $A5000\n")


def test_roles_of_long_names_are_unknown() -> None:
    assert find_role("replicate_parallel_group_1") == "replicate"
    assert find_role("fsdp" + "_axis" * 100) == "unknown"
    assert stop_after(SECONDS, lambda: find_role("x" + "1" * 1_000_000 + "x"))


@pytest.mark.full
@pytest.mark.parametrize("name", FORMATS)
def test_descriptions_of_clusters_are_read_in_time(name: str) -> None:
    module = import_module(f"meshplan.topology.formats.{name}")
    sample = import_module(f"tests.test_format_{name}").SAMPLES[0]
    lines = sample.split("\n")
    late = []
    for piece in (
        "[",
        "(",
        "{",
        "<a>",
        "- ",
        "\x1b[",
        "|-",
        "=",
        " \n",
        "\n",
        "\r",
        "GPU0 ",
        "NCCL INFO ",
        "a[0-9],",
        *filter(None, lines[:6]),
        lambda i: f"{lines[-2].replace('=', f'={i}', 1)}\n",
    ):
        text = "\n".join([*lines[: len(lines) // 2], fill(piece, CLUSTER_CHARACTERS)])

        def read(text: str = text) -> None:
            module.recognises(text)
            with suppress(MeshplanError):
                module.read(text)

        if not stop_after(SECONDS, read):
            late.append(piece)
    assert late == []
