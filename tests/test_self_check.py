"""Torch is refused where it has moved, with all that has moved in one message."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import TestCase
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.placement_types import Partial

import meshplan
from meshplan.dtensor._install import check_seam, check_version
from meshplan.errors import UnsupportedTorchError


def refusal() -> str:
    with pytest.raises(UnsupportedTorchError) as caught:
        meshplan.install()
    assert meshplan.dtensor.current_config() is None
    return str(caught.value).replace(torch.__version__, "VERSION")


def test_installed_torch_passes() -> None:
    check_seam()
    check_version(torch.__version__, False)


def test_wrapped_caller_is_accepted() -> None:
    """Profilers do."""
    own = _redistribute.redistribute_local_tensor

    @wraps(own)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    with mock.patch.object(_redistribute, "redistribute_local_tensor", wrapped):
        check_seam()


class TestMessages(TestCase):
    maxDiff = None

    def test_unsupported_versions_are_refused(self) -> None:
        for version in ("", "main", "2", "2.x", "2.10.2", "2.16.0.dev20261101+cu132", "3.0.0a0"):
            with pytest.raises(UnsupportedTorchError) as caught:
                check_version(version, False)
            check_version(version, True)
        self.assertExpectedInline(
            str(caught.value),
            """MP602: torch 3.0.0a0 is not tested with meshplan, which supports 2.11 to 2.15; install one of these, or call meshplan.install(allow_untested_torch=True) and compare replicas yourself""",
        )
        for version in ("2.11.0", "2.13.0+cpu", "2.13.0a0+git", "2.15.1"):
            check_version(version, False)

    def test_all_moved_names_are_listed(self) -> None:
        @dataclass
        class Step:
            mesh_dim: int
            placements: object

        def seam(infos: object, mesh: object) -> None: ...

        def caller(tensor: object) -> object:
            return tensor

        def reduce_value(self: object, tensor: object, mesh: object) -> None: ...

        with (
            mock.patch.multiple(
                _redistribute,
                _optimize_transform_infos=seam,
                redistribute_local_tensor=caller,
                _TransformInfo=Step,
            ),
            mock.patch.object(Partial, "_reduce_value", reduce_value),
        ):
            self.assertExpectedInline(
                refusal(),
                """MP602: torch VERSION is not what meshplan was written for: torch.distributed.tensor._redistribute._optimize_transform_infos (the seam): has infos, mesh instead of transform_infos, device_mesh, src_placements, dst_placements; torch.distributed.tensor._redistribute.redistribute_local_tensor (runs the plan): has tensor instead of local_tensor, current_spec, target_spec, ...; torch.distributed.tensor._dispatch.redistribute_local_tensor (runs the plan): another one than that of torch.distributed.tensor._redistribute; torch.distributed.tensor._api.redistribute_local_tensor (runs the plan): another one than that of torch.distributed.tensor._redistribute; torch.distributed.tensor._redistribute._TransformInfo (steps of a plan): has mesh_dim, placements instead of mesh_dim, src_dst_placements, logical_shape; torch.distributed.tensor._redistribute._TransformInfo._comm_type_key (identifies the steps that torch merges): not found; torch.distributed.tensor.placement_types.Partial._reduce_value (reductions and shards of a plan): has self, tensor, mesh instead of self, tensor, mesh, mesh_dim; torch.distributed.tensor._redistribute.redistribute_local_tensor (runs the plan): in a first run of a plan made by hand, it fails before it calls Partial._reduce_value, with AttributeError: type object 'Step' has no attribute '__post_init__'; install torch 2.11 to 2.15, and undo what other packages have replaced in it""",
            )
