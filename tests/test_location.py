"""A rank's place as a value and as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import TopologyInputError
from meshplan.topology._locate import Fabric, Gpu, RankLocation

WHOLE = RankLocation(
    host="node7 0123",
    name="node7",
    machine="0123",
    agent=7,
    gpu=Gpu(
        id="GPU-1",
        bus="0000:1b:00.0",
        vendor="nvidia",
        model="NVIDIA H100",
        links=17,
        unread=(3, 4),
        peers=("0000:2b:00.0",),
        switch=True,
        fabric=Fabric("ab" * 16, 3, 3, 0, 0xAA),
        on_host=8,
        domain=8,
    ),
    multi_node=False,
    imex=True,
)


class TestLocation(TestCase):
    def test_json_has_every_field(self) -> None:
        self.assertExpectedInline(
            json.dumps(WHOLE.to_json()),
            """{"host": "node7 0123", "name": "node7", "machine": "0123", "agent": 7, "gpu": {"id": "GPU-1", "bus": "0000:1b:00.0", "vendor": "nvidia", "model": "NVIDIA H100", "links": 17, "unread": [3, 4], "peers": ["0000:2b:00.0"], "switch": true, "fabric": {"cluster": "abababababababababababababababab", "clique": 3, "state": 3, "health": 170}, "on_host": 8, "domain": 8}, "multi_node": false, "imex": true}""",
        )
        assert json.dumps(RankLocation("h", "n").to_json()) == '{"host": "h", "name": "n"}'

    def test_other_versions_are_refused(self) -> None:
        with pytest.raises(TopologyInputError) as caught:
            RankLocation.from_json({"host": "h", "name": "n", "rack": 3})
        self.assertExpectedInline(
            str(caught.value),
            """MP212: not a valid RankLocation of a rank: "{'host': 'h', 'name': 'n', 'rack': 3}"; do all ranks run one version of meshplan?""",
        )


@pytest.mark.parametrize(
    "place", [WHOLE, RankLocation("h", "n"), RankLocation("h", "n", reason="no GPU")]
)
def test_json_round_trip_is_lossless(place: RankLocation) -> None:
    assert RankLocation.from_json(json.loads(json.dumps(place.to_json()))) == place


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {},
        {"host": "h"},
        {"host": "h", "name": "n", "gpu": "GPU-1"},
        {"host": "h", "name": "n", "gpu": {"id": "1"}},
        {"host": "h", "name": "n", "gpu": {"id": "1", "bus": "2", "vendor": "amd", "fabric": {}}},
    ],
)
def test_invalid_json_is_refused(found: Any) -> None:
    with pytest.raises(TopologyInputError):
        RankLocation.from_json(found)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["host", "name", "gpu", "id", "bus", "vendor", "fabric", "peers"]),
            inner,
        )
    ),
    max_leaves=20,
)


@given(_JSON)
def test_any_json_is_read_or_refused(found: Any) -> None:
    refused = ""
    try:
        RankLocation.from_json(found)
    except TopologyInputError as error:
        refused = str(error)
    assert "\n" not in refused


def test_fabric_health_is_decoded() -> None:
    def faults(health: int | None, status: int = 0, state: int = 3) -> tuple[str, ...]:
        return Fabric("ab" * 16, 0, state, status, health).faults

    assert faults(None) == faults(0) == faults(0xAA) == faults(0x1AA) == ()
    assert faults(0x01) == ("bandwidth is degraded",)
    assert faults(0x04) == ("routes are recovering",)
    assert faults(0x55 | 0x500) == (
        "bandwidth is degraded",
        "routes are recovering",
        "routes are unhealthy",
        "recovery from access timeouts",
        "misconfigured (5)",
    )
    assert faults(0xAA, status=999) == ("registered with status 999",)
    # Until it is completed, its status is meaningless.
    assert faults(0xAA, status=999, state=2) == ()
