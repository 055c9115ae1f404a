"""Reductions by GPUs over real processes, on a GPU that a CPU plays with the kernels' own source.

The driver's functions, the launch, the votes and the shared memory are gone through as on a GPU; what
only a GPU can show (the order of its memory, its clock, its speed) is not: see test_gpu.
"""

from __future__ import annotations

import logging
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase

from meshplan import kernel
from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.errors import GroupStateError, PeerTimeoutError, SignatureMismatchError
from meshplan.flatten import Group, _connect
from meshplan.flatten._connect import connect_devices
from meshplan.flatten._group_table import GroupKey
from meshplan.flatten._join import members_of, share_memory
from meshplan.kernel import DeviceCommunicator, Ipc, TransportError, _device_peers, check
from meshplan.kernel._device_code import kernel_name
from meshplan.kernel._device_peers import share_out, tile_bytes
from meshplan.kernel._driver import Driver, DriverError
from tests.devices import (
    EMULATED,
    Emulated,
    connect_ranks,
    emulated_library,
    have_equal_bits,
    reduce_peers,
    synchronize,
    wrong_arithmetic,
    wrong_golden,
    wrong_sizes,
)
from tests.inputs import draw_leaves
from tests.processes import arrive, common_result, run_ranks, wait_for
from tests.refusals import refusal

pytestmark = EMULATED


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        (0, (1 << 10, 1)),
        (8 << 10, (1 << 10, 8)),  # two_shot of 64 KiB over 8 ranks
        (64 << 10, (2 << 10, 32)),  # 512 KiB
        (8 << 20, (23_872, 32)),  # 64 MiB: 11 pieces
        (1 << 30, (24_576, 32)),
    ],
)
def test_every_block_has_a_piece(longest: int, expected: tuple[int, int]) -> None:
    assert share_out(longest, 32, tile_bytes(8)) == expected


@pytest.mark.parametrize("world_size", [2, 3, 5, 8, 9])
def test_golden_vectors_and_sizes_match(world_size: int) -> None:
    def ranks(rank: int) -> list[str]:
        connect_ranks(Emulated(), range(world_size), lanes=3)
        wrong = wrong_golden(rank, world_size, "cpu")
        large = 70_001 if world_size < 6 else 20_001
        return wrong + wrong_sizes(
            rank, world_size, "cpu", (0, 1, 3, 7, 8, 15, 16, 17, 4095, 4097, large)
        )

    assert run_ranks(ranks, world_size) == [[]] * world_size


@pytest.mark.parametrize("kind", ["cuda", "hip"])
@pytest.mark.parametrize("shape", [(2, 3), (3, 3)])
def test_every_kernel_matches_the_definition(
    shape: tuple[int, ...], kind: kernel.DriverKind
) -> None:
    world_size = math.prod(shape)

    def ranks(rank: int) -> list[str]:
        connect_ranks(Emulated(kind), range(world_size), lanes=2)
        return wrong_arithmetic(rank, shape, "cpu", 37)

    assert run_ranks(ranks, world_size) == [[]] * world_size


@pytest.mark.parametrize("lanes", [1, 33, 512])
def test_any_number_of_lanes_has_the_same_bits(lanes: int) -> None:
    """Any number of blocks and lanes."""

    def ranks(rank: int) -> list[str]:
        connect_ranks(Emulated(), range(3), lanes=lanes)
        return wrong_sizes(rank, 3, "cpu", (1, 17, 40_001))

    assert run_ranks(ranks, 3) == [[]] * 3


def test_large_message_uses_all_blocks() -> None:
    """No limit of size."""

    def ranks(rank: int) -> list[str]:
        # The GPU with fewer processors decides how many blocks run at once.
        device = Emulated(processors=5 if rank == 0 else 7)
        connect_ranks(device, range(2), lanes=4)
        leaves = draw_leaves(2, 300_000)
        assert have_equal_bits(
            reduce_peers(leaves[rank], (2,), "two_shot"), reduce_leaves(leaves, "sum", (2,))
        )
        assert have_equal_bits(
            reduce_peers(leaves[rank][:9], (2,), "two_shot"), reduce_leaves(leaves, "sum", (2,))[:9]
        )
        return [line for line in device.history() if line.startswith("launch")]

    assert run_ranks(ranks, 2) == [["launch 5 on 7", "launch 1 on 7"]] * 2


class TestFaults(TestCase):
    def test_a_missing_rank_is_named_at_the_next_call(self) -> None:
        def ranks(rank: int) -> list[str]:
            found = connect_ranks(Emulated(), range(3), lanes=2)
            assert isinstance(found, DeviceCommunicator)
            ones = torch.ones(20)
            reduce_peers(ones, (3,), "two_shot")
            synchronize()
            found.set_timeout(1.0)
            # It is the second lane that waits for this one.
            if rank == 1:
                wait_for("the failure", 2)
                return []
            said = []
            result = reduce_peers(ones, (3,), "two_shot")
            synchronize()
            assert result.isnan().all()
            # The error describes the failed call, not the call that raises it.
            for again in (lambda: reduce_peers(ones[:7], (3,), "one_shot"), check, check):
                with pytest.raises(PeerTimeoutError) as caught:
                    again()
                assert (caught.value.rank, caught.value.phase) == (1, 0)
                said.append(str(caught.value))
            arrive("the failure")
            return said

        first, second, third = run_ranks(ranks, 3)
        assert second == []
        assert set(first + third) == {first[0]}
        self.assertExpectedInline(
            first[0],
            """MP702: rank 1 did not reach block 0, phase 0 (summands) of a reduction over ranks 0, 1, 2 within 1 s: float32[20] for all_reduce sum over 3 ranks, contract v1/tree/wide/once, path two_shot; look for a rank that died or took another branch. Call meshplan.shutdown on every rank, and these ranks reconnect""",
        )

    def test_differing_calls_are_named_on_every_rank(self) -> None:
        def ranks(rank: int) -> tuple[int, str]:
            connect_ranks(Emulated(), range(3), timeout=60.0, lanes=2)
            numbers = torch.ones(4000 if rank != 1 else 8, dtype=torch.int32)
            result = reduce_peers(numbers, (3,), "two_shot")
            synchronize()
            assert (result == -1).all()
            with pytest.raises(SignatureMismatchError) as caught:
                check()
            return caught.value.rank, str(caught.value)

        found = run_ranks(ranks, 3)
        assert [rank for rank, _ in found] == [1, 0, 1]
        self.assertExpectedInline(
            found[0][1],
            """MP703: rank 1 called a reduction over ranks 0, 1, 2 with int32[8] for all_reduce sum over 3 ranks, contract v1/tree/wide/once, path two_shot, this rank 0 with int32[4000] for all_reduce sum over 3 ranks, contract v1/tree/wide/once, path two_shot. Different: shape [8] (rank 1), [4000] (rank 0). Nothing was reduced: every rank must pass the same shape, dtype, operation and contract""",
        )

    def test_communicator_is_remade_after_all_ranks_close(self) -> None:
        def ranks(rank: int) -> list[bool]:
            device = Emulated()
            found = connect_ranks(device, range(2), lanes=2)
            assert isinstance(found, DeviceCommunicator)
            if rank == 0:
                found.set_timeout(0.5)
                reduce_peers(torch.ones(5), (2,), "one_shot")
                synchronize()
                with pytest.raises(PeerTimeoutError):
                    check()
            found.close()
            check()
            with pytest.raises(GroupStateError, match="closed"):
                reduce_peers(torch.ones(5), (2,), "one_shot")
            freed = device.history().count("free")
            connect_ranks(device, range(2), lanes=2)
            leaves = draw_leaves(2, 50)
            right = have_equal_bits(
                reduce_peers(leaves[rank], (2,), "one_shot"), reduce_leaves(leaves, "sum", (2,))
            )
            return [freed == 2, right]

        assert run_ranks(ranks, 2) == [[True, True]] * 2

    def test_unsupported_tensors_are_refused(self) -> None:
        def ranks(rank: int) -> str:
            connect_ranks(Emulated(), range(2))
            said = []
            for tensor in (torch.ones(3).to_sparse(), torch.ones(3, dtype=torch.complex64)):
                said.append(refusal(TypeError, reduce_peers, tensor, (2,), "one_shot"))
            return "\n".join(said)

        self.assertExpectedInline(
            run_ranks(ranks, 2)[0],
            """\
MP412: a tensor on torch.sparse_coo cannot be reduced through the memory that these ranks share; pass a strided tensor on the device of their group, or path='exchange'
MP412: torch.complex64 is outside the contract; convert to one of float32, bfloat16, float16, float64, int8, int16, int32, int64, uint8""",
        )


def test_close_does_not_wait_for_a_hung_device() -> None:
    def ranks(rank: int) -> int:
        device = Emulated()
        found = connect_ranks(device, range(2), lanes=2)
        assert isinstance(found, DeviceCommunicator)
        reduce_peers(torch.ones(2), (2,), "one_shot")
        synchronize()
        found.set_timeout(0.5)
        device.delay(1000)
        reduce_peers(torch.ones(2), (2,), "one_shot")
        # Seconds: were it waited for, the test would not end.
        found.close()
        found.close()
        return device.history().count("free")

    assert run_ranks(ranks, 2) == [0] * 2


@dataclass(frozen=True)
class Nothing:
    """A transport that no machine has."""

    name: str = "nothing"

    def open(self, *_: object) -> kernel.Regions:
        raise TransportError("there is no such memory")


class TestMissingMemory(TestCase):
    def test_every_rank_reports_the_same_reasons(self) -> None:
        """A rank that cannot share memory reports why; the others release theirs, and all try the next transport."""

        def ranks(rank: int) -> list[str]:
            # The process may have run other tests before it forked.
            said, before = [], Emulated().history().count("free")
            for reason in ("NO_MEMORY", "NO_IPC", "NO_PEERS"):
                if rank == 1:
                    os.environ[f"EMULATED_{reason}"] = "1"
                device = Emulated()
                said.append(str(connect_ranks(device, range(3), transports=(Nothing(), Ipc()))))
                os.environ.pop(f"EMULATED_{reason}", None)
            found = connect_ranks(Emulated(), range(3), transports=(Nothing(), Ipc()))
            return [*said, str(found), str(Emulated().history().count("free") - before)]

        first, second, third = run_ranks(ranks, 3)
        assert first[:4] == second[:4] == third[:4]
        # All that was allocated, and once what the others mapped before rank 1 could not.
        assert second[4] == "2"
        assert {first[4], third[4]} <= {"4", "5"}
        # Whichever rank is first to say so.
        text = re.sub(r"nothing: rank \d", "nothing: rank N", "\n".join(first[:4]))
        self.assertExpectedInline(
            text,
            """\
nothing: rank N: there is no such memory; IPC: rank 1: 500544 bytes of its device: out of memory (2)
nothing: rank N: there is no such memory; IPC: rank 1: operation not supported (801)
nothing: rank N: there is no such memory; IPC: rank 1: operation not supported (801)
memory of 3 GPUs""",
        )

    def test_missing_device_is_reported(self) -> None:
        def ranks(rank: int) -> str:
            def find() -> Emulated:
                if rank == 1:
                    raise DriverError("libcuda.so.1: no such file")
                return Emulated()

            members = members_of(None, (0, 1), 20.0)
            return str(connect_devices("", members, "x", timeout=20, find=find))

        found = common_result(ranks, 2)
        self.assertExpectedInline(found, """rank 1: libcuda.so.1: no such file""")


class TestTimedGpus(TestCase):
    def test_auto_shares_memory_only_where_it_was_timed_to_be_faster(self) -> None:
        rows = {
            "fast": {"2": {"one_shot_bytes": 400, "share_memory": 1}},
            "also": {"2": {"one_shot_bytes": 400, "share_memory": 1}},
            "slow": {"2": {"one_shot_bytes": 400, "share_memory": 0}},
        }

        def ranks(rank: int) -> list[str]:
            device, found = Emulated(), []
            _connect.device_of = lambda index: device  # type: ignore[assignment]
            torch.cuda.current_device = lambda: 0
            _device_peers._read = lambda: rows  # type: ignore[assignment]
            group, members = group_of_two(), members_of(None, (0, 1), 20.0)
            key = GroupKey((0, 1), "gloo", "cuda", "timed")
            for names in (("new", "new"), ("fast", "slow"), ("fast", "also"), ("fast", "fast")):
                torch.cuda.get_device_name = lambda name=names[rank]: name  # type: ignore[assignment]
                shared = share_memory(group, key, members, objection=None)
                found.append(shared.no_peers)
            assert shared.peers is not None
            found.append(f"{shared.peers}: {shared.peers.faster_mode(400)} of 400 bytes")
            found.append(f"{shared.peers.faster_mode(401)} of 401")
            # A path that is named has memory of its own, with published limits.
            named = share_memory(group, key._replace(peers="always"), members, objection=None)
            assert named.peers is not None
            assert named.peers.name != shared.peers.name
            assert named.peers.faster_mode(401) == "one_shot"
            leaves = draw_leaves(2, 101)
            result = reduce_peers(leaves[rank], (2,), "auto", name=shared.peers.name)
            assert have_equal_bits(result, reduce_leaves(leaves, "sum", (2,)))
            return found

        self.assertExpectedInline(
            "\n".join(common_result(ranks, 2)),
            """\
rank 0: one_shot and two_shot were not timed on new with 2 ranks; write the path that you want, or time them with make bench-gpu
rank 1: exchange was timed to be faster on slow with 2 ranks
its ranks have GPUs of several kinds

memory of 2 GPUs: one_shot of 400 bytes
two_shot of 401""",
        )


def group_of_two() -> Group:
    world: Any = dist.group.WORLD
    return Group.of(world, (0, 1), "default")


def test_shared_device_memory_is_logged() -> None:
    def ranks(rank: int) -> tuple[bool, list[str]]:
        lines: list[str] = []
        log = logging.getLogger("meshplan")
        log.setLevel(logging.INFO)
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        log.addHandler(handler)
        device = Emulated()
        _connect.device_of = lambda index: device  # type: ignore[assignment]
        torch.cuda.current_device = lambda: 0
        members = members_of(None, (0, 1), 20.0)
        key = GroupKey((0, 1), "gloo", "cuda", "always")
        found = share_memory(group_of_two(), key, members, objection=None)
        assert isinstance(found.peers, DeviceCommunicator)
        leaves = draw_leaves(2, 99)
        result = reduce_peers(leaves[rank], (2,), "auto", name=found.peers.name)
        return have_equal_bits(result, reduce_leaves(leaves, "sum", (2,))), lines

    expected = "[meshplan] default group 0 of 2 ranks: 0, 1: memory of 2 GPUs, "
    expected += "one_shot up to 1048576 bytes, two_shot above"
    assert run_ranks(ranks, 2) == [(True, [expected])] * 2


def test_missing_driver_is_a_reason() -> None:
    with pytest.raises(DriverError, match="libnothing"):
        Driver("cuda", 0, "libnothing.so")
    with pytest.raises(DriverError, match="undefined symbol"):
        Driver("hip", 0, emulated_library("cuda"))


def test_every_kernel_has_a_name() -> None:
    """The names that calls ask for are those of csrc/device.cu."""
    device = Emulated()
    names = set()
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int8,
        torch.uint8,
    ):
        for op in ("sum", "avg", "product", "max", "min"):
            for accumulate in ("wide", "float64"):
                for rounding in ("once", "node"):
                    contract = Contract("tree", accumulate, rounding)  # type: ignore[arg-type]
                    names.add(kernel_name(dtype, op, contract))
    with device.driver.current():
        assert all(device.kernel(name) for name in names)
        with pytest.raises(DriverError, match="not found"):
            device.kernel("mp_complex_sum")
    assert len(names) == 32
