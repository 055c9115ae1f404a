"""Settings of the process that change the bits of a model's gradients."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.backends import cudnn

from meshplan._torch import (
    bf16_reduced_precision,
    fp16_reduced_precision,
    fp32_precision,
    is_in_bad_fork,
    set_fp32_precision,
)
from meshplan.errors import ContractError

# (backend, operation) of torch's newer interface to reduced float32 precision.
_GENERIC = ("generic", "all")
_BACKENDS = (("cuda", "all"), ("mkldnn", "all"))
_OPERATIONS = tuple(
    (backend, name) for backend in ("cuda", "mkldnn") for name in ("matmul", "conv", "rnn")
)


@contextmanager
def deterministic_controls(seed: int = 0, *, threads: int = 1) -> Iterator[None]:
    """Inside, two runs of one computation have the same bits, as far as torch guarantees it.

    * seeds: Python's ``random``, torch on the CPU and on all GPUs, numpy where it is imported.
    * float32 stays float32: no TF32, no bfloat16 in its place, in matmul, convolution and RNN; and
      float16 and bfloat16 products are added in float32 throughout.
    * ``torch.use_deterministic_algorithms(True, warn_only=True)``; cuDNN deterministic and without
      benchmarking, which picks kernels by time.
    * ``threads`` threads within an operation on the CPU. Some kernels split a sum by them: the
      gradient of a layer norm's weight has other bits with two threads than with one, and torchrun
      sets one thread for several ranks per node, and all cores for one rank.

    On exit, after an exception too, every setting and every state of random numbers is restored.
    Where a GPU is available, CUDA is initialised to read its states. No environment variable is
    set: on GPUs set ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` before the process starts (torch warns
    where it is missing). Not thread safe.

    Args:
        seed: from 0 to 2**32 - 1, numpy's range.
        threads: at least 1.

    Raises:
        ContractError: a number outside these ranges.
    """
    if not 0 <= seed < 1 << 32 or threads < 1:
        raise ContractError(
            f"seed={seed}, threads={threads}; pass a seed from 0 to 2**32 - 1 and 1 thread or more"
        )
    with ExitStack() as back:
        _keep_random_states(back)
        _set_full_precision(back)
        _set_full_sums(back)
        back.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        for name in ("benchmark", "deterministic"):
            back.callback(setattr, cudnn, name, getattr(cudnn, name))
        back.callback(torch.set_num_threads, torch.get_num_threads())

        random.seed(seed)
        torch.manual_seed(seed)
        if (numpy := _numpy()) is not None:
            numpy.random.seed(seed)
        torch.use_deterministic_algorithms(True, warn_only=True)
        cudnn.benchmark, cudnn.deterministic = False, True
        torch.set_num_threads(threads)
        yield


def _keep_random_states(back: ExitStack) -> None:
    back.callback(random.setstate, random.getstate())
    back.callback(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_available() and not is_in_bad_fork():
        torch.cuda.init()
        back.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    if (numpy := _numpy()) is not None:
        back.callback(numpy.random.set_state, numpy.random.get_state())


def _set_full_precision(back: ExitStack) -> None:
    """Turn off reduced float32 precision, in both of torch's interfaces to it. An operation set to
    "none" shows the value of its backend, and that the value for all: the wider ones are set to
    "none" first.
    """
    read, write = fp32_precision, set_fp32_precision
    kept = []
    for level in ((_GENERIC,), _BACKENDS, _OPERATIONS):
        own = [(place, read(*place)) for place in level]
        kept += own
        for place, _ in own:
            write(*place, "none")
    matmul = torch.get_float32_matmul_precision()
    # The older flag for cuDNN can be read only while both interfaces agree.
    for operation in ("conv", "rnn"):
        write("cuda", operation, "tf32")
    try:
        convolution = cudnn.allow_tf32
    except RuntimeError:
        convolution = False

    def restore() -> None:
        torch.set_float32_matmul_precision(matmul)
        cudnn.allow_tf32 = convolution
        for place, value in kept:
            write(*place, value)

    back.callback(restore)
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    for place in _OPERATIONS:
        write(*place, "ieee")


def _set_full_sums(back: ExitStack) -> None:
    for dtype, read in (
        ("fp16", fp16_reduced_precision),
        ("bf16", bf16_reduced_precision),
    ):
        name = f"allow_{dtype}_reduced_precision_reduction"
        # The flag, and whether products may be split; the attribute shows only the first.
        back.callback(setattr, torch.backends.cuda.matmul, name, read())
        setattr(torch.backends.cuda.matmul, name, False)


def _numpy() -> Any:
    return sys.modules.get("numpy")
