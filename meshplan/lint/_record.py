"""The child process of ``meshplan lint --run``: a script as rank 0 of ranks that do not exist.

``python -m meshplan.lint._record OUTPUT WORLD_SIZE NODE_SIZE SCRIPT ARGUMENT...`` writes a line of
JSON for each mesh and each use of one, and a last one on how the script ended. The groups of torch
are of its fake backend, whose collectives move nothing, and devices of CUDA are the CPU.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import traceback
import types
from collections.abc import Callable
from functools import wraps
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, fsdp
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from meshplan._torch import FakeStore

_CUDA = re.compile(r"cuda(?::\d+)?")
_WATCHED: tuple[tuple[Any, str, str], ...] = (
    (fsdp, "fully_shard", "fsdp2"),
    (fsdp.FullyShardedDataParallel, "__init__", "fsdp1"),
    (DistributedDataParallel, "__init__", "ddp"),
    (parallel, "parallelize_module", "model"),
    (parallel.SequenceParallel, "__init__", "sequence"),
    (dtensor, "distribute_tensor", "dtensor"),
    (dtensor, "distribute_module", "dtensor"),
    (dtensor.DTensor, "from_local", "dtensor"),
)
_NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")


class _FirstStep(BaseException):
    """The script has reached its first optimizer step: its meshes are made."""


class _OnCpu(TorchFunctionMode):
    """Tensors of CUDA devices are on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {key: _replace_device(value) for key, value in (kwargs or {}).items()}
        return func(*map(_replace_device, args), **kwargs)


def _replace_device(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and _CUDA.fullmatch(value) else value


class _Recorder:
    """Writes what a script does with meshes."""

    def __init__(self, script: str, out: TextIO) -> None:
        self.script = os.path.abspath(script)
        self.out = out

    def write(self, **event: Any) -> None:
        """One line; the process may end at any time."""
        print(json.dumps(event), file=self.out, flush=True)

    def find_line(self) -> int | None:
        """The line of the script that runs."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.script:
            frame = frame.f_back
        return None if frame is None else frame.f_lineno

    def stop(self, *_: Any) -> None:
        """End the script at its first optimizer step."""
        raise _FirstStep

    def watch(self, owner: Any, name: str, kind: str) -> None:
        """Record calls of a function of torch, with the mesh among their arguments."""
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def record(*args: Any, **kwargs: Any) -> Any:
            mesh = next(
                (a for a in (*args, *kwargs.values()) if isinstance(a, DeviceMesh)),
                None,
            )
            # The ranks along each axis from rank 0, which identify the axes of the whole mesh.
            along = []
            if mesh is not None:
                grids = [mesh.mesh.movedim(i, -1) for i in range(mesh.ndim)]
                along = [grid.reshape(-1, grid.shape[-1])[0].tolist() for grid in grids]
            self.write(use=kind, along=along, line=self.find_line())
            return function(*args, **kwargs)

        setattr(owner, name, record)

    def watch_meshes(self) -> None:
        """Record meshes; those of CUDA devices become meshes of CPUs."""
        make, init = device_mesh.init_device_mesh, DeviceMesh.__init__

        @wraps(make)
        def make_mesh(device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
            mesh = make(_replace_device(device_type), *args, **kwargs)
            self._write_mesh(mesh)
            return mesh

        @wraps(init)
        def init_mesh(
            mesh: DeviceMesh,
            device_type: str,
            ranks: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            ranks = kwargs.pop("mesh", ranks)
            init(mesh, _replace_device(device_type), ranks, *args, **kwargs)
            if ranks is not None:  # else torch makes a part of another one
                self._write_mesh(mesh)

        device_mesh.init_device_mesh = dist.init_device_mesh = make_mesh  # type: ignore[attr-defined]
        DeviceMesh.__init__ = init_mesh  # type: ignore[assignment, method-assign]

    def _write_mesh(self, mesh: DeviceMesh) -> None:
        shape, ranks = [*mesh.mesh.shape], mesh.mesh.flatten().tolist()
        self.write(
            mesh=shape,
            names=mesh.mesh_dim_names,
            ranks=ranks,
            line=self.find_line(),
        )


def _answer(world_size: int, node_size: int) -> None:
    """Replace what a script asks the launcher, the other ranks and CUDA."""
    init = dist.init_process_group

    def init_group(*_: Any, **__: Any) -> None:
        if not dist.is_initialized():
            init("fake", rank=0, world_size=world_size, store=FakeStore())

    def gather(objects: list[Any], mine: Any, *_: Any, **__: Any) -> None:
        objects[:] = [mine] * len(objects)

    def refuse(event: str, _: tuple[Any, ...]) -> None:
        if event in _NETWORK:
            raise OSError("meshplan lint --run has no network")

    dist.init_process_group = init_group
    dist.all_gather_object = gather  # type: ignore[assignment]
    dist.is_nccl_available = torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: node_size
    torch.cuda.current_device = lambda: 0
    # Each has a function of its own: torch's compiler refuses one with several names.
    for name in ("broadcast_object_list", "monitored_barrier"):
        setattr(dist, name, lambda *_, **__: None)
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "manual_seed",
        "manual_seed_all",
    ):
        setattr(torch.cuda, name, lambda *_, **__: None)
    sys.addaudithook(refuse)
    init_group()


def main(output: str, world_size: int, node_size: int, script: str, arguments: list[str]) -> None:
    """Run the script, and record its meshes and why it ended."""
    with open(output, "a", encoding="utf-8") as out:
        recorder = _Recorder(script, out)
        for owner, name, kind in _WATCHED:
            recorder.watch(owner, name, kind)
        recorder.watch_meshes()
        _answer(world_size, node_size)
        register_optimizer_step_pre_hook(recorder.stop)
        sys.argv = [script, *arguments]
        sys.path[0] = os.path.dirname(recorder.script)
        end: dict[str, Any] = {"end": "", "line": None, "missing": ""}
        try:
            with _OnCpu():
                runpy.run_path(recorder.script, run_name="__main__")
        except BaseException as error:
            found = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in found if frame.filename == recorder.script]
            whole = isinstance(error, SystemExit) and error.code in (None, 0)
            if not whole and not isinstance(error, _FirstStep):
                end = {
                    "end": f"{type(error).__name__}: {error}",
                    "line": lines[-1] if lines else None,
                }
                end["missing"] = error.name if isinstance(error, ModuleNotFoundError) else ""
        recorder.write(**end)
    os._exit(0)  # threads of the script may still run


if __name__ == "__main__":
    main(
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4],
        sys.argv[5:],
    )
