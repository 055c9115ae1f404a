"""What a process remembers of its groups, and when it must not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshplan.flatten import Group, _group_table
from meshplan.flatten._group_table import GroupKey, GroupTable

KEY = GroupKey((0, 1), "fake", "cpu", "never")


def init() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())


@pytest.fixture(autouse=True)
def default_group() -> Iterator[None]:
    init()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def book() -> GroupTable:
    book = GroupTable()
    book.follow_default_group()
    return book


def created(ranks: tuple[int, ...] = (0, 1)) -> Group:
    pg = dist.new_group(list(ranks))
    return Group.of(pg, ranks, "created")


class Memory:
    """Of a communicator, what the book asks."""

    alive = True

    def close(self) -> None:
        self.alive = False


def sharing(group: Group, memory: Memory) -> Group:
    return replace(group, peers=memory)  # type: ignore[arg-type]


def test_group_is_found_again(book: GroupTable) -> None:
    group = created()
    book.add(KEY, group)
    book.add_shortcut("shortcut", group)
    assert book.alive(KEY) == book.short("shortcut") == group
    assert book.alive(KEY._replace(ranks=(1, 0))) is None
    assert book.short("other") is None
    assert len(book) == book.created() == 1


@pytest.mark.parametrize("again", [False, True], ids=["destroyed", "replaced"])
def test_nothing_outlives_the_default_group(book: GroupTable, again: bool) -> None:
    group = created()
    memory = Memory()
    book.add(KEY, sharing(group, memory))
    book.add_shortcut("shortcut", group)
    book.meetings.add("meeting")
    first = book.signatures("group", mock.Mock)
    assert book.signatures("group", mock.Mock) is first
    dist.destroy_process_group()
    if again:
        init()
    assert book.short("shortcut") is None
    assert len(book) == 0
    assert book.alive(KEY) is None
    assert book.short("shortcut") is None
    assert not book.meetings
    assert not memory.alive
    assert book.signatures("group", mock.Mock) is not first


def test_group_destroyed_by_the_user_is_forgotten(book: GroupTable) -> None:
    group = created()
    book.add(KEY, group)
    book.add_shortcut("shortcut", group)
    dist.destroy_process_group(group.pg)
    assert book.alive(KEY) is None
    assert book.short("shortcut") is None
    assert book.kept(KEY) is None
    assert book.take_created() == []


def test_shared_memory_is_added_to_the_same_process_group(book: GroupTable) -> None:
    group = created()
    book.add(KEY, group)
    other = KEY._replace(peers="always")
    assert book.alive(other) is None
    found = book.kept(other)
    assert found is not None
    assert found.pg is group.pg
    assert found.origin == "kept"
    assert book.kept(KEY._replace(use="threads")) is None
    # It is destroyed once, under the name that it was created with.
    book.add(other, found)
    assert len(book) == 2
    assert book.created() == 1


def test_group_with_shared_memory_serves_other_paths(book: GroupTable) -> None:
    memory = Memory()
    shared = sharing(created(), memory)
    book.add(KEY._replace(peers="always"), shared)
    assert book.alive(KEY) == shared
    assert book.sharing() == 1
    memory.alive = False
    assert book.alive(KEY) is None
    assert book.sharing() == 0
    # The process group is of use as before.
    kept = book.kept(KEY)
    assert kept is not None
    assert kept.peers is None


def test_created_groups_are_taken_once_in_the_order_of_their_names(book: GroupTable) -> None:
    groups = [created(ranks) for ranks in ((0, 1), (0, 2), (0, 3))]
    default = dist.group.WORLD
    assert default is not None
    for group in reversed(groups):
        book.add(KEY._replace(ranks=group.ranks), group)
    given = Group.of(default, (0, 1, 2, 3), "default")
    book.add(KEY._replace(ranks=given.ranks), given)
    taken = book.take_created()
    assert [group.name for group in taken] == sorted(group.name for group in groups)
    assert book.take_created() == []
    assert len(book) == 0


def test_fork_inherits_no_groups(book: GroupTable) -> None:
    memory = Memory()
    book.add(KEY, sharing(created(), memory))
    book.add_shortcut("shortcut", created())
    with mock.patch.object(_group_table, "is_forked", return_value=True):
        assert book.short("shortcut") is None
        assert book.take_created() == []
    assert memory.alive


def test_shortcuts_and_agreements_are_bounded(book: GroupTable) -> None:
    group = created()
    for number in range(2 * _group_table.MAX_SHORTCUTS + 1):
        book.add_shortcut(number, group)
    assert len(book._shortcuts) == 1
    assert book.short(2 * _group_table.MAX_SHORTCUTS) == group
    for number in range(_group_table.MAX_MEETINGS):
        assert book.why_no_meeting() is None
        book.meetings.add(number)
    # None was forgotten: its members would not agree on it again.
    assert book.meetings == set(range(_group_table.MAX_MEETINGS))
    assert book.why_no_meeting() == (
        "1024 different reductions in blocks were agreed on, which is the limit; "
        "call meshplan.shutdown() between phases that use different meshes"
    )
    book.take_created()
    assert book.why_no_meeting() is None
