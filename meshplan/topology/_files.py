"""Reads files that describe a cluster, in any format."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TextIO

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import Reading
from meshplan.topology.formats import FORMATS

MAX_BYTES = 64 << 20


def read_file(name: str) -> Reading:
    text = read_content(name)
    try:
        return read_text(text)
    except TopologyInputError as error:
        where = show_file(name) if error.line is None else f"{show_file(name)}:{error.line}"
        message = str(error.args[0]).removeprefix(f"line {error.line}: ")
        raise TopologyInputError(f"{where}: {message}") from error


def read_content(name: str) -> str:
    """The text of a file; ``-`` is standard input. Invalid bytes become U+FFFD."""
    try:
        if name == "-":
            stream: TextIO | None = sys.stdin
            if stream is None:
                raise OSError("it is closed")
            content = stream.buffer.read(MAX_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TopologyInputError(f"{show_file(name)}: cannot be read: {reason}") from error
    if len(content) > MAX_BYTES:
        raise TopologyInputError(
            f"{show_file(name)}: larger than {MAX_BYTES >> 20} MB; pass the part that describes "
            "the topology, of one run"
        )
    # Redirection in Windows' shells writes UTF-16 with a byte order mark.
    utf16 = content[:2] in (b"\xff\xfe", b"\xfe\xff")
    return content.decode("utf-16" if utf16 else "utf-8-sig", errors="replace")


def read_text(text: str) -> Reading:
    for name in FORMATS:
        module = import_module(f"meshplan.topology.formats.{name}")
        if module.recognises(text):
            reading: Reading = module.read(text)
            return reading
    if not text.strip():
        raise TopologyInputError("the input is empty; did the command before it fail?")
    if "<!DOCTYPE" in text[:4096] or "<!ENTITY" in text[:4096]:
        raise TopologyInputError(
            "XML that declares its own document type or entities is refused; remove these "
            "declarations"
        )
    raise TopologyInputError(
        "unknown format; pass the output of nvidia-smi topo -m, rocm-smi --showtopo, amd-smi "
        "topology or kubectl get nodes -o json, a dump of NCCL (XML of its topology, or a log with "
        "NCCL_DEBUG=INFO), or Slurm's topology.conf or topology.yaml"
    )


def show_file(name: str) -> str:
    return "standard input" if name == "-" else name
