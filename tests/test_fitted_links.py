"""Links fitted to exchanges reproduce the figures that the exchanges were computed from."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import TopologyError
from meshplan.topology import Link, Links
from meshplan.topology._links import TimedExchange, fit_links, predict_seconds
from tests.refusals import refusal

SIZES = (1 << 10, 1 << 16, 1 << 22)


def make_exchanges(
    links: Links, classes: tuple[str, ...], peers: tuple[int, ...]
) -> list[TimedExchange]:
    """Exchanges that take exactly the time of the model."""
    bare = [
        TimedExchange(name, n, size, 1.0, batched)
        for name in classes
        for n in peers
        for size in SIZES
        for batched in (False, True)
    ]
    return [replace(one, seconds=predict_seconds(links, one)) for one in bare]


links = st.builds(
    Link, st.floats(1e-7, 1e-3), st.floats(1e7, 1e12).filter(lambda width: width < 1e12)
)


@given(links, links, links, st.floats(1e-6, 1e-3), st.floats(0, 1e-3))
def test_fit_predicts_the_measured_exchanges(
    domain: Link, node: Link, network: Link, launch: float, batch: float
) -> None:
    truth = Links(domain=domain, node=node, network=network, launch=launch, batch=batch)
    found = make_exchanges(truth, ("domain", "node", "network"), (1, 7))
    fitted, error = fit_links(found)
    assert error < 1e-3
    for one in found:
        assert predict_seconds(fitted, one) == pytest.approx(one.seconds, rel=0.02)


def test_fit_recovers_the_figures() -> None:
    truth = Links(domain=Link(2e-5, 1e9), network=Link(1e-4, 1e8), launch=3e-4, batch=2e-4)
    fitted, error = fit_links(make_exchanges(truth, ("domain", "network"), (1, 3)))
    assert error < 1e-9
    assert fitted.launch == pytest.approx(truth.launch)
    assert fitted.batch == pytest.approx(truth.batch)
    for name in ("domain", "network"):
        assert getattr(fitted, name).latency == pytest.approx(getattr(truth, name).latency)
        assert getattr(fitted, name).bandwidth == pytest.approx(getattr(truth, name).bandwidth)
    # Of nodes nothing was measured.
    assert fitted.node == truth.node


def test_fitted_figures_are_not_negative() -> None:
    # Faster than any launch at a small size: least squares alone would take a negative latency.
    fitted, _ = fit_links(
        [
            TimedExchange("node", 1, 1 << 10, 1e-5),
            TimedExchange("node", 7, 1 << 10, 0.9e-5),
            TimedExchange("node", 1, 1 << 22, 4e-3),
            TimedExchange("node", 7, 1 << 22, 30e-3),
        ]
    )
    assert fitted.node.latency == 0
    assert fitted.launch > 0


def test_half_the_time_is_as_far_off_as_twice_the_time() -> None:
    """Least squares of relative errors alone would follow the shorter time."""
    found = [
        TimedExchange("node", 3, size, size * factor * 1e-9)
        for size in (1 << 20, 1 << 22)
        for factor in (1, 4)
    ]
    fitted, _ = fit_links(found)
    for one in found:
        assert predict_seconds(fitted, one) == pytest.approx(one.size * 2e-9, rel=0.01)


def test_groups_count_more_than_pairs() -> None:
    truth = Links(node=Link(0.0, 1e9), launch=0.0)
    groups = make_exchanges(truth, ("node",), (7,))
    pairs = [
        replace(one, seconds=one.seconds / 4) for one in make_exchanges(truth, ("node",), (1,))
    ]
    fitted, _ = fit_links([*groups, *pairs])
    off = [predict_seconds(fitted, one) / one.seconds for one in (groups[-1], pairs[-1])]
    assert abs(math.log(off[0])) < abs(math.log(off[1])) / 2


def test_unmeasured_figures_are_the_defaults() -> None:
    truth = Links(node=Link(1.0, 1.0), network=Link(1.0, 1.0), group=2.0, uses=3)
    fitted, _ = fit_links(make_exchanges(truth, ("node",), (1, 2)))
    assert (fitted.network, fitted.group, fitted.uses) == (Links().network, 0.5, 10_000)


@pytest.mark.parametrize("step", [0.0, 1e-15, -1e-15, 1e-13, -1e-13])
def test_last_bits_decide_no_verdict(step: float) -> None:
    """Libraries of linear algebra round as processors do: steps play their different solutions."""
    flat = [
        TimedExchange("node", n, size, 1e-4 * (1 + i * step))
        for i, (n, size) in enumerate(product((1, 2), SIZES))
    ]
    with pytest.raises(TopologyError, match="the bandwidth of node is unknown"):
        fit_links(flat)
    # Without latency: its sign is that of the rounding.
    truth = Links(node=Link(0.0, 1e9), launch=1e-4)
    exchanges = make_exchanges(truth, ("node",), (1, 3))
    fitted, error = fit_links(
        [replace(one, seconds=one.seconds * (1 + i * step)) for i, one in enumerate(exchanges)]
    )
    assert (fitted.node.latency, fitted.batch) == (0, 0)
    assert fitted.node.bandwidth == pytest.approx(1e9)
    assert error < 1e-9


class TestRefusals(TestCase):
    def test_unusable_measurements_are_refused(self) -> None:
        messages = []
        flat = [TimedExchange("node", n, size, 1e-4) for n in (1, 2) for size in SIZES]
        for found in ([], [TimedExchange("node", 1, 1, 0.0)], flat):
            messages.append(refusal(TopologyError, fit_links, found))
        self.assertExpectedInline(
            "\n".join(messages),
            """\
MP211: no link was measured; time exchanges between two ranks or more
MP211: no link was measured; time exchanges between two ranks or more
MP211: the bandwidth of node is unknown: large exchanges took no longer than small ones; measure larger sizes, on an idle machine""",
        )
