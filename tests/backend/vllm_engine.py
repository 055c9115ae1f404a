"""An engine of vLLM with two tensor-parallel workers and a small Llama of random weights.

Prints what its workers have reduced as JSON. For ``test_vllm``, in an environment that has vLLM.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def reduce_in_worker(worker: Any) -> dict[str, Any]:
    """Every reduction of the communicator, and the report of what ran before them."""
    from vllm.distributed import get_tp_group

    import meshplan

    before = meshplan.report(json=True)
    group = get_tp_group()
    rank = group.rank_in_group
    rows = torch.arange(12.0).view(3, 4) * (rank + 1)
    into = torch.empty(1 + rank, 4)
    group.reduce_scatterv_into_output(rows, into, 0, [1, 2])
    return {
        "rank": rank,
        "report": before,
        "all_reduce": group.all_reduce(rows).tolist(),
        "reduce_scatter": group.reduce_scatter(rows, 1).tolist(),
        "reduce_scatterv": group.reduce_scatterv(rows, 0, [1, 2]).tolist(),
        "into_output": into.tolist(),
    }


def main(folder: str) -> None:
    from vllm import LLM, SamplingParams

    Path(folder, "config.json").write_text(json.dumps(MODEL))
    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        tensor_parallel_size=2,
        enforce_eager=True,
        max_model_len=64,
        kv_cache_memory_bytes=1 << 26,
    )
    prompts = [{"prompt_token_ids": [1, 5, 9, 17]}, {"prompt_token_ids": [1, 7]}]
    sampling = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True)
    tokens = [list(one.outputs[0].token_ids) for one in engine.generate(prompts, sampling)]
    result = {"tokens": tokens, "workers": engine.collective_rpc(reduce_in_worker)}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
