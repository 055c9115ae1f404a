"""Hosts made of Linux namespaces: each has its own network, name, processes and ``/dev/shm``.

Nothing of it has a name that could be left behind. The first process of a host is ``cat``, which
reads a pipe that this process holds; when this process ends, however that ends, the pipe closes,
``cat`` ends, and the kernel ends all other processes of the host and removes its links. The bridge
lives in a network namespace of its own, so that the machine's own network is not touched.

Root may make such hosts, and other users where the kernel lets them have a user namespace.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.programs import capture

_SECONDS = 20.0
# Bytes of a full packet, and the smallest bucket that lets one through.
_PACKET, _BUCKET = 1500, 1600


class Namespaces:
    """One set of namespaces, alive until ``close``.

    Args:
        name: the host's.
        setup: commands of a shell that are run in it first.
        within: whose user namespace it belongs to; of its own, for users other than root, if not
            given.
    """

    def __init__(self, name: str, setup: str = "", within: Namespaces | None = None) -> None:
        enter = within.entering("--user", "--preserve-credentials") if within else []
        user = [] if within or os.geteuid() == 0 else ["--user", "--map-root-user"]
        if within is not None and not within.has_user:
            enter = []
        self.has_user = bool(user) if within is None else within.has_user
        own = ["--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc"]
        # The name first: a command that fails ends the shell, and that ends the wait below.
        script = f"set -e; hostname {name} || echo {name} > /proc/sys/kernel/hostname; "
        script += f"{setup} exec cat"
        self.process = subprocess.Popen(
            [*enter, "unshare", *user, *own, "--fork", "--kill-child", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.name = name
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        """Wait until ``cat`` echoes a line: all commands before it are done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        try:
            self.process.stdin.write(b"ready\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if answer != b"ready\n":
            self.process.wait(_SECONDS)
            why = self.process.stderr.read().decode(errors="replace").strip()
            raise OSError(f"no namespaces for {self.name}: {why}")

    def entering(self, *options: str) -> list[str]:
        """The words before a command that run it in these namespaces."""
        if not options:
            options = ("--net", "--uts", "--ipc", "--mount", "--pid")
            if self.has_user:
                options = ("--user", "--preserve-credentials", *options)
        words = ["nsenter"]
        proc = f"/proc/{self.process.pid}/ns"
        for option in options:
            kind = {"--mount": "mnt", "--pid": "pid_for_children"}.get(option, option[2:])
            known = option == "--preserve-credentials"
            words.append(option if known else f"{option}={proc}/{kind}")
        return words

    def run(self, *words: str) -> str:
        """The output of a command that ends soon. Raises OSError if it fails."""
        done = capture([*self.entering(), *words], timeout=_SECONDS)
        if done.returncode:
            raise OSError(f"{' '.join(words)} on {self.name}: {done.stderr.strip()}")
        return done.stdout

    def try_run(self, *words: str) -> bool:
        """Whether a command succeeded."""
        try:
            self.run(*words)
        except OSError:
            return False
        return True

    def delay(self, link: str, seconds: float) -> str:
        """Slow down what leaves by ``link``; which of the kernel's queues does it.

        ``netem`` holds each packet for that long. ``tbf``, for kernels that lack it, lets packets
        out at the rate at which a full one takes that long.
        """
        start = ["tc", "qdisc", "replace", "dev", link, "root"]
        if self.try_run(*start, "netem", "delay", f"{seconds * 1000:g}ms"):
            return "netem"
        rate = max(1, round(8 * _PACKET / seconds))
        self.run(*start, "tbf", "rate", f"{rate}bit", "burst", str(_BUCKET), "limit", "10000000")
        return "tbf"

    def close(self) -> None:
        """End all processes in them, and with these the namespaces; again is nothing."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_SECONDS)
        self.process.stdout.close()
        self.process.stderr.close()


@cache
def why_no_namespaces() -> str:
    """Why hosts cannot be made of namespaces here; empty if they can."""
    try:
        tried = Namespaces("tried", hosts_file(Path("/etc/hosts")))
    except OSError as error:
        return str(error)
    try:
        tried.run("ip", "link", "add", "switch", "type", "bridge")
        tried.run("ip", "link", "add", "port", "type", "veth", "peer", "name", "eth0")
    except OSError as error:
        return str(error)
    finally:
        tried.close()
    return ""


def hosts_file(file: Path) -> str:
    """Commands of a shell: ``file`` is ``/etc/hosts``, and ``/dev/shm`` is empty and one's own."""
    return f"mount -t tmpfs tmpfs /dev/shm; mount --bind '{file}' /etc/hosts;"


def wire(switch: Namespaces, host: Namespaces, number: int, address: str) -> None:
    """A cable from ``eth0`` of ``host`` to port ``number`` of the bridge in ``switch``."""
    port = f"port{number}"
    # `ip` takes the process whose network it is: the one that waits for the host's first process.
    words = ["ip", "link", "add", port, "type", "veth", "peer", "name", "eth0"]
    # A number of a process means something only outside, where /proc is the machine's.
    _outside(switch, [*words, "netns", str(host.process.pid)])
    switch.run("ip", "link", "set", port, "master", "switch", "up")
    host.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
    host.run("ip", "link", "set", "lo", "up")
    host.run("ip", "link", "set", "eth0", "up")


def _outside(switch: Namespaces, words: Sequence[str]) -> None:
    options = ["--net"]
    if switch.has_user:
        options = ["--user", "--preserve-credentials", *options]
    done = capture([*switch.entering(*options), *words], timeout=_SECONDS)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
