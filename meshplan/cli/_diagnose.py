"""``meshplan diagnose``: the real orders of additions of sibling groups, from NCCL's logs.
``meshplan topo``: the readings of files that describe a cluster.
"""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshplan._message_text import elide, format_first, format_runs
from meshplan.cli._options import (
    add_mesh,
    add_output,
    add_verb,
    say,
)
from meshplan.lint._reporters.text import escape_line
from meshplan.topology import Reading
from meshplan.topology._files import read_content, read_file

_EPILOG = """\
Run the job with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH and pass the logs of all ranks. With
NCCL_DEBUG_FILE=logs/nccl.%h.%p.log as well, each process writes a log of its own to a directory.

examples:
  meshplan diagnose nccl.log --mesh ddp=8,fsdp=5
  meshplan diagnose logs --mesh ddp=8,fsdp=5

exit status:
  0  no siblings add in different orders, as far as the log shows
  1  some siblings add in different orders
  2  the command or its input is invalid, or the log has no siblings to compare
"""
_FIXES = (
    "call torch.distributed.init_process_group('meshplan') on every rank: each reduction then "
    "adds in one order (docs/howto/backend.md)",
    "or use a mesh whose groups are placed identically: {lint} proposes one",
)


def add_diagnose(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "diagnose",
        _run,
        "compare the rings and trees of sibling groups in a log of NCCL",
        description="Read the rings and trees of all communicators from NCCL's log, and show which "
        "groups of a mesh add in different orders.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="log of NCCL, directory of logs, or - for standard input; several of one job",
    )
    add_mesh(parser, required=True)
    add_output(parser)


def _run(given: argparse.Namespace) -> int:
    from meshplan.errors import TopologyInputError
    from meshplan.lint._spec import parse_mesh
    from meshplan.planner._observed_orders import compare_siblings
    from meshplan.topology.formats.nccl_log import (
        find_global_ranks,
        read_communicators,
    )

    layout = parse_mesh(given.mesh)
    files = [file for name in given.files for file in _list_files(name)]
    communicators = read_communicators("\n".join(map(read_content, files)))
    ranks = find_global_ranks(communicators, layout.world_size)
    found = compare_siblings(layout, communicators, ranks)
    if not found:
        raise TopologyInputError(
            f"the log has no two complete communicators of 3 or more ranks over the same axes of "
            f"{layout}; pass the logs of all ranks, and check --mesh"
        )
    if not any(one.orders["ring"] or one.orders["tree"] for one in found):
        raise TopologyInputError(
            "the log has no whole ring or tree; run the job with NCCL_DEBUG_SUBSYS=INIT,GRAPH"
        )
    differ = any(one.differ for one in found)
    if given.output_format == "json":
        say(json.dumps({"siblings": [_to_json(one) for one in found]}, indent=2) + "\n")
    else:
        lines = [line for one in found for line in _describe(one)]
        if differ:
            lint = _write_command(given.mesh, given.files)
            lines += [
                "what to do:",
                *(f"  {fix.format(lint=lint)}" for fix in _FIXES),
            ]
        lines.append(
            "not in a log: the order of NVLS, CollNet and PAT, and the choice of algorithm"
        )
        say("\n".join(lines) + "\n")
    return 1 if differ else 0


def _list_files(name: str) -> list[str]:
    """The files of a directory; any other name stands for itself."""
    if name == "-" or not Path(name).is_dir():
        return [name]
    return sorted(str(path) for path in Path(name).iterdir() if path.is_file())


def _write_command(mesh: str, files: list[str]) -> str:
    lint = f"meshplan lint --mesh {mesh} --topology"
    if len(files) > 1:
        return f"cat FILES | {lint} -"
    name = shlex.quote(files[0])
    return f"cat {name}/* | {lint} -" if Path(files[0]).is_dir() else f"{lint} {name}"


def _describe(one: Any) -> list[str]:
    total = len(one.groups) + one.missing
    absent = f", {one.missing} of {total} not complete in the log" if one.missing else ""
    lines = [
        f"{len(one.groups)} groups of {len(one.groups[0])} ranks over {', '.join(one.axes)}{absent}"
    ]
    for algorithm, orders in one.orders.items():
        if one.unread[algorithm]:
            lines.append(
                f"  {algorithm}: the log has no whole {algorithm} of {len(one.unread[algorithm])} "
                "groups; set NCCL_DEBUG_SUBSYS=INIT,GRAPH"
            )
        if len(orders) == 1 and len(orders[0]) > 1:
            lines.append(f"  {algorithm}: not shown to differ, one order in every channel")
        elif len(orders) > 1:
            lines.append(f"  {algorithm}: {len(orders)} different orders")
            for positions in orders:
                groups = [",".join(format_runs(sorted(one.groups[i]))) for i in positions]
                shown = format_first([f"{{{group}}}" for group in groups], 6)
                lines.append(f"    groups of ranks {shown}")
            channel, *texts = one.examples[algorithm]
            lines += [f"    channel {channel}: {elide(text)}" for text in texts]
    return lines


def _to_json(one: Any) -> dict[str, Any]:
    examples = {
        name: {"channel": at, "additions": texts} for name, (at, *texts) in one.examples.items()
    }
    return {**asdict(one), "examples": examples, "differ": one.differ}


def add_topo(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "topo",
        show_readings,
        "show the contents of files that describe a cluster",
        description="Show the domains and nodes of GPUs or ranks, read from supported files.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="file, or - for standard input",
    )
    add_output(parser)


def show_readings(given: argparse.Namespace) -> str:
    readings = [(name, read_file(name)) for name in given.files]
    if given.output_format == "json":
        found = [reading.to_json() for _, reading in readings]
        if len(found) > 1:
            found = [{"file": name, **one} for (name, _), one in zip(readings, found, strict=True)]
        return json.dumps(found[0] if len(found) == 1 else found, indent=2) + "\n"
    return "\n\n".join(_format_reading(name, reading) for name, reading in readings) + "\n"


def _format_reading(name: str, reading: Reading) -> str:
    shown = "standard input" if name == "-" else name
    lines = [f"{shown}: {reading.kind}{'' if reading.complete else ', incomplete'}"]
    for what, groups in (
        ("domains", reading.domains),
        ("nodes", reading.nodes),
    ):
        text = "unknown from this input"
        if groups is not None:
            text = " ".join(f"{{{','.join(format_runs(group))}}}" for group in groups) or "none"
        lines.append(f"  {what + ':':<9}{text}")
    if reading.names:
        lines.append(f"  {'names:':<9}{' '.join(reading.names[:20])}")
        if len(reading.names) > 20:
            lines[-1] += f" ... ({len(reading.names)})"
    lines += [f"  {note}" for note in reading.notes]
    # Names come from the file: control characters must not reach a terminal.
    return "\n".join(map(escape_line, lines))
