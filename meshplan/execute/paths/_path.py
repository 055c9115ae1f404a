"""The interface of paths, and the register of paths.

A path moves the summands of a step and runs the contract over them. Every path within the contract
returns the same bits. ``CONTRIBUTING.md`` has the recipe for a new one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from meshplan.errors import PolicyError
from meshplan.execute._groups import StepGroups
from meshplan.execute._provenance import CollectiveLog
from meshplan.execute._wire import Wire
from meshplan.flatten import Sharing
from meshplan.planner import (
    Cost,
    PlannedReduction,
    Step,
    exchange_cost,
    register_cost,
)


class Outcome(NamedTuple):
    tensor: Tensor  # the result or this rank's shard: contiguous, of the summand's dtype
    log: CollectiveLog  # the wire's own, so that a path cannot report calls that it did not make
    pending: bool = False  # the last collective may still be under way: wait for the result


class Path(Protocol):
    """A way to move the data of a step. Subclass it, and pass an instance to ``register``. A path
    sends by the methods of its ``wire``, which compare headers, or calls collectives as
    ``wire.issue(collective, ...)`` after ``wire.compare()``.
    """

    name: str  # the value of ``path=`` that selects it
    offered: bool = True  # whether users may select it by name
    in_contract: bool = True  # whether the contract fixes its bits
    shares_memory: bool = False  # it needs memory that the ranks share, instead of a backend
    captured: bool = True  # a CUDA graph may hold it
    replaceable: bool = True  # an exchange may run in its place where it cannot
    # Torch may trace through it. It need not over gloo: there graphs hold one operator, which runs
    # the path later.
    traced: bool = True
    # It may return on a CPU while its last collective is under way, which leaves the backend's
    # errors to whoever waits.
    asynchronous: bool = False

    @property
    def reported_name(self) -> str:
        """Its name in reports, errors and headers."""
        return self.name

    def why_not(self, step: Step, groups: StepGroups, tensor: Tensor) -> str:
        """Why it cannot run ``step``, equal on all ranks; empty if it can. It must not read the
        shape of ``tensor``: a rank that passes another shape than the others must still take
        part in the comparison.
        """
        return (
            ""
            if groups.whole is not None
            else f"path {self.name} needs one group of all ranks, and the plan has blocks"
        )

    # The decisions of a path may depend on the step, the groups and the summand's shape and dtype
    # only: once headers are compared, these are equal on all ranks, so all ranks issue the same
    # collectives.
    def all_reduce(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        """Every rank gets the whole. ``tensor`` has any strides and is left as it is. It has at
        least one element, except on paths that share memory.
        """
        ...

    def reduce_scatter(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        """Each rank gets its shard: ``select_shard(tensor, step, groups.position)`` of the
        whole.
        """
        ...

    def cost(self, reduction: PlannedReduction) -> Cost:
        """The planner's cost of one reduction. A path that does not override this is in no plan of
        its own: plans are made with an exchange, which it replaces where it runs.
        """
        return exchange_cost(reduction)


_paths: dict[str, Path] = {}
PATHS = ["auto"]
"""The names of paths that users may write: ``auto``, and every registered path that is offered."""
changes = 0
"""How often the register has changed. A choice made before the last change is made again."""


def register(path: Path) -> None:
    """Make ``path`` known under its name: to users, to the planner and to the choice. Every rank of
    a job registers the same paths, before anything is installed. Raises PolicyError if another path
    has that name.
    """
    if _paths.get(path.name, path) is not path or path.name in ("", "auto"):
        raise PolicyError(
            f"a path {path.name!r} exists; give the new path a name of its own, or call "
            "unregister first"
        )
    global changes
    changes += 1
    _paths[path.name] = path
    if path.offered and path.name not in PATHS:
        PATHS.append(path.name)
    if type(path).cost is not Path.cost:
        register_cost(path.name, path.cost)


def unregister(name: str) -> None:
    """Remove the path of that name, or raise PolicyError. Plans and graphs that use it fail."""
    global changes
    offered = get_path(name).offered
    changes += 1
    if offered:
        PATHS.remove(name)
    del _paths[name]
    register_cost(name, None)


def get_path(name: str) -> Path:
    """The path of that name. Raises PolicyError if there is none."""
    if name not in _paths:
        check_path(name)
        raise PolicyError("auto stands for a chosen path; pass the name of a path")
    return _paths[name]


def check_path(name: str) -> None:
    """Raise PolicyError, which names the existing paths, if ``name`` is not one of ``PATHS``."""
    if name not in PATHS:
        raise PolicyError(f"no path {name!r}; use one of {', '.join(map(repr, PATHS))}")


def select_path(name: str, verify: str | None) -> str:
    """The path that runs for path ``name`` with this ``verify``. Raises PolicyError if it has no
    such check.
    """
    if verify is None:
        return name
    if verify != "checksum" or name != "integer":
        raise PolicyError(
            f"verify={verify!r} with path={name!r}: only the messages of path 'integer' have "
            "checksums; pass path='integer' and verify='checksum', or leave verify out"
        )
    return "integer_checksum"


def sharing_of(name: str, device_type: str, one_shot: bool | None) -> Sharing:
    """When ranks that can share memory use it, for ``name``, one of ``PATHS`` or another word. By
    ``auto`` on GPUs where it was timed to be faster, or if the switch ``one_shot`` requests it.
    """
    if name == "auto":
        return "always" if device_type == "cpu" or one_shot else "timed"
    return "always" if name in _paths and _paths[name].shares_memory else "never"
