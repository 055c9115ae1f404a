"""The certificate of a job: one chain for any shards and ranks, and what two of them show."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase, assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import meshplan
from meshplan import kernel
from meshplan.elastic import GradientAccumulator
from meshplan.errors import ReplicaInputError
from meshplan.run._compare import compare_files
from meshplan.run._words import find_spans, find_words, format_words
from meshplan.testing import order_sensitive
from tests.cli import meshplan as command
from tests.processes import arrive, run_ranks, wait_for
from tests.run.observing import flip, observe_ranks, observed

pytestmark = pytest.mark.processes

MICRO_BATCHES, STEPS = 4, 4
# Some have no rows for each rank.
SHAPES = ((7, 11), (3, 5), (64, 3), (9,))


@cache
def row(number: int, shape: tuple[int, ...], step: int) -> Tensor:
    flat = order_sensitive(
        torch.Size(shape).numel(), rank=number, world_size=MICRO_BATCHES, seed=step
    )
    return flat.view(shape)


class Model(nn.Module):
    """The gradients of a micro-batch are rows, which are dealt by its number."""

    def __init__(self, device_mesh: Any = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weights = nn.ParameterList(torch.randn(shape) for shape in SHAPES)
        self.register_buffer("seen", torch.zeros(3))
        self.mesh = device_mesh
        for i, one in enumerate(self.weights) if device_mesh is not None else ():
            self.weights[i] = nn.Parameter(distribute_tensor(one, device_mesh, [Shard(0)]))

    def forward(self, number: int, step: int) -> Tensor:
        self.seen += 1
        total = torch.zeros(())
        for shape, one in zip(SHAPES, self.weights, strict=True):
            found = row(number, shape, step)
            if isinstance(one, DTensor):
                found, one = (
                    distribute_tensor(found, self.mesh, [Shard(0)]).to_local(),
                    one.to_local(),
                )
            total = total + (one * found).sum()
        return total


def make_model(kind: str) -> nn.Module:
    ranks = dist.get_world_size()
    if kind == "ddp":
        return DistributedDataParallel(Model())
    if kind == "fsdp":
        return fully_shard(Model(), mesh=init_device_mesh("cpu", (ranks,)))
    names = ("dp", "fsdp" if kind == "hsdp" else "tp")
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names)
    if kind == "hsdp":
        return fully_shard(Model(), mesh=mesh)
    return fully_shard(Model(mesh["tp"]), mesh=mesh["dp"])


def train(kind: str, fault: str = "", steps: Sequence[int] = range(1, STEPS + 1)) -> Any:
    rank, model = dist.get_rank(), make_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weight = next(iter(model.parameters()))
    for step in steps:
        loss = model(rank // 2 if kind == "tp" else rank, step)
        loss.backward()
        now = fault if step == 3 and rank == 0 else ""
        if now == "optimizer state":
            flip(optimizer.state[weight]["exp_avg"], bit=29)
        elif now == "buffer":
            flip(next(iter(model.buffers())), bit=29)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


FLIPPED = "parameter weights.0 float32[7,11], optimizer state weights.0.exp_avg float32[7,11]"


def certify(path: Path, kind: str, ranks: int, **options: Any) -> Any:
    """Run a job, and return what rank 0 reports on its certificate."""
    settings = f"certify={path} {options.pop('settings', 'every=1')}"
    backend, job = options.pop("backend", "meshplan"), options.pop("job", train)

    def run(*_: Any) -> None:
        job(kind, **options)

    return observe_ranks(run, ranks, settings, backend=backend)[1]["certificate"]


def read(path: Path, key: str = "link") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if key in line]


def chain_of(path: Path) -> list[str]:
    return [line["link"] for line in read(path)]


class TestWords:
    def test_words_in_inference_mode_change_no_later_ones(self) -> None:
        # Keys of these indices are made in inference mode and kept.
        whole, spans = torch.randn(4, 50), ((3, 7), (0, 50))
        for compiled in (True, False):
            with mock.patch("meshplan.run._words.available", return_value=compiled):
                with torch.inference_mode():
                    first = find_words(whole, spans).tolist()
                assert find_words(whole, spans).tolist() == first

    def test_golden_words(self) -> None:
        """Certificates are compared with those of earlier versions, and with those of GPUs."""
        numbers = torch.arange(70_001) * 2654435761
        tensors: dict[str, tuple[Tensor, tuple[int, ...]]] = {
            "float32[]": (torch.tensor(1.5), ()),
            "uint8[300]": ((numbers[:300] % 256).to(torch.uint8), (5,)),
            "bfloat16[70001]": (
                (numbers % 65536 - 32768).to(torch.int16).view(torch.bfloat16),
                (1000,),
            ),
            "float32[10,100]": (torch.arange(1000.0).view(10, 100), (3, 2000)),
            "float32[7,10000]": (torch.arange(70_000.0).view(7, 10_000), (0, 0)),
            "float32[8,4,3,3]": (torch.arange(288.0).view(8, 4, 3, 3), (0, 4, 0, 0)),
            "int64[70001]": (numbers * numbers, (0,)),
            "complex128[3]": (torch.tensor([1 + 2j, -1j, -2.0], dtype=torch.complex128), (7,)),
        }
        shown = ""
        for name, (tensor, starts) in tensors.items():
            spans = tuple((a, a + n) for a, n in zip(starts, tensor.shape, strict=True))
            shown += f"{format_words(find_words(tensor, spans).tolist())} {name}\n"
        assert_expected_inline(
            shown,
            """\
72cd33998940000021b55b651e400000 float32[]
f057154aac64b46622362736712b7f3a uint8[300]
2a637b7d5d7f48ae0f708abcc4bdbcce bfloat16[70001]
cde3aea7bc280000d500c7a9dee38000 float32[10,100]
5cca961be96f25005271f44730563c00 float32[7,10000]
e01d681bc48c00006093ef0ab4f40000 float32[8,4,3,3]
339f0b2afd2b14e4a4b83e3162afed5a int64[70001]
6b0bbf9a23e00000858a80946b800000 complex128[3]
""",
        )

    def test_each_bit_and_each_place_counts(self) -> None:
        whole = torch.zeros(6, 5)
        spans = ((0, 6), (0, 5))
        seen = {tuple(find_words(whole, spans).tolist())}
        bits = whole.view(torch.int32).view(-1)
        for element in range(30):
            for bit in range(32):
                bits[element] = -(1 << 31) if bit == 31 else 1 << bit
                seen.add(tuple(find_words(whole, spans).tolist()))
            bits[element] = 0
        assert len(seen) == 1 + 30 * 32

    @pytest.mark.parametrize(("value", "dtype"), [(-1, torch.int64), (-(1 << 31), torch.int32)])
    def test_sums_of_the_largest_numbers_are_exact(self, value: int, dtype: torch.dtype) -> None:
        """As floats of 53 bits; those of single columns are added as integers."""
        whole = torch.full((2, 3000), value, dtype=dtype)
        total = torch.zeros(2, dtype=torch.int64)
        for at in range(3000):
            total += find_words(whole[:, at : at + 1], ((0, 2), (at, at + 1)))
        assert find_words(whole, ((0, 2), (0, 3000))).tolist() == total.tolist()

    @pytest.mark.parametrize("rows", [8, 7, 5, 3, 1])
    def test_spans_of_strided_shards_are_those_of_shards_of_shards(self, rows: int) -> None:
        whole = torch.arange(rows)
        for first in range(2):
            for last in range(3):
                placements = [_StridedShard(0, split_factor=3), Replicate(), Shard(0)]
                ((start, stop),) = (
                    find_spans((rows,), (2, 1, 3), (first, 0, last), placements) or ()
                )
                outer = [*torch.chunk(whole, 3), whole[:0], whole[:0]][last]
                inner = [*torch.chunk(outer, 2), outer[:0]][first] if len(outer) else outer
                assert list(range(start, stop)) == inner.tolist()


DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.uint16, torch.int16, torch.float16, torch.bfloat16, torch.uint32, torch.int32),
    *(torch.float32, torch.uint64, torch.int64, torch.float64, torch.complex64, torch.complex128),
)


@st.composite
def sharded(draw: Callable[[Any], Any]) -> tuple[Tensor, list[tuple[Any, Any]]]:
    """A tensor, and the spans and the elements of the rank at each coordinate of a mesh that is the
    first one with these elements.
    """
    dtype = draw(st.sampled_from(DTYPES))
    most = [300_000, 12_000, 3_000, 12, 6, 4][draw(st.integers(0, 5))]
    lengths = st.integers(most // 2 if most > 12_000 else 0, most)
    shape = draw(st.lists(lengths, min_size=most > 12_000, max_size=1 if most > 3_000 else 4))
    shape[1:] = [size % 12 for size in shape[1:]] if most == 3_000 else shape[1:]
    shape = draw(st.permutations(shape))
    numel = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator)
    if dtype is torch.bool:
        raw &= 1  # copies do not keep other bytes
    whole = raw.to(torch.uint8).view(dtype).view(shape)
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    placements: list[Any] = [Replicate()] * len(sizes)
    for axis in range(len(sizes)) if shape else ():
        dim = draw(st.integers(0, len(shape) - 1))
        placements[axis] = draw(st.sampled_from([Replicate(), Shard(dim), Shard(dim)]))
    if shape and len(sizes) > 1 and placements[-1] == Shard(0) and draw(st.booleans()):
        placements[0] = _StridedShard(0, split_factor=sizes[-1])
    parts = []
    for coordinate in itertools.product(*map(range, sizes)):
        spans = find_spans(shape, sizes, coordinate, placements)
        assert spans is not None
        first = all(
            not at for at, one in zip(coordinate, placements, strict=True) if one.is_replicate()
        )
        if first:
            parts.append((spans, whole[tuple(slice(*span) for span in spans)]))
    return whole, parts


@pytest.mark.skipif(not kernel.available(), reason=str(kernel.why_not()))
@pytest.mark.soak
@given(sharded(), st.sampled_from(["contiguous", "view", "transposed", "every other"]))
def test_compiled_and_plain_words_of_shards_agree(drawn: Any, memory: str) -> None:
    whole, parts = drawn
    total = torch.zeros(2, dtype=torch.int64)
    for spans, part in parts:
        if memory == "contiguous":
            part = part.contiguous()
        elif memory == "transposed" and part.dim():
            part = part.transpose(0, -1).contiguous().transpose(0, -1)
        elif memory == "every other" and part.dim():
            part = torch.stack([part, part], -1)[..., 0]
        with mock.patch("meshplan.run._words.library", wraps=kernel.library) as used:
            compiled = find_words(part, spans)
        assert bool(used.called) >= (memory == "contiguous" and part.numel() > 0)
        with mock.patch("meshplan.run._words.available", return_value=False):
            assert compiled.tolist() == find_words(part, spans).tolist()
        total += compiled
    assert total.tolist() == find_words(whole, tuple((0, size) for size in whole.shape)).tolist()


def test_golden_chain(tmp_path: Path) -> None:
    """Of a job whose numbers are exact on any processor."""

    def job(kind: str) -> None:
        parameters = {
            "a": torch.arange(5000.0),
            "b": torch.arange(600.0).view(200, 3),
            "c": torch.arange(12, dtype=torch.float64).view(2, 2, 3),
            "d": torch.arange(100, dtype=torch.bfloat16).view(10, 10),
        }
        model = nn.ParameterDict({name: nn.Parameter(one) for name, one in parameters.items()})
        model.register_buffer("e", torch.arange(3000))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        for step in range(3):
            for one in model.parameters():
                one.grad = torch.full_like(one, float(step))
            optimizer.step()

    assert certify(tmp_path / "a", "", 1, job=job)["tensors"] == 9
    assert_expected_inline(
        "\n".join(chain_of(tmp_path / "a")),
        """\
8045aa9dff1b33304895ace4617fbfb8
4216b6d3dce2e064d3d2eff1ab7931aa
a1922afc3908ab3920587261bdaa6130""",
    )


@pytest.mark.parametrize(
    "cases",
    [
        [("ddp", 4), ("fsdp", 4), ("hsdp", 4)],
        # Two data-parallel ranks, each with or without two strided shards of tensor parallelism.
        [("fsdp", 2), ("tp", 4)],
    ],
)
def test_ranks_and_placements_have_one_chain(cases: Any, tmp_path: Path) -> None:
    paths = [tmp_path / f"{kind}{ranks}" for kind, ranks in cases]
    for (kind, ranks), path in zip(cases, paths, strict=True):
        found = certify(path, kind, ranks)
        # Four parameters with two states each, and a buffer.
        assert (found["links"], found["tensors"], found["not_certified"]) == (STEPS, 13, {})
        assert found["last"] == chain_of(path)[-1]
    assert len({tuple(chain_of(path)) for path in paths}) == 1
    assert compare_files(*map(str, paths[:2]))[1] == 0


def train_elastic(kind: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    model = fully_shard(Model(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accumulator = GradientAccumulator(model, MICRO_BATCHES, mesh)
    for step in range(3):
        losses = []
        for number in range(accumulator.micro_batches.rounds):
            with accumulator.round():
                loss = model(accumulator.micro_batches.index(number), step)
                loss.backward()
            losses.append(float(loss.detach()))
        accumulator.finish()
        model.seen.zero_()  # it has counted rounds
        meshplan.log_value("loss", accumulator.sum_scalars(losses))
        optimizer.step()
        optimizer.zero_grad()


def test_elastic_ranks_have_one_chain(tmp_path: Path) -> None:
    paths = [tmp_path / str(ranks) for ranks in (4, 2, 1)]
    for ranks, path in zip((4, 2, 1), paths, strict=True):
        found = certify(path, "", ranks, job=train_elastic)
        assert (found["links"], found["tensors"], found["not_certified"]) == (3, 14, {})
    assert chain_of(paths[0]) == chain_of(paths[1]) == chain_of(paths[2])


@pytest.mark.parametrize(
    ("fault", "ranks", "settings", "shown"),
    [
        # In the same step the bit reaches the parameter.
        ("optimizer state", 2, "every=1", f"3: {FLIPPED}"),
        ("buffer", 1, "every=1", "3: buffer seen float32[3]"),
        (
            "optimizer state",
            2,
            "every=4 first=0",
            f"3; at step 4, the next with words of tensors: {FLIPPED}",
        ),
    ],
)
def test_a_flipped_bit_without_a_replica_is_found_by_compare(
    fault: str, ranks: int, settings: str, shown: str, tmp_path: Path
) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for path, now in zip(paths, ("", fault), strict=True):
        certify(path, "fsdp", ranks, fault=now, settings=settings)
    text, status = compare_files(*map(str, paths))
    assert status == 1
    assert f"differ: first at step {shown}" in text
    links = [read(path) for path in paths]
    assert [one["words"] for one in links[0][:2]] == [one["words"] for one in links[1][:2]]
    assert ["tensors" in one for one in links[0]] == [settings == "every=1"] * 3 + [True]


def train_experts(kind: str) -> None:
    """A shared weight, and one of the same name that each rank has of its own."""
    torch.manual_seed(dist.get_rank())
    own = nn.ParameterDict({"expert": nn.Parameter(torch.randn(4))})
    shared = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD([*own.parameters(), *shared.parameters()], lr=0.1)
    for step in range(2):
        loss = (shared(torch.ones(1, 2)).sum() + own["expert"].sum()) * dist.get_rank()
        loss.backward()
        meshplan.log_value("loss", loss)
        meshplan.log_value("step", step)
        optimizer.step()


def test_what_is_no_replica_is_listed_and_not_certified(tmp_path: Path) -> None:
    found = certify(tmp_path / "a", "", 2, job=train_experts)
    why = "ranks hold other bits, and no replicas are known"
    names = ("parameter expert float32[4]", "value loss float32[]")
    assert found["not_certified"] == dict.fromkeys(names, why)
    # The shared weight and bias, and the logged step.
    assert (found["links"], found["tensors"]) == (2, 3)


def test_states_of_scalars_and_states_in_lists_are_certified(tmp_path: Path) -> None:
    def job(kind: str) -> None:
        model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(2.0))})
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model["scale"].square().backward()
            optimizer.step()
            optimizer.state[model["scale"]]["more"] = [torch.ones(2), 0.5]

    found = certify(tmp_path / "a", "", 1, job=job)
    names = ("exp_avg", "exp_avg_sq", "more.0", "more.1")
    listed = read(tmp_path / "a", "certified")[-1]["certified"]
    assert [one.split()[2] for one in listed[:-1]] == [f"scale.{name}" for name in names]
    assert (found["tensors"], found["not_certified"]) == (5, {})


def test_a_parameter_with_other_placements_stays_certified(tmp_path: Path) -> None:
    def job(kind: str) -> None:
        mesh, model = init_device_mesh("cpu", (2,)), nn.Module()
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        for placement in (Shard(0), Replicate()):
            weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [placement]))
            model.weight, weight.grad = weight, torch.zeros_like(weight)
            optimizer.param_groups[0]["params"] = [weight]
            optimizer.step()

    found = certify(tmp_path / "a", "", 2, job=job)
    assert (found["links"], found["not_certified"]) == (2, {})


def test_a_resumed_job_is_aligned_by_the_steps_of_its_optimizer(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    kind = torch.optim.AdamW

    def step_through(model: Any, optimizer: Any, steps: Sequence[int]) -> None:
        for step in steps:
            model(0, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    def run(rank: int) -> None:
        old = Model()
        optimizer = kind(old.parameters(), lr=1e-2)
        step_through(old, optimizer, (1, 2))
        found = observed(f"certify={resumed}")
        model = Model()
        model.load_state_dict(old.state_dict())
        again = kind(model.parameters(), lr=1e-2)
        again.load_state_dict(optimizer.state_dict())
        step_through(model, again, (3, 4))
        found.finish(None)

    def start(_: str) -> None:
        model = Model()
        step_through(model, kind(model.parameters(), lr=1e-2), (1, 2, 3, 4))

    certify(whole, "", 1, job=start)
    run_ranks(run, 1)
    assert [line["step"] for line in read(resumed)] == [3, 4]
    text, status = compare_files(str(whole), str(resumed))
    assert status == 0, text
    assert "same: 2 steps, " in text
    assert text.endswith("; 2 more steps are in one of them only")


def test_steps_that_some_ranks_skip_end_nothing(tmp_path: Path) -> None:
    """Only the first replica posts, so that another one may step less often."""

    def job(kind: str) -> None:
        model = DistributedDataParallel(nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.ones(1, 3)).sum().backward()
            if step != 1 or dist.get_rank() == 0:
                optimizer.step()

    assert certify(tmp_path / "a", "", 2, job=job)["links"] == 3


def test_a_rank_that_stops_early_ends_the_chain(tmp_path: Path) -> None:
    def job(kind: str) -> None:
        torch.manual_seed(0)
        names = "ab"[dist.get_rank()]
        model = nn.ModuleDict({names: nn.Linear(3, 3)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3 - dist.get_rank()):
            model[names](torch.ones(1, 3)).sum().backward()
            optimizer.step()

    found = certify(tmp_path / "a", "", 2, job=job)
    # Two stages of a pipeline: each tensor is on one rank.
    assert (found["links"], found["tensors"], found["not_certified"]) == (2, 4, {})
    assert found["ended"] == ["no step 3 on ranks 1"]


def test_a_killed_job_leaves_a_certificate(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole", tmp_path / "killed"
    certify(whole, "fsdp", 2)

    def run(rank: int) -> None:
        observed(f"certify={path} every=1")
        train("fsdp", steps=(1, 2))
        # The last posts of a rank that dies are lost.
        while not path.exists() or len(read(path)) < 2:
            time.sleep(0.01)
        arrive("seen")
        wait_for("seen", 2)
        os._exit(9)

    with pytest.raises((AssertionError, EOFError)):
        run_ranks(run, 2, backend="meshplan")
    with path.open("a", encoding="utf-8") as file:
        file.write('{"optimizer": 0, "st')
    text, status = compare_files(str(whole), str(path))
    assert status == 0, text
    assert "same: 2 steps, 13 tensors; 2 more steps are in one of them only" in text


def test_a_value_is_a_tensor_or_a_number() -> None:
    meshplan.log_value("loss", 1.0)
    with pytest.raises(ReplicaInputError, match="loss is of type str"):
        meshplan.log_value("loss", "1.0")  # type: ignore[arg-type]


def write(path: Path, words: Sequence[str], tensors: str = "a[2]", ranks: int = 2) -> str:
    """A certificate of steps with these words."""
    lines: list[Any] = [
        {"meshplan certificate": 2, "conditions": {"world_size": ranks, "setting threads": 1}},
        {"optimizer": 0, "step": 1, "certified": tensors.split(), "not_certified": {}},
    ]
    for step, one in enumerate(words, 1):
        lines.append({"optimizer": 0, "step": step, "words": one, "link": f"link {step}"})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return str(path)


class CompareTest(TestCase):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def test_statuses_and_texts(self) -> None:
        first = write(Path("a"), ["1", "2", "3"])
        write(Path("b"), ["1", "2", "3"], ranks=4)
        write(Path("c"), ["1", "4", "5"])
        write(Path("d"), ["1", "2", "3"], "a[2] b[3]")
        write(Path("e"), [])
        shown = ""
        for other in "bcde":
            status, out, errors = command("compare", first, other)
            assert not errors
            shown += f"{out}{status}\n\n"
        self.assertExpectedInline(
            shown,
            """\
a: 2 ranks, 3 links of steps 1-3, the last link 3
b: 4 ranks, 3 links of steps 1-3, the last link 3
condition world_size: 2 against 4
same: 3 steps, 1 tensors
0

a: 2 ranks, 3 links of steps 1-3, the last link 3
c: 2 ranks, 3 links of steps 1-3, the last link 3
differ: first at step 2; no later step has words of each tensor: use --every 1 to name the tensor
1

a: 2 ranks, 3 links of steps 1-3, the last link 3
d: 2 ranks, 3 links of steps 1-3, the last link 3
cannot compare: certified in one of them only: b[3]
2

a: 2 ranks, 3 links of steps 1-3, the last link 3
e: 2 ranks, 0 links
cannot compare: no step is in both
2

""",
        )

    def test_other_files_are_refused(self) -> None:
        write(Path("a"), ["1"])
        Path("report").write_text('{"version": 1, "replicas": {"first_difference": null}}')
        Path("text").write_text("nothing")
        Path("old").write_text('{"meshplan certificate": 1, "conditions": {}}\n')
        shown = ""
        for other in ("report", "text", "old", "missing"):
            status, out, errors = command("compare", "a", other)
            assert (status, out) == (2, "")
            shown += errors
        self.assertExpectedInline(
            shown,
            """\
meshplan: MP402: a and report are a report and a certificate; compare two files of --report, or two of --certify
meshplan: MP402: text: is neither a report nor a certificate of version 2; pass a file that meshplan run wrote with --certify or --report
meshplan: MP402: old: is neither a report nor a certificate of version 2; pass a file that meshplan run wrote with --certify or --report
meshplan: MP402: missing: cannot be read: [Errno 2] No such file or directory: 'missing'
""",
        )
