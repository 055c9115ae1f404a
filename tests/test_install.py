"""Putting the plugin in and out, without process groups."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, _redistribute
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshplan
from meshplan.dtensor import _seam, current_config
from meshplan.dtensor._graphs import remove_tag
from meshplan.errors import InstallError
from meshplan.planner import Policy
from meshplan.replicas._coverage import report_libraries
from tests.processes import run_in_threads
from tests.refusals import refusal
from tests.traffic import Issued, counts

HOUR = 3600
TORCHS_OWN = _redistribute._optimize_transform_infos


@pytest.fixture(autouse=True)
def _always_out() -> object:
    yield
    _redistribute._optimize_transform_infos = TORCHS_OWN
    _seam.activate(None)
    report_libraries(None)
    remove_tag()


def patched_attributes() -> dict[str, object]:
    """Every attribute of torch's DTensor modules."""
    return {
        f"{name}.{attribute}": value
        for name, module in list(sys.modules.items())
        if name.startswith("torch.distributed")
        for attribute, value in list(vars(module).items())
        if callable(value)
    }


def test_uninstall_restores_the_same_objects() -> None:
    before = patched_attributes()
    meshplan.install()
    during = patched_attributes()
    changed = {name for name in before if during[name] is not before[name]}
    assert changed == {
        "torch.distributed.tensor._redistribute._optimize_transform_infos",
    }
    meshplan.uninstall()
    after = patched_attributes()
    assert all(after[name] is before[name] for name in before)
    assert current_config() is None


def test_second_install_changes_nothing() -> None:
    meshplan.install()
    hook = _redistribute._optimize_transform_infos
    meshplan.install(policy="fast")
    assert _redistribute._optimize_transform_infos is hook
    config = current_config()
    assert config is not None
    assert config.policy == "fast"
    meshplan.uninstall()
    meshplan.uninstall()
    assert _redistribute._optimize_transform_infos is TORCHS_OWN


def test_installed_restores_the_previous_configuration() -> None:
    with meshplan.installed(contract=meshplan.Contract(order="rank")):
        outer = current_config()
        with meshplan.installed(policy="fast"):
            inner = current_config()
            assert inner is not None
            assert inner.policy == "fast"
        assert current_config() is outer
        with pytest.raises(ZeroDivisionError), meshplan.installed(path="reference"):
            raise ZeroDivisionError
        assert current_config() is outer
    assert _redistribute._optimize_transform_infos is TORCHS_OWN
    with pytest.raises(meshplan.MeshplanError), meshplan.installed(policy="no such"):
        pass
    assert _redistribute._optimize_transform_infos is TORCHS_OWN


def test_uninstall_inside_a_block_is_restored_at_its_end() -> None:
    meshplan.install(contract=meshplan.Contract(order="rank"))
    hook = _redistribute._optimize_transform_infos
    with meshplan.installed(policy="fast"):
        meshplan.uninstall()
        assert _redistribute._optimize_transform_infos is TORCHS_OWN
    config = current_config()
    assert config is not None
    assert config.contract.order == "rank"
    assert _redistribute._optimize_transform_infos is hook
    meshplan.uninstall()
    assert _redistribute._optimize_transform_infos is TORCHS_OWN
    with meshplan.installed():
        meshplan.uninstall()
    assert current_config() is None


@pytest.mark.parametrize("outside", [False, True])
def test_overlapping_blocks_end_in_any_order(outside: bool) -> None:
    """The one that was entered last and has not ended holds, whichever ends first."""
    if outside:
        meshplan.install(policy="consistent")
    first, second, third = (
        meshplan.installed(policy=choice) for choice in ("fast", {"a": "fast"}, {"b": "fast"})
    )
    held = []

    def look() -> None:
        config = current_config()
        held.append(None if config is None else config.policy)
        installed = _redistribute._optimize_transform_infos is not TORCHS_OWN
        assert installed == (config is not None)

    for step in (
        first.__enter__,
        second.__enter__,
        lambda: first.__exit__(None, None, None),
        third.__enter__,
        lambda: third.__exit__(None, None, None),
        lambda: second.__exit__(None, None, None),
    ):
        step()
        look()
    a, b = (("a", "fast"),), (("b", "fast"),)
    assert held == ["fast", a, a, b, a, "consistent" if outside else None]
    meshplan.uninstall()


@pytest.mark.full
def test_threads_may_install_concurrently() -> None:
    def work() -> None:
        for _ in range(200):
            meshplan.install()
            meshplan.uninstall()

    # To the end, however busy the machine: a thread that is left would uninstall in the next test.
    run_in_threads(*[work] * 4, seconds=HOUR)
    meshplan.uninstall()
    assert _redistribute._optimize_transform_infos is TORCHS_OWN


def test_policy_applies_to_its_thread_and_block_only() -> None:
    meshplan.install(contract=meshplan.Contract(order="rank"))

    def elsewhere() -> str:
        config = current_config()
        assert config is not None
        return str(config.policy)

    with meshplan.policy("fast"):
        config = current_config()
        assert config is not None
        assert (config.policy, config.contract.order) == ("fast", "rank")
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(elsewhere).result(10) == "deterministic"
        with pytest.raises(ZeroDivisionError), meshplan.policy({"a": "consistent"}):
            raise ZeroDivisionError
        assert elsewhere() == "fast"
    assert elsewhere() == "deterministic"


def test_policies_of_threads_are_apart_while_others_install() -> None:
    """Each thread reads its own policy after each switch; the process keeps one contract."""
    choices: tuple[Policy, ...] = ("deterministic", "consistent", "fast")
    meshplan.install(contract=meshplan.Contract(order="rank"))
    everyone = threading.Barrier(4)

    def work(index: int) -> None:
        everyone.wait(HOUR)
        for turn in range(60):
            choice = choices[(index + turn) % 3]
            with meshplan.policy(choice):
                # Installed again meanwhile by others: never absent in between.
                meshplan.install(contract=meshplan.Contract(order="rank"))
                config = current_config()
                assert config is not None
                assert (config.policy, config.contract.order) == (choice, "rank")
            config = current_config()
            assert config is not None
            assert config.policy == "deterministic"

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for one in [pool.submit(work, index) for index in range(4)]:
                one.result(HOUR)
    finally:
        sys.setswitchinterval(interval)
    meshplan.uninstall()
    assert current_config() is None


class TestMessages(TestCase):
    def message(self, error: type[Exception], **options: object) -> str:
        with pytest.raises(error) as caught:
            meshplan.install(**options)  # type: ignore[arg-type]
        assert _redistribute._optimize_transform_infos is TORCHS_OWN
        return str(caught.value)

    def test_invalid_arguments_are_refused(self) -> None:
        self.assertExpectedInline(
            self.message(ValueError, policy="deterministc"),
            """MP402: unknown policy 'deterministc'; use 'deterministic' or 'consistent' or 'fast'""",
        )
        self.assertExpectedInline(
            self.message(ValueError, contract="tree"),
            """MP411: contract='tree' is not a contract; pass contract=meshplan.Contract()""",
        )
        self.assertExpectedInline(
            self.message(ValueError, policy={"tp": "quick"}),
            """MP402: unknown policy 'quick'; use 'deterministic' or 'consistent' or 'fast'""",
        )
        with pytest.raises(InstallError) as caught, meshplan.policy("fast"):
            pass
        self.assertExpectedInline(
            str(caught.value),
            """MP601: meshplan is not installed, there is no policy to change; call meshplan.install first""",
        )
        self.assertExpectedInline(
            self.message(ValueError, timeout=0),
            """MP402: timeout=0 is not a positive number of seconds""",
        )

    def test_uninstall_refuses_a_later_patch(self) -> None:
        meshplan.install()
        hook = _redistribute._optimize_transform_infos
        _redistribute._optimize_transform_infos = len  # type: ignore[assignment]
        self.assertExpectedInline(
            refusal(InstallError, meshplan.uninstall),
            """MP601: torch.distributed.tensor._redistribute._optimize_transform_infos was replaced after meshplan.install by <built-in function len>; undo that first, then uninstall""",
        )
        _redistribute._optimize_transform_infos = hook
        meshplan.uninstall()
        assert _redistribute._optimize_transform_infos is TORCHS_OWN


def test_install_works_before_init_process_group() -> None:
    """On a fake group, where no rank answers: only issued collectives are visible."""
    meshplan.install()
    dist.init_process_group("fake", rank=0, world_size=6, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 3))
        d = DTensor.from_local(torch.ones(4), mesh, (Partial(), Partial()), run_check=False)
        with Issued() as calls:
            d.redistribute(mesh, (Replicate(), Replicate()))
        assert counts(calls) == {"all_gather_into_tensor": 1}
    finally:
        dist.destroy_process_group()
