"""Tests that need a GPU. Run by ``make test-gpu``; skipped where there is none.

Several processes share one GPU, whose contexts then take turns: that shows bits, votes and lifetimes,
not speed. Nothing here shows what links between GPUs reorder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshplan import kernel
from meshplan.definition import reduce_leaves
from meshplan.errors import PeerTimeoutError
from meshplan.kernel import DeviceCommunicator, Ipc, Symmetric, Transport, check, device_of
from meshplan.kernel._device_code import sources
from meshplan.kernel._driver import loaded_files
from tests.devices import (
    Swapped,
    connect_ranks,
    have_equal_bits,
    reduce_peers,
    wrong_arithmetic,
    wrong_golden,
    wrong_offsets,
    wrong_sizes,
)
from tests.inputs import draw_leaves
from tests.processes import run_ranks


@cache
def gpus() -> int:
    """The number of GPUs, without starting CUDA in a process that will fork. Raises
    CalledProcessError, whose output has the reason, if torch fails.
    """
    if not torch.backends.cuda.is_built():
        return 0
    ask = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run(
        [sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, timeout=300, check=True
    )
    return int(done.stdout.split()[-1])


NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpus() == 0, reason="no GPU"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    # A GPU without it would skip everything that is tested here.
    assert kernel.available(), f"{kernel.why_not()}; or python tools/build_in_place.py"


def ready(rank: int) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())


def connect(
    rank: int, world_size: int, *transports: Transport, timeout: float = 60.0
) -> DeviceCommunicator:
    """Of this rank, over IPC if no transports are given."""
    ready(rank)
    found = connect_ranks(
        None, range(world_size), transports=transports or (Ipc(),), timeout=timeout
    )
    assert isinstance(found, DeviceCommunicator), found
    return found


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All ranks in one launch, compiled for this GPU."""
    if NVCC is None:
        pytest.skip("no nvcc")
    folder = tmp_path_factory.mktemp("fused")
    cpu = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-c", str(sources() / "cpu.cpp")]
    subprocess.run([*cpu, "-o", str(folder / "cpu.o")], check=True, timeout=300)
    program = folder / "fused_ranks"
    main = Path(__file__).parent / "native" / "fused_ranks.cu"
    command = [NVCC, "-std=c++17", "-O3", "-fmad=false", "-arch=native", f"-I{sources()}"]
    command += [str(main), str(folder / "cpu.o"), "-o", str(program)]
    subprocess.run(command, check=True, timeout=300)
    return program


def test_fused_ranks_match_the_definition(fused: Path) -> None:
    done = subprocess.run([fused, "check"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(fused: Path, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", str(fused), "check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this machine")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_processes_reduce_over_ipc(world_size: int) -> None:
    def ranks(rank: int) -> list[str]:
        found = connect(rank, world_size)
        wrong = wrong_golden(rank, world_size, "cuda")
        wrong += wrong_sizes(rank, world_size, "cuda", (0, 1, 3, 8, 17, 4095, 4097, (1 << 20) + 3))
        torch.cuda.synchronize()
        check()
        found.close()
        return wrong

    assert run_ranks(ranks, world_size, timeout=500) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_offset_has_the_same_bits(world_size: int) -> None:
    """A GPU stops at an access that is not aligned."""

    def ranks(rank: int) -> list[str]:
        connect(rank, world_size)
        wrong = wrong_offsets(rank, world_size, "cuda", (37, 40_011))
        torch.cuda.synchronize()
        check()
        return wrong

    assert run_ranks(ranks, world_size, timeout=500) == [[]] * world_size


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_every_kernel_matches_the_definition(shape: tuple[int, ...]) -> None:
    world_size = 3 if shape == (3,) else 4

    def ranks(rank: int) -> list[str]:
        connect(rank, world_size)
        return wrong_arithmetic(rank, shape, "cuda", 4099)

    assert run_ranks(ranks, world_size, timeout=500) == [[]] * world_size


def test_swapped_mappings_are_found() -> None:
    """Two addresses of rank 0 are exchanged; all ranks then take the next transport."""

    def ranks(rank: int) -> tuple[str, list[str]]:
        ready(rank)
        said = str(connect_ranks(None, range(3), transports=(Swapped(),), timeout=30.0))
        connect(rank, 3, Swapped(), Ipc())
        wrong = wrong_sizes(rank, 3, "cuda", (17, 10_001))
        torch.cuda.synchronize()
        check()
        return said, wrong

    found = run_ranks(ranks, 3, timeout=300)
    assert [wrong for _, wrong in found] == [[]] * 3
    (said,) = {said for said, _ in found}
    assert said.startswith(("swapped: rank 1: what rank 0 wrote", "swapped: rank 2: what rank 0"))


def test_the_driver_is_the_one_that_torch_has_loaded() -> None:
    def ranks(rank: int) -> bool:
        ready(rank)
        torch.ones(1, device="cuda")
        library = device_of(torch.cuda.current_device()).driver.library
        return [library] == loaded_files(library.split("/")[-1].split(".so")[0] + ".so")

    assert run_ranks(ranks, 1, init=False) == [True]


def test_symmetric_memory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    # Several ranks on one GPU, which torch else refuses.
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")

    def ranks(rank: int) -> list[str]:
        connect(rank, 2, Symmetric(dist.group.WORLD.group_name))
        return wrong_golden(rank, 2, "cuda") + wrong_sizes(rank, 2, "cuda", (1, 17, 100_003))

    assert run_ranks(ranks, 2, timeout=300) == [[]] * 2


def test_a_graph_is_captured_and_replayed_between_eager_calls() -> None:
    def ranks(rank: int) -> list[bool]:
        connect(rank, 2)
        static = torch.zeros(50_001, device="cuda")
        reduce_peers(static, (2,), "two_shot")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = reduce_peers(static, (2,), "two_shot")
        right = []
        for turn in range(7):
            leaves = draw_leaves(2, 50_001, seed=turn)
            expected = reduce_leaves(leaves, "sum", (2,))
            static.copy_(leaves[rank])
            graph.replay()
            right.append(have_equal_bits(captured, expected))
            right.append(
                have_equal_bits(reduce_peers(leaves[rank].cuda(), (2,), "one_shot"), expected)
            )
        torch.cuda.synchronize()
        check()
        return right

    assert run_ranks(ranks, 2, timeout=300) == [[True] * 14] * 2


def test_two_streams_of_one_rank_do_not_race() -> None:
    def ranks(rank: int) -> list[bool]:
        connect(rank, 2)
        streams = [torch.cuda.Stream() for _ in range(3)]
        leaves = draw_leaves(2, 200_003)
        mine = leaves[rank].cuda()
        torch.cuda.synchronize()
        results = []
        for turn in range(30):
            with torch.cuda.stream(streams[turn % 3]):
                results.append(reduce_peers(mine, (2,), ("one_shot", "two_shot")[turn % 2]))
        torch.cuda.synchronize()
        check()
        expected = reduce_leaves(leaves, "sum", (2,))
        return [have_equal_bits(result, expected) for result in results]

    assert run_ranks(ranks, 2, timeout=300) == [[True] * 30] * 2


@pytest.mark.parametrize("program", ["forked", "eager after", "replay after", "two graphs"])
def test_streams_and_graphs_are_in_one_order(program: str) -> None:
    """Calls of one communicator, each of other numbers; inputs stay, so that replays repeat bits."""

    def ranks(rank: int) -> list[bool]:
        connect(rank, 2)
        one, two, three = (torch.cuda.Stream() for _ in range(3))
        started: list[tuple[torch.Tensor, torch.Tensor]] = []
        inputs = []
        for seed in range(12):
            numel = (50, 20_001, 200_003)[seed % 3]
            leaves = draw_leaves(2, numel, seed=seed)
            inputs.append((leaves[rank].cuda(), reduce_leaves(leaves, "sum", (2,))))

        def call(stream: torch.cuda.Stream) -> None:
            mine, expected = inputs[len(started) % len(inputs)]
            with torch.cuda.stream(stream):
                mode = ("one_shot", "two_shot")[len(started) % 2]
                started.append((reduce_peers(mine, (2,), mode), expected))

        def captured(forked: bool) -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                origin = torch.cuda.current_stream()
                side = three if forked else origin
                side.wait_stream(origin)
                for stream in (origin, side, side, origin, side):
                    call(stream)
                origin.wait_stream(side)
            return graph

        def replay(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
            with torch.cuda.stream(stream):
                graph.replay()

        call(one)
        torch.cuda.synchronize()
        graph = captured(forked=program == "forked")
        second = captured(forked=False) if program == "two graphs" else None
        for _ in range(10):
            if program == "replay after":
                call(two)
            replay(graph, one)
            if program == "eager after":
                call(two)
                call(one)
            if second is not None:
                replay(second, two)
        torch.cuda.synchronize()
        check()
        return [have_equal_bits(result, expected) for result, expected in started]

    first, other = run_ranks(ranks, 2, timeout=300)
    assert first
    assert all(first)
    assert all(other)


@pytest.mark.parametrize("world_size", [2, 3])
def test_queued_calls_after_a_failure_are_errors(world_size: int) -> None:
    """The hosts run ahead; one rank comes when the others have given up, and may be told at once."""

    def ranks(rank: int) -> list[str]:
        connect(rank, world_size, timeout=3.0)
        calls = []
        for seed in range(8):
            leaves = draw_leaves(world_size, 100_003, seed=seed)
            calls.append((leaves[rank].cuda(), reduce_leaves(leaves, "sum", (world_size,))))
        # Kernels are loaded when they are first launched, which takes its time.
        for mode in ("one_shot", "two_shot"):
            reduce_peers(calls[0][0], (world_size,), mode)
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 1:
            time.sleep(9)
        results: list[torch.Tensor | None] = []
        for number, (mine, _) in enumerate(calls):
            mode = ("one_shot", "two_shot")[number % 2]
            try:
                results.append(reduce_peers(mine, (world_size,), mode))
            except PeerTimeoutError:
                results.append(None)
        torch.cuda.synchronize()
        with pytest.raises(PeerTimeoutError):
            check()
        said = []
        for result, (_, expected) in zip(results, calls, strict=True):
            if result is None:
                said.append("raised")
            elif bool(result.isnan().all()):
                said.append("poison")
            else:
                said.append("right" if have_equal_bits(result, expected) else "wrong")
        dist.barrier()
        return said

    said = run_ranks(ranks, world_size, timeout=120)
    # The others have queued all of it before they know.
    assert [said[rank] for rank in range(world_size) if rank != 1] == [["poison"] * 8] * (
        world_size - 1
    )
    assert set(said[1]) <= {"poison", "raised"}


def test_absent_rank_is_named() -> None:
    def ranks(rank: int) -> str:
        connect(rank, 3, timeout=3.0)
        ones = torch.ones(1000, device="cuda")
        reduce_peers(ones, (3,), "two_shot")
        torch.cuda.synchronize()
        if rank == 2:
            dist.barrier()
            return "absent"
        result = reduce_peers(ones, (3,), "two_shot")
        torch.cuda.synchronize()
        assert result.isnan().all()
        with pytest.raises(PeerTimeoutError) as caught:
            check()
        # The process stays usable.
        assert float(torch.ones(4, device="cuda").sum()) == 4
        dist.barrier()
        return f"rank {caught.value.rank}, phase {caught.value.phase}"

    assert run_ranks(ranks, 3, timeout=120) == ["rank 2, phase 0", "rank 2, phase 0", "absent"]


def test_kernels_compile_at_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that were installed: NVRTC's or nvcc's of this machine."""
    monkeypatch.setenv("MESHPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr("meshplan.kernel._device_code.prebuilt", lambda: None)

    def ranks(rank: int) -> list[str]:
        device_of.cache_clear()
        connect(rank, 2)
        return wrong_sizes(rank, 2, "cuda", (17, 10_001))

    assert run_ranks(ranks, 2, timeout=300) == [[]] * 2
    assert len(list(tmp_path.glob("*.image"))) == 1
