"""Lose one rank of 8, go on with 7, and get the bits of a run on 8 ranks throughout.

A small transformer with dropout learns real text. FSDP2 shards it (HSDP on 4, 6, 8, ... ranks),
computes in bfloat16 and keeps parameters in float32; gradients are clipped. On one machine, phases
of ``ranks:steps`` follow each other through checkpoints:

    python examples/elastic.py --schedule 8:10,7:10,5:5,3:5,8:5 --micro-batches 16
    python examples/elastic.py --schedule 8:35 --micro-batches 16

Both print the same digest of parameters, optimizer state, losses and norms. ``--plain`` trains with
FSDP2 alone, on the same micro-batches with the same dropout: the digests differ. ``2x4:10`` is a
phase of two replicas and four shards, ``1x4:10`` of four shards without replicas.

On nodes that may be lost, each with 2 ranks, and a folder F that all of them see:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:4 --nproc-per-node 2 \\
        --max-restarts 9 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        examples/elastic.py --steps 30 --micro-batches 16 --folder F
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import meshplan
from meshplan.elastic import GradientAccumulator, MicroBatches, MicroBatchSampler, seed_micro_batch
from meshplan.errors import ElasticError

TEXT = Path(__file__).parent / "data" / "declaration.txt"
SEED, CLIP, WIDTH, CONTEXT, SAMPLES, BATCH = 1776, 0.5, 32, 24, 256, 2

Sizes = tuple[int, ...]
"""Of a mesh: replicas and shards, or shards."""
Observer = Callable[[int, dict[str, Tensor]], None]


class ByteTransformer(nn.Module):
    """Bytes in, the mean loss of each next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


def build(mesh: DeviceMesh, compute: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model of every run, sharded over ``mesh``, and its optimizer."""
    torch.manual_seed(SEED)
    model = ByteTransformer()
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def read_samples() -> list[Tensor]:
    """Windows of the text, as bytes."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    stride = (len(text) - CONTEXT - 1) // SAMPLES
    return [text[at * stride : at * stride + CONTEXT + 1] for at in range(SAMPLES)]


def elastic_step(
    model: nn.Module, accumulator: GradientAccumulator, batches: Iterator[Tensor]
) -> tuple[float, float]:
    """The loss and the norm of a step whose bits do not depend on the number of ranks."""
    losses = []
    for _ in range(accumulator.micro_batches.rounds):
        with accumulator.round():
            loss = model(next(batches))
            loss.backward()
        losses.append(loss.detach())
    accumulator.finish()
    norm = meshplan.clip_grad_norm_(model.parameters(), CLIP)
    return accumulator.sum_scalars(losses) / accumulator.micro_batches.count, norm.item()


def plain_step(
    model: nn.Module, micro_batches: MicroBatches, batches: Iterator[Tensor]
) -> tuple[float, float]:
    """The same step by FSDP2 alone, with a reduction in each round."""
    total = torch.zeros(())
    for round in range(micro_batches.rounds):
        # FSDP2 divides by the number of ranks.
        share = micro_batches.ranks / micro_batches.count
        with seed_micro_batch(SEED, micro_batches.step, micro_batches.index(round)):
            loss = model(next(batches)) * (0 if micro_batches.is_repeated(round) else share)
            loss.backward()
        total += loss.detach()
    micro_batches.finish_step()
    dist.all_reduce(total)
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    return total.item() / micro_batches.ranks, norm.full_tensor().item()


def read_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Whole parameters and optimizer states, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        parts = {"parameter": parameter, **optimizer.state[parameter]}
        for part, value in sorted(parts.items()):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name} {part}"] = whole.detach()
    return found


def digest(state: dict[str, Tensor], log: Sequence[dict[str, Any]]) -> str:
    """A hash of all bits of a state, and of what was logged so far."""
    found = hashlib.sha256()
    for name, tensor in state.items():
        found.update(name.encode() + tensor.numpy().tobytes())
    values = [[line["loss"], line["norm"]] for line in log]
    found.update(json.dumps(values).encode())
    return found.hexdigest()


def train(
    options: argparse.Namespace, sizes: Sizes, until: int, observe: Observer | None = None
) -> None:
    """Train from the last checkpoint in the folder, if there is one, to step ``until``.

    Runs on every rank of the default process group.
    """
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])
    model, optimizer = build(mesh, getattr(torch, options.compute))
    count, ranks = options.micro_batches, dist.get_world_size()
    if options.plain:
        accumulator = None
        micro_batches = MicroBatches(count, ranks=ranks, rank=dist.get_rank())
    else:
        accumulator = GradientAccumulator(model, count, mesh, seed=SEED)
        micro_batches = accumulator.micro_batches
    log: list[dict[str, Any]] = []

    found = sorted(path.parent for path in Path(options.folder).glob("step*/.metadata"))
    if found:
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state, **micro_batches.state_dict(), "log": ""}
        checkpoint.load(saved, checkpoint_id=found[-1])
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        micro_batches.load_state_dict(saved)
        log = json.loads(saved["log"])

    sampler = MicroBatchSampler(micro_batches, SAMPLES, BATCH, seed=SEED)
    batches = iter(DataLoader(read_samples(), batch_sampler=sampler))  # type: ignore[arg-type]
    while micro_batches.step < until:
        step = micro_batches.step + 1
        if step == options.lose:
            # In the middle of the step: the others wait for the gradients of this node.
            model(next(batches)).detach()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        if accumulator is None:
            loss, norm = plain_step(model, micro_batches, batches)
        else:
            loss, norm = elastic_step(model, accumulator, batches)
        optimizer.step()
        optimizer.zero_grad()
        log.append({"step": step, "ranks": ranks, "loss": loss.hex(), "norm": norm.hex()})
        state = read_state(model, optimizer)
        log[-1]["digest"] = digest(state, log)
        if observe:
            observe(step, state)
        if step == until or (options.steps and step % options.save_every == 0):
            weights, state = get_state_dict(model, optimizer)
            position = {**micro_batches.state_dict(), "log": json.dumps(log)}
            checkpoint.save(
                {"model": weights, "optimizer": state, **position},
                checkpoint_id=Path(options.folder) / f"step{step:06}",
            )
    if dist.get_rank() == 0:
        Path(options.folder, "log.json").write_text(json.dumps(log))
        print(f"{ranks} ranks, step {until}, loss {float.fromhex(log[-1]['loss']):.6f}", flush=True)


def run_rank(rank: int, options: argparse.Namespace, sizes: Sizes, until: int, store: str) -> None:
    """One rank of a phase."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo" if options.plain else "meshplan",
        init_method=f"file://{store}",
        rank=rank,
        world_size=_product(sizes),
    )
    train(options, sizes, until)
    # A rank that ends early would break the connections that others still open.
    dist.barrier()
    meshplan.shutdown()
    dist.destroy_process_group()


def run_schedule(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All phases, each in processes of its own; the log."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    until = 0
    for phase, (sizes, steps) in enumerate(options.schedule):
        until += steps
        store = str(Path(options.folder, f"store{phase}").absolute())
        torch.multiprocessing.start_processes(
            run_rank, (options, sizes, until, store), _product(sizes), start_method="fork"
        )
    found: list[dict[str, Any]] = json.loads(Path(options.folder, "log.json").read_text())
    return found


def draw(runs: dict[str, list[list[dict[str, Any]]]], path: Path) -> None:
    """Losses and digests of each run on the schedule, compared with the first ranks throughout."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("--picture draws with matplotlib; write: pip install matplotlib", file=sys.stderr)
        raise SystemExit(2) from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, middle, bottom) = plt.subplots(
        *(3, 1),
        figsize=(9, 6),
        sharex=True,
        layout="constrained",
        dpi=110,
        gridspec_kw={"height_ratios": (4, 3, 1.5)},
    )
    for row, (run, (changing, whole)) in enumerate(runs.items()):
        colour, width, alpha = (("#b5332e", 5, 0.5), ("#1f6f8b", 1.5, 1))[row]
        steps = [line["step"] for line in changing]
        losses, wanted = (
            [float.fromhex(line["loss"]) for line in log] for log in (changing, whole)
        )
        top.plot(steps, losses, color=colour, linewidth=width, alpha=alpha, label=run)
        apart = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
        middle.plot(steps, apart, ".-", color=colour, label=run)
        equal = [a["digest"] == b["digest"] for a, b in zip(changing, whole, strict=True)]
        for found, mark in ((True, "o"), (False, "x")):
            at = [step for step, one in zip(steps, equal, strict=True) if one is found]
            bottom.plot(at, [-row] * len(at), mark, color=colour)
    phases = [list(lines) for _, lines in itertools.groupby(changing, lambda line: line["ranks"])]
    for lines in phases:
        top.text(
            lines[0]["step"] - 0.4, 1.02, lines[0]["ranks"], transform=top.get_xaxis_transform()
        )
        for axis in (top, middle, bottom) if lines is not phases[0] else ():
            axis.axvline(lines[0]["step"] - 0.5, color="#cccccc", zorder=0)
    top.set(ylabel="loss (nats per byte)", xlim=(0.5, len(changing) + 0.5))
    top.text(-0.01, 1.02, "ranks", transform=top.transAxes, ha="right")
    middle.set(ylabel="difference of the loss\n(nats per byte)", ylim=(-1e-9, 1e-6))
    middle.set_yscale("symlog", linthresh=1e-8)
    bottom.set_title("digest: a dot is equal, a cross is different", fontsize=9)
    bottom.set(xlabel="step", ylim=(-1.6, 0.6))
    bottom.set_yticks([0, -1], list(runs))
    top.legend(fontsize=8)
    middle.legend(fontsize=8)
    figure.suptitle(f"Changing ranks, compared with {phases[0][0]['ranks']} ranks throughout")
    figure.savefig(path)
    plt.close(figure)


def compare(options: argparse.Namespace) -> None:
    """Run the schedule and its first ranks throughout, by FSDP2 alone and elastic; draw both."""
    folder, schedule = Path(options.folder), options.schedule
    whole = [(schedule[0][0], sum(steps for _, steps in schedule))]
    runs = {}
    for run in ("FSDP2 alone", "elastic"):
        options.plain, logs = run != "elastic", []
        for name, options.schedule in (("changing", schedule), ("whole", whole)):
            options.folder = str(folder / f"{run} {name}")
            Path(options.folder).mkdir(parents=True)
            logs.append(run_schedule(options))
        runs[run] = logs
    draw(runs, options.picture)


def mesh_sizes(ranks: int) -> Sizes:
    """HSDP with two replicas, or FSDP on an odd number of ranks or fewer than four."""
    return (2, ranks // 2) if ranks >= 4 and ranks % 2 == 0 else (ranks,)


def read_schedule(text: str) -> list[tuple[Sizes, int]]:
    """The meshes and steps of ``8:10,1x4:5``."""
    phases = []
    for phase in text.split(","):
        ranks, steps = phase.split(":")
        if "x" in ranks:
            replicas, shards = map(int, ranks.split("x"))
            sizes: Sizes = (replicas, shards) if replicas > 1 else (shards,)
        else:
            sizes = mesh_sizes(int(ranks))
        phases.append((sizes, int(steps)))
    return phases


def _product(sizes: Sizes) -> int:
    return sizes[0] * sizes[-1] if len(sizes) == 2 else sizes[0]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--schedule", help="ranks:steps,... on this machine")
    mode.add_argument("--steps", type=int, help="train so far, as a rank of torchrun")
    parser.add_argument("--micro-batches", type=int, default=16, help="of a step, on all ranks")
    parser.add_argument("--picture", type=Path, help="draw a comparison with FSDP2 alone, as PNG")
    parser.add_argument("--plain", action="store_true", help="FSDP2 alone")
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--folder", help="for checkpoints; a temporary one if omitted")
    parser.add_argument("--save-every", type=int, default=2, help="steps, under torchrun")
    parser.add_argument("--timeout", type=float, default=60, help="seconds, under torchrun")
    parser.add_argument("--lose", type=int, help="kill this node in a step, under torchrun")
    options = parser.parse_args(arguments)
    if options.picture and (options.steps or options.plain):
        parser.error("--picture needs --schedule, and runs with FSDP2 alone by itself")
    if options.steps:
        if "WORLD_SIZE" not in os.environ or not options.folder:
            parser.error("--steps runs under torchrun, with --folder")
        return options
    if options.lose:
        parser.error("--lose needs torchrun and --steps")
    try:
        options.schedule = read_schedule(options.schedule)
    except ValueError:
        parser.error(f"--schedule {options.schedule}: write ranks:steps,... such as 8:10,7:10")
    for sizes, _ in options.schedule:
        try:
            MicroBatches(options.micro_batches, ranks=_product(sizes))
        except ElasticError as error:
            parser.error(str(error))
    return options


def main() -> None:
    """Run a schedule, or one rank under torchrun."""
    options = parse()
    if options.steps:
        torch.set_num_threads(1)
        # In the options too: torch gives groups of mesh axes 30 minutes, whatever the job has.
        timeout = timedelta(seconds=options.timeout)
        if options.plain:
            dist.init_process_group("gloo", timeout=timeout)
        else:
            pg_options = meshplan.BackendOptions(timeout=timeout)
            dist.init_process_group("meshplan", timeout=timeout, pg_options=pg_options)
        train(options, mesh_sizes(dist.get_world_size()), options.steps)
        if dist.get_rank() == 0:
            log = json.loads(Path(options.folder, "log.json").read_text())
            print(f"digest {log[-1]['digest']}", flush=True)
        dist.barrier()
        meshplan.shutdown()
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        options.folder = options.folder or folder
        Path(options.folder).mkdir(parents=True, exist_ok=True)
        if options.picture:
            compare(options)
            return
        log = run_schedule(options)
    print(f"digest {log[-1]['digest']}", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
