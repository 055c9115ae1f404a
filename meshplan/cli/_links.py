"""``meshplan links``: measured costs of the links between the ranks of a job."""

from __future__ import annotations

import argparse
import os
from typing import Any

from meshplan._needs_torch import import_with_torch
from meshplan.cli._options import (
    add_texts,
    add_timeout,
    add_verb,
    check_timeout,
    require_launcher,
)
from meshplan.cli._output import complain, save, say, try_to_open
from meshplan.errors import MeshplanError, PolicyError


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "links",
        _run,
        "measure latencies and bandwidths between the ranks of a job",
        description="Run with torchrun on all ranks of an otherwise idle job. Times exchanges "
        "and recursive halving between the ranks of a domain, of a node and of several nodes, and "
        "writes latencies and bandwidths for --links of meshplan plan and meshplan simulate "
        "--cost.",
    )
    option = parser.add_argument
    option(
        "--backend",
        choices=("gloo", "nccl"),
        help="default: nccl with GPUs, else gloo",
    )
    option(
        "--repeat",
        type=int,
        default=20,
        metavar="N",
        help="repetitions of each exchange (default: 20)",
    )
    add_timeout(parser)
    what = "write the links here, not to standard output"
    add_texts(parser.add_argument_group("output"), ("--output-file", "FILE", what))


def _run(given: argparse.Namespace) -> int:
    # Only rank 0 reports an invalid command: the error is the same on all ranks.
    rank = os.environ.get("RANK") or "0"
    try:
        require_launcher(
            os.environ,
            "meshplan links",
            "links --output-file links.json",
        )
        check_timeout(given.timeout)
        if not 1 <= given.repeat <= 10_000:
            raise PolicyError(f"--repeat: use an integer from 1 to 10000, got {given.repeat}")
        if given.output_file is not None and rank == "0":
            try_to_open(given.output_file)
        links_run = import_with_torch("meshplan.cli._links_run", "meshplan links")
        text, about = links_run.measure(given.backend, given.repeat, given.timeout)
        if rank == "0":
            if given.output_file is None:
                say(text + "\n")
            else:
                save(given.output_file, text + "\n")
            complain(about + "\n")
        return 0
    except PolicyError as error:
        if rank == "0":
            complain(f"meshplan: {error}\n")
    except (MeshplanError, RuntimeError, ValueError, OSError) as error:
        complain(f"meshplan: rank {rank[:10]}: {' '.join(str(error).split())[:1000]}\n")
    return 2
