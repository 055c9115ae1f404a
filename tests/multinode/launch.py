"""One job over several hosts: an agent of torchrun on each, with as many ranks as it is given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.multinode.cluster import Cluster

ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.05
_TAIL = 3000


@dataclass(slots=True)
class Job:
    """A job that was started.

    Attributes:
        cluster: where it runs.
        ranks_per_host: how many ranks each host has; torchrun numbers them host by host.
        folder: shared by all ranks; what a rank says it writes there.
        agents: the process on each host.
    """

    cluster: Cluster
    ranks_per_host: tuple[int, ...]
    folder: Path
    agents: list[subprocess.Popen] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """Ranks on all hosts."""
        return sum(self.ranks_per_host)

    def said(self, what: str) -> dict[int, Any]:
        """The messages of ranks so far under that name, by rank."""
        found = {}
        for file in self.folder.glob(f"{what}.*.json"):
            found[int(file.name.split(".")[-2])] = json.loads(file.read_text())
        return dict(sorted(found.items()))

    def wait_for(self, what: str, seconds: float, ranks: Sequence[int] | None = None) -> None:
        """Wait until ``ranks``, or all of them, have said something under that name."""
        wanted = set(range(self.world_size) if ranks is None else ranks)
        self._until(
            lambda: wanted <= set(self.said(what)),
            seconds,
            lambda: f"ranks {sorted(wanted - set(self.said(what)))} have not said {what!r}",
        )

    def tell(self, what: str) -> None:
        """Send a message to all ranks; see ``workers.common.wait_for_message``."""
        (self.folder / f"{what}.told").touch()

    def wait(self, seconds: float) -> list[int]:
        """The exit codes of the agents, once all have ended."""
        self._until(
            lambda: all(agent.poll() is not None for agent in self.agents),
            seconds,
            lambda: (
                "the agents of hosts "
                f"{[i for i, agent in enumerate(self.agents) if agent.poll() is None]} run on"
            ),
            ended=False,
        )
        return [int(agent.returncode) for agent in self.agents]

    def wait_until_ranks_are_gone(self, seconds: float) -> None:
        """Wait until no rank is left, whatever its agent waits for."""
        self._until(
            lambda: not processes_of(self.folder, ranks=True),
            seconds,
            lambda: f"processes {processes_of(self.folder, ranks=True)} are ranks that run on",
            ended=False,
        )

    def check(self, seconds: float, what: str = "result") -> dict[int, Any]:
        """Wait for a job that succeeds; what its ranks have said under that name."""
        codes = self.wait(seconds)
        assert not any(codes), f"exit codes {codes} of the agents\n{self.tails()}"
        found = self.said(what)
        missing = sorted(set(range(self.world_size)) - set(found))
        assert not missing, f"ranks {missing} have not said {what!r}\n{self.tails()}"
        return found

    def output(self, host: int) -> str:
        """Both outputs of a host's agent and ranks, as far as written."""
        return (self.folder / f"{host}.log").read_text(errors="replace")

    def tails(self) -> str:
        """The ends of all outputs."""
        return "\n".join(
            f"--- the end of what host {i} printed\n{self.output(i)[-_TAIL:]}"
            for i in range(len(self.ranks_per_host))
        )

    def _until(
        self,
        done: Callable[[], bool],
        seconds: float,
        what: Callable[[], str],
        ended: bool = True,
    ) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            # Read before it is looked at again: an agent ends after what its ranks said.
            gone = ended and all(agent.poll() is not None for agent in self.agents)
            if done():
                return
            assert not gone, f"the job has ended and {what()}\n{self.tails()}"
            late = time.monotonic() > deadline
            assert not late, f"after {seconds:g} s {what()}\n{self.tails()}"
            time.sleep(_POLL_SECONDS)


@contextmanager
def job(
    cluster: Cluster,
    worker: str,
    ranks_per_host: Sequence[int],
    *,
    arguments: Sequence[str] = (),
    env: dict[str, str] | None = None,
    rendezvous: str = "static",
    max_restarts: int = 0,
) -> Iterator[Job]:
    """Start ``worker`` on the hosts of ``cluster``, with ``ranks_per_host`` from host 0 on, and end
    what is left of it at the end. ``worker`` is a file of ``tests/multinode/workers``, or any by
    its whole path, without ``.py``. ``rendezvous`` is torchrun's: ``static``, where host i is node
    i, or ``c10d``, where agents are numbered as they come, and come again after a failure. An agent
    restarts its ranks ``max_restarts`` times.
    """
    assert len(ranks_per_host) == len(cluster.hosts)
    ranks = tuple(ranks_per_host)
    port = cluster.free_port()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        started = Job(cluster, ranks, Path(name))
        stack.callback(_end, started)
        for host, count in zip(cluster.hosts, ranks, strict=True):
            log = stack.enter_context((started.folder / f"{host.number}.log").open("wb"))
            words = [sys.executable, "-m", "torch.distributed.run"]
            words += ["--nnodes", str(len(ranks)), "--nproc-per-node", str(count)]
            words += ["--max-restarts", str(max_restarts), "--monitor-interval", "0.1"]
            words += _meeting(cluster, host.number, port, rendezvous)
            words += [str(ROOT / "tests" / "multinode" / "workers" / f"{worker}.py"), *arguments]
            variables = os.environ | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "PYTHONUNBUFFERED": "1",
                "MESHPLAN_TEST_FOLDER": name,
                "MESHPLAN_TEST_RANKS": ",".join(map(str, ranks)),
                **(env or {}),
            }
            started.agents.append(host.start(words, variables, log))
        yield started


def launch(
    cluster: Cluster, worker: str, ranks_per_host: Sequence[int], *, seconds: float, **how: Any
) -> dict[int, Any]:
    """Run a job that succeeds; returns the result that each rank reported. ``how``: as for ``job``."""
    with job(cluster, worker, ranks_per_host, **how) as started:
        return started.check(seconds)


def _meeting(cluster: Cluster, host: int, port: int, rendezvous: str) -> list[str]:
    first = cluster.hosts[0]
    address = first.name if first.namespaces else first.address
    if rendezvous == "static":
        return ["--node-rank", str(host), "--master-addr", address, "--master-port", str(port)]
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}"]
    words += ["--rdzv-id", "job", "--local-addr", cluster.hosts[host].address]
    return [*words, "--rdzv-conf", f"is_host={str(host == 0).lower()},last_call_timeout=1"]


def _end(job: Job) -> None:
    """End the agents with all their ranks, which have separate sessions."""
    for agent, host in zip(job.agents, job.cluster.hosts, strict=False):
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        if host.namespaces is not None:
            # All but the host's first process, which no signal from inside can end.
            host.namespaces.try_run("kill", "-KILL", "-1")
        agent.wait(20)
    for process in processes_of(job.folder):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def processes_of(folder: Path, ranks: bool = False) -> list[int]:
    """The processes on this machine of the job that has this folder; or only its ranks."""
    mark = f"MESHPLAN_TEST_FOLDER={folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        # It may end meanwhile, or be another user's.
        with suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            if mark in variables and (not ranks or any(v[:5] == b"RANK=" for v in variables)):
                found.append(int(entry.name))
    return found
