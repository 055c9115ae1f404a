"""Which calls of optimizers are steps of the job, and what observing leaves alone."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.optim import SGD, AdamW, Optimizer

import meshplan
from meshplan.replicas._tensors import named_tensors
from meshplan.run._holders import ParameterTable
from meshplan.run._observation import Observation
from tests.processes import run_ranks, warm_compiler
from tests.run.observing import backward, flip, make_model, observe_ranks, take_step

pytestmark = pytest.mark.processes


class Container(Optimizer):
    """An optimizer for each parameter, as torchtitan's."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        every = list(params)
        self.parts = [AdamW([one], lr=lr) for one in every]
        super().__init__(every, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.parts:
            one.step(closure)


class Subclass(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_only_outermost_steps_count() -> None:
    def job(rank: int, found: Observation) -> Any:
        taken = {}
        for kind in (SGD, Container, Subclass, AdamW):
            model, optimizer = make_model(kind=kind)
            if kind is AdamW:
                # It steps with gradients of zero, so that there is a state to load into.
                get_optimizer_state_dict(model, optimizer)
            for _ in range(3):
                take_step(model, optimizer)
            taken[kind.__name__] = found._steps[found._by_optimizer[optimizer]]
        return taken

    (taken, _), report = observe_ranks(job)
    assert taken == dict.fromkeys(("SGD", "Container", "Subclass", "AdamW"), 3)
    assert report["replicas"]["first_difference"] is None
    # Two parameters of four models, and two states each of the container's and of AdamW's.
    assert report["replicas"]["compared"] == 3 * (2 * 4 + 4 * 2)


def test_steps_in_backward_count_for_each_parameter() -> None:
    def job(*_: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates what it uses there
            from torch.distributed.optim import _apply_optimizer_in_backward
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
        for _ in range(3):
            backward(model)

    assert observe_ranks(job)[1]["steps"]["taken"] == {"0": 3, "1": 3}


@pytest.mark.parametrize("faulty", [False, True])
def test_gradients_that_a_step_computes_are_compared_after_it(faulty: bool) -> None:
    """As Lightning steps: before it, each rank has gradients of its own micro-batch."""

    def job(rank: int, _: Observation) -> None:
        model, optimizer = make_model()

        def compute() -> None:
            backward(model)
            if faulty and rank == 1:
                flip(next(model.parameters()).grad)

        for closure in ({"closure": compute}, {}):
            with model.no_sync():  # type: ignore[operator]
                backward(model, torch.full((1, 4), 1.0 + rank))
            optimizer.step(*(() if closure else (compute,)), **closure)
            optimizer.zero_grad()

    _, report = observe_ranks(job, settings="gradients first=9")
    found = report["replicas"]["first_difference"]
    assert (found and (found["step"], found["kind"])) == ((1, "gradient") if faulty else None)
    # Of two tensors, their gradients and no state: twice.
    assert report["replicas"]["compared"] == 8


class Owner(torch.optim.Optimizer):
    """As distributed Muon: the rank that owns a parameter writes to its gradient in the step."""

    def __init__(self, parameters: Any, rank: int) -> None:
        super().__init__(parameters, {"rank": rank})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad.mul_(1 + group["rank"])


def test_gradients_that_a_step_changes_and_frees_are_compared_before_it() -> None:
    def job(rank: int, _: Observation) -> None:
        model, _ = make_model()
        optimizer = Owner(model.parameters(), rank)
        optimizer.register_step_post_hook(lambda one, *_: one.zero_grad())
        for _ in range(2):
            backward(model)
            optimizer.step()

    found = observe_ranks(job, settings="gradients first=9")[1]["replicas"]
    # Of two tensors and their gradients: twice.
    assert (found["first_difference"], found["compared"]) == (None, 8)


def test_a_compiled_step_runs_and_is_not_observed() -> None:
    def job(*_: Any) -> Any:
        model, optimizer = make_model(ddp=False)
        step = torch.compile(lambda: optimizer.step(), backend="eager")
        weight: Any = model.weight
        before = weight.detach().clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates what it uses there
            backward(model)
            step()
        return bool((weight == before - 0.1).all())

    warm_compiler()
    (stepped,), report = observe_ranks(job, 1, "gradients first=9")
    assert stepped
    note = "no optimizer step was seen (compiled steps are not)"
    assert report["not_observed"] == [note]


def test_two_optimizers_of_equal_models_are_told_apart() -> None:
    def job(*_: Any) -> None:
        pairs = [make_model() for _ in range(2)]
        for step in range(4):
            for number, (model, optimizer) in enumerate(pairs):
                backward(model)
                # One of them steps half as often, as in adversarial training.
                if step % 2 <= number:
                    optimizer.step()
                    optimizer.zero_grad()

    report = observe_ranks(job)[1]
    assert report["replicas"]["first_difference"] is None
    assert report["replicas"]["compared"] == 2 * (2 + 4)
    assert report["steps"]["unequal"] == []


def test_a_forked_child_is_not_observed(tmp_path: Any) -> None:
    def job(rank: int, found: Observation) -> None:
        _, optimizer = make_model(ddp=False)
        if (child := os.fork()) == 0:
            optimizer.step()
            os._exit(17 if found.finish(None) is None and not found._steps else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
        dist.barrier()

    report = observe_ranks(job, settings=f"report={tmp_path / 'run.json'} first=9")[1]
    assert report["steps"]["taken"] == {"0": 0, "1": 0}


def test_reductions_without_memory_or_ranks_leave_the_job_alone() -> None:
    """A sparse tensor, and a group that torch has not registered, as torchft's."""

    def job(rank: int, _: Observation) -> Any:
        given = torch.eye(3).to_sparse()
        dist.all_reduce(given)
        store = dist.PrefixStore("own", dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
        own = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        tensor = torch.ones(2)
        own.allreduce([tensor]).wait()
        return given.to_dense().diag().tolist(), tensor.tolist()

    results, report = observe_ranks(job, settings="")
    assert results[0] == ([2.0] * 3, [2.0] * 2)
    assert report["reductions"]


def test_sparse_gradient_leaves_the_other_tensors_compared() -> None:
    def job(*_: Any) -> None:
        layers = nn.EmbeddingBag(4, 4, sparse=True), nn.Linear(4, 4)
        model, optimizer = make_model(layers=layers)
        backward(model, torch.tensor([[1, 2]]))
        optimizer.step()

    report = observe_ranks(job, settings="gradients first=9")[1]
    # Two gradients and three parameters.
    assert report["replicas"]["compared"] == 5
    (note,) = report["not_observed"]
    assert "weight is sparse" in note


def test_steps_over_a_smaller_default_group_are_not_compared() -> None:
    def job(*_: Any) -> None:
        _, optimizer = make_model(ddp=False)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        optimizer.step()

    notes = observe_ranks(job)[1]["not_observed"]
    assert "steps over a later default group of other ranks" in notes


def test_settings_by_either_interface_of_torch_are_read() -> None:
    def job(*_: Any) -> None:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.allow_tf32 = True

    report = observe_ranks(job, settings="")[1]
    names = ("matmul_precision", "convolution_precision", "rnn_precision")
    assert {report["settings"][name] for name in names} == {"tf32"}
    assert [len(ranks) for ranks in report["hosts"].values()] == [2]


def test_a_failing_observer_is_noted_and_never_raises() -> None:
    def job(rank: int, found: Observation) -> None:
        model, optimizer = make_model()
        found._shares.take = None  # type: ignore[method-assign,assignment]
        take_step(model, optimizer)

    (note,) = observe_ranks(job)[1]["not_observed"]
    assert note == "TypeError: 'NoneType' object is not callable"


def test_error_of_a_signal_handler_is_the_job_s_own() -> None:
    """Wherever in the hook it arrives: also where an error of the hook itself is passed over."""

    def job(rank: int, found: Observation) -> list[str]:
        class Handler:
            def stop(self, *_: Any) -> None:
                raise TimeoutError("of the job")

            __call__ = stop

        def arrive(*_: Any) -> None:
            signal.raise_signal(signal.SIGUSR1)

        seen: list[str] = []
        _, optimizer = make_model()
        handler = Handler()
        places: list[tuple[Any, str]] = [
            (found, "_look"),
            (found._parameters, "note_reduction"),
        ]
        for owner, name in places:
            for one in (handler, handler.stop, partial(Handler.stop, handler)):
                signal.signal(signal.SIGUSR1, one)
                with mock.patch.object(owner, name, side_effect=arrive):
                    try:
                        dist.all_reduce(torch.ones(1))
                        optimizer.step()
                    except TimeoutError as error:
                        seen.append(str(error))
        with mock.patch.object(found, "_look", side_effect=TimeoutError("of the hook")):
            optimizer.step()
        return seen

    (seen, _), report = observe_ranks(job)
    assert seen == ["of the job"] * 6
    assert "TimeoutError: of the hook" in report["not_observed"]


@pytest.mark.full
@pytest.mark.parametrize("path", ["exchange", "one_shot"])
def test_reductions_of_a_graph_have_their_contract(path: str) -> None:
    def job(*_: Any) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

        def reduce(x: Tensor) -> Tensor:
            partial_sum = DTensor.from_local(x, mesh, [Partial()], run_check=False)
            return partial_sum.redistribute(mesh, [Replicate()]).to_local()

        with meshplan.installed(path=path):
            compiled = torch.compile(reduce, backend="aot_eager")
            assert [compiled(torch.ones(2)).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2

    warm_compiler()
    report = observe_ranks(job, settings="require=bitwise")[1]
    (row,) = report["reductions"]
    assert (row["kind"], row["contract"], row["group"]) == ("contract", "v1/tree/wide/once", "dp")
    assert report["refused"] is None


def test_meshes_in_a_whole_graph_are_compiled_as_before() -> None:
    def reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
        part = mesh["a"]
        partial_sum = DTensor.from_local(x, part, [Partial()])
        total: Any = partial_sum.redistribute(part, [Replicate()])
        whole: Tensor = total.to_local()
        return whole + mesh._flatten("ab").size() + part.size()

    def job(*_: Any) -> Any:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        compiled = torch.compile(reduce, backend="aot_eager", fullgraph=True)
        return compiled(torch.ones(2), mesh).tolist()

    warm_compiler()
    assert observe_ranks(job)[0] == [[6.0, 6.0]] * 2


def test_holders_by_mesh_and_by_module_add_up() -> None:
    """As of DistributedDataParallel around a model with tensor parallelism."""

    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        parameter = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
        table = ParameterTable()
        table.refresh()
        table._groups[parameter] = (rank, 7)
        (named,) = named_tensors({"weight": parameter})
        return table.holders_of(parameter, named, rank), table.uses

    for rank, (holders, uses) in enumerate(run_ranks(run, 2)):
        assert holders == {(0, 1), (rank, 7)}
        assert uses == {(0, 1): {True}, (rank, 7): {True}}
