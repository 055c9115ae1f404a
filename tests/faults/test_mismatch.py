"""A rank that took another branch: an error on every member, and what comes after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshplan
from meshplan.contract import Contract
from tests.faults.jobs import attempt, end, right_bits, run_to_end

pytestmark = pytest.mark.processes

ODD = 1
P, R = Partial(), Replicate()


def bring(mesh: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> DTensor:
    return DTensor.from_local(torch.ones(shape, dtype=dtype), mesh, (P, P), run_check=False)


# The call of all ranks but one, and the call of that one.
BRANCHES: dict[str, Callable[[Any, bool], Any]] = {
    "shape": lambda mesh, odd: bring(mesh, (6, 5) if odd else (6, 4)).full_tensor(),
    "dtype": lambda mesh, odd: bring(
        mesh, (6,), torch.float64 if odd else torch.float32
    ).full_tensor(),
    "placements": lambda mesh, odd: bring(mesh, (6, 4)).redistribute(
        mesh, (Shard(0), Shard(1)) if odd else (R, R)
    ),
    "operation": lambda mesh, odd: DTensor.from_local(
        torch.ones(6), mesh, [Partial("max" if odd else "sum")] * 2, run_check=False
    ).full_tensor(),
    "order": lambda mesh, odd: [
        bring(mesh, (n,)).full_tensor() for n in ((7, 6) if odd else (6, 7))
    ],
}


@pytest.mark.parametrize("how", [{"path": "auto"}, {"path": "exchange", "debug": True}])
def test_different_inputs_are_an_error_on_every_member(how: dict[str, Any]) -> None:
    """As the first call of its groups, and as a later one; the next right call is right at once."""

    def ranks(rank: int) -> list[tuple[str, str, str]]:
        mesh = init_device_mesh("cpu", (2, 2))
        found = []
        with meshplan.installed(timeout=60.0, **how):
            for name, branch in BRANCHES.items():
                for _ in range(2):
                    kind, message = attempt(lambda b=branch: b(mesh, rank == ODD))  # type: ignore[misc]
                    found.append((name, kind, message))
                    right_bits(mesh)
        end()
        return found

    for rank, found in enumerate(run_to_end(ranks, 4)):
        for name, kind, message in found:
            assert kind == "SignatureMismatchError", (name, rank, message)
            other = "rank 0" if rank == ODD else "rank 1"
            assert f"{other} called a reduction over ranks 0, 1, 2, 3 with " in message
            assert f"this rank {rank} with " in message


@pytest.mark.parametrize("path", ["auto", "exchange"])
def test_switched_contracts_are_found_with_debug(path: Any) -> None:
    """A contract is agreed on once per group; with ``debug``, each call compares it."""

    def ranks(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (3,))
        group = dist.group.WORLD
        tree, rank_order = Contract(), Contract("rank")

        def dtensor(contract: Contract) -> Any:
            with meshplan.installed(contract=contract, timeout=60.0, path=path, debug=True):
                return DTensor.from_local(torch.ones(8), mesh, (P,), run_check=False).full_tensor()

        def functional(contract: Contract) -> Any:
            config: dict[str, Any] = {
                "path": path,
                "contract": contract,
                "debug": True,
                "group": group,
            }
            return meshplan.collectives.functional.all_reduce(torch.ones(8), **config)

        kinds = []
        for function in (dtensor, functional):
            for contract in (tree, rank_order, tree):
                assert function(contract).tolist() == [3.0] * 8
            odd = rank_order if rank == ODD else tree
            kinds.append(attempt(lambda f=function, c=odd: f(c))[0])  # type: ignore[misc]
            assert function(tree).tolist() == [3.0] * 8
        end()
        return kinds

    assert run_to_end(ranks, 3) == [["SignatureMismatchError"] * 2] * 3


def test_members_on_different_groups_name_each_other() -> None:
    """A rank that waits for an absent member names it; no other rank waits."""

    def ranks(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2, 2))
        d = DTensor.from_local(torch.ones(6), mesh, (P, P if rank == ODD else R), run_check=False)
        with meshplan.installed(timeout=5.0):
            _, message = attempt(lambda: d.redistribute(mesh, (R, R)))
        # Rank 1 has made a call that the others have not.
        dist.barrier()
        meshplan.shutdown()
        with meshplan.installed(timeout=60.0):
            right_bits(mesh)
        end()
        return message

    messages = run_to_end(ranks, 4)
    # Ranks 0 and 2 are one group over the first axis, 1 and 3 the other.
    assert messages[0] == messages[2] == ""
    assert "rank 1 did not reach the first reduction over ranks 1, 3 within 5 s" in messages[3]
    assert "within 5 s, so no rank started it" in messages[1]


class TestMessages(TestCase):
    def test_different_install_arguments_are_named_on_all_members(self) -> None:
        """Named on all members; after ``shutdown`` and the same arguments all is well."""

        def ranks(rank: int) -> list[str]:
            mesh = init_device_mesh("cpu", (3,))
            messages = []
            for odd, even in (
                ({"contract": Contract(order="rank")}, {"contract": Contract(order="tree")}),
                ({"path": "exchange"}, {"path": "auto"}),
            ):
                with meshplan.installed(
                    timeout=60.0,
                    topology=None,
                    **(odd if rank == ODD else even),  # type: ignore[arg-type]
                ):
                    messages.append(attempt(lambda: right_bits(mesh))[1])
                meshplan.shutdown()
                with meshplan.installed(timeout=60.0):
                    right_bits(mesh)
                meshplan.shutdown()
            end()
            return messages

        values = run_to_end(ranks, 3)
        assert values[0] == values[1] == values[2]
        self.assertExpectedInline(
            "\n".join(values[0]),
            """\
MP501: rank 1 called the first reduction over ranks 0, 1, 2 with other settings than the others. Different: contract v1/tree/wide/once (ranks 0, 2), v1/rank/wide/once (rank 1). No rank started it; pass the same arguments (to meshplan.install, or to the call) on every rank; after meshplan.install call meshplan.shutdown there
MP501: rank 1 called the first reduction over ranks 0, 1, 2 with other settings than the others. Different: path auto (ranks 0, 2), exchange (rank 1). No rank started it; pass the same arguments (to meshplan.install, or to the call) on every rank; after meshplan.install call meshplan.shutdown there""",
        )
