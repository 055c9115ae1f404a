from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import TopologyInputError
from meshplan.topology.formats.slurm import assign_nodes, read_nodes


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
    with pytest.raises(TopologyInputError) as error:
        read_nodes(environ)
    assert len(str(error.value).splitlines()) == 1


def test_unsupported_rank_orders_are_refused() -> None:
    with pytest.raises(TopologyInputError):
        assign_nodes(2, [1], "block")
    with pytest.raises(TopologyInputError):
        assign_nodes(1, [-1], "block")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 12))
def test_every_rank_is_assigned(per_node: list[int], size: int) -> None:
    for order in ("block", "cyclic", f"plane={size}"):
        found = assign_nodes(len(per_node), per_node, order)
        assert found is not None
        assert [found.count(node) for node in range(len(per_node))] == per_node
    assert assign_nodes(len(per_node), per_node, "plane=1") == assign_nodes(
        len(per_node), per_node, "cyclic"
    )
    assert assign_nodes(len(per_node), per_node, "plane=9") == assign_nodes(
        len(per_node), per_node, "block"
    )


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
