"""The main job: gradients on a jagged mesh, reduced by plain DTensor and by meshplan.

A byte-level transformer runs forward and backward on real text, each rank on a slice of its own.
Its gradients are ``Partial`` over (ddp, fsdp) and become ``Replicate``: every rank must end with
the same bits. The processes talk through a model of NCCL's order of additions (association only:
one channel, NVSwitch hosts; it is a model, not NCCL) with NVLink domains of ``--domain`` GPUs.

    python -m torch.distributed.run --standalone --nproc-per-node 40 examples/jagged_mesh.py

With ``--backend meshplan`` the default group is of meshplan's backend, with that model inside: the
replicas of plain DTensor are equal, too. Exit code 1 if replicas differ where meshplan reduces.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshplan
from meshplan.layout import signature
from meshplan.testing import nccl_model

TEXT = Path(__file__).parent / "data" / "declaration.txt"
AXES = ("ddp", "fsdp", "tp")
CONTEXT = 64
Placements = tuple[Partial | Replicate, ...]


class ByteTransformer(nn.Module):
    """One block, 28 k parameters: embedding, attention, MLP, head over the 256 bytes."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(256, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.embed(tokens)
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, -1))
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x)


@dataclass(frozen=True)
class Row:
    """One run. ``seconds`` is of the slowest rank, for all parameters."""

    run: str
    redistribution: str
    model: str
    reductions: int
    digest: str
    backend_calls: dict[str, int]
    distinct_replicas: int
    max_fraction_differing: float
    seconds: float


def gradients(slice_index: int) -> list[Tensor]:
    """Gradients of the loss on one slice of the text, the model being the same on all ranks."""
    torch.manual_seed(0)
    model = ByteTransformer()
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    start = (slice_index * CONTEXT) % (len(text) - CONTEXT - 1)
    tokens = text[start : start + CONTEXT + 1]
    logits = model(tokens[:-1].unsqueeze(0))
    F.cross_entropy(logits.flatten(0, 1), tokens[1:]).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def count_calls(function: Callable[[], object]) -> dict[str, int]:
    """Run ``function`` on all ranks; the collectives that it made, by name, as rank 0 saw them."""
    if dist.get_rank() > 0:
        function()
        return {}
    # Loaded on one rank only: it takes a second, and forty processes share a few cores.
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as calls:
        function()
    return {str(op).split(".")[-1]: n for op, n in calls.get_comm_counts().items()}


def redistribute(
    grads: Sequence[Tensor], mesh: DeviceMesh, source: Placements
) -> tuple[list[Tensor], dict[str, int], float]:
    """Reduce every gradient; also what the backend ran for the first, and the seconds of all."""
    target = tuple(Replicate() for _ in source)
    dtensors = [DTensor.from_local(g, mesh, source, run_check=False) for g in grads]
    counts = count_calls(lambda: dtensors[0].redistribute(mesh, target).to_local())
    dist.barrier()
    started = time.perf_counter()
    results = [d.redistribute(mesh, target).to_local().clone() for d in dtensors]
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    slowest = [torch.zeros_like(seconds) for _ in range(dist.get_world_size())]
    dist.all_gather(slowest, seconds)
    return results, counts, float(torch.stack(slowest).max())


def compare(results: Sequence[Tensor]) -> tuple[int, float, str]:
    """Distinct replicas, the largest share of elements unlike rank 0's, and rank 0's digest."""
    bits = torch.cat([r.flatten() for r in results]).view(torch.int32)
    gathered = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, bits)
    patterns = [hashlib.sha256(g.numpy().tobytes()).hexdigest() for g in gathered]
    differing = max(float((g != gathered[0]).float().mean()) for g in gathered)
    return len(set(patterns)), differing, patterns[0]


def measure(
    run: str, model: str, grads: Sequence[Tensor], mesh: DeviceMesh, source: Placements
) -> Row:
    """One row: run it, count it, compare the replicas."""
    meshplan.clear_report()
    results, calls, seconds = redistribute(grads, mesh, source)
    distinct, fraction, digest = compare(results)
    ran = [e for e in meshplan.report().entries if e["ran"] != "torch"]
    # Over meshplan's backend, a reduction that is left to the backend is reported by both.
    ran = [e for e in ran if e["kind"] == "redistribution"] or ran
    planned = sum(e["count"] for e in ran) // (len(grads) + 1)
    if ran:
        # Over gloo, the first message of a planned reduction is not an operator of torch.
        calls = dict(Counter(ran[0]["sends"]))
    # Plain DTensor combines summands once per reducing call of the backend.
    counted = sum(n for name, n in calls.items() if name.startswith(("all_reduce", "reduce_")))
    letters = ", ".join("P" if p.is_partial() else "R" for p in source)
    target = ", ".join("R" for _ in source)
    return Row(
        run=run,
        redistribution=f"({letters}) -> ({target})",
        model=model,
        reductions=planned or counted,
        digest=digest,
        backend_calls=calls,
        distinct_replicas=distinct,
        max_fraction_differing=fraction,
        seconds=seconds,
    )


def shuffle(count: int, seed: int | None) -> list[int]:
    """0 to ``count - 1``: in a random order with a seed."""
    if seed is None:
        return list(range(count))
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def run_all(mesh: DeviceMesh, domain: int, order: str, seed: int | None) -> list[Row]:
    """Plain DTensor and policy ``fast`` under both algorithms, meshplan once under each."""
    layout = meshplan.Layout.from_mesh(mesh)
    coordinate = mesh.get_coordinate() or []
    data_axes = min(2, mesh.ndim)
    both: Placements = tuple(Partial() if i < data_axes else Replicate() for i in range(mesh.ndim))
    first: Placements = tuple(Partial() if i < 1 else Replicate() for i in range(mesh.ndim))
    index = 0
    for i in range(data_axes):
        index = index * layout.sizes[i] + coordinate[i]
    # Partial over (ddp, fsdp): each rank has its own slice. Partial over ddp alone: the ranks
    # along fsdp are replicas of one another, and hold the same gradients.
    # Another order of the ranks is another order of the slices along the axes that are reduced.
    slices = shuffle(math.prod(layout.sizes[:data_axes]), seed)
    rows_of_slices = shuffle(layout.sizes[0], seed)
    jobs = [(both, gradients(slices[index])), (first, gradients(rows_of_slices[coordinate[0]]))]
    if data_axes == 1:
        jobs.pop()
    rows = []
    for algorithm in ("ring", "tree"):
        nccl_model.configure(domain_size=domain, algorithm=algorithm)
        for source, grads in jobs:
            rows.append(measure("plain DTensor", algorithm, grads, mesh, source))
            # The nodes that this models could not share memory.
            with meshplan.installed(path="exchange", contract=meshplan.Contract(order)):
                rows.append(measure("meshplan", algorithm, grads, mesh, source))
        with meshplan.installed(policy="fast"):
            rows.append(measure("meshplan fast", algorithm, jobs[0][1], mesh, both))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    head = (
        "run",
        "redistribution",
        "order",
        "reductions",
        "replicas",
        "differ",
        "s",
        "the backend ran",
    )
    body = [
        (
            row.run,
            row.redistribution,
            row.model,
            str(row.reductions),
            str(row.distinct_replicas),
            f"{row.max_fraction_differing:.1%}",
            f"{row.seconds:.2f}",
            " + ".join(f"{n} {name}" for name, n in row.backend_calls.items()),
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in [head, *body]
    ]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(line.rstrip() for line in lines)


def describe(mesh: DeviceMesh, domain: int) -> str:
    """How the groups of each axis are placed on the domains."""
    layout = meshplan.Layout.from_mesh(mesh)
    nodes = [rank // domain for rank in range(layout.world_size)]
    lines = [f"mesh {layout}, NVLink domains of {domain}"]
    for axis, size in zip(layout.axes, layout.sizes, strict=True):
        if size > 1:
            groups = layout.siblings([axis]).tolist()
            found = sorted({signature(group, nodes) for group in groups}, reverse=True)
            kinds = " ".join(f"({','.join(map(str, s))})" for s in found)
            lines.append(f"  {axis}: {len(groups)} groups of {size}, ranks per domain {kinds}")
    lines.append(f"order of additions: {nccl_model.ABOUT}")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--mesh", default="8,5,1", help="axis sizes: ddp[,fsdp[,tp]]")
    parser.add_argument("--domain", type=int, default=8, help="GPUs in an NVLink domain")
    parser.add_argument(
        "--backend",
        choices=("nccl_model", "meshplan"),
        default="nccl_model",
        help="backend of the default group; meshplan reduces under the contract for every caller",
    )
    parser.add_argument(
        "--order", choices=("tree", "rank", "exact"), default="tree", help="of meshplan's contract"
    )
    parser.add_argument(
        "--permute",
        type=int,
        metavar="SEED",
        help="permute the ranks of the mesh, and with them the slices of the text",
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(arguments)
    try:
        options.sizes = tuple(int(size) for size in options.mesh.split(","))
    except ValueError:
        parser.error(f"--mesh {options.mesh}: write sizes like 8,5,1")
    if not 1 <= len(options.sizes) <= len(AXES) or min(options.sizes) < 1 or options.domain < 1:
        parser.error(
            f"--mesh {options.mesh} --domain {options.domain}: one to three sizes, all >= 1"
        )
    return options


def main() -> int:
    """Run under torchrun with as many processes as the mesh has ranks."""
    options = parse()
    if "RANK" not in os.environ:
        count = math.prod(options.sizes)
        print(
            "this is one of many processes; start them with\n  python -m torch.distributed.run "
            f"--standalone --nproc-per-node {count} {' '.join(sys.argv)}",
            file=sys.stderr,
        )
        return 2
    torch.set_num_threads(1)
    if int(os.environ.get("RANK", "0")) > 0:
        # Torch warns of two all-reduces in a row on every rank; once is enough to read.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    nccl_model.register()
    nccl_model.configure(domain_size=options.domain)
    if options.backend == "meshplan":
        # As below: the nodes that this models could not share memory.
        contract = meshplan.Contract(options.order)
        inside = meshplan.BackendOptions(contract, inner="nccl_model", path="exchange")
        dist.init_process_group("meshplan", pg_options=inside)
    else:
        dist.init_process_group("nccl_model")
    try:
        if math.prod(options.sizes) != dist.get_world_size():
            print(
                f"--mesh {options.mesh} has {math.prod(options.sizes)} ranks and "
                f"{dist.get_world_size()} were started; use --nproc-per-node "
                f"{math.prod(options.sizes)}",
                file=sys.stderr,
            )
            return 2
        names = AXES[: len(options.sizes)]
        ranks = torch.tensor(shuffle(dist.get_world_size(), options.permute)).view(options.sizes)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        rows = run_all(mesh, options.domain, options.order, options.permute)
        if dist.get_rank() == 0:
            print(describe(mesh, options.domain))
            print(table(rows))
            if options.json:
                found = {
                    "mesh": options.sizes,
                    "domain": options.domain,
                    "backend": options.backend,
                    "order": options.order,
                    "order_of_additions": nccl_model.ABOUT,
                    "rows": [asdict(row) for row in rows],
                }
                options.json.write_text(json.dumps(found, indent=2) + "\n")
        promised = [r for r in rows if "meshplan" in (r.run, options.backend)]
        wrong = [r for r in promised if r.distinct_replicas != 1]
        meshplan.shutdown()
        return 1 if wrong else 0
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Taking the interpreter down costs each of the forty processes a second of a shared core.
    os._exit(status)
