from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import TopologyInputError
from meshplan.topology.formats.kubernetes import read, recognises
from tests.readings import read_or_refused
from tests.refusals import refusal

CLIQUE, COUNT = "nvidia.com/gpu.clique", "nvidia.com/gpu.count"


def node(name: str, clique: str | None = None, count: Any = None, **more: Any) -> dict[str, Any]:
    labels = {"topology.example/rack": "{not read}", CLIQUE: clique, COUNT: count}
    kept = {key: value for key, value in labels.items() if value is not None}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": kept}, **more}


def listed(*nodes: Any) -> str:
    return json.dumps({"apiVersion": "v1", "items": list(nodes), "kind": "List"}, indent=4)


def test_cliques_become_domains() -> None:
    text = listed(
        node("t0", "u-1.1", "2"), node("login"), node("t1", "u-1.2", "2"), node("t2", "u-1.1", "1"), node("pcie", None, "2")
    )  # fmt: skip
    assert recognises(text)
    found = read(text)
    assert found.kind == "kubectl get nodes"
    assert found.names == ("t0", "login", "t1", "t2", "pcie")
    assert found.domains is None
    assert found.nodes == ((0, 1, 4), (2, 3), (5, 6))
    assert [note.message for note in found.notes] == [
        "clique u-1.1: 2 hosts: t0, t2",
        "clique u-1.2: 1 host: t1",
    ]


@pytest.mark.parametrize(
    ("label", "values"),
    [
        ("network.topology.nvidia.com/accelerator", ("u-1.7", "u-1.9")),
        ("network.topology.kubernetes.io/accelerator", ("rack-7", "rack-9")),
        ("topology.k8s.aws/ultraserver-id", ("us-1234abcd", "us-5678")),
        ("topology.k8s.aws/capacity-block-id", None),
        ("topology.k8s.aws/network-node-layer-1", None),
    ],
)
def test_labels_of_other_programs_name_cliques(label: str, values: tuple[str, str] | None) -> None:
    nodes = [node(f"n{i}", None, "4") for i in range(3)]
    first, second = values or ("b-1", "b-2")
    for one, value in zip(nodes, (first, first, second), strict=True):
        one["metadata"]["labels"][label] = value
    found = read(listed(*nodes))
    whole = (tuple(range(8)), tuple(range(8, 12)))
    assert found.nodes == (whole if values else tuple(tuple(range(i, i + 4)) for i in (0, 4, 8)))
    # NVIDIA's own label is the one that counts.
    for one in nodes:
        one["metadata"]["labels"][CLIQUE] = "u-1.1"
    assert read(listed(*nodes)).nodes == (tuple(range(12)),)


def test_missing_gpu_counts_are_reported() -> None:
    for uncounted in (node("b", "u.1"), node("b", status={"capacity": {"nvidia.com/gpu": "4"}})):
        found = read(listed(node("a", "u.1", "4"), uncounted))
        assert found.nodes is None
        assert "1 of 2 hosts with GPUs" in found.notes[-1].message
    assert read(listed(node("a"), node("b"))).nodes is None
    assert read(listed()).nodes is None


def test_missing_cliques_leave_domains_unknown() -> None:
    found = read(listed(node("a", None, "2"), node("b", None, "1")))
    assert found.nodes == ((0, 1), (2,))
    assert "no host has the label" in found.notes[0].message


def test_single_node_is_read() -> None:
    text = json.dumps(node("a", "u.1", 2))
    assert recognises(text)
    assert read(text).nodes == ((0, 1),)
    assert read("\ufeff" + text).nodes == ((0, 1),)


def test_many_cliques_are_read() -> None:
    found = read(listed(*(node(f"n{number}", f"u.{number // 9}", "4") for number in range(900))))
    assert len(found.notes) == 65
    assert found.notes[0].message == "clique u.0: 9 hosts: n0, n1, n2, n3, ... 5 more"
    assert found.notes[-1].message == "... 36 more cliques"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"items": 3}',
        '{"items": [3]}',
        listed({"kind": "Pod", "metadata": {"name": "a"}}),
        listed(node("")),
        listed(node("a", "no clique")),
        listed(node("a", "u.1", "-1")),
        listed(node("a", "u.1", "99999")),
        listed(node("a", 3)),
        listed({"metadata": {"name": "a", "labels": [1]}}),
        '{"items": ' + "[" * 200_000,
        '{"items": [' + "9" * 100_000 + "]}",
    ],
    ids=range(14),
)
def test_invalid_texts_are_refused(text: str) -> None:
    assert len(refusal(TopologyInputError, read, text).splitlines()) == 1


def test_excessive_gpu_counts_are_refused() -> None:
    """A file of some megabytes must not fill the memory."""
    many = [node(f"n{i}", None, "4096") for i in range(1025)]
    with pytest.raises(TopologyInputError, match="more than 4194304 GPUs"):
        read(listed(*many))


def test_json_error_has_its_line() -> None:
    with pytest.raises(TopologyInputError) as error:
        read(listed(node("a")).replace('"kind": "Node"', "kind"))
    assert error.value.line == 6


def test_format_is_recognised() -> None:
    assert not recognises('{"blockdevices": []}')
    assert recognises("apiVersion: v1\nitems: []\nkind: List\n")
    assert not recognises("apiVersion: v1\nkind: Pod\nspec:\n  kind: List\n")
    assert not recognises("{" * 1_000_000)


def write_yaml(text: str) -> str:
    return str(yaml.safe_dump(json.loads(text), sort_keys=True))


def test_yaml_has_the_reading_of_json() -> None:
    text = listed(
        node("t0", "12.1", "2"), node("login"), node("t1", "12.1", "2"), node("9", None, "2")
    )
    found = write_yaml(text)
    assert recognises(found)
    assert read(found) == read(text)
    single = json.dumps(node("a", "u.1", "4"))
    assert recognises(write_yaml(single))
    assert read(write_yaml(single)) == read(single)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("apiVersion: v1\nkind: List\nitems: [\n", 4),
        ("apiVersion: v1\nkind: List\nitems: \x07\n", None),
        ("apiVersion: v1\nkind: List\nitems: " + "[" * 100_000, None),
        ("apiVersion: v1\nkind: List\nitems: *missing\n", 3),
        ("apiVersion: v1\nkind: List\nitems:\n- [a]\n", None),
    ],
)
def test_invalid_yaml_is_refused(text: str, line: int | None) -> None:
    assert recognises(text)
    with pytest.raises(TopologyInputError) as error:
        read(text)
    assert error.value.line == line


VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=4), st.sampled_from(["u.1", "4", "Node"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["kind", "items", "metadata", "labels", "name", "status", "capacity", CLIQUE, COUNT]
            ),
            inner,
        ),
    ),
)


@given(st.lists(VALUES), VALUES)
def test_any_json(items: list[Any], metadata: Any) -> None:
    for text in (
        json.dumps(items),
        listed(*items),
        listed({"metadata": metadata}),
        json.dumps(metadata),
    ):
        read_or_refused("kubernetes", text)
        read_or_refused("kubernetes", f"apiVersion: v1\nkind: List\n{text[1:]}")


# For tests/test_formats.py.
SAMPLES = tuple(
    write(listed(node("a", "u.1", "4"), node("b", None, "2"))) for write in (str, write_yaml)
)
