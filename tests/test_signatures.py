"""The debug mode finds ranks that reduce different tensors over the backend."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshplan
from meshplan.definition import reduce_leaves
from meshplan.errors import GroupAgreementError, SignatureMismatchError
from meshplan.flatten._agree import Members, Signatures
from meshplan.record import Record
from meshplan.testing import assert_bitwise_equal, order_sensitive
from meshplan.topology import Topology
from tests.processes import arrive, patience, run_ranks, shorten, wait_for

pytestmark = pytest.mark.processes

P, R = Partial(), Replicate()


class TestMessages(TestCase):
    def test_different_shape_or_dtype_is_named(self) -> None:
        def ranks(rank: int) -> list[str]:
            mesh = init_device_mesh("cpu", (3,))
            messages = []
            with meshplan.installed(path="exchange", debug=True):
                for odd in (torch.ones(5), torch.ones(4, dtype=torch.float64)):
                    mine = odd if rank == 1 else torch.ones(4)
                    d = DTensor.from_local(mine, mesh, (P,), run_check=False)
                    with pytest.raises(SignatureMismatchError) as caught:
                        d.full_tensor()
                    assert caught.value.rank == (0 if rank == 1 else 1)
                    messages.append(str(caught.value))
                # The next reduction is right on all of them.
                leaves = [order_sensitive(100, rank=r, world_size=3) for r in range(3)]
                d = DTensor.from_local(leaves[rank], mesh, (P,), run_check=False)
                assert_bitwise_equal(d.full_tensor(), reduce_leaves(leaves, "sum", (3,)))
            return messages

        found = run_ranks(ranks, 3)
        self.assertExpectedInline(
            "\n".join(found[0]),
            """\
MP703: rank 1 called a reduction over ranks 0, 1, 2 with tensor float32[5], call (P(sum)) -> (R) on (axis0=3), step all_reduce sum over (axis0), exchange, contract v1/tree/wide/once, this rank 0 with tensor float32[4], call (P(sum)) -> (R) on (axis0=3), step all_reduce sum over (axis0), exchange, contract v1/tree/wide/once. Different: tensor float32[5] (rank 1), float32[4] (rank 0). Nothing was sent: every rank must pass the same shape, dtype, operation and contract
MP703: rank 1 called a reduction over ranks 0, 1, 2 with tensor float64[4], call (P(sum)) -> (R) on (axis0=3), step all_reduce sum over (axis0), exchange, contract v1/tree/wide/once, this rank 0 with tensor float32[4], call (P(sum)) -> (R) on (axis0=3), step all_reduce sum over (axis0), exchange, contract v1/tree/wide/once. Different: tensor float64[4] (rank 1), float32[4] (rank 0). Nothing was sent: every rank must pass the same shape, dtype, operation and contract""",
        )
        self.assertExpectedInline(
            found[1][0],
            """MP703: rank 0 called a reduction over ranks 0, 1, 2 with tensor float32[4], call (P(sum)) -> (R) on (axis0=3), step all_reduce sum over (axis0), exchange, contract v1/tree/wide/once, this rank 1 with tensor float32[5], call (P(sum)) -> (R) on (axis0=3), step all_reduce sum over (axis0), exchange, contract v1/tree/wide/once. Different: tensor float32[4] (rank 0), float32[5] (rank 1). Nothing was sent: every rank must pass the same shape, dtype, operation and contract""",
        )

    def test_absent_rank_is_named(self) -> None:
        def ranks(rank: int) -> str:
            mesh = init_device_mesh("cpu", (3,))
            d = DTensor.from_local(torch.ones(4), mesh, (P,), run_check=False)
            with meshplan.installed(path="exchange", debug=True):
                d.full_tensor()
                if rank == 2:
                    wait_for("the error", 2)
                    return ""
                shorten(1.0)
                with patience(2), pytest.raises(GroupAgreementError) as caught:
                    d.full_tensor()
            arrive("the error")
            return str(caught.value)

        found = run_ranks(ranks, 3)
        assert found[0] == found[1]
        self.assertExpectedInline(
            found[0],
            """MP501: rank 2 did not reach a reduction over ranks 0, 1, 2 within 1 s, so no rank started it; every rank of the group must make the same calls: look for a rank that died or took another branch""",
        )


def test_every_group_of_every_call_is_compared() -> None:
    """Hierarchical steps too; the store does not grow."""

    def ranks(rank: int) -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (2, 2))
        leaves = [order_sensitive(60, rank=r, world_size=4) for r in range(4)]
        full = reduce_leaves(leaves, "sum", (2, 2))
        d = DTensor.from_local(leaves[rank], mesh, (P, P), run_check=False)
        nodes = Topology.uniform(4, node_size=2, domain_size=2)
        keys = []
        for topology in (None, nodes):
            with meshplan.installed(path="exchange", debug=True, topology=topology, strict=True):
                for _ in range(3):
                    assert_bitwise_equal(d.redistribute(mesh, (R, R)).to_local(), full)
                dist.barrier()
                keys.append(c10d._get_default_store().num_keys())
                dist.barrier()
                for _ in range(20):
                    assert_bitwise_equal(d.redistribute(mesh, (R, R)).to_local(), full)
                dist.barrier()
                keys.append(c10d._get_default_store().num_keys())
                dist.barrier()
        meshplan.shutdown()
        with meshplan.installed(path="exchange", debug=True):
            assert_bitwise_equal(d.redistribute(mesh, (R, R)).to_local(), full)
        return keys[1] - keys[0], keys[3] - keys[2]

    for flat, near in run_ranks(ranks, 4):
        assert flat == 0
        assert near == 0


def test_two_groups_of_the_same_ranks_are_compared_separately() -> None:
    store = dist.HashStore()
    first, second = (Signatures.of(Members(store, (0,), 0, 1.0), "a") for _ in range(2))
    assert first.prefix != second.prefix
    for _ in range(3):
        assert first.compare(Record.of(call="x"), 1.0).unanimous
        assert second.compare(Record.of(call="y"), 1.0).unanimous
