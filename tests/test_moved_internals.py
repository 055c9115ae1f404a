"""A torch whose internals have moved: the right sum, or one refusal with all that has moved."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.programs import capture

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
# What the one refusal names; None: nothing is refused, and the sum is right.
WANTED: dict[str, tuple[str, ...] | None] = {
    "nothing": None,
    "flattened_step_with_another_field": ("redistribute_local_tensor", "group_hint"),
    "mask_partial_renamed": ("_MaskPartial",),
    "kinds_renamed": ("_comm_type_key", "'ar'"),
    "executor_reduces_by_itself": ("fails before it calls Partial._reduce_value",),
    "executor_reduces_over_whatever_mesh": ("does not call Partial._reduce_value",),
    "executor_gathers_by_itself": ("fails before it calls Shard._to_replicate_tensor",),
    "executor_has_the_planner_by_another_name": (
        "redistribute_local_tensor (runs the plan): in a first",
    ),
    "executor_keeps_plans": ("second run", "_optimize_transform_infos is not looked up"),
    "executor_plans_by_keyword": None,
    "executor_plans_by_other_keywords": ("has infos, mesh, src, dst", "'infos'"),
    "executor_takes_steps_by_index": None,
    "executor_passes_more_to_a_reduction": ("async_op", "takes 4 positional arguments"),
    "dispatcher_has_an_executor_of_its_own": ("_dispatch.redistribute_local_tensor",),
    "redistribute_module_renamed": ("tensor._redistribute (", "._TransformInfo"),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    done = capture(
        [sys.executable, "-m", "tests.moved_internals"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(WANTED)
    return found


@pytest.mark.parametrize("name", WANTED)
def test_moved_internals_give_the_right_sum_or_one_refusal(
    name: str, outcomes: dict[str, dict[str, Any]]
) -> None:
    wanted, found = WANTED[name], outcomes[name]
    assert "error" not in found, found["error"]
    if wanted is None:
        assert found == {"values": [10.0]}
        return
    assert found["refused"] == "UnsupportedTorchError", found
    message = found["message"]
    assert message.startswith("MP602: ")
    assert message.count("MP602") == 1
    assert "\n" not in message
    assert [part for part in wanted if part not in message] == []
