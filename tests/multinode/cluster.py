"""Several hosts on this machine, with a network that tests can cut and slow down.

They are made of namespaces where the kernel allows it (see ``namespaces``). Elsewhere they are this
machine under several names, ``MESHPLAN_HOST``: enough for what meshplan plans, while a link that
can be cut and memory that cannot be shared are not to be had.

``MESHPLAN_TEST_HOSTS`` says ``namespaces`` or ``loopback``; without it the first one that works.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from tests.multinode.namespaces import Namespaces, hosts_file, why_no_namespaces, wire

KINDS = ("namespaces", "loopback")
_DATAGRAMS = """
import socket, sys
with socket.socket(type=socket.SOCK_DGRAM) as one:
    for _ in range(2):
        one.sendto(bytes(1400), (sys.argv[1], 9))
"""


@dataclass(frozen=True, slots=True)
class Host:
    """One host.

    Attributes:
        number: 0, 1, 2, ...
        name: its host name.
        address: of its link.
        link: the interface that reaches the other hosts.
        namespaces: of what it is made; ``None``: it is this machine under another name.
    """

    number: int
    name: str
    address: str
    link: str
    namespaces: Namespaces | None = None

    def start(self, words: Sequence[str], env: dict[str, str], log: IO[bytes]) -> subprocess.Popen:
        """Start a command on the host; both its outputs go to ``log``.

        It is the first of a session of its own, so that it can be ended with its children where no
        namespace does that.
        """
        if self.namespaces:
            entering = self.namespaces.entering()
        else:
            # Linux signals it and its children when this process ends, for any reason.
            entering = ["setpriv", "--pdeathsig", "TERM"]
            env = env | {"MESHPLAN_HOST": self.name}
        return subprocess.Popen(
            [*entering, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env | {"GLOO_SOCKET_IFNAME": self.link, "TP_SOCKET_IFNAME": self.link},
            start_new_session=True,
        )


@dataclass(slots=True)
class Cluster:
    """Hosts that reach each other.

    Attributes:
        hosts: all of them.
        switch: where the cables of all hosts end; ``None`` without namespaces.
        slowed_by: which of the kernel's queues ``slow`` has used last.
    """

    hosts: tuple[Host, ...]
    switch: Namespaces | None = None
    slowed_by: str = ""

    @property
    def kind(self) -> str:
        """One of ``KINDS``."""
        return KINDS[self.switch is None]

    def free_port(self) -> int:
        """A port on which host 0 can be reached."""
        if self.switch is not None:
            return 29500
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            return int(one.getsockname()[1])

    def link_down(self, host: int) -> None:
        """Disconnect a host from the switch: packets are lost without an error."""
        self._switch.run("ip", "link", "set", f"port{host}", "down")

    def link_up(self, host: int) -> None:
        """Put it back."""
        self._switch.run("ip", "link", "set", f"port{host}", "up")

    def slow(self, host: int, seconds: float) -> None:
        """Each full packet from and to ``host`` takes that long more."""
        inside = self.hosts[host].namespaces
        assert inside is not None
        self.slowed_by = inside.delay("eth0", seconds)
        self._switch.delay(f"port{host}", seconds)
        other = self.hosts[host - 1]
        assert other.namespaces is not None
        # A queue of the kernel that limits a rate lets the first bytes pass: these are the first.
        inside.run(sys.executable, "-c", _DATAGRAMS, other.address)
        other.namespaces.run(sys.executable, "-c", _DATAGRAMS, self.hosts[host].address)

    def fast(self, host: int) -> None:
        """As quick as it was before ``slow``."""
        inside = self.hosts[host].namespaces
        assert inside is not None
        inside.run("tc", "qdisc", "delete", "dev", "eth0", "root")
        self._switch.run("tc", "qdisc", "delete", "dev", f"port{host}", "root")

    @property
    def _switch(self) -> Namespaces:
        assert self.switch is not None, "there is no link to cut between hosts on one machine"
        return self.switch


@cache
def kind_here() -> str:
    """Of what hosts are made here, one of ``KINDS``."""
    wanted = os.environ.get("MESHPLAN_TEST_HOSTS", "")
    assert wanted in ("", *KINDS), f"MESHPLAN_TEST_HOSTS={wanted}: write one of {KINDS}"
    if wanted == "namespaces":
        assert not why_no_namespaces(), why_no_namespaces()
    return wanted or KINDS[bool(why_no_namespaces())]


def why_not(kind: str) -> str:
    """Why hosts of a kind cannot be had here; empty if they can."""
    if kind == "loopback" or kind_here() == kind:
        return ""
    return f"hosts are {kind_here()} here: {why_no_namespaces() or 'MESHPLAN_TEST_HOSTS'}"


@contextmanager
def cluster(hosts: int, kind: str | None = None) -> Iterator[Cluster]:
    """Hosts named ``host0``, ``host1``, ..., gone with all their processes at the end. ``kind`` is
    one of ``KINDS``; by default the best that works here. Raises OSError if none of it does.
    """
    if (kind or kind_here()) == "loopback":
        yield Cluster(tuple(Host(i, f"host{i}", "127.0.0.1", "lo") for i in range(hosts)))
        return
    addresses = [f"10.77.0.{i + 1}" for i in range(hosts)]
    made: list[Namespaces] = []
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder) / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{a} host{i}" for i, a in enumerate(addresses))]
        names.write_text("\n".join(lines) + "\n")
        try:
            switch = Namespaces("switch")
            made.append(switch)
            switch.run("ip", "link", "add", "switch", "type", "bridge")
            switch.run("ip", "link", "set", "switch", "up")
            found = []
            for number, address in enumerate(addresses):
                inside = Namespaces(f"host{number}", hosts_file(names), within=switch)
                made.append(inside)
                wire(switch, inside, number, address)
                found.append(Host(number, f"host{number}", address, "eth0", inside))
            yield Cluster(tuple(found), switch)
        finally:
            for one in reversed(made):
                one.close()
