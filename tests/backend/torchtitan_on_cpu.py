"""Torchtitan on CPUs: what its trainer needs where there is no GPU, for its release and its source.

Import it before torchtitan. It edits no file of torchtitan, and changes nothing that reduces.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

SEQUENCE = 32
VOCABULARY = 2048

# Imported by torchtitan's modules for jobs that none of these is: they are hundreds of megabytes.
_PLACEHOLDERS = (
    "datasets",
    "datasets.distributed",
    # Of Triton.
    "torchtitan.distributed.minimal_async_ep.kernels",
)


class _Placeholder(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def prepare() -> None:
    """Let torchtitan find a CPU where it looks for a GPU. Call it before torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
    torch._utils._get_device_module = lambda _: torch.cpu  # type: ignore[attr-defined,assignment]
    properties = types.SimpleNamespace(name="cpu", total_memory=1 << 30)
    cpu: Any = torch.cpu
    cpu.set_device = lambda _: None
    cpu.current_device = lambda: 0
    cpu.get_device_name = lambda _: "cpu"
    cpu.get_device_properties = lambda _: properties
    cpu.memory_stats = lambda _: {}
    cpu.empty_cache = cpu.reset_peak_memory_stats = lambda: None
    if not hasattr(dist, "set_timeout"):
        # The name since torch 2.14.
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
    for name in _PLACEHOLDERS:
        sys.modules.setdefault(name, _Placeholder(name))
    _attend_without_flex()
    if "arg_mbs" not in inspect.signature(PipelineScheduleSingle.step).parameters:
        _join_microbatches()


def _join_microbatches() -> None:
    """Pass torchtitan's microbatches as whole batches, which torch 2.13 splits again."""
    step = PipelineScheduleSingle.step

    def step_in_microbatches(self: Any, *, kwarg_mbs: Any, **kwargs: Any) -> Any:
        parts, targets = kwargs.pop("arg_mbs"), kwargs.pop("target_mbs")
        whole = [torch.cat(column) for column in zip(*(parts or ()), strict=True)]
        first = {name for name, value in kwarg_mbs[0].items() if value is not None}
        kwargs |= {name: torch.cat([one[name] for one in kwarg_mbs]) for name in first}
        target = None if targets is None else torch.cat(targets)
        return step(self, *whole, target=target, **kwargs)

    PipelineScheduleSingle.step = step_in_microbatches  # type: ignore[method-assign]


def _attend_without_flex() -> None:
    """Attention by products of matrices: torch compiles FlexAttention for minutes on a CPU."""
    attention = importlib.import_module("torchtitan.models.common.attention")
    decoder = importlib.import_module("torchtitan.models.common.decoder")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # (tokens, heads, width), in the release with a batch in front.
        q, k, v = (one.transpose(-3, -2) for one in (q, k, v))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        length = scores.shape[-2]
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(scores.shape[-1] - length + 1)
        return (scores.masked_fill(mask, float("-inf")).softmax(-1) @ v).transpose(-3, -2)

    # With the names of its arguments, which torchtitan's sharding binds.
    names = list(attention.FlexAttention.forward.__annotations__)[:3]
    code = f"def forward(self, {', '.join(names)}, **_): return attend({', '.join(names)})"
    scope: dict[str, Any] = {"attend": attend}
    exec(code, scope)
    attention.FlexAttention.forward = scope["forward"]
    decoder.Decoder.get_attention_masks = lambda *_, **__: None


def _no_tokenizer() -> Any:
    """In place of a tokenizer, whose files torchtitan does not install."""
    configurable = importlib.import_module("torchtitan.config.configurable").Configurable

    class NoTokenizer(configurable):  # type: ignore[misc,valid-type]
        @dataclass(kw_only=True, slots=True)
        class Config(configurable.Config):  # type: ignore[misc,name-defined]
            pass

        def __init__(self, config: Any, **_: Any) -> None: ...

    return NoTokenizer.Config()


def _random_batches() -> Any:
    """A data loader of random tokens, different on each data-parallel rank."""
    try:
        base = importlib.import_module("torchtitan.components.data.loader").BaseDataLoader
    except ImportError:
        base = importlib.import_module("torchtitan.components.dataloader").BaseDataLoader

    class RandomBatches(base):  # type: ignore[misc,valid-type]
        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):  # type: ignore[misc,name-defined]
            pass

        def __init__(self, config: Any, *, dp_rank: int, **kwargs: Any) -> None:
            self.generator = torch.Generator().manual_seed(1000 + dp_rank)
            # The release has batches of sequences, its source a flat row of tokens.
            self.shape = [kwargs["local_batch_size"]] if "local_batch_size" in kwargs else []

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                shape = [*self.shape, SEQUENCE + 1]
                tokens = torch.randint(VOCABULARY, shape, generator=self.generator)
                places = torch.arange(SEQUENCE).expand(*self.shape, SEQUENCE)
                batch = {"input": tokens[..., :-1].clone(), "positions": places.clone()}
                yield batch, tokens[..., 1:].clone()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, _: Any) -> None: ...

        def close(self) -> None: ...

    return RandomBatches.Config()


def configure(folder: str, steps: int, activation_checkpoint: str, **parallelism: Any) -> Any:
    """A configuration of torchtitan's Llama 3 for tests, of two layers, with active clipping. The
    job writes to ``folder``; ``parallelism`` is of torchtitan's ``ParallelismConfig``.
    """
    llama = importlib.import_module("torchtitan.models.llama3.config_registry")
    config = llama.llama3_debugmodel()
    config.model_spec = llama.model_registry("debugmodel", attn_backend="flex")
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.dataloader = _random_batches()
    config.tokenizer = _no_tokenizer()
    config.validator.enable = config.checkpoint.enable = False
    config.dump_folder = folder
    config.debug.seed = 42
    config.debug.enable_structured_logging = False
    kinds = {"selective": llama.SelectiveAC, "full": llama.FullAC}
    kind = kinds.get(activation_checkpoint)
    config.activation_checkpoint = None if kind is None else kind.Config()
    training: dict[str, Any] = {
        "steps": steps,
        "max_norm": 0.1,
        "mixed_precision_param": "float32",
        "disable_cuda_graphs": True,
        "gc_freq": 1000,
        "local_batch_size": parallelism.get("pipeline_parallel_degree", 1),
        "seq_len": SEQUENCE,
        "num_tokens_per_microbatch_per_dp_rank": SEQUENCE,
        "max_context_length": SEQUENCE,
    }
    parallelism.setdefault("context_parallel_load_balancer", None)
    parallelism.setdefault("pipeline_parallel_schedule", "1F1B")
    if parallelism.get("pipeline_parallel_degree", 1) > 1:
        parallelism.setdefault("num_pp_microbatches", 2)
    _set_known(config.training, training)
    _set_known(config.parallelism, parallelism)
    return config


def _set_known(section: Any, values: dict[str, Any]) -> None:
    """The release and the source name some fields differently."""
    known = {one.name for one in fields(section)}
    for name in known & values.keys():
        setattr(section, name, values[name])
