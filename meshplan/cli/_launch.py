"""Checks and errors of what torchrun starts on all ranks of a job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from meshplan.cli._output import complain
from meshplan.errors import MeshplanError, PolicyError


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


def run_links(timeout: float, measure: Callable[[bool], int]) -> int:
    """Call ``measure`` with whether this is rank 0; its exit status, or 2 on an error."""
    # Only rank 0 reports an invalid command: the error is the same on all ranks.
    rank = os.environ.get("RANK") or "0"
    try:
        require_launcher(
            os.environ,
            "meshplan links",
            "links --output-file links.json",
        )
        check_timeout(timeout)
        return measure(rank == "0")
    except PolicyError as error:
        if rank == "0":
            complain(f"meshplan: {error}\n")
    except (MeshplanError, RuntimeError, ValueError, OSError) as error:
        complain(f"meshplan: rank {rank[:10]}: {' '.join(str(error).split())[:1000]}\n")
    return 2
