from __future__ import annotations

import time

import pytest
import yaml
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import TopologyInputError
from meshplan.topology import Reading
from meshplan.topology.formats.slurm import (
    assign_nodes,
    expand_hosts,
    read,
    read_nodes,
    recognises,
)
from tests.refusals import refusal

CONF = """\
# two racks
BlockName=left Nodes=gpu[01-18] # and their hosts
blockname=right Nodes=gpu[19-35],\\
spare1

BlockSizes=18,36
"""
TREE = """\
SwitchName=leaf0 Nodes=n[0-2,7] LinkSpeed=9
SwitchName=leaf1 Nodes=m1 Vendor=x
SwitchName=top Switches=leaf[0-1]
"""
YAML = """\
---
- topology: racks   # the default
  cluster_default: true
  block:
    block_sizes:
      - 2
      - 4
    blocks:
      - block: a
        nodes: n[1-2]
      - block: "b"
        nodes: n[3-4]
- topology: net
  tree:
    switches:
      - switch: a
        nodes: n[1-4]
      - switch: top
        children: a
- topology: nothing
  flat: true
"""


def format_reading(found: Reading) -> str:
    return "".join(f"{one}\n" for one in (found.kind, *found.names, *found.notes))


class TestReadings(TestCase):
    def test_files_are_read(self) -> None:
        self.assertExpectedInline(
            "".join(format_reading(read(text)) for text in (CONF, TREE, YAML)),
            """\
Slurm topology/block
left
right
line 2: block left: 18 hosts
line 3: block right: 18 hosts
line 6: sizes of blocks: 18,36 hosts
Slurm topology/tree
leaf0
leaf1
top
line 1: switch leaf0: 4 hosts
line 2: vendor is not known and not read
line 2: switch leaf1: 1 host
line 3: switch top: 2 switches
Slurm topology.yaml
a
b
a
top
line 2: topology racks
line 5: sizes of blocks: 2,4 hosts
line 10: block a: 2 hosts
line 12: block b: 2 hosts
line 13: topology net
line 17: switch a: 4 hosts
line 19: switch top: 1 switch
line 20: topology nothing
""",
        )

    def test_output_of_scontrol_is_read(self) -> None:
        shown = """\
BlockName=b1 BlockIndex=0 Nodes=n[01-18] BlockSize=18
BlockName=b2 BlockIndex=1 Nodes=n[19-36] BlockSize=18
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[01-36] BlockSize=36
"""
        found = read(shown)
        assert found.blocks == (("b1", "n[01-18]"), ("b2", "n[19-36]"))
        self.assertExpectedInline(
            format_reading(found),
            """\
Slurm topology/block
b1
b2
line 1: block b1: 18 hosts
line 2: block b2: 18 hosts
""",
        )
        tree = "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[0-3]\nSwitchName=s1 Level=1 LinkSpeed=1 Nodes=n[0-3] Switches=s0\n"
        assert not [note for note in read(tree).notes if "not known" in note.message]


@pytest.mark.parametrize("text", [CONF, TREE, YAML])
def test_ambiguous_files_leave_placement_unknown(text: str) -> None:
    assert recognises(text)
    found = read(text)
    assert (found.domains, found.nodes) == (None, None)
    assert read(text.replace("\n", "\r\n")) == found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("tux[0-3,12],foo7", ["tux0", "tux1", "tux2", "tux3", "tux12", "foo7"]),
        ("n[08-10], m", ["n08", "n09", "n10", "m"]),
        ("n[8-010]", ["n8", "n9", "n10"]),
        ("r[1-2]n[3,5]-ib", ["r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib"]),
    ],
)
def test_hostlists_are_expanded(text: str, expected: list[str]) -> None:
    assert expand_hosts(text) == expected


@pytest.mark.parametrize(
    "text",
    ["a[1", "a]1", "a[[1]]", "a[b[1]]", "a[]", "a[1-]", "a[2-1]", "a[x]", "a[²]", "a,,b", "a b", ",", "a[1-3", "a[-1]",
     "a[0-1000000]", "a[0-999999],b", "a[0-999][0-9999]", "a" + "[0-99]" * 50, "a[0-" + "9" * 5000 + "]"],
)  # fmt: skip
def test_invalid_hostlists_are_refused(text: str) -> None:
    began = time.process_time()
    assert len(refusal(TopologyInputError, expand_hosts, text).splitlines()) == 1
    assert time.process_time() - began < 30


NAMES = st.tuples(st.sampled_from(["a", "gpu-", "r1n"]), st.integers(0, 2000), st.integers(1, 6))


@given(st.lists(NAMES, max_size=20), st.booleans())
def test_hostlist_round_trip(names: list[tuple[str, int, int]], joined: bool) -> None:
    plain = [f"{name}{number:0{width}}" for name, number, width in names]
    if joined:  # numbers of one name in one bracket
        text, position = [], 0
        while position < len(names):
            end = position
            while end < len(names) and names[end][0] == names[position][0]:
                end += 1
            numbers = ",".join(f"{number:0{width}}" for _, number, width in names[position:end])
            text.append(f"{names[position][0]}[{numbers}]")
            position = end
        assert expand_hosts(",".join(text)) == plain
    else:
        assert expand_hosts(",".join(plain)) == plain


@given(st.integers(0, 5000), st.integers(0, 300), st.integers(1, 6))
def test_consecutive_hosts_become_a_range(first: int, more: int, width: int) -> None:
    expected = [f"x{number:0{width}}" for number in range(first, first + more + 1)]
    assert expand_hosts(f"x[{first:0{width}}-{first + more}]") == expected


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("BlockName=a Nodes=n1\nnonsense\n", 2),
        ("BlockName=a Nodes=n1\nBlockName=a Nodes=n2\n", 2),
        ("BlockName=a Nodes=n[1\n", 1),
        ("# one\nBlockName= Nodes=n1\n", 2),
        ("BlockName=a Nodes=n[0-999999]\nBlockName=b Nodes=n[0-999999]\n", 2),
        ("- topology: a\n  nonsense: [\n", 3),
        ("- topology: a\n\tblock: a\n", 2),
        ("- topology: a\n  block: *x\n", 2),
        ("- topology: a\n  nodes: n[3-1]\n", 2),
        ("nothing", None),
    ],
)
def test_invalid_texts_are_refused(text: str, line: int | None) -> None:
    with pytest.raises(TopologyInputError) as error:
        read(text)
    assert error.value.line == line


@given(st.text("[]-,=:\\# \t\nn0²") | st.binary(max_size=20).map(lambda raw: raw.decode("latin-1")))
def test_any_hostlist_is_expanded_or_refused(text: str) -> None:
    try:
        expand_hosts(text)
    except TopologyInputError as error:
        message = str(error)
        assert len(message.splitlines()) == 1


def test_name_with_a_newline_is_noted_in_one_line() -> None:
    found = read('- topology: "r\\racks"\n')
    assert [note.message for note in found.notes] == ["topology r acks"]


def test_keys_of_yaml_may_have_any_order() -> None:
    found = read(YAML)
    assert found.blocks == (("a", "n[1-2]"), ("b", "n[3-4]"))
    ordered = read(yaml.safe_dump(yaml.safe_load(YAML), sort_keys=True))
    assert (ordered.blocks, ordered.names) == (found.blocks, found.names)
    messages = [sorted(note.message for note in one.notes) for one in (ordered, found)]
    assert messages[0] == messages[1]


def job(tasks: str, order: str, hosts: str = "n[1-3]", **more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_DISTRIBUTION": order,
    } | more


@pytest.mark.parametrize(
    ("tasks", "order", "expected"),
    [
        ("2(x2),1", "block", (0, 0, 1, 1, 2)),
        ("2(x2),1", "block:cyclic", (0, 0, 1, 1, 2)),
        ("2(x2),1", "block:block,NoPack", (0, 0, 1, 1, 2)),
        ("1,3,2", "cyclic", (0, 1, 2, 1, 2, 1)),
        ("4,1,4", "plane=2", (0, 0, 1, 2, 2, 0, 0, 2, 2)),
        ("2(x2),1", "block,Pack", None),
        ("2(x2),1", "arbitrary", None),
        ("2(x2),1", "plane", None),
        ("2(x2),1", "*", None),
    ],
)
def test_environment_places_ranks(tasks: str, order: str, expected: tuple[int, ...] | None) -> None:
    assert read_nodes(job(tasks, order)) == expected


def test_missing_variables_leave_placement_unknown() -> None:
    whole = job("1(x3)", "block", SLURM_NTASKS="3")
    assert read_nodes(whole) == (0, 1, 2)
    for name in ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"):
        assert read_nodes({key: value for key, value in whole.items() if key != name}) is None
    assert read_nodes({}) is None
    # sbatch sets no distribution; srun's own default is block.
    del whole["SLURM_DISTRIBUTION"]
    assert read_nodes(whole | {"SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_NTASKS": "6"}) == (
        *(0, 0, 1, 1, 2, 2),
    )
    cyclic = read_nodes(whole | {"SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_NTASKS": "6"}, "cyclic")
    assert cyclic == (0, 1, 2, 0, 1, 2)
    older = {
        "SLURM_NODELIST" if key == "SLURM_JOB_NODELIST" else key: value
        for key, value in whole.items()
    }
    assert read_nodes(older) == (0, 1, 2)
    assert read_nodes(job("2(x3)", "plane", SLURM_DIST_PLANESIZE="1")) == (0, 1, 2, 0, 1, 2)


@pytest.mark.parametrize(
    "environ",
    [
        job("2(x2)", "block"),
        job("2(x4)", "block"),
        job("2(x3)", "block", SLURM_NTASKS="7"),
        job("2(x3)", "block", SLURM_NTASKS="six"),
        job("2(x3", "block"),
        job("two", "block"),
        job("2(x3)", "plane=0"),
        job("2(x3)", "plane=x"),
        job("2(x3)", "block", hosts="n[1-3"),
        job("9(x999999999)", "block"),
        job("999999999", "block", hosts="n"),
    ],
)
def test_invalid_environments_are_refused(environ: dict[str, str]) -> None:
    assert len(refusal(TopologyInputError, read_nodes, environ).splitlines()) == 1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 12))
def test_every_rank_is_assigned(per_node: list[int], size: int) -> None:
    for order in ("block", "cyclic", f"plane={size}"):
        found = assign_nodes(per_node, order)
        assert found is not None
        assert [found.count(node) for node in range(len(per_node))] == per_node
    assert assign_nodes(per_node, "plane=1") == assign_nodes(per_node, "cyclic")
    assert assign_nodes(per_node, "plane=9") == assign_nodes(per_node, "block")


@given(st.dictionaries(
    st.sampled_from(["SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_NTASKS"]),
    st.one_of(st.text(max_size=9), st.sampled_from(["n[1-3]", "n", "1(x3)", "2", "3", "block", "cyclic", "plane=2"])),
))  # fmt: skip
def test_any_environment_is_read_or_refused(environ: dict[str, str]) -> None:
    try:
        read_nodes(environ)
    except TopologyInputError as error:
        message = str(error)
        assert len(message.splitlines()) == 1


@pytest.mark.full
def test_many_ranks_are_assigned() -> None:
    began = time.process_time()
    found = read_nodes(job("2000000", "cyclic", hosts="n"))
    assert found is not None
    assert len(found) == 2_000_000
    assert time.process_time() - began < 20


# For tests/test_formats.py.
SAMPLES = (CONF, TREE, YAML)
