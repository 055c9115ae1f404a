"""``examples/elastic.py``: the bits of all steps do not depend on the ranks that computed them."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshplan.elastic import GradientAccumulator
from meshplan.testing import assert_bitwise_equal, bits
from tests.processes import run_ranks
from tests.programs import load_script

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "elastic.py"
HOURS = 6 * 3600.0
# A node whose heartbeats a busy machine delays must not be a lost one.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=60,read_timeout=900,join_timeout=3600"
# All five nodes begin, however late one is; later none waits for the lost one.
AGENT = """
import sys
from datetime import timedelta
from pathlib import Path
from torch.distributed import run
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout
lost = Path(sys.argv.pop(1))
RendezvousTimeout.last_call = property(lambda _: timedelta(seconds=5 if lost.exists() else 3600))
run.main()
"""


def builder(module: ModuleType, kind: str) -> Callable[..., tuple[nn.Module, Any]]:
    """The model of the example over DDP, or with four experts of which a micro-batch uses one."""

    class Experts(module.ByteTransformer):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))
            self.head.register_forward_hook(self.refine)

        def forward(self, tokens: Tensor) -> Tensor:
            self.expert = self.experts[int(tokens.sum()) % 4]
            loss: Tensor = super().forward(tokens)
            return loss

        def refine(self, head: nn.Module, arguments: Any, logits: Tensor) -> Tensor:
            return logits + self.expert(logits)

    def build(mesh: DeviceMesh, compute: torch.dtype) -> tuple[nn.Module, Any]:
        torch.manual_seed(module.SEED)
        model: Any = Experts() if "experts" in kind else module.ByteTransformer()
        if "DDP" in kind:
            forward = model.forward
            model.forward = torch.autocast("cpu", compute, compute is not torch.float32)(forward)
            model = DistributedDataParallel(model, find_unused_parameters="experts" in kind)
        else:
            policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh, mp_policy=policy)
        return model, torch.optim.AdamW(model.parameters(), lr=3e-3)

    return build


def train(
    folder: Path, schedule: str, *options: str, kind: str = "FSDP2"
) -> list[tuple[dict[str, Tensor], Any]]:
    """The whole state and the logged values of each step."""
    module = load_script(SCRIPT)
    if kind != "FSDP2":
        module.build = builder(module, kind)  # type: ignore[attr-defined]
    if "DDP" in kind:
        module.GradientAccumulator = lambda model, count, mesh, seed: GradientAccumulator(  # type: ignore[attr-defined]
            model, count, seed=seed
        )
    # Ranks write their shards, as gathers of all states take as long as the steps.
    make_digest = module.digest
    module.DTensor, module.digest = (), lambda *_: ""  # type: ignore[attr-defined]
    folder.mkdir()
    parsed = module.parse(["--schedule", schedule, "--folder", str(folder), *options])

    def run(rank: int, sizes: tuple[int, ...], until: int) -> None:
        def keep(step: int, state: dict[str, Any]) -> None:
            shards = {
                name: (
                    isinstance(one, DTensor),
                    one.to_local() if isinstance(one, DTensor) else one,
                )
                for name, one in state.items()
            }
            torch.save(shards, folder / f"{step}-{rank}.pt")

        module.train(parsed, sizes, until, keep)

    until, states = 0, []
    for sizes, steps in parsed.schedule:
        until += steps
        run_ranks(
            partial(run, sizes=sizes, until=until),
            math.prod(sizes),
            backend="gloo" if parsed.plain else "meshplan",
            # Of pytest alone: 15 minutes were 13 steps of 60 on a busy machine.
            timeout=HOURS,
            collective_timeout=HOURS,
        )
        states += [whole_state(folder, step, sizes) for step in range(until - steps + 1, until + 1)]
    log = json.loads((folder / "log.json").read_text())
    for step, (state, line) in enumerate(zip(states, log, strict=True), 1):
        line["digest"] = make_digest(state, log[:step])
    return [(state, values_of(line)) for state, line in zip(states, log, strict=True)]


def whole_state(folder: Path, step: int, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """What all ranks wrote after a step: of each replica the same."""
    ranks = [torch.load(folder / f"{step}-{rank}.pt") for rank in range(math.prod(sizes))]
    found: dict[str, Tensor] = {}
    for name, (sharded, _) in ranks[0].items():
        every = [one[name][1] for one in ranks]
        width = sizes[-1] if sharded else 1
        for first in range(0, len(every), width):
            whole = torch.cat(every[first : first + width]) if sharded else every[first]
            assert_bitwise_equal(whole, found.setdefault(name, whole), f"step {step}, {name}")
    return found


def values_of(line: dict[str, str]) -> tuple[str, str, str]:
    return line["loss"], line["norm"], line["digest"]


def assert_same_steps(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for step, (one, other) in enumerate(zip(found, wanted, strict=True), 1):
        assert one[1] == other[1], f"step {step}"
        assert one[0].keys() == other[0].keys()
        for name, tensor in one[0].items():
            assert_bitwise_equal(tensor, other[0][name], f"step {step}, {name}")


def share_of_difference(found: list[Any], wanted: list[Any]) -> float:
    """Elements of the last state with other bits."""
    differing = [bits(one) != bits(wanted[-1][0][name]) for name, one in found[-1][0].items()]
    return torch.cat([one.flatten() for one in differing]).float().mean().item()


@pytest.mark.full
def test_steps_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """With active clipping and dropout, through checkpoints."""
    options = ("--compute", "float32", "--micro-batches", "8")
    wanted = train(tmp_path / "whole", "8:5", *options)
    assert all(float.fromhex(norm) > 0.5 for _, (_, norm, _) in wanted)
    assert_same_steps(train(tmp_path / "parts", "8:1,7:1,5:1,3:1,1:1", *options), wanted)
    # In 16 bits the order of few summands hardly shows, and on some processors nowhere.
    plain = train(tmp_path / "plain", "8:5", *options, "--plain")
    parts = train(tmp_path / "plain parts", "8:1,7:1,5:1,3:1,1:1", *options, "--plain")
    assert share_of_difference(parts, plain) > 0.1


@pytest.mark.dist
@pytest.mark.timeout(HOURS)
@pytest.mark.parametrize(
    ("kind", "micro_batches", "compute"),
    [
        ("FSDP2", "16", "float32"),
        ("FSDP2", "24", "bfloat16"),
        ("FSDP2 and experts", "24", "float32"),
        ("DDP", "24", "float32"),
        ("DDP and experts", "16", "bfloat16"),
    ],
)
def test_sixty_steps_do_not_depend_on_the_number_of_ranks(
    tmp_path: Path, kind: str, micro_batches: str, compute: str
) -> None:
    """8 ranks throughout; 8, 7, 5, 3, 1, 6 and 8 at checkpoints, with HSDP meshes among them."""
    options = ("--compute", compute, "--micro-batches", micro_batches)
    wanted = train(tmp_path / "whole", "8:60", *options, kind=kind)
    assert all(float.fromhex(norm) > 0.5 for _, (_, norm, _) in wanted[:5])
    schedule = "2x4:10,7:10,5:10,3:5,1:5,2x3:10,8:10"
    assert_same_steps(train(tmp_path / "parts", schedule, *options, kind=kind), wanted)
    if kind == "FSDP2":
        schedule = "2x4:20,7x1:20,1x5:20"
        assert_same_steps(train(tmp_path / "other parts", schedule, *options), wanted)


def launch(
    folder: Path, node: int, port: int, steps: int, nodes: str, *options: str
) -> subprocess.Popen[bytes]:
    """The agent of a node with one rank."""
    command = [
        *(sys.executable, "-c", AGENT, str(folder / "lost"), "--nnodes", nodes),
        *("--nproc-per-node", "1", "--max-restarts", "9", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "elastic"),
        # The store is not on the node that is killed.
        *("--rdzv-conf", f"{RENDEZVOUS},is_host={int(node == 0)}"),
        *(str(SCRIPT), "--steps", str(steps), "--micro-batches", "8", "--folder", str(folder)),
        *("--timeout", "180"),
        *options,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Else gloo connects to addresses of ended processes (pytorch#135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with (folder / f"log{steps}-{node}").open("w") as out:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )


def run_nodes(folder: Path, steps: int, nodes: str, *options: str) -> list[int]:
    """Five nodes, of which the last one has the options; their exit codes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    agents = [launch(folder, node, port, steps, nodes, *options * (node == 4)) for node in range(5)]
    try:
        agents[-1].wait()
        (folder / "lost").touch()
        return [agent.wait() for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()


@pytest.mark.dist
@pytest.mark.timeout(HOURS)
def test_job_goes_on_with_four_ranks_of_five_after_one_is_killed(tmp_path: Path) -> None:
    """A node is killed in the middle of step 6; a later job has five again."""
    wanted = train(tmp_path / "whole", "5:10", "--micro-batches", "8")
    folder = tmp_path / "job"
    folder.mkdir()
    for steps, options, codes in (
        (8, ("4:5", "--lose", "6"), [0, 0, 0, 0, -9]),
        (10, ("5",), [0] * 5),
    ):
        found = run_nodes(folder, steps, *options)
        logs = [one.read_text() for one in sorted(folder.glob(f"log{steps}-*"))]
        assert found == codes, "\n".join(logs)
    log = json.loads((folder / "log.json").read_text())
    assert [line["ranks"] for line in log] == [5, 5, 5, 5, 4, 4, 4, 4, 5, 5]
    assert [values_of(line) for line in log] == [values for _, values in wanted]
    printed = "".join(one.read_text() for one in folder.glob("log10-*"))
    assert re.search(rf"digest {log[-1]['digest']}\s", printed)
