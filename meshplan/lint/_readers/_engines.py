"""Entries of the table of degree keys: engines that serve a model, and plain options."""

from __future__ import annotations

from dataclasses import replace

from meshplan.lint._readers._tables import Framework, Mesh

# vLLM, vllm/distributed/parallel_state.py, initialize_model_parallel: (dp, pp, pcp, tp). Data
# parallel ranks serve different requests and reduce nothing. SGLang, python/sglang/srt/
# distributed/parallel_state.py, initialize_model_parallel: (pp, tp) on world_size = pp * tp ranks,
# and python/sglang/srt/managers/data_parallel_controller.py, launch_dp_schedulers: as many for each
# data-parallel replica. With --enable-dp-attention attention has its own groups inside of tp.
# Sections: a file of engines has a list; vLLM's production stack has vllmConfig in Helm's values.
_SECTION = (
    r"(?:(?P<part>\d+\.(?=engine_args)|.*(?=vllm_config))?"
    r"(?:engine_args|engine_kwargs|server_args|vllm|parallel|vllm_config))?"
)
_SERVING_MESH = Mesh(
    keys={
        "data_parallel_size": "dp",
        "pipeline_parallel_size": "pp",
        "prefill_context_parallel_size": "cp",
        "context_parallel_size": "cp",
        "tensor_parallel_size": "tp",
        **{f"{axis}{unit}": axis for axis in ("dp", "pp", "cp", "tp") for unit in ("", "_size")},
    },
    order=("dp", "pp", "cp", "tp"),
    section=_SECTION,
    roles={"dp": "apart"},
    reduction="dtensor",
    needs=frozenset({"dp", "pp", "tp"}),
    refused={
        r"enable_dp_attention=true": "--enable-dp-attention has two meshes on the same ranks",
        r".*args\.\d+=--(?:tensor|pipeline|data)[_-]parallel[_-]size.*": (
            "an argument of the engine has another degree"
        ),
    },
)
VLLM = Framework(
    program="vllm",
    mark=r"(?:(?:\d+\.engine_args|.*vllm_config)\.)?(?:data|pipeline|tensor|prefill_context)_parallel_size"
    r"|tp|dp|pp|tp_size|dp_size|pp_size",
    meshes=(_SERVING_MESH,),
    kinds=frozenset({"document", "command", "python"}),
    classes=frozenset({"LLM", "EngineArgs", "AsyncEngineArgs"}),
    without=r"(?:fsdp|ddp|dp_shard|dp_replicate)(?:_size|_degree)?",
    word=r"\bvllm\b",
)
SGLANG = replace(
    VLLM,
    program="sglang",
    classes=frozenset({"Engine", "ServerArgs"}),
    word=r"\b(?:sglang|sgl)\b",
)
SERVING = replace(
    VLLM,
    program="serving",
    mark=r"(?:data|pipeline|tensor|prefill_context)_parallel_size",
    kinds=frozenset({"command"}),
    classes=frozenset(),
    word="",
)

# Plain options: the order of options does not specify the order of ranks, which is torchtitan's.
_PLAIN_AXES = ("pp", "dp_replicate", "dp", "ddp", "dp_shard", "fsdp", "cp", "sp", "tp")
PLAIN = Framework(
    program="unknown",
    mark=r"(?:" + "|".join(_PLAIN_AXES) + r")(?:_size|_degree)?",
    meshes=(
        Mesh(
            keys={
                f"{axis}{unit}": axis for axis in _PLAIN_AXES for unit in ("", "_size", "_degree")
            },
            order=_PLAIN_AXES,
            reduction="dtensor",
        ),
    ),
    kinds=frozenset({"command"}),
    # FastVideo's data axes, which shard parameters along the ranks of sp.
    without=r"hsdp_(?:replicate|shard)_dim",
)
