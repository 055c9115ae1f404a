"""An all-reduce under torchrun: this file is the test, and the worker that it starts.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/test_two_rank_smoke.py --help
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshplan import Contract, configure_deterministic_nccl_env, deterministic_all_reduce
from meshplan.testing import bits, order_sensitive, reference_reduce_tensors

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PATHS = ("native", "reference", "auto", "one_shot", "two_shot", "exchange", "halving")
# Relative and absolute; what has a contract has no tolerance, whatever its dtype.
TOLERANCES = {"fp32": (1e-6, 1e-6), "bf16": (8e-3, 8e-3), "fp16": (2e-3, 2e-3)}


def expected(path: str, op: str, leaves: list[Tensor]) -> Tensor:
    """By additions in float64, or by the oracle; in the order of the group's ranks."""
    if path == "native":
        total = sum(leaf.double() for leaf in leaves)
        assert isinstance(total, Tensor)
        total = total / len(leaves) if op == "avg" else total
        return total.to(leaves[0].dtype)
    return reference_reduce_tensors(leaves, op, (len(leaves),), Contract())  # type: ignore[arg-type]


def leaf_of(rank: int, world_size: int, numel: int, dtype: str, path: str) -> Tensor:
    if path == "native":
        # Values whose sum no order changes by more than the tolerance.
        return torch.linspace(-1, 1, numel).mul(rank + 1).to(DTYPES[dtype])
    return order_sensitive(numel, rank=rank, world_size=world_size, dtype=DTYPES[dtype])


def record_of(arguments: argparse.Namespace, dtype: str, device: str) -> dict[str, Any]:
    """Reduce, compare with the iteration before and with the expected bits, on every rank."""
    world = dist.get_world_size()
    group = dist.new_group(list(reversed(range(world)))) if arguments.reverse_group else None
    path, op = arguments.path, arguments.op
    how: dict[str, Any] = {"path": path, "op": op, "group": group}
    members = [dist.get_global_rank(group, i) if group else i for i in range(world)]
    leaves = [leaf_of(r, world, arguments.numel, dtype, path) for r in members]
    wanted = expected(path, op, leaves)
    exact = path != "native"
    rtol, atol = (0.0, 0.0) if exact or arguments.no_tolerance else TOLERANCES[dtype]
    mine = leaves[members.index(dist.get_rank())]
    previous, repeats, found = None, True, wanted
    for _ in range(arguments.iterations):
        tensor = mine.clone().to(device)
        assert deterministic_all_reduce(tensor, **how) is tensor
        found = tensor.cpu()
        repeats = repeats and (previous is None or torch.equal(bits(found), bits(previous)))
        previous = found
    apart = (found.double() - wanted.double()).abs()
    mismatches = (
        int((bits(found) != bits(wanted)).sum())
        if exact and rtol == atol == 0
        else int((apart > atol + rtol * wanted.double().abs()).sum())
    )
    facts = {
        "bitwise_equal": torch.equal(bits(found), bits(wanted)),
        "mismatch_count": mismatches,
        "repeats_equal": repeats,
    }
    of_all: list[dict[str, Any]] = [{}] * world
    dist.all_gather_object(of_all, facts)
    passed = all(one["mismatch_count"] == 0 and one["repeats_equal"] for one in of_all)
    return {
        "status": "pass" if passed else "fail",
        "backend": dist.get_backend(),
        "path": path,
        "op": op,
        "dtype": dtype,
        "device": device,
        "world_size": world,
        "iterations": arguments.iterations,
        "rtol": rtol,
        "atol": atol,
        "bitwise_equal": all(one["bitwise_equal"] for one in of_all),
        "repeats_equal": all(one["repeats_equal"] for one in of_all),
        "mismatch_count": sum(one["mismatch_count"] for one in of_all),
    }


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of the worker."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--path", choices=PATHS, default="reference")
    parser.add_argument("--op", choices=["sum", "avg"], default="sum")
    parser.add_argument("--dtype", choices=[*DTYPES, "all"], default="fp32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--numel", type=int, default=257)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--configure-nccl-env", action="store_true")
    parser.add_argument("--reverse-group", action="store_true")
    parser.add_argument("--no-tolerance", action="store_true")
    return parser.parse_args(words)


def main() -> int:
    """What every rank runs. The exit status is 1 if any rank found a difference."""
    arguments = parsed()
    if arguments.configure_nccl_env:
        configure_deterministic_nccl_env()
    device = arguments.device
    if device == "auto":
        device = "cuda" if arguments.backend == "nccl" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(arguments.backend)
    try:
        dtypes = DTYPES if arguments.dtype == "all" else (arguments.dtype,)
        records = [record_of(arguments, dtype, device) for dtype in dtypes]
        if dist.get_rank() == 0:
            for one in records:
                sys.stdout.write(json.dumps(one, sort_keys=True) + "\n")
        return int(any(one["status"] != "pass" for one in records))
    finally:
        dist.destroy_process_group()


def launched(*words: str, ranks: int = 2) -> tuple[int, list[dict[str, Any]], str]:
    """The exit status, the records of rank 0, and everything that was said."""
    root = Path(__file__).parents[1]
    # A copy: neither this process nor the tests after it see what the workers are given.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NCCL_")}
    environment |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), __file__, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, records, done.stdout + done.stderr


pytestmark = [pytest.mark.full, pytest.mark.processes]


@pytest.mark.parametrize(
    ("words", "bitwise"),
    [
        (["--path", "reference"], True),
        (["--path", "auto", "--op", "avg", "--reverse-group"], True),
        (["--path", "native", "--configure-nccl-env"], False),
    ],
)
def test_smoke_test_passes_under_torchrun(words: list[str], bitwise: bool) -> None:
    """A reversed group, flags, repeats, tolerances and the record."""
    before = dict(os.environ)
    code, records, said = launched("--dtype", "all", *words)
    assert code == 0, said
    assert [one["dtype"] for one in records] == list(DTYPES)
    for one in records:
        assert one["status"] == "pass"
        assert one["world_size"] == 2
        assert one["iterations"] == 3
        assert one["mismatch_count"] == 0
        assert one["repeats_equal"] is True
        assert (one["rtol"], one["atol"]) == ((0, 0) if bitwise else TOLERANCES[one["dtype"]])
        if bitwise:
            assert one["bitwise_equal"] is True
    assert dict(os.environ) == before


def test_wrong_result_fails() -> None:
    """The worker says so, and its exit status does: three ranks, whose order shows."""
    words = ("--path", "native", "--no-tolerance", "--numel", "4099")
    code, records, said = launched(*words, "--op", "avg", ranks=3)
    assert code != 0, said
    assert records[0]["status"] == "fail"
    assert records[0]["mismatch_count"] > 0


def test_gpu_recipe_is_accepted() -> None:
    page = Path(__file__).parents[1] / "docs" / "howto" / "deterministic-collectives.md"
    command = page.read_text().split(f"tests/{Path(__file__).name} ")[1].split("\n\n")[0]
    arguments = parsed(command.replace("\\", " ").split())
    assert (arguments.backend, arguments.configure_nccl_env) == ("nccl", True)


if __name__ == "__main__":
    sys.exit(main())
