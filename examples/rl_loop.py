"""Reinforcement learning whose trainer and generator agree bit for bit on every log-probability.

    torchrun --nproc-per-node 8 examples/rl_loop.py
    torchrun --nproc-per-node 8 examples/rl_loop.py --plain
    VLLM_PLUGINS=meshplan torchrun --nproc-per-node 8 examples/rl_loop.py --generator vllm

The trainer is FSDP2 with four tensor-parallel ranks and reads whole sequences. The generator
decodes one token at a time on the same ranks, and sums over them by a communicator of its own or
of vLLM. With --plain, gloo reduces on both sides. Exit code 1 if log-probabilities differ without
--plain, or none differs with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshplan

TP, WIDTH, HEADS, VOCABULARY, LENGTH = 4, 64, 4, 32, 12
Past = tuple[Tensor, Tensor]  # keys and values of a block


class Linear(nn.Linear):
    """Adds the products of a row in one order for any batch. A matrix product does not."""

    def forward(self, rows: Tensor) -> Tensor:
        return (rows.unsqueeze(-2) * self.weight).sum(-1)


class Down(Linear):
    """Its summands are split over the ranks. The trainer adds them by DTensor."""

    all_reduce: Callable[[Tensor], Tensor] | None = None

    def forward(self, rows: Tensor) -> Tensor:
        partial = super().forward(rows)
        return partial if self.all_reduce is None else self.all_reduce(partial)


class Block(nn.Module):
    """Attention and an MLP; each of ``split`` ranks has a part of the heads and inner width."""

    def __init__(self, split: int) -> None:
        super().__init__()
        for name in ("q", "k", "v", "up"):
            self.add_module(name, Linear(WIDTH, WIDTH // split, bias=False))
        self.out = Down(WIDTH // split, WIDTH, bias=False)
        self.down = Down(WIDTH // split, WIDTH, bias=False)

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden = nn.functional.rms_norm(x, (WIDTH,))
        q, k, v = (
            getattr(self, name)(hidden).unflatten(-1, (-1, WIDTH // HEADS)) for name in "qkv"
        )
        k, v = torch.cat([past[0], k]), torch.cat([past[1], v])
        start = len(k) - len(q)
        # Each position alone: kernels for a whole sequence add in another order.
        mixed = [attend(q[t], k[: start + t + 1], v[: start + t + 1]) for t in range(len(q))]
        x = x + self.out(torch.stack(mixed))
        return x + self.down(self.up(nn.functional.rms_norm(x, (WIDTH,))).relu()), (k, v)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One position over all before it: ``q`` is [heads, size], ``k`` and ``v`` [position, ...]."""
    weights = (q * k).sum(-1).softmax(0)
    return (weights.unsqueeze(-1) * v).sum(0).flatten()


class Policy(nn.Module):
    def __init__(self, split: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(split) for _ in range(2))
        self.head = Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, cache: list[Past] | None = None) -> tuple[Tensor, list[Past]]:
        """The log-probabilities of the next token at each position, and the cache with them."""
        x, kept = self.embedding(tokens), []
        nothing = x.new_empty(0, HEADS // TP, WIDTH // HEADS)
        for index, block in enumerate(self.blocks):
            x, new = block(x, (nothing, nothing) if cache is None else cache[index])
            kept.append(new)
        return self.head(nn.functional.rms_norm(x, (WIDTH,))).log_softmax(-1), kept


def make_trainer(mesh: DeviceMesh) -> Policy:
    torch.manual_seed(0)
    model = Policy()
    columns, rows = ColwiseParallel(), RowwiseParallel()
    for block in model.blocks:
        plan = dict.fromkeys(("q", "k", "v", "up"), columns) | {"out": rows, "down": rows}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    whole = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], {"embedding": whole, "head": whole})
    return fully_shard(model, mesh=mesh["dp"])


class Communicator:
    """The generator's own; ``--generator vllm`` has vLLM's in its place."""

    def __init__(self, group: dist.ProcessGroup, plain: bool) -> None:
        self.group, self.plain = group, plain

    def all_reduce(self, partial: Tensor) -> Tensor:
        if not self.plain:
            return meshplan.deterministic_all_reduce(partial.clone(), group=self.group)
        dist.all_reduce(partial, group=self.group)
        return partial


def join_vllm() -> Callable[[Tensor], Tensor]:
    """The all-reduce of vLLM's tensor-parallel group, on the ranks of the trainer."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    ranks, backend = dist.get_world_size(), current_platform.dist_backend
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(ranks, dist.get_rank(), backend=backend)
        parallel_state.initialize_model_parallel(TP, backend=backend)
    return parallel_state.get_tp_group().all_reduce


def load_weights(generator: Policy, trainer: Policy, rank: int) -> None:
    """Copy this rank's part of the trainer's weights to the generator."""
    shards = dict(generator.named_parameters())
    for name, parameter in trainer.named_parameters():
        full, shard = parameter.full_tensor(), shards[name]
        for dim in range(full.dim()):
            full = full.narrow(dim, rank * shard.shape[dim] % full.shape[dim], shard.shape[dim])
        shard.data.copy_(full)


@torch.no_grad()
def generate(generator: Policy, seed: int) -> tuple[Tensor, Tensor]:
    """A sequence of tokens, and the log-probability of each after the first."""
    chance = torch.Generator().manual_seed(seed)
    tokens, chosen, cache = [torch.tensor([1])], [], None
    for _ in range(LENGTH):
        scores, cache = generator(tokens[-1], cache)
        tokens.append(torch.multinomial(scores[0].exp(), 1, generator=chance))
        chosen.append(scores[0, tokens[-1]])
    return torch.cat(tokens), torch.cat(chosen)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--generator", choices=["own", "vllm"], default="own")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    dist.init_process_group("gloo" if options.plain else "meshplan")
    ranks = dist.get_world_size()
    if ranks % TP:
        parser.error(f"pass a multiple of {TP} to torchrun --nproc-per-node, got {ranks}")
    mesh = init_device_mesh("cpu", (ranks // TP, TP), mesh_dim_names=("dp", "tp"))
    trainer, generator = make_trainer(mesh), Policy(TP)
    all_reduce = (
        join_vllm()
        if options.generator == "vllm"
        else Communicator(mesh.get_group("tp"), options.plain).all_reduce
    )
    for module in generator.modules():
        if isinstance(module, Down):
            module.all_reduce = all_reduce
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)

    wrong = 0
    for step in range(options.steps):
        load_weights(generator, trainer, mesh.get_local_rank("tp"))
        tokens, before = generate(generator, seed=100 * step + mesh.get_local_rank("dp"))
        after = trainer(tokens[:-1])[0].gather(-1, tokens[1:, None])[:, 0]
        differ = (after.detach().view(torch.int32) != before.view(torch.int32)).sum()
        reward = (tokens[1:] % 2 == 0).float()
        loss = -((after - before).exp() * (reward - 0.5)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        counts = torch.stack([differ, reward.sum().long()])
        dist.all_reduce(counts, group=mesh.get_group("dp"))
        wrong += int(counts[0])
        if dist.get_rank() == 0:
            total = LENGTH * mesh.size(0)
            print(
                f"step {step}: {counts[0]} of {total} log-probabilities differ, reward {counts[1]}"
            )
    dist.destroy_process_group()
    if bool(wrong) != options.plain:
        raise SystemExit(
            f"{wrong} log-probabilities differ {'with' if options.plain else 'without'} --plain"
        )


if __name__ == "__main__":
    main()
