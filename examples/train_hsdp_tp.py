"""Train on a jagged mesh, plain and with meshplan, and compare the replicas after every step.

A byte-level transformer learns real text on mesh (ddp, fsdp, tp): FSDP2 shards it, HSDP replicates
it, tensor and sequence parallel styles split its blocks, gradients are clipped. The processes talk
through a model of NCCL's order of additions (association only: one channel, NVSwitch hosts; it is
a model, not NCCL) with hosts of ``--domain`` GPUs, or through ``--backend``.

    python -m torch.distributed.run --standalone --nproc-per-node 12 examples/train_hsdp_tp.py

On GPUs:

    torchrun --nproc-per-node 8 examples/train_hsdp_tp.py --backend nccl --mesh 2,2,2

Exit code 1 if a replica of any parameter ever differs by a bit under meshplan.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import shlex
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import meshplan
from meshplan.integrations import fsdp
from meshplan.testing import nccl_model

TEXT = Path(__file__).parent / "data" / "declaration.txt"
AXES = ("ddp", "fsdp", "tp")
RUNS = ("plain", "meshplan")
HEAD_DIM = 8


class Attention(nn.Module):
    """Causal self-attention of as many heads as this rank has columns for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        # Written out: sums of a fused kernel may follow the number of threads.
        scores = (q @ k.transpose(-1, -2)) / HEAD_DIM**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        attended = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteTransformer(nn.Module):
    """Bytes in, the mean loss of each next byte out."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def split(model: ByteTransformer, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallel styles over axis tp, as torch's own tutorial has them."""
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm1": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "norm2": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )


def build(run: str, mesh: DeviceMesh, options: argparse.Namespace) -> nn.Module:
    """The model on its mesh, its gradients reduced by HSDP, twice or once rounded."""
    torch.manual_seed(0)
    model = ByteTransformer(options.width, options.layers).to(mesh.device_type)
    if mesh.size(2) > 1:
        split(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["ddp", "fsdp"])
    fully_shard(model, mesh=mesh["ddp", "fsdp"])
    if run == "meshplan":
        fsdp.apply(model)
    return model


@dataclass(frozen=True)
class Step:
    """One step of one run.

    ``differing``: of each parameter, the share of its elements that are not the same bits on all
    replicas. ``seconds``: of the slowest rank, without the comparison.
    """

    step: int
    loss: float
    seconds: float
    differing: dict[str, float]


def replica_groups(parameter: DTensor, mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The groups along which this rank's part of the parameter is a replica."""
    groups = [mesh["ddp"].get_group()]
    names = parameter.device_mesh.mesh_dim_names or ()
    split_by_tp = "tp" in names and not parameter.placements[names.index("tp")].is_replicate()
    if not split_by_tp and mesh.size(2) > 1:
        groups.append(mesh["tp"].get_group())
    return [group for group in groups if group.size() > 1]


def compare(model: nn.Module, mesh: DeviceMesh) -> dict[str, float]:
    """Of each parameter, the share of elements that differ in any bit from another replica's."""
    counts = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        mine = parameter.to_local().detach().contiguous().view(-1).view(torch.int32)
        differs = torch.zeros_like(mine, dtype=torch.bool)
        for group in replica_groups(parameter, mesh):
            others = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(others, mine, group=group)
            for other in others:
                differs |= other != mine
        counts.append((int(differs.sum()), mine.numel()))
    every: list[list[tuple[int, int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, counts)
    names = [name for name, _ in model.named_parameters()]
    totals = [
        [sum(column) for column in zip(*ranks, strict=True)] for ranks in zip(*every, strict=True)
    ]
    return {n: found / max(1, all_) for n, (found, all_) in zip(names, totals, strict=True)}


def batch(step: int, mesh: DeviceMesh, options: argparse.Namespace) -> Tensor:
    """Tokens [batch, context + 1]: each data-parallel rank has its own piece of the text."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    data = mesh.get_local_rank("ddp") * mesh.size(1) + mesh.get_local_rank("fsdp")
    drawn = torch.Generator().manual_seed(1000 * step + data)
    starts = torch.randint(len(text) - options.context - 1, (options.batch,), generator=drawn)
    rows = [text[start : start + options.context + 1] for start in starts.tolist()]
    return torch.stack(rows).to(mesh.device_type)


def train(run: str, mesh: DeviceMesh, options: argparse.Namespace) -> list[Step]:
    """All steps of one run; the same list on every rank."""
    model = build(run, mesh, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    steps = []
    for step in range(options.steps):
        tokens = batch(step, mesh, options)
        started = time.perf_counter()
        loss = model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        found = [loss.item(), time.perf_counter() - started]
        ranks: list[list[float]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, found)
        steps.append(
            Step(
                step=step + 1,
                loss=math.fsum(rank[0] for rank in ranks) / len(ranks),
                seconds=max(rank[1] for rank in ranks),
                differing=compare(model, mesh),
            )
        )
    return steps


def table(runs: dict[str, list[Step]]) -> str:
    """Both runs as a Markdown table."""
    head = ("run", "steps with a difference", "parameters that differ", "elements that differ")
    head += ("loss at the end", "median step")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for run, steps in runs.items():
        last = steps[-1]
        bad = sum(any(step.differing.values()) for step in steps)
        parameters = sum(share > 0 for share in last.differing.values())
        worst = max(max(step.differing.values()) for step in steps)
        cells = (
            run,
            f"{bad} of {len(steps)}",
            f"{parameters} of {len(last.differing)}",
            f"up to {worst:.1%}" if worst else "0",
            f"{last.loss:.7f}",
            f"{statistics.median(step.seconds for step in steps) * 1e3:.0f} ms",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(runs: dict[str, list[Step]], title: str, path: Path) -> None:
    """Replica differences of every parameter by step, loss, and step time, as a PNG."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("--output draws with matplotlib; write: pip install matplotlib", file=sys.stderr)
        raise SystemExit(2) from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import LogNorm

    names = list(runs["plain"][0].differing)
    figure, axes = plt.subplots(
        2, 2, figsize=(9, 7.5), height_ratios=(3, 1), layout="constrained", dpi=160
    )
    figure.suptitle(title)
    images = []
    for axis, (run, steps) in zip(axes[0], runs.items(), strict=True):
        shares = [[step.differing[name] for step in steps] for name in names]
        colours = mpl.colormaps["inferno_r"].with_extremes(under="#e3f1e6", bad="#e3f1e6")
        # A logarithm has no colour for none.
        images.append(
            axis.imshow(
                shares,
                aspect="auto",
                interpolation="nearest",
                cmap=colours,
                norm=LogNorm(1e-4, 1),
                extent=(0.5, len(steps) + 0.5, len(names) - 0.5, -0.5),
            )
        )
        checks = [share > 0 for row in shares for share in row]
        axis.set_title(f"{run}: replicas differ in {sum(checks)} of {len(checks)} checks", size=10)
        axis.set_yticks(range(len(names)), [] if images[1:] else names, fontsize=8)
        axis.set_xlabel("step")
    figure.colorbar(images[0], ax=axes[0], label="share of elements with other bits (green: none)")
    styles = {"plain": ("#b5332e", "-"), "meshplan": ("#1f6f8b", "--")}
    for run, steps in runs.items():
        colour, line = styles[run]
        xs = [step.step for step in steps]
        axes[1][0].plot(xs, [s.loss for s in steps], line, color=colour, label=run)
        axes[1][1].plot(xs, [s.seconds * 1e3 for s in steps], line, color=colour, label=run)
    axes[1][0].set(xlabel="step", ylabel="loss")
    axes[1][1].set(xlabel="step", ylabel="slowest rank (ms)", yscale="log")
    for axis in axes[1]:
        axis.legend()
        axis.grid(alpha=0.3)
    figure.savefig(path)


def write(
    runs: dict[str, list[Step]], text: str, folder: Path, options: argparse.Namespace
) -> None:
    """The page, the picture and the numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{text}, {len(runs['plain'])} steps"
    plot(runs, title, folder / "hsdp_tp.png")
    numbers = {run: [asdict(step) for step in steps] for run, steps in runs.items()}
    (folder / "hsdp_tp.json").write_text(json.dumps(numbers) + "\n")
    ranks = math.prod(options.sizes)
    script = Path(sys.argv[0]).name
    about = (
        f"{text}. {options.layers} layers of width {options.width}, context {options.context}, "
        f"batch {options.batch} for each data-parallel rank, AdamW, gradients clipped to "
        f"{options.clip:g}; torch {torch.__version__} on {platform.machine()}, {os.cpu_count()} "
        f"cores for all {ranks} processes. Plain is torch's own HSDP and clipping. A parameter is "
        "compared on all its replicas, by bits, after every step."
    )
    why = (
        "In plain torch the replicas of a shard get it from one all-reduce, and agree. But the "
        "norm for clipping is summed over fsdp and then over tp, in groups that lie on the hosts "
        "differently for every ddp replica: replicas clip by factors that differ in the last bit, "
        "and from then on they train different models. Step times are of processes that share "
        "cores, and say nothing about GPUs."
    )
    page = f"""# Training with HSDP and tensor parallelism on a jagged mesh

Made by one command; do not edit.

    python -m torch.distributed.run --standalone --nproc-per-node {ranks} \\
        examples/{script} {shlex.join(sys.argv[1:])}

{textwrap.fill(about, 112)}

{table(runs)}

![replica differences by step, loss and step time](hsdp_tp.png)

{textwrap.fill(why, 112)}
"""
    (folder / "hsdp_tp.md").write_text(page)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--mesh", default="2,3,2", help="axis sizes: ddp,fsdp,tp")
    parser.add_argument("--domain", type=int, default=4, help="GPUs of a host, for the model")
    parser.add_argument("--algorithm", choices=("ring", "tree"), default="tree")
    parser.add_argument("--backend", default="nccl_model", help="nccl_model, gloo or nccl")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=48)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients")
    parser.add_argument("--output", type=Path, help="folder for a page, a picture and numbers")
    options = parser.parse_args(arguments)
    try:
        options.sizes = tuple(int(size) for size in options.mesh.split(","))
    except ValueError:
        parser.error(f"--mesh {options.mesh}: write sizes like 2,3,2")
    if len(options.sizes) != 3 or min(options.sizes) < 1:
        parser.error(f"--mesh {options.mesh}: three sizes, all >= 1")
    tp = options.sizes[2]
    if options.width % (HEAD_DIM * tp) or options.context % tp:
        parser.error(
            f"--width {options.width} must be a multiple of {HEAD_DIM * tp}, and --context "
            f"{options.context} of {tp}: heads and sequence are split over tp"
        )
    return options


def train_over(run: str, device: str, options: argparse.Namespace) -> list[Step]:
    """All steps of one run, over process groups of its own."""
    # The hosts that are modelled could not share memory.
    path = "exchange" if options.backend == "nccl_model" else "auto"
    ours = run == "meshplan"
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        ranks,
        is_master=rank == 0 and not agent,
        multi_tenant=True,
    )
    dist.init_process_group(
        "meshplan" if ours else options.backend,
        store=dist.PrefixStore(run, store),
        rank=rank,
        world_size=ranks,
        pg_options=meshplan.BackendOptions(path=path, inner=options.backend) if ours else None,
    )
    try:
        if ours:
            meshplan.install(path=path)
        steps = train(run, init_device_mesh(device, options.sizes, mesh_dim_names=AXES), options)
        if rank == 0:
            print(f"{run}: {len(steps)} steps, loss {steps[-1].loss:.4f}", flush=True)
        meshplan.shutdown()
    finally:
        dist.destroy_process_group()
    return steps


def main() -> int:
    """Run under torchrun with as many processes as the mesh has ranks."""
    options = parse()
    ranks = math.prod(options.sizes)
    if int(os.environ.get("WORLD_SIZE", "0")) != ranks:
        print(
            f"--mesh {options.mesh} has {ranks} ranks; start them with\n"
            f"  python -m torch.distributed.run --standalone --nproc-per-node {ranks} "
            f"{shlex.join(sys.argv)}",
            file=sys.stderr,
        )
        return 2
    device = "cuda" if options.backend == "nccl" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    # Torch warns, on every rank, of the very thing that this is about.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    torch.use_deterministic_algorithms(True)
    where = f"mesh (ddp, fsdp, tp) = ({', '.join(map(str, options.sizes))}) over {options.backend}"
    if options.backend == "nccl_model":
        nccl_model.register()
        nccl_model.configure(domain_size=options.domain, algorithm=options.algorithm)
        where += f", {options.algorithm}, hosts of {options.domain}"
    runs = {run: train_over(run, device, options) for run in RUNS}
    if int(os.environ["RANK"]) == 0:
        print(where)
        print(table(runs))
        if options.output:
            write(runs, where, options.output, options)
    return 1 if any(any(step.differing.values()) for step in runs["meshplan"]) else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Taking the interpreter down costs each process a second of a shared core.
    os._exit(status)
