"""Ranks handed out to hosts, and files with the host of each rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import TopologyError, TopologyInputError
from meshplan.topology._read_cluster import assign_in_order, is_rank_order, read_rank_file


@pytest.mark.parametrize(
    ("per_host", "order", "hosts"),
    [
        ([2, 2], "block", (0, 0, 1, 1)),
        ([2, 2], "cyclic", (0, 1, 0, 1)),
        ([1, 3], "cyclic", (0, 1, 1, 1)),
        ([4, 4], "plane=2", (0, 0, 1, 1, 0, 0, 1, 1)),
        ([2, 1], "Block:cyclic", (0, 0, 1)),
    ],
)
def test_ranks_are_assigned_in_each_order(
    per_host: list[int], order: str, hosts: tuple[int, ...]
) -> None:
    assert assign_in_order(per_host, order) == hosts


@pytest.mark.parametrize("order", ["", "blocks", "plane", "arbitrary", "hosts.txt", "./plane=0"])
def test_invalid_rank_order_is_refused(order: str) -> None:
    assert not is_rank_order(order)
    with pytest.raises(TopologyError, match="no rank order"):
        assign_in_order([1], order)


@pytest.mark.parametrize("order", ["plane=0", "plane=", "plane=x", "Plane=-1", "plane=1.5"])
def test_plane_without_size_is_refused(order: str) -> None:
    with pytest.raises(TopologyError) as caught:
        is_rank_order(order)
    assert str(caught.value) == (
        f"MP211: rank order {order!r}: a plane is a whole number of ranks from 1 up; pass for "
        "example plane=4"
    )


def test_pack_order_is_refused() -> None:
    with pytest.raises(TopologyError, match="no rank order 'block:pack'"):
        assign_in_order([1], "block:pack")


@pytest.mark.parametrize(
    "text",
    [
        "a\na\nb\nb\nb\n",
        "a slots=2\nb slots=3\n",
        "a:2\nb:3\n",
        "# of the job\na:2  # first\n\nb slots=3",
        "a :2\r\nb:3\r\n",
    ],
)
def test_rank_files_are_read(tmp_path: Path, text: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    assert read_rank_file(str(file)) == ((0, 0, 1, 1, 1), ("a", "b"))


def test_interleaved_hosts_are_read(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("b\na\nb\n")
    assert read_rank_file(str(tmp_path / "hosts")) == ((0, 1, 0), ("b", "a"))


class TestMessages(TestCase):
    def refusal(self, text: str) -> str:
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("meshplan.topology._read_cluster.read_content", lambda name: text)
                read_rank_file("hosts")
        except TopologyInputError as error:
            return str(error)
        return ""

    def test_invalid_rank_files_are_refused(self) -> None:
        texts = ["", "# none\n", "a b\n", "a 1 2\n", ":8\n", "a:99999999\n", "a:999999\n" * 20]
        self.assertExpectedInline(
            "\n".join(map(self.refusal, texts)),
            """\
MP212: hosts: no host in it; list the host of each rank, one per line
MP212: hosts: no host in it; list the host of each rank, one per line
MP212: hosts:1: expected the host of a rank, or host slots=8, got 'a b'
MP212: hosts:1: expected the host of a rank, or host slots=8, got 'a 1 2'
MP212: hosts:1: expected the host of a rank, or host slots=8, got ':8'
MP212: hosts:1: expected the host of a rank, or host slots=8, got 'a:99999999'
MP212: hosts:17: more than 16,777,216 ranks""",
        )


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshplan.topology._read_cluster.read_content", lambda name: text)
        try:
            hosts, names = read_rank_file("hosts")
        except TopologyInputError:
            return
        assert set(hosts) <= set(range(len(names)))
