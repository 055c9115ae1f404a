"""A job's parameters, the ranks that hold a replica of each, and its reductions by call site.

A DTensor has replicas along the axes of its mesh where it is ``Replicate``. A plain parameter has
some only where the job shows it: by DistributedDataParallel, or by an all-reduce of its gradient's
memory, as FSDP1 issues one. Modules and meshes are remembered by weak references as they are built:
the collector's list would also have tuples that another thread has not finished.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, combinations
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing import reductions
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from meshplan._dtypes import itemsize
from meshplan._observing import Source
from meshplan._torch import disable_current_modes
from meshplan.execute._groups import StepGroups
from meshplan.layout import Layout
from meshplan.replicas._coverage import MAX_ROWS, CoverageRow, CoverageStep
from meshplan.replicas._tensors import NamedTensor
from meshplan.run._ledger import format_ranks
from meshplan.run._signals import suppress

_WRAPPERS = (
    "_fsdp_wrapped_module.",
    "_orig_mod.",
    "_checkpoint_wrapped_module.",
)
# All-reduces whose memory is remembered, before those of freed memory are forgotten.
_REDUCED = 4096

Ranks = tuple[int, ...]


# In the order of their first appearance.
_MODULES: Any = WeakIdKeyDictionary()
_MESHES: Any = WeakIdKeyDictionary()  # and what is read of each once: holders by placements, layout
_REGISTERED = [0]  # how many parts modules have got
_LAYOUTS: dict[Layout, None] = {}
_MOST_LAYOUTS = 64


def find_layouts() -> list[Layout]:
    """The layouts of the device meshes that this process has or had."""
    for mesh in _list_alive(_MESHES) if len(_LAYOUTS) < _MOST_LAYOUTS else ():
        # A slice reads its ranks from the default group, and only on its own ranks.
        with suppress(Exception):
            _LAYOUTS.setdefault(layout_of(mesh))
    return list(_LAYOUTS)


def layout_of(mesh: DeviceMesh) -> Layout:
    """Read once: it takes longer than the digest of a small tensor."""
    found: dict[Any, Any] = _MESHES.setdefault(mesh, {})
    if None not in found:
        found[None] = Layout.from_mesh(mesh)
    layout: Layout = found[None]
    return layout


def remember_modules_and_meshes() -> None:
    """Remember what is built from now on; once in a process."""
    register_module_parameter_registration_hook(_remember_module)
    register_module_module_registration_hook(_remember_module)
    owner: Any = DeviceMesh
    init = owner.__init__

    @functools.wraps(init)
    def remembered(mesh: DeviceMesh, *arguments: Any, **options: Any) -> None:
        init(mesh, *arguments, **options)
        _MESHES[mesh] = {}

    owner.__init__ = remembered


def _remember_module(module: Any, *_: Any) -> None:
    _REGISTERED[0] += 1
    with suppress(TypeError):  # a class without weak references
        _MODULES[module] = None


def _list_alive(found: Any) -> list[Any]:
    """While other threads add to them."""
    return [one for ref in found.keyrefs() if (one := ref()) is not None]


class ParameterTable:
    """Facts about parameters, by identity; read again when an unknown one appears."""

    def __init__(self) -> None:
        self.uses: dict[Ranks, set[bool]] = {}  # whether replicated, along a group of this rank
        self._names: dict[int, tuple[Any, str]] = {}  # by identity; asked for at each step
        self._groups: Any = {}
        self._tops: list[tuple[Any, set[int]]] = []  # outermost modules, and their parameters' ids
        self._read = -1  # of _REGISTERED
        # A handler of a signal may reduce wherever the main thread is.
        self._lock = threading.RLock()
        self._reduced: dict[Any, tuple[int, int, Ranks]] = {}
        self._most_reduced = _REDUCED

    def name_of(self, parameter: Tensor) -> str | None:
        """Its path in the outermost module that has it; ``None`` if no module does."""
        reference, name = self._names.get(id(parameter), (None, None))
        return name if reference is not None and reference() is parameter else None

    def refresh(self) -> None:
        """Read the modules of this process, if there are new ones."""
        find_layouts()  # slices of meshes may be gone at the end
        if self._read == _REGISTERED[0]:
            return
        self._read = _REGISTERED[0]
        modules = _list_alive(_MODULES)
        inner = {id(child) for module in modules for child in module.children()}
        self._names, self._groups = {}, WeakTensorKeyDictionary()
        self._tops = []
        for module in modules:
            replicated = isinstance(module, DistributedDataParallel)
            top = module.module if replicated else module
            named = list(top.named_parameters()) if replicated or id(module) not in inner else []
            self._tops += [(weakref.ref(top), {id(one) for _, one in named})] if named else []
            for name, parameter in named:
                if replicated and name not in module.parameters_to_ignore:
                    self._groups[parameter] = ranks_of(module.process_group)
                self._names.setdefault(id(parameter), (weakref.ref(parameter), _unwrap(name)))

    def buffers_beside(self, parameters: Iterable[Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Buffers of the outermost modules that have one of the parameters, each once."""
        numbers, seen = set(map(id, parameters)), set[int]()
        for reference, owned in self._tops:
            if (top := reference()) is not None and not owned.isdisjoint(numbers):
                for name, one in top.named_buffers():
                    if id(one) not in seen:
                        yield _unwrap(name), one, one
                    seen.add(id(one))

    def note_reduction(self, tensors: Sequence[Tensor], ranks: Ranks) -> None:
        """Remember the memory of an all-reduce."""
        with self._lock:
            if len(self._reduced) > self._most_reduced:
                self._reduced = {k: v for k, v in self._reduced.items() if not k.expired()}
                self._most_reduced = max(_REDUCED, 2 * len(self._reduced))
            for one in tensors:
                start = one.data_ptr()
                # A weak reference keeps the address of the storage from being used again.
                self._reduced[_refer(one)] = (start, start + one.nbytes, ranks)

    def holders_of(self, parameter: Tensor, tensor: NamedTensor, rank: int) -> set[Ranks]:
        """The groups of ranks that hold a replica of a tensor of this parameter."""
        found: set[Ranks] = {self._groups.get(parameter, ())}
        gradient = parameter.grad
        if tensor.mesh is not None:
            found |= self._find_holders(tensor.mesh, tensor.placements, rank)
        elif found == {()} and type(gradient) is Tensor and gradient.numel():
            with self._lock:
                start, end, ranks = self._reduced.get(_refer(gradient), (0, 0, ()))
            at = gradient.data_ptr()
            found.add(ranks if start <= at and at + gradient.nbytes <= end else ())
        found = {ranks for ranks in found if len(ranks) > 1}
        for ranks in found:
            self.uses.setdefault(ranks, set()).add(True)
        return found

    def _find_holders(self, mesh: DeviceMesh, placements: Any, rank: int) -> set[Ranks]:
        layout = layout_of(mesh)
        known: dict[Any, set[Ranks]] = _MESHES[mesh]
        if placements not in known:
            # A strided shard is no shard to torch's is_shard.
            replicated = [one.is_replicate() for one in placements]
            axes = [axis for axis, one in enumerate(replicated) if one]
            ranks = tuple(sorted(layout.group_of(rank, axes) or ())) if axes else ()
            partial = any(one.is_partial() for one in placements)
            known[placements] = {ranks} if len(ranks) > 1 and not partial else set()
            for axis, one in enumerate(replicated):
                group = tuple(sorted(layout.group_of(rank, axis) or ()))
                self.uses.setdefault(group, set()).add(one)
        return known[placements]


def ranks_of(group: Any) -> Ranks:
    """Of a process group, or of the group of a ``Source``."""
    ranks = group.members if isinstance(group, StepGroups) else group
    known = ranks if isinstance(ranks, tuple) else dist.get_process_group_ranks(ranks)
    return tuple(sorted(known))


def _unwrap(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _refer(tensor: Tensor) -> Any:
    reference: Any = reductions.StorageWeakRef
    return reference(tensor.untyped_storage())


class ReductionTable(CoverageStep):
    """The one step of ``coverage``, which lasts as long as the job."""

    def __init__(self, parameters: ParameterTable) -> None:
        super().__init__(1)
        self._parameters = parameters
        # Called with the ranks of a reduction whose leaves cannot be kept, and the reason.
        self.skip: Callable[[Ranks, str], object] | None = None
        self._guard = threading.RLock()
        self._found: dict[tuple[CoverageRow, Ranks, str | None, str | None], list[int]] = {}
        # Elements reduced, by ranks and by whether an order may change the result.
        self.elements: dict[tuple[Ranks, bool], int] = {}

    def add(
        self,
        row: CoverageRow,
        nbytes: int,
        seconds: float,
        source: Source | None = None,
    ) -> None:
        """Count one reduction, and remember whose memory it was."""
        group, tensors, contract, described = source or Source(None)
        ranks: Ranks = ()
        # Torch does not know the ranks of each group, and sparse tensors have no memory.
        with suppress(Exception):
            ranks = ranks_of(group)
            if contract is not None or row.reduction.startswith("all_reduce"):
                self._parameters.note_reduction(tensors, ranks)
        if self.skip is not None and row.kind != "any order":
            if contract is None:
                self.skip(ranks, "outside the contract")
            elif row.reduction.endswith("compiled graph"):
                self.skip(ranks, "in a compiled graph")
        key = row, ranks, contract, described
        if key not in self._found:
            with disable_current_modes():
                find_layouts()  # meshes may not live until the end
        elements = nbytes // itemsize(row.dtype)
        where = ranks, contract is None and row.kind != "any order"
        with self._guard:
            if key in self._found or len(self._found) < MAX_ROWS:
                counts = self._found.setdefault(key, [0, 0])
                counts[0] += 1
                counts[1] += elements
            if where in self.elements or len(self.elements) < MAX_ROWS:
                self.elements[where] = self.elements.get(where, 0) + elements

    def describe(self, rank: int) -> list[dict[str, Any]]:
        """``reductions`` of the report: those whose result depends on an order."""
        with self._guard:
            found = list(self._found.items())
        labels = name_groups(rank)
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for (row, ranks, contract, described), (calls, elements) in found:
            if row.kind == "any order":
                continue
            call, op, backend = row.reduction, None, None
            if row.kind != "contract":
                call, op, _, backend = row.reduction.split(" ", 3)
            facts = {
                "call": call,
                "op": op,
                "dtype": row.dtype,
                "group": (labels.get(ranks) or format_ranks(ranks)) if ranks else described,
                "group_size": row.ranks,
                "backend": backend,
                "site": row.site,
                "kind": row.kind,
                "contract": contract,
            }
            # Groups of torch that have the same ranks are one row.
            shown = rows.setdefault(tuple(facts.values()), facts | {"calls": 0, "elements": 0})
            shown["calls"] += calls
            shown["elements"] += elements
        return list(rows.values())


def name_groups(rank: int) -> dict[Ranks, str]:
    """Labels of axes and of sets of axes, by the ranks of this rank's groups over them."""
    found: dict[Ranks, str] = {}
    for layout in find_layouts():
        wide = [axis for axis, size in enumerate(layout.sizes) if size > 1]
        sets = chain.from_iterable(combinations(wide, n + 1) for n in range(len(wide)))
        # A mesh without names has labels only if it has several axes.
        for axes in sets if layout.names or len(wide) > 1 else ():
            label = " x ".join(layout.axes[axis] for axis in axes)
            found.setdefault(tuple(sorted(layout.group_of(rank, axes) or ())), label)
    return found
