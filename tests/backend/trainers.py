"""Training jobs that know nothing of meshplan but the backend's name, which the command line gives.

    python -m tests.backend.trainers JOB BACKEND FILE [SETTINGS]

Its ranks are processes as torchrun starts them, forked from this one, which has imported what they
need. Their nodes are those of ``nccl_model``. FILE gets, for each rank of each run, how many
reductions ran under the contract and outside, and what the rank holds. With the settings of
``meshplan run`` the ranks are observed, and that of rank 0 has the report.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset

import meshplan
from meshplan.run import RunSettings
from meshplan.run._job import ObservedJob
from meshplan.testing import nccl_model
from tests.backend.training import resume
from tests.processes import run_ranks

STEPS, CLIP, VOCABULARY, WIDTH = 6, 0.1, 96, 12

Held = tuple[str, str, bytes]
"""The name of a tensor, which part of it a rank holds, and its bits. Equal parts are replicas."""


class Numbers(Dataset[Tensor]):
    """Rows of different magnitudes: the order of additions shows."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator) * 3.0 ** (index % 7)


class Tokens(Dataset[dict[str, Tensor]]):
    """Sequences for a language model."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(VOCABULARY, (16,), generator=generator)
        return {"input_ids": row, "labels": row}


class Block(nn.Module):
    """A norm, whose weight tensor parallelism replicates, and two layers that it shards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.enter, self.leave = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(nn.functional.gelu(self.enter(self.norm(x))))
        return x + found


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def hold(name: str, value: Tensor | float) -> Held:
    """What this rank holds of a tensor."""
    if isinstance(value, float):
        value = torch.tensor(value, dtype=torch.float64)
    found = value.detach()
    if not isinstance(found, DTensor):
        return name, "all", bits(found)
    places = found.device_mesh.get_coordinate()
    assert places is not None
    pairs = zip(places, found.placements, strict=True)
    part = [f"{place} of {one}" for place, one in pairs if one != Replicate()]
    return name, ", ".join(part) or "all", bits(found.to_local())


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Held]:
    """Parameters and the state of the optimizer."""
    found = []
    for name, parameter in model.named_parameters():
        found.append(hold(name, parameter))
        state = optimizer.state[parameter]
        found += [hold(f"{key} of {name}", state[key]) for key in ("exp_avg", "exp_avg_sq")]
    return found


def hold_norm(name: str, norm: Tensor) -> Held:
    return hold(name, norm.full_tensor() if isinstance(norm, DTensor) else norm)


def train_llama(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, ranks_of_a_batch: int = 1
) -> list[Held]:
    """A loop without a trainer, which clips each gradient by its own norm; the norms."""
    norms = []
    for step in steps:
        place = dist.get_rank() // ranks_of_a_batch
        generator = torch.Generator().manual_seed(100 * place + step)
        tokens = torch.randint(VOCABULARY, (2, 16), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        for name, parameter in model.named_parameters():
            norm = nn.utils.clip_grad_norm_([parameter], CLIP)
            norms.append(hold_norm(f"norm of {name}, step {step}", norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def build_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def load_llama(**sizes: int) -> nn.Module:
    """Sharded by Transformers as it reads the model: FSDP2, HSDP, tensor parallel."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    path = f"{os.environ['JOB_FOLDER']}/llama"
    build_llama().save_pretrained(path)
    dist.barrier()
    config = DistributedConfig(**sizes)
    return LlamaForCausalLM.from_pretrained(path, distributed_config=config)


def shard_llama(shape: tuple[int, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2, or HSDP on a mesh of two axes, as torch's tutorial applies it."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
    model: Any = build_llama()
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def llama_fsdp2(backend: str, shape: tuple[int, ...] = (3,)) -> list[Held]:
    dist.init_process_group(backend)
    model, optimizer = shard_llama(shape)
    norms = train_llama(model, optimizer, range(STEPS))
    return read(model, optimizer) + norms


def llama_tensor_parallel(backend: str) -> list[Held]:
    """FSDP2 over four ranks and tensor parallelism over two."""
    dist.init_process_group(backend)
    model = load_llama(fsdp_size=4, tp_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    norms = train_llama(model, optimizer, range(STEPS), ranks_of_a_batch=2)
    return read(model, optimizer) + norms


def llama_trainer(backend: str, **sizes: int) -> list[Held]:
    """``transformers.Trainer``: with sizes, of a model that is sharded already, else DDP."""
    import transformers

    dist.init_process_group(backend)
    model: Any = load_llama(**sizes) if sizes else build_llama()
    arguments = transformers.TrainingArguments(
        output_dir=os.environ["JOB_FOLDER"],
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_grad_norm=CLIP,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    found: list[Held] = []

    class LogNorms(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *given: Any, model: nn.Module, **_: Any) -> None:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                step = f"step {given[1].global_step}"
                found.append(hold_norm(f"norm of {name}, {step}", parameter.grad.norm()))

    trainer = transformers.Trainer(model, arguments, train_dataset=Tokens(), callbacks=[LogNorms()])
    trainer.train()
    found += read(trainer.model, trainer.optimizer.optimizer)
    for entry in trainer.state.log_history[:STEPS]:
        found += [hold(f"{key} {entry['step']}", entry[key]) for key in ("loss", "grad_norm")]
    return found


def lightning_ddp(backend: str) -> list[Held]:
    from lightning.pytorch.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend=backend)
    return fit_with_lightning(strategy, lambda module: None)


def lightning_model_parallel(backend: str) -> list[Held]:
    """FSDP2 over four ranks and tensor parallelism over two."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(4, 2, process_group_backend=backend)
    return fit_with_lightning(strategy, parallelize)


def parallelize(module: Any) -> None:
    """All parameters on one mesh, which the clipping requires."""
    mesh = module.device_mesh
    plan: Any = {
        "enter": ColwiseParallel(input_layouts=Shard(0)),
        "leave": RowwiseParallel(),
    }
    rows = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
    for layer in module.layers:
        parallelize_module(layer.norm, mesh["tensor_parallel"], rows)
        parallelize_module(layer.norm, mesh["tensor_parallel"], SequenceParallel(sequence_dim=0))
        parallelize_module(layer, mesh["tensor_parallel"], plan)
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(module.layers, mesh=mesh["data_parallel"])


def fit_with_lightning(strategy: Any, configure: Callable[[Any], None]) -> list[Held]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = build()

        def configure_model(self) -> None:
            configure(self)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss: Tensor = (self.layers(batch) - batch.roll(1, 0)).square().mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(Numbers(), batch_size=2))
    assert trainer.global_step == STEPS
    loss = hold("loss", trainer.callback_metrics["loss"])
    return [*read(module, trainer.optimizers[0]), loss]


def accelerate_ddp(backend: str) -> list[Held]:
    from accelerate import Accelerator

    # On CPUs it accepts the names gloo and mpi alone, and takes a default group that exists.
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True)
    model: Any = build()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, batches = accelerator.prepare(
        model, optimizer, DataLoader(Numbers(), batch_size=2)
    )
    found = []
    for step, batch in zip(range(STEPS), batches, strict=False):
        loss = (model(batch) - batch.roll(1, 0)).square().mean()
        accelerator.backward(loss)
        found.append(hold(f"norm {step}", accelerator.clip_grad_norm_(model.parameters(), CLIP)))
        found.append(hold(f"loss {step}", accelerator.reduce(loss.detach(), "mean")))
        optimizer.step()
        optimizer.zero_grad()
    return read(model, optimizer.optimizer) + found


def llama_checkpoints(backend: str) -> list[Held]:
    """HSDP: saved, also while it goes on, and resumed from both, each time in another group.

    A resumed job holds replicas of the one that went on.
    """
    folder, store = os.environ["JOB_FOLDER"], os.environ["MESHPLAN_TEST_STORE"]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: list[Held] = []
    for name in ("first", "now", "later"):
        own = dist.PrefixStore(name, dist.FileStore(store, size))
        dist.init_process_group(backend, store=own, rank=rank, world_size=size)
        model, optimizer = shard_llama((2, 3))
        if name == "first":
            train_llama(model, optimizer, range(3))
            weights, state = get_state_dict(model, optimizer)
            whole = {"model": weights, "optimizer": state}
            dcp.save(whole, checkpoint_id=f"{folder}/now")
            pending = dcp.async_save(whole, checkpoint_id=f"{folder}/later")
        else:
            resume(model, optimizer, f"{folder}/{name}")
        found += train_llama(model, optimizer, range(3, STEPS))
        found += read(model, optimizer)
        pending.result()
        if name != "later":
            dist.destroy_process_group()
    return found


class Job(NamedTuple):
    """A job.

    Attributes:
        train: takes the name of a backend.
        nodes: of each rank, for each run of the job.
        module: to import before the ranks are forked.
    """

    train: Callable[[str], list[Held]]
    nodes: tuple[tuple[int, ...], ...]
    module: str


# All ranks are one group: what differs is where they are in another run.
ONE_GROUP = ((0, 0, 1), (0, 1, 1))
# The groups of three neighbours span nodes in two ways. So do those of every second rank, whose
# rings have different orders.
NEIGHBOURS, SECONDS = ((0, 0, 1, 1, 2, 2),), ((0, 0, 1, 0, 0, 1, 1, 1),)
LLAMA, TRAINER = "transformers.models.llama.modeling_llama", "transformers.trainer"
JOBS = {
    "Llama with FSDP2": Job(llama_fsdp2, ONE_GROUP, LLAMA),
    "Llama with HSDP": Job(partial(llama_fsdp2, shape=(2, 3)), NEIGHBOURS, LLAMA),
    "Llama with FSDP2 and TP": Job(llama_tensor_parallel, SECONDS, LLAMA),
    "Llama with DCP": Job(llama_checkpoints, NEIGHBOURS, LLAMA),
    "Transformers with DDP": Job(llama_trainer, ONE_GROUP, TRAINER),
    "Transformers with HSDP": Job(
        partial(llama_trainer, dp_replicate_size=2, fsdp_size=3), NEIGHBOURS, TRAINER
    ),
    "Lightning with DDP": Job(lightning_ddp, ONE_GROUP, "lightning.pytorch"),
    "Lightning with FSDP2 and TP": Job(lightning_model_parallel, SECONDS, "lightning.pytorch"),
    "Accelerate with DDP": Job(accelerate_ddp, ONE_GROUP, "accelerate"),
}


def run_rank(
    name: str,
    backend: str,
    nodes: tuple[int, ...],
    port: int,
    folder: str,
    settings: str | None,
    rank: int,
) -> dict[str, Any]:
    """How one rank has reduced, and what it holds."""
    size = str(len(nodes))
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MESHPLAN_INNER": "nccl_model",
        "JOB_FOLDER": folder,
        "MESHPLAN_HOST": f"host{nodes[rank]}",
    }
    warnings.simplefilter("ignore")
    nccl_model.register()
    nccl_model.configure(node_of_rank=nodes, algorithm="tree")
    file = f"{folder}/run.json"
    parsed = RunSettings.parse(f"{settings} report={file}") if settings else None
    job = parsed and ObservedJob(parsed)
    with meshplan.coverage() as covered:
        held = JOBS[name].train(backend)
    kind_of_group = type(dist.group.WORLD).__name__
    dist.barrier()
    dist.destroy_process_group()
    scalars = covered.steps[0].to_scalars()
    kinds = ("outside", "native", "any_order", "contract")
    counts = {kind: int(scalars[f"meshplan/{kind}/count"]) for kind in kinds}
    found = {"group": kind_of_group, "held": held, "counts": counts, "table": str(covered)}
    if job is not None and not job.finish(None) + rank:
        found["report"] = json.loads(Path(file).read_text())
    return found


def main(name: str, backend: str, path: str, settings: str | None = None) -> None:
    """Run a job, once for each map of nodes."""
    torch.set_num_threads(1)
    importlib.import_module(JOBS[name].module)
    found = []
    for nodes in JOBS[name].nodes:
        with tempfile.TemporaryDirectory() as folder:
            agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            run = partial(run_rank, name, backend, nodes, agent.port, folder, settings)
            found += run_ranks(run, len(nodes), init=False)
    Path(path).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
