"""Settings that change bits: their values inside, and their restoration outside."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from torch.backends import cudnn

from meshplan.errors import ContractError
from meshplan.testing.dp import compare_gradients, deterministic_controls, dp_gradients
from meshplan.testing.dp._controls import _BACKENDS, _GENERIC, _OPERATIONS

PLACES = (_GENERIC, *_BACKENDS, *_OPERATIONS)


def precision(place: tuple[str, str]) -> str:
    return torch._C._get_fp32_precision_getter(*place)


def write(place: tuple[str, str], value: str) -> None:
    torch._C._set_fp32_precision_setter(*place, value)


def own_precisions() -> list[str]:
    """The own setting of each place; leaves all of them unset."""
    found = []
    for place in PLACES:
        found.append(precision(place))
        write(place, "none")
    return found


def readable(read: Callable[[], Any]) -> Any:
    """The older interface refuses to answer if the newer one disagrees."""
    try:
        return read()
    except RuntimeError:
        return "differs from the newer"


def visible() -> dict[str, Any]:
    return {
        "precision": [precision(place) for place in PLACES],
        "matmul": readable(torch.get_float32_matmul_precision),
        "cuda tf32": readable(lambda: torch.backends.cuda.matmul.allow_tf32),
        "cudnn tf32": readable(lambda: cudnn.allow_tf32),
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": (cudnn.benchmark, cudnn.deterministic),
        "threads": torch.get_num_threads(),
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "numpy": [np.random.get_state()[1].tolist(), np.random.get_state()[2:]],
        "environment": dict(os.environ),
    }


@contextmanager
def settings_put_back() -> Iterator[None]:
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        cudnn.benchmark, cudnn.deterministic = False, False
        torch.set_num_threads(threads)
        for place in PLACES:
            write(place, "none")
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = True
        write(("cuda", "matmul"), "none")
        write(("mkldnn", "matmul"), "none")


def nothing() -> None:
    pass


def older() -> None:
    torch.set_float32_matmul_precision("medium")
    cudnn.allow_tf32 = False


def older_on() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    cudnn.allow_tf32 = True


def newer() -> None:
    write(("cuda", "matmul"), "tf32")
    write(("cuda", "conv"), "ieee")
    write(("mkldnn", "rnn"), "bf16")


def inherited() -> None:
    write(_GENERIC, "tf32")
    write(("mkldnn", "all"), "bf16")
    write(("mkldnn", "conv"), "ieee")


def both() -> None:
    older_on()
    newer()


def both_off() -> None:
    cudnn.allow_tf32 = False
    write(("cuda", "all"), "tf32")


def algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark = True
    torch.set_num_threads(3)


def warning_only() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn.deterministic = True


ALL = [nothing, older, older_on, newer, inherited, both, both_off, algorithms, warning_only]


@pytest.mark.parametrize("before", [True, False, (True, True), (False, False)])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_reduced_precision_is_off_inside_and_restored(dtype: str, before: Any) -> None:
    name = f"allow_{dtype}_reduced_precision_reduction"
    matmul = torch.backends.cuda.matmul
    read = getattr(torch._C, f"_get_cublas_{name}")
    at_first = read()
    try:
        setattr(matmul, name, before)
        found = read()
        with deterministic_controls():
            assert getattr(matmul, name) is False
        assert read() == found
    finally:
        setattr(matmul, name, at_first)


@pytest.mark.parametrize("set_up", ALL)
def test_settings_and_seeds_apply_inside(set_up: Callable[[], None]) -> None:
    with settings_put_back():
        set_up()
        with deterministic_controls(seed=5):
            inside = visible()
            draws = [torch.rand(2).tolist(), random.random(), np.random.rand()]
        assert inside["precision"] == ["none"] * 3 + ["ieee"] * 6
        assert inside["matmul"] == "highest"
        assert (inside["cuda tf32"], inside["cudnn tf32"]) == (False, False)
        assert (inside["algorithms"], inside["warn only"]) == (True, True)
        assert inside["cudnn"] == (False, True)
        assert inside["threads"] == 1
        torch.manual_seed(5)
        assert draws[0] == torch.rand(2).tolist()
        assert draws[1] == random.Random(5).random()
        assert draws[2] == np.random.RandomState(5).rand()


def changes_much_and_fails() -> None:
    with deterministic_controls(seed=5, threads=2):
        assert torch.get_num_threads() == 2
        torch.rand(3)
        random.random()
        np.random.rand()
        with deterministic_controls(seed=6):
            torch.backends.cuda.matmul.allow_tf32 = True
        assert not torch.backends.cuda.matmul.allow_tf32
        raise ArithmeticError


@pytest.mark.parametrize("set_up", ALL)
def test_settings_are_restored_after_an_exception(set_up: Callable[[], None]) -> None:
    with settings_put_back():
        set_up()
        own = own_precisions()
    with settings_put_back():
        set_up()
        before = visible()
        with pytest.raises(ArithmeticError):
            changes_much_and_fails()
        assert visible() == before
        assert own_precisions() == own


def test_bits_do_not_depend_on_threads_of_the_process() -> None:
    # Over so many rows, the gradient of the weight is a sum that is split by threads.
    x = torch.cos(torch.arange(4096 * 64.0)).view(1, 4096, 64)
    model = torch.nn.LayerNorm(64)
    found = []
    for threads in (1, 2, 3):
        with settings_put_back():
            torch.set_num_threads(threads)
            with deterministic_controls():
                found.append(dp_gradients(model, lambda out, _: (out * x).sum(), x, None))
            assert torch.get_num_threads() == threads
    compare_gradients(found[1], found[0])
    compare_gradients(found[2], found[0])


def test_invalid_arguments_are_errors() -> None:
    messages = []
    for options in ({"seed": -1}, {"seed": 1 << 32}, {"threads": 0}):
        with pytest.raises(ContractError) as caught, deterministic_controls(**options):
            pass
        messages.append(str(caught.value))
    assert_expected_inline(
        "\n".join(messages),
        """\
MP411: seed=-1, threads=1; pass a seed from 0 to 2**32 - 1 and 1 thread or more
MP411: seed=4294967296, threads=1; pass a seed from 0 to 2**32 - 1 and 1 thread or more
MP411: seed=0, threads=0; pass a seed from 0 to 2**32 - 1 and 1 thread or more""",
    )
