"""What several verbs share: options, parsers of their values, and output to streams and files."""

from __future__ import annotations

import argparse
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from meshplan.errors import MeshplanError, PolicyError, TopologyError
from meshplan.lint._reporters.text import escape_line

if TYPE_CHECKING:
    from meshplan.topology import Cluster, Inputs, Reading

_TOPOLOGY = "a file in a format that meshplan topo reads, or - for standard input; repeat it "
_TOPOLOGY += "for heterogeneous hosts"
_HOSTS = "number of hosts; or a list such as 8,8,4: the ranks of each host, or with several "
_HOSTS += "files the number of hosts of each"
_DOMAIN = "GPUs that NVLink or xGMI joins; above the size of a host: a clique of hosts"
_ORDER = "block (default), cyclic, plane=N, or a file with the host of each rank"
PLACEMENT_OPTIONS = {
    "topology": ("FILE", _TOPOLOGY),
    "hosts": ("N", _HOSTS, "--nodes", "--nnodes"),
    "node_size": ("N", "ranks on each host", "--gpus-per-node", "--nproc-per-node"),
    "domain_size": ("N", _DOMAIN),
    "rank_order": ("ORDER", _ORDER),
}
"""The options that place ranks: value, help, and the flags of torchrun, srun and others."""
REPEATED: dict[str, Any] = {"action": "append", "default": []}


def add_verb(verbs: Any, name: str, run: Any, help: str, **options: Any) -> Any:
    """The parser of a verb: ``run`` gets its options and returns an exit status, or a text."""
    # Scripts with a shortened option would break when a verb gets another one.
    parser = verbs.add_parser(name, help=help, allow_abbrev=False, **options)
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_texts(group: Any, *rows: tuple[str, str, str], **options: Any) -> None:
    """Add options that have a text: the flag, the name of the text, and the help of each."""
    for flag, metavar, text in rows:
        group.add_argument(flag, metavar=metavar, help=text, **options)


def add_switches(group: Any, *rows: tuple[str, str]) -> None:
    for flag, text in rows:
        group.add_argument(flag, action="store_true", help=text)


def add_mesh(parser: Any, **options: Any) -> None:
    add_texts(
        parser, ("--mesh", "AXES", "names and sizes, outermost first: ddp=8,fsdp=5"), **options
    )


def add_output(parser: Any, formats: Sequence[str] = ("text", "json")) -> Any:
    group = parser.add_argument_group("output")
    group.add_argument("--output-format", choices=formats, help="default: text")
    return group


def add_timeout(parser: Any, default: float | None = 300.0) -> None:
    parser.add_argument(
        "--timeout",
        type=float,
        default=default,
        metavar="S",
        help="seconds to wait for the other ranks (default: 300)",
    )


def require_launcher(
    environ: Mapping[str, str],
    what: str,
    example: str,
    error: type[MeshplanError] = PolicyError,
) -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise error(
            f"{what} runs on all ranks of a job at once, and {', '.join(missing)} is not set; "
            f"use torchrun --nproc-per-node 8 -m meshplan {example}"
        )


def check_timeout(timeout: float) -> None:
    if not 0 < timeout < 1e6:
        raise PolicyError(f"--timeout: use a positive number of seconds, got {timeout:g}")


def add_placement(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("placement of ranks")
    for name, (value, text, *others) in PLACEMENT_OPTIONS.items():
        options = REPEATED if name == "topology" else {}
        group.add_argument(_format_flag(name), *others, metavar=value, help=text, **options)
    return group


def list_placement_options(given: argparse.Namespace) -> list[str]:
    return [_format_flag(name) for name in PLACEMENT_OPTIONS if getattr(given, name)]


def _format_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_inputs(given: argparse.Namespace) -> Inputs:
    from meshplan.topology import Inputs

    def number(text: str | None, option: str) -> int | None:
        return None if text is None else read_number(text, option, error=TopologyError)

    return Inputs(
        files=tuple(given.topology),
        hosts=read_hosts(given.hosts) if given.hosts else (),
        node_size=number(given.node_size, "--node-size"),
        domain_size=number(given.domain_size, "--domain-size"),
        rank_order=given.rank_order or "block",
    )


def read_hosts(text: str) -> tuple[int, ...]:
    return tuple(read_number(n, "--hosts", error=TopologyError) for n in text.split(","))


def count_hosts(inputs: Inputs) -> tuple[int | None, int | None]:
    """The number of hosts, and the ranks of each: ``None`` if unknown, 0 if of several numbers."""
    listed = inputs.hosts
    if len(listed) < 2 or len(inputs.files) > 1:
        return sum(listed) or None, inputs.node_size
    return len(listed), inputs.node_size or (listed[0] if len({*listed}) == 1 else 0)


def find_cluster(
    inputs: Inputs, world_size: int, read: Callable[[str], Reading] | None = None
) -> Cluster | None:
    """The placement of the ranks of a job, by options and environment; ``None`` if unknown."""
    from meshplan.topology import read_cluster
    from meshplan.topology._files import read_file

    return read_cluster(inputs, world_size, os.environ, read=read or read_file)


def require_cluster(cluster: Cluster | None) -> Cluster:
    if cluster is None:
        raise TopologyError(
            "the placement of ranks is unknown; use --domain-size 8, --node-size 8, --hosts 5, or "
            "--topology FILE with the output of nvidia-smi topo -m"
        )
    return cluster


def read_number(
    text: str,
    option: str,
    *,
    least: int = 1,
    error: type[MeshplanError] = PolicyError,
) -> int:
    if re.fullmatch(r"[0-9]{1,10}", text.strip()) and least <= int(text) <= 10**9:
        return int(text)
    raise error(f"{option}: use an integer from {least} to {10**9}, got {quote(text)}")


def quote(text: str) -> str:
    """The user's text, shortened and in ASCII, for an error of one line."""
    return ascii(text if len(text) <= 40 else f"{text[:40]}...")


# Standard streams may be closed, full or unread.


def say(text: str) -> None:
    """Write lines to standard output and flush."""
    # A reader that leaves early does not change the status.
    error = _write(sys.stdout, text)
    if error is not None and not isinstance(error, BrokenPipeError):
        reason = error.strerror or error
        raise PolicyError(f"standard output: cannot be written: {reason}") from error


def complain(text: str) -> None:
    """Write to standard error; if that fails, only the exit status reports the error."""
    _write(sys.stderr, text)


def refuse(error: Exception) -> int:
    """Report in one line why a command cannot run; the exit status."""
    # Names from files may be in it: escape_line removes control characters for terminals.
    complain(f"meshplan: {escape_line(str(error))}\n")
    return 2


def save(name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as error:
        raise _make_error(name, error) from error


def write(name: str | None, text: str) -> None:
    """Write to a file, or without a name to standard output."""
    if name is None:
        say(text)
    else:
        save(name, text)


def try_to_open(name: str) -> None:
    """Check before a long computation that a file can be written. Its content stays."""
    try:
        path = Path(name)
        try:
            mode = path.stat().st_mode
            # Not a pipe: closing it would end the input of its reader.
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
                path.open("ab").close()
        except FileNotFoundError:
            # Not under its name: ranks check at once, and would remove the file of each other.
            beside = path.parent / f".meshplan-{os.getpid()}"
            beside.open("ab").close()
            beside.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise _make_error(name, error) from error


_T = TypeVar("_T")


def track(what: str, items: Sequence[_T]) -> Iterator[_T]:
    """The items, with a line about the present one (``meshplan: reading file 3 of 2460``) on a
    terminal, on rank 0 after a second, and not in CI.
    """
    stream: TextIO | None = sys.stderr
    shows = stream is not None and stream.isatty() and not os.environ.get("CI")
    shows &= os.environ.get("TERM") != "dumb" and os.environ.get("RANK", "0") == "0"
    due = time.monotonic() + 1.0
    is_shown = False
    try:
        for number, item in enumerate(items, 1):
            if shows and (now := time.monotonic()) >= due:
                due, is_shown = now + 0.1, True
                import shutil  # it loads all compressions, which takes 5 ms

                width = shutil.get_terminal_size().columns - 1
                complain("\r\x1b[K" + f"meshplan: {what} {number} of {len(items)}"[:width])
            yield item
    finally:
        if is_shown:
            complain("\r\x1b[K")


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines of equal columns, and a line below the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * width for width in widths]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [rows[0], rule, *rows[1:]]
    ]


def _make_error(name: str, error: Exception) -> PolicyError:
    reason = getattr(error, "strerror", None) or error
    return PolicyError(f"{name[:200]}: cannot be written: {reason}")


def _write(stream: TextIO | None, text: str) -> OSError | None:
    if stream is None:  # closed when the process began
        return OSError("it is closed")
    # Names of files may have characters that the encoding of a terminal lacks.
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        # Python would try again at exit, and report an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None
