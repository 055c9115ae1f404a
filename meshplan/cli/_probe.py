"""``meshplan probe``: whether the backend's all-reduces return the same bits in sibling groups."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from meshplan._needs_torch import import_with_torch
from meshplan.cli._launch import run_on_ranks
from meshplan.cli._options import (
    add_mesh,
    add_output,
    add_timeout,
    add_verb,
    read_dtype,
)
from meshplan.cli._output import format_table, say
from meshplan.errors import PolicyError

DTYPES = ("float32", "bfloat16", "float16", "float64")
# Small, medium, and large enough for the protocols and algorithms of large messages. Odd lengths
# make the last chunk of each rank shorter than the others.
NUMELS = (1_021, 65_539, 2_097_169)
_SEEN = "observed in this run; equal bits prove nothing about other sizes, placements or versions"


@dataclass(frozen=True, slots=True)
class ProbeRow:
    axes: tuple[str, ...]  # labels of the reduced axes
    groups: int  # number of groups
    size: int  # ranks in each group
    dtype: str  # of the tensor
    numel: int
    results: int  # different bit patterns among the groups
    share: float  # the largest share of elements in which a rank differs from the first rank
    consistent: bool  # whether all ranks of each group had the same bits

    @property
    def differs(self) -> bool:
        return self.results > 1 or not self.consistent


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "probe",
        probe,
        "test whether the backend's all-reduces return the same bits in sibling groups",
        description="Run with torchrun on all ranks of a job. Sibling groups reduce the same "
        "inputs with the backend's own all-reduce, and the results are compared bit by bit.",
    )
    add_mesh(parser, required=True)
    option = parser.add_argument
    option(
        "--backend",
        choices=("gloo", "nccl", "nccl_model"),
        help="default: nccl with GPUs, else gloo; nccl_model adds on CPUs in an order of NCCL",
    )
    option(
        "--node-size",
        type=int,
        metavar="N",
        help="for nccl_model: consecutive ranks on each host",
    )
    option(
        "--algorithm",
        choices=("ring", "tree"),
        help="for nccl_model (default: ring)",
    )
    option(
        "--dtype",
        action="append",
        metavar="DTYPE",
        help="e.g. bf16; may be repeated (default: float32 and bfloat16)",
    )
    option(
        "--numel",
        type=int,
        action="append",
        metavar="N",
        help="number of elements; may be repeated (default: "
        f"{', '.join(map(str, NUMELS[:-1]))} and {NUMELS[-1]})",
    )
    add_timeout(parser)
    add_output(parser)


def probe(given: argparse.Namespace) -> int:
    """Run the probe; 0 if nothing differed, 1 if something did, 2 if it could not run."""
    example = f"probe --mesh {given.mesh[:80]}"
    return run_on_ranks("probe", example, given.timeout, partial(_compare, given))


def _compare(given: argparse.Namespace, is_first: bool) -> int:
    _check(given)
    probe_run = import_with_torch("meshplan.cli._probe_run", "meshplan probe")
    header, rows = probe_run.run_probe(given)
    if is_first:
        is_json = given.output_format == "json"
        write = _format_json if is_json else _format_text
        say(write(header, rows) + "\n", fits=not is_json)
    return 1 if any(row.differs for row in rows) else 0


def _check(given: argparse.Namespace) -> None:
    if given.backend == "nccl_model":
        if given.node_size is None or given.node_size < 1:
            raise PolicyError(
                "nccl_model needs the number of consecutive ranks on a node; use, for example, "
                "--node-size 8"
            )
    elif given.node_size is not None or given.algorithm is not None:
        raise PolicyError(
            "--node-size and --algorithm need --backend nccl_model; add it, or leave them out"
        )
    given.dtype = list(map(read_dtype, given.dtype or DTYPES[:2]))
    for dtype in given.dtype:
        if dtype not in DTYPES:
            raise PolicyError(f"--dtype: use one of {', '.join(DTYPES)}, got {dtype}")
    for numel in given.numel or ():
        if not 1 <= numel <= 1 << 31:
            raise PolicyError(f"--numel: use 1 to 2147483648, got {numel}")


def _format_json(header: dict[str, Any], rows: Sequence[ProbeRow]) -> str:
    found = [asdict(row) | {"axes": list(row.axes), "differs": row.differs} for row in rows]
    answer = {
        **header,
        "differs": any(row.differs for row in rows),
        "reductions": found,
    }
    return json.dumps({**answer, "about": _SEEN}, indent=2)


def _format_text(header: dict[str, Any], rows: Sequence[ProbeRow]) -> str:
    lines = [
        f"mesh {header['mesh']}, backend {header['backend']}",
        header["origin"],
    ]
    table = [("axes", "groups", "dtype", "elements", "results", "differ", "in a group")]
    table += [
        (
            " x ".join(row.axes),
            f"{row.groups} of {row.size}",
            row.dtype,
            str(row.numel),
            str(row.results),
            f"{row.share:.1%}",
            "equal" if row.consistent else "DIFFERENT",
        )
        for row in rows
    ]
    lines += format_table(table, ruled=False)
    differing = list(dict.fromkeys(" x ".join(row.axes) for row in rows if row.differs))
    if differing:
        verdict = f"groups with the same inputs had different bits over: {', '.join(differing)}"
    else:
        verdict = "all groups with the same inputs had the same bits"
    return "\n".join([*lines, f"{verdict} ({_SEEN})"])
