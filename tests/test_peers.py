"""Reductions through shared memory over real processes: bits, sizes, faults."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshplan
from meshplan import kernel
from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.errors import (
    GroupAgreementError,
    GroupStateError,
    PeerTimeoutError,
    SignatureMismatchError,
)
from meshplan.flatten import _connect, _missing
from meshplan.flatten._connect import connect
from meshplan.flatten._join import members_of
from meshplan.kernel import Communicator
from meshplan.kernel._communicator import Arithmetic, CallKey, _communicators
from meshplan.testing import assert_bitwise_equal
from tests.devices import reduce_peers, wrong_golden, wrong_sizes
from tests.inputs import FLOATS, INTEGERS, OPS, at_byte, draw_leaves
from tests.marks import full
from tests.processes import (
    arrive,
    common_result,
    nothing_stays_in_shared_memory,
    open_links,
    run_in_threads,
    run_ranks,
    wait_for,
    warm_compiler,
)
from tests.refusals import refusal
from tests.strategies import CONTRACTS

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not kernel.available(), reason=str(kernel.why_not())),
]

PATHS = ("one_shot", "two_shot")
NUMELS = (0, 1, 3, 7, 8, 15, 16, 17, 4095, 4097)
P, R, S = Partial(), Replicate(), Shard
_held: list[Communicator] = []


def connected(world_size: int, timeout: float = 20.0) -> Communicator:
    members = members_of(None, tuple(range(world_size)), 20.0)
    found = connect(members, "test", timeout=timeout)
    assert isinstance(found, Communicator), found
    # Operators find it by name, and only while it is referenced.
    _held.append(found)
    return found


def repeat(times: int, d: DTensor) -> None:
    for _ in range(times):
        d.full_tensor()


@pytest.mark.parametrize("world_size", [2, 3, 5, full(4), full(6), full(9), full(16)])
def test_golden_vectors_and_sizes_match(world_size: int) -> None:
    """Under ``rank`` a left fold over the ranks, for any number of elements."""

    def ranks(rank: int) -> list[str]:
        connected(world_size)
        wrong = wrong_sizes(rank, world_size, "cpu", NUMELS, specials=True)
        return wrong + wrong_golden(rank, world_size, "cpu")

    assert run_ranks(ranks, world_size) == [[]] * world_size


def test_every_dtype_operation_contract_offset_and_stride_matches() -> None:
    """Every dtype, operation, contract, offset and stride."""
    # Reduced by the definition once, for all ranks.
    cases = []
    for dtype in (*FLOATS, *INTEGERS):
        leaves = draw_leaves(6, 517, dtype, specials=True)
        for op, contract in itertools.product(OPS, CONTRACTS):
            if op == "avg" and dtype in INTEGERS:
                continue
            how: dict[str, Any] = {"contract": contract, "divisor": 6 if op == "avg" else None}
            cases.append((leaves, op, how, reduce_leaves(leaves, op, (2, 3), **how)))  # type: ignore[arg-type]

    def ranks(rank: int) -> None:
        connected(6)
        for leaves, op, how, expected in cases:
            for path in PATHS:
                found = reduce_peers(leaves[rank], (2, 3), path, op=op, **how)
                assert_bitwise_equal(found, expected, f"{op} {found.dtype} {how} {path}")
        leaves = draw_leaves(6, 600, specials=True)
        expected = reduce_leaves(leaves, "sum", (6,))
        for offset, path in itertools.product(range(16), PATHS):
            assert_bitwise_equal(reduce_peers(at_byte(leaves[rank], offset), (6,), path), expected)
        strided = leaves[rank].view(20, 30).t()
        for path in PATHS:
            found = reduce_peers(strided, (6,), path)
            assert found.is_contiguous()
            assert_bitwise_equal(found, expected.view(20, 30).t().contiguous())
            same = strided.clone(memory_format=torch.preserve_format)
            torch.ops.meshplan.peer_reduce_(
                same, "sum", [6], "tree", "wide", "once", None, path, "test"
            )
            assert same.stride() == strided.stride()
            assert_bitwise_equal(same.contiguous(), found)

    run_ranks(ranks, 6)


def test_size_never_changes_a_bit() -> None:
    """Across every switch point; and a slice alone is that slice of the whole."""

    def ranks(rank: int) -> None:
        limit = connected(3).one_shot_bytes // 4
        tile = kernel.region_bytes(3) // 2 // 6 // 4
        for numel in (limit - 1, limit, limit + 1, 3 * tile - 1, 3 * tile + 1, 20 * tile + 5):
            leaves = draw_leaves(3, numel)
            whole = reduce_leaves(leaves, "sum", (3,))
            for path in ("auto", *PATHS):
                assert_bitwise_equal(reduce_peers(leaves[rank], (3,), path), whole)
            for start, stop in ((0, 1), (1, numel // 2), (numel // 3, numel)):
                part = reduce_peers(leaves[rank][start:stop], (3,), "auto")
                assert_bitwise_equal(part, whole[start:stop])
            rows = torch.stack(leaves)[:, : numel // 3 * 3].view(3, 3, -1)
            found = reduce_peers(rows[rank].view(-1), (3,), "leaves", parts=(numel // 3,) * 3)
            assert_bitwise_equal(found, rows[:, rank].reshape(-1), f"leaves of {numel}")

    run_ranks(ranks, 3)


def test_compiled_and_eager_ranks_reduce_together() -> None:
    """The operator chooses when it runs, so ranks may compile different parts of a program."""

    def ranks(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (3,))
        leaves = draw_leaves(3, 70_000)
        expected = reduce_leaves(leaves, "sum", (3,))
        graphs: list[str] = []

        def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph.print_readable(print_output=False))
            return graph

        def whole(x: Tensor) -> Tensor:
            return torch.ops.meshplan.peer_reduce(
                x, [], "sum", [3], "tree", "wide", "once", None, "auto", "test"
            )

        del mesh
        connected(3)
        function = torch.compile(whole, backend=keep, fullgraph=True) if rank else whole
        for count in (70_000, 100):
            found = function(leaves[rank][:count])
            assert_bitwise_equal(found, expected[:count])
        return graphs

    warm_compiler()
    graphs = run_ranks(ranks, 3)
    assert all("meshplan.peer_reduce" in text for text in graphs[1] + graphs[2])
    assert graphs[0] == []


@pytest.mark.parametrize(
    ("path", "why"),
    [("one_shot", "late"), ("two_shot", "differs"), ("scatter", "late"), ("leaves", "differs")],
)
def test_failed_call_leaves_poison(path: str, why: str) -> None:
    """Every byte, on every rank, also of the one that comes when the others have given up."""

    def ranks(rank: int) -> bool:
        peers = connected(3, timeout=1.0 if why == "late" else 60.0)
        # Several steps.
        numel = 3 * kernel.region_bytes(3) // 4
        here = torch.ones(numel, dtype=torch.int32)
        parts = () if path in PATHS else (numel // 3,) * 3
        out = here[: numel // 3].clone() if path == "scatter" else here
        odd = why == "differs" and rank == 1
        how = Arithmetic("max" if odd else "sum", (3,), "tree", "wide", "once", None)
        if why == "late" and rank == 1:
            wait_for("the error", 2)
        call = peers.prepare(CallKey(path, tuple(here.shape), parts, here.dtype, how))
        with pytest.raises(PeerTimeoutError if why == "late" else SignatureMismatchError):
            peers.run(call, here, out)
        arrive("the error")
        return bool((out.view(torch.int32) == -1).all())

    assert run_ranks(ranks, 3) == [True] * 3


def test_failed_in_place_call_leaves_poison_in_strided_tensors() -> None:
    def ranks(rank: int) -> bool:
        connected(2, timeout=1.0)
        if rank == 1:
            wait_for("the error", 1)
        strided = torch.ones(40, 30).t()
        with pytest.raises(PeerTimeoutError):
            torch.ops.meshplan.peer_reduce_(
                strided, "sum", [2], "tree", "wide", "once", None, "auto", "test"
            )
        arrive("the error")
        return bool(strided.isnan().all())

    assert run_ranks(ranks, 2) == [True, True]


class TestFaults(TestCase):
    @pytest.mark.full
    def test_absent_rank_is_named(self) -> None:
        def ranks(rank: int) -> str:
            mesh = init_device_mesh("cpu", (4,))
            leaves = draw_leaves(4, 1000)
            d = DTensor.from_local(leaves[rank], mesh, (P,), run_check=False)
            waits, call = [], _missing.roll_call

            def roll_call(members: Any, *given: Any) -> Any:
                waits.append(members.wait)
                return call(members, *given)

            _missing.roll_call = roll_call  # type: ignore[assignment]
            with meshplan.installed():
                d.full_tensor()
                started = time.monotonic()
                if rank == 2:
                    wait_for("the error", 3)
                    message = ""
                else:
                    with pytest.raises(PeerTimeoutError) as caught:
                        d.full_tensor()
                    assert (caught.value.rank, caught.value.block, caught.value.phase) == (2, 0, 0)
                    message = str(caught.value)
                    assert time.monotonic() - started > 3.5
                    # Both waits together: at most an eighth longer than the timeout.
                    assert 0.5 <= waits[0] <= 0.9
                    arrive("the error")
            dist.barrier()
            # The one that was away fails in its next reduction, the others have stopped.
            with meshplan.installed():
                late = r"rank 2 \(this one\) did not reach block .* within 3\.6 s, and the others gave up"
                error, text = (
                    (PeerTimeoutError, late) if rank == 2 else (GroupStateError, "stopped")
                )
                with pytest.raises(error, match=text):
                    d.full_tensor()
                dist.barrier()
                meshplan.shutdown()
                assert_bitwise_equal(d.full_tensor(), reduce_leaves(leaves, "sum", (4,)))
            return re.sub(r"waited \d+\.\d s", "waited N s", message)

        found = run_ranks(ranks, 4, collective_timeout=4.0)
        assert found == [found[0], found[0], "", found[0]]
        self.assertExpectedInline(
            found[0],
            """MP702: rank 2 did not reach block 0, phase 0 (summands) of a reduction over ranks 0, 1, 2, 3 within 3.6 s: float32[1000] for all_reduce sum over 4 ranks, contract v1/tree/wide/once, path one_shot; look for a rank that died or took another branch. Call meshplan.shutdown on every rank, and these ranks reconnect. This rank waited N s""",
        )

    def test_different_arguments_are_named(self) -> None:
        """A kernel's arguments are checked on every rank."""

        def ranks(rank: int) -> list[str]:
            connected(3)
            messages = []
            odd = rank == 1
            for tensor, more in (
                (torch.ones(1001 if odd else 1000), {}),
                (torch.ones(8, dtype=torch.int32 if odd else torch.float32), {}),
                (torch.ones(8), {"op": "max" if odd else "sum"}),
                (torch.ones(8), {"contract": Contract(order="rank" if odd else "tree")}),
            ):
                call = functools.partial(reduce_peers, tensor, (3,), "two_shot", **more)
                messages.append(refusal(SignatureMismatchError, call))
                with pytest.raises(GroupStateError, match="reconnect"):
                    call()
                connected(3)
            # The same tree: axes of size 1 are nothing.
            found = reduce_peers(torch.ones(8), (3, 1) if odd else (3,), "auto")
            assert_bitwise_equal(found, torch.full((8,), 3.0))
            return messages

        found = run_ranks(ranks, 3)
        self.assertExpectedInline(
            "\n".join(found[0]),
            """\
MP703: rank 1 called a reduction over ranks 0, 1, 2 with float32[1001] for all_reduce sum over 3 ranks, contract v1/tree/wide/once, path two_shot, this rank 0 with float32[1000] for all_reduce sum over 3 ranks, contract v1/tree/wide/once, path two_shot. Different: shape [1001] (rank 1), [1000] (rank 0). Nothing was reduced: every rank must pass the same shape, dtype, operation and contract
MP703: rank 1 called a reduction over ranks 0, 1, 2 with int32[8] for all_reduce sum over 3 ranks, contract v1/tree/wide/once, path two_shot, this rank 0 with float32[8] for all_reduce sum over 3 ranks, contract v1/tree/wide/once, path two_shot. Different: dtype int32 (rank 1), float32 (rank 0). Nothing was reduced: every rank must pass the same shape, dtype, operation and contract
MP703: rank 1 called a reduction over ranks 0, 1, 2 with float32[8] for all_reduce max over 3 ranks, contract v1/tree/wide/once, path two_shot, this rank 0 with float32[8] for all_reduce sum over 3 ranks, contract v1/tree/wide/once, path two_shot. Different: op max (rank 1), sum (rank 0). Nothing was reduced: every rank must pass the same shape, dtype, operation and contract
MP703: rank 1 called a reduction over ranks 0, 1, 2 with float32[8] for all_reduce sum over 3 ranks, contract v1/rank/wide/once, path two_shot, this rank 0 with float32[8] for all_reduce sum over 3 ranks, contract v1/tree/wide/once, path two_shot. Different: contract v1/rank/wide/once (rank 1), v1/tree/wide/once (rank 0). Nothing was reduced: every rank must pass the same shape, dtype, operation and contract""",
        )
        self.assertExpectedInline(
            found[1][0],
            """MP703: rank 0 called a reduction over ranks 0, 1, 2 with float32[1000] for all_reduce sum over 3 ranks, contract v1/tree/wide/once, path two_shot, this rank 1 with float32[1001] for all_reduce sum over 3 ranks, contract v1/tree/wide/once, path two_shot. Different: shape [1000] (rank 0), [1001] (rank 1). Nothing was reduced: every rank must pass the same shape, dtype, operation and contract""",
        )

    @pytest.mark.full
    def test_ranks_failed_in_different_calls_stay_failed(self) -> None:
        """One is done just before the others give up, and so is one reduction ahead of them."""

        def ranks(rank: int) -> None:
            mesh = init_device_mesh("cpu", (2,))
            d = DTensor.from_local(torch.full((8,), 1.0 + rank), mesh, (P,), run_check=False)
            with meshplan.installed():
                d.full_tensor()
                if rank == 1:
                    (peers,) = _communicators.values()
                    peers._run = lambda call, message, out, _: out.fill_(3.0)  # type: ignore[method-assign]
                    d.full_tensor()
                    del peers._run
                    wait_for("the error", 1)
                with pytest.raises(PeerTimeoutError):
                    d.full_tensor()
                arrive("the error")
                with pytest.raises(GroupStateError, match="has stopped"):
                    d.full_tensor()
                meshplan.shutdown()
                dist.barrier()
                assert_bitwise_equal(d.full_tensor(), torch.full((8,), 3.0))

        run_ranks(ranks, 2, collective_timeout=8.0)

    def test_absence_while_mapping_is_named(self) -> None:
        def ranks(rank: int) -> str:
            if rank == 1:
                wait_for("the error", 2)
                return ""
            mesh = init_device_mesh("cpu", (3,))
            d = DTensor.from_local(torch.ones(4), mesh, (P,), run_check=False)
            arrive("the call")
            wait_for("the call", 2)
            with meshplan.installed(timeout=3.0), pytest.raises(GroupAgreementError) as caught:
                d.full_tensor()
            arrive("the error")
            return ",".join(map(str, caught.value.missing))

        assert run_ranks(ranks, 3) == ["1", "", "1"]


class TestWrongCalls(TestCase):
    def test_invalid_calls_are_refused_before_any_write(self) -> None:
        def ranks(rank: int) -> list[str]:
            connected(2)
            ones = torch.ones(6)
            messages = []
            for tensor, more in (
                (torch.ones(6, dtype=torch.complex64), {}),
                (torch.ones(6, dtype=torch.bool), {}),
                (ones.to_sparse(), {}),
                (torch.ones(6, dtype=torch.int32), {"op": "avg"}),
                (ones, {"op": "mean"}),
                (ones, {"shape": (3,)}),
                (ones, {"op": "avg", "divisor": 0}),
                (ones, {"parts": (3, 2)}),
                (ones, {"mode": "three_shot"}),
            ):
                call = functools.partial(reduce_peers, tensor, shape=(2,), mode="auto")
                messages.append(refusal((TypeError, ValueError), call, **more))
            # All is as it was.
            assert reduce_peers(ones, (2,), "auto").tolist() == [2.0] * 6
            assert reduce_peers(ones, (2,), "auto", op="avg").tolist() == [1.0] * 6
            return messages

        self.assertExpectedInline(
            "\n".join(common_result(ranks, 2)),
            """\
MP412: torch.complex64 is outside the contract; convert to one of float32, bfloat16, float16, float64, int8, int16, int32, int64, uint8
MP412: torch.bool is outside the contract; convert to one of float32, bfloat16, float16, float64, int8, int16, int32, int64, uint8
MP412: a tensor on torch.sparse_coo cannot be reduced through the memory that these ranks share; pass a strided tensor on the device of their group, or path='exchange'
MP412: avg of torch.int32 has no exact result, the contract defines avg for floats only; reduce with 'sum' and divide as you need, or convert to a floating dtype first
MP411: no reduction 'mean' in the contract; use one of sum, avg, max, min, product
MP411: axes of [3] are not 2 ranks; pass axis sizes whose product is 2
MP411: no average over 0 leaves; pass a divisor above 0
MP411: parts of [3, 2] elements do not split a message of 6 among 2 ranks; pass one part for each rank
MP402: no mode 'three_shot'; use one of 'auto', 'one_shot', 'two_shot'""",
        )

    def test_groups_are_logged_once(self) -> None:
        """Once for each group."""

        def ranks(rank: int) -> list[str]:
            lines: list[str] = []

            class Keep(logging.Handler):
                def emit(self, record: logging.LogRecord) -> None:
                    # Not what is reduced, nor where the ranks sit, which one rank tells.
                    if record.getMessage().startswith("[meshplan] default group"):
                        lines.append(record.getMessage())

            logger = logging.getLogger("meshplan")
            logger.setLevel(logging.INFO)
            logger.addHandler(Keep())
            mesh = init_device_mesh("cpu", (2,))
            d = DTensor.from_local(torch.ones(4), mesh, (P,), run_check=False)
            with meshplan.installed():
                for _ in range(3):
                    d.full_tensor()
                meshplan.shutdown()
                _connect.host = lambda: f"host {rank}"
                d.full_tensor()
            return lines

        self.assertExpectedInline(
            "\n".join(common_result(ranks, 2)),
            """\
[meshplan] default group 0 of 2 ranks: 0, 1: shared memory of 2 ranks, one_shot up to 32768 bytes, two_shot above
[meshplan] default group 0 of 2 ranks: 0, 1: path exchange, no peers: its ranks are on several hosts, or in containers that cannot see each other""",
        )


def test_killed_rank_leaves_nothing_behind() -> None:
    """The others name it; no file, no mapping, no descriptor stays."""

    def ranks(rank: int) -> str:
        mesh = init_device_mesh("cpu", (3,))
        d = DTensor.from_local(torch.ones(1 << 20), mesh, (P,), run_check=False)
        with meshplan.installed():
            d.full_tensor()
            if rank == 1:
                # Dies in the middle of a reduction, or between two.
                threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            with pytest.raises(
                PeerTimeoutError, match="rank 1 has ended and did not reach block"
            ) as caught:
                repeat(100_000, d)
            assert caught.value.rank == 1
            meshplan.shutdown()
        maps = Path("/proc/self/maps").read_text()
        assert "memfd:meshplan" not in maps
        assert not any("memfd:meshplan" in link for link in open_links())
        return str(caught.value.rank)

    with nothing_stays_in_shared_memory(), pytest.raises(AssertionError) as caught:
        # Longer than the test may take: what is seen does not come from a timeout.
        run_ranks(ranks, 3, collective_timeout=3600.0)
    message = str(caught.value)
    assert "rank 1 died" in message
    assert "raised" not in message.replace("rank 1", "")


def test_memory_is_released() -> None:
    """By shutdown, with the default group, and never twice."""

    def mapped() -> int:
        """Mappings, and descriptors of the processes at the other ends."""
        watched = sum("pidfd" in link for link in open_links())
        return Path("/proc/self/maps").read_text().count("memfd:meshplan") + 10 * watched

    def ranks(rank: int) -> list[int]:
        mesh = init_device_mesh("cpu", (3,))
        d = DTensor.from_local(torch.ones(8), mesh, (P,), run_check=False)
        counts = [mapped()]
        with meshplan.installed():
            for _ in range(3):
                d.full_tensor()
            counts.append(mapped())
            meshplan.shutdown()
            meshplan.shutdown()
            counts.append(mapped())
            d.full_tensor()
            counts.append(mapped())
        meshplan.shutdown()
        return [*counts, mapped()]

    assert run_ranks(ranks, 3) == [[0, 31, 0, 31, 0]] * 3


def test_fork_may_not_use_shared_memory() -> None:
    def ranks(rank: int) -> int:
        connected(2)
        child = os.fork()
        if child == 0:
            try:
                reduce_peers(torch.ones(4), (2,), "auto")
            except GroupStateError as error:
                os._exit(0 if "is a fork" in str(error) else 2)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        reduce_peers(torch.ones(4), (2,), "auto")
        return os.waitstatus_to_exitcode(status)

    assert run_ranks(ranks, 2) == [0, 0]


def test_threads_serialize_on_one_communicator() -> None:
    """Two threads of each rank on one communicator: never a wrong bit, whatever is in flight."""

    def ranks(rank: int) -> int:
        connected(2)
        right = [0, 0]

        def work(number: int) -> None:
            for _ in range(200):
                found = reduce_peers(torch.full((3000,), float(rank + 1)), (2,), "auto")
                right[number] += int((found == 3).all())

        run_in_threads(*(functools.partial(work, n) for n in range(2)))
        return sum(right)

    assert run_ranks(ranks, 2) == [400, 400]
