"""Every error that meshplan raises, each with a stable code.

A message has the problem, the actual value, and the fix. The code in front of it never changes its
meaning; the linter's rules share the numbering (1xx layout, 2xx topology input,
3xx environment, 4xx plan, 5xx process groups, 6xx installation, 7xx execution, 8xx references of
tensor parallelism, 9xx integrations).

A child of ``ValueError`` or ``TypeError`` is a mistake in the call, and is raised before anything
is sent. A child of ``RuntimeError`` is the state of the job or of the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class MeshplanError(Exception):
    """Base of all errors of meshplan. ``str(error)`` starts with the code."""

    code: ClassVar[str] = "MP000"

    def __str__(self) -> str:
        return f"{self.code}: {super().__str__()}"


class LayoutError(MeshplanError, ValueError):
    """Axis sizes, names and ranks do not describe a mesh."""

    code = "MP111"


class AxisNameError(MeshplanError, ValueError):
    """The mesh has no axis of this name or position."""

    code = "MP112"


class TopologyError(MeshplanError, ValueError):
    """Invalid nodes or domains of ranks, or a rank outside the topology."""

    code = "MP211"


class TopologyInputError(TopologyError):
    """An invalid description of a cluster: a file, an output or variables.

    ``line`` counts from 1; ``None`` if it is about the whole input.
    """

    code = "MP212"

    def __init__(self, message: str, *, line: int | None = None) -> None:
        super().__init__(message if line is None else f"line {line}: {message}")
        self.line = line


class PlacementError(MeshplanError, ValueError):
    """Placements that do not fit the mesh or the local tensor, or cannot be reduced together."""

    code = "MP401"


class PolicyError(MeshplanError, ValueError):
    """A policy, path or option that does not exist."""

    code = "MP402"


class ShardOrderError(MeshplanError, ValueError):
    """Shards would be gathered in the order of sorted ranks, but are ordered by mesh coordinate."""

    code = "MP403"


class BackendTypeError(MeshplanError, TypeError):
    """The ``pg_options`` of a group of the backend ``meshplan`` are of another type or backend."""

    code = "MP404"


class ContractError(MeshplanError, ValueError):
    """A malformed contract, or malformed leaves for it."""

    code = "MP411"


class ContractTypeError(MeshplanError, TypeError):
    """The contract does not define this operation on this dtype."""

    code = "MP412"


class ContractStateError(MeshplanError, RuntimeError):
    """The floating-point mode of the process breaks the contract's bits."""

    code = "MP413"


class GroupError(MeshplanError, RuntimeError):
    """Base of the process-group errors."""

    code = "MP500"


class GroupAgreementError(GroupError):
    """The members of a group did not agree to create it: ranks missing, or plans that differ.

    Raised on every member that took part; no member has created the group.
    ``missing`` and ``differing`` hold global ranks.
    """

    code = "MP501"

    def __init__(
        self, message: str, *, missing: tuple[int, ...] = (), differing: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.differing = differing


class GroupCreationError(GroupError):
    """All members agreed, but a group could not be created or warmed up on all of them."""

    code = "MP502"


class GroupStateError(GroupError):
    """The state of the job does not allow the creation of a group.

    ``unanswered``: the store of the job does not answer this rank, which no peer has seen.
    """

    code = "MP503"

    def __init__(self, message: str, *, unanswered: bool = False) -> None:
        super().__init__(message)
        self.unanswered = unanswered


class CollectiveError(GroupError):
    """A collective of a reduction failed in the backend: a member ended, or timed out.

    Raised on every rank of the collective. ``missing`` holds the global ranks that did not report
    the failure as well: those that ended, hang or took another branch, and those that still wait.
    """

    code = "MP504"

    def __init__(self, message: str, *, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class BackendError(GroupError):
    """The backend ``meshplan`` does not support this call, or its options are invalid."""

    code = "MP505"


class InstallError(MeshplanError, RuntimeError):
    """The plugin cannot be installed, or cannot be removed exactly."""

    code = "MP601"


class UnsupportedTorchError(InstallError):
    """This torch version has not been tested with the plugin."""

    code = "MP602"


class TorchMissingError(InstallError, ImportError):
    """The called function needs torch, which is not installed. The linter and planner do not."""

    code = "MP610"


class PlanNotRunError(InstallError):
    """Torch received a plan and returned without running its reduction: the result is wrong.

    Raised in the same redistribution, or in the next one of the same thread.
    """

    code = "MP603"


class FallbackRefusedError(MeshplanError, RuntimeError):
    """``strict=True`` and a reduction would have run outside the contract."""

    code = "MP701"


class PeerTimeoutError(MeshplanError, RuntimeError):
    """A rank timed out in a reduction over mapped memory.

    Raised on every other rank. ``rank`` is the global rank that is missing, ``ended`` whether its
    process has ended; ``block`` and ``phase`` are its progress: phase 0 copies the summands,
    phase 1 the results.
    """

    code = "MP702"

    def __init__(
        self, message: str, *, rank: int, block: int, phase: int, ended: bool = False
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.ended = ended
        self.block = block
        self.phase = phase


class SignatureMismatchError(MeshplanError, RuntimeError):
    """Ranks called one reduction with different sizes, dtypes, operations or contracts.

    Raised on every rank, before a result is written. ``rank`` is a global rank that differs from
    this one. ``unlike_calls``: the ranks are in different calls, such as call 7 and call 8 of their
    group. Then later calls of the group raise ``GroupStateError``.
    """

    code = "MP703"

    def __init__(self, message: str, *, rank: int, unlike_calls: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.unlike_calls = unlike_calls


UNLIKE_CALLS = (
    "No result was returned on any rank, and the group has stopped: a rank skipped or repeated a "
    "call, or failed alone in one. Make the same calls on every rank, in one order"
)
"""Of a ``SignatureMismatchError`` whose ranks are in different calls of one group."""


class AuditError(MeshplanError, RuntimeError):
    """An audit found bits other than those of the contract in the result of a reduction.

    Raised on every rank that took part. ``ranks`` holds the global ranks with wrong elements,
    ``elements`` their number on all of them together.
    """

    code = "MP704"

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), elements: int = 0) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.elements = elements


class ChecksumError(MeshplanError, RuntimeError):
    """The checksum of a reduction is wrong: a bit changed on its way or in memory.

    Raised on every rank that took part.
    """

    code = "MP706"


class BitwiseRequirementError(MeshplanError, RuntimeError):
    """``meshplan run --require bitwise`` stopped the job: something in it can change bits.

    The message names the cause and its fix: a reduction outside the contract, a setting, or an
    operator of torch. Each later reduction or optimizer step raises it again, on all ranks.
    """

    code = "MP707"


class ReplicaInputError(MeshplanError, TypeError):
    """A compared value is not a tensor, or is a tensor without data of its own."""

    code = "MP421"


@dataclass(frozen=True, slots=True)
class Elements:
    """How the local tensor of one rank differs from that of the reference rank.

    Attributes:
        rank: global rank of the compared tensor.
        count: elements that differ; 0 if the second comparison found none, because the tensor
            changes while it is compared.
        index: of the first of them in the local tensor; ``None`` if there is none, or if the local
            shapes differ.
        value, reference: of that element on ``rank`` and on the reference rank, with the bits:
            ``0.5 (0x3f000000)``.
        max_ulps: the largest distance in units in the last place; ``None`` for dtypes other than
            float16, bfloat16, float32, float64 and complex of them, and where each pair has a NaN.
        numel: elements of the local tensor.
        shapes: local shapes of ``rank`` and of the reference rank, where they differ.
        unrelated: elements that differ in sign or by more than a factor of 2; 0 where ``max_ulps``
            is ``None``.
    """

    rank: int
    count: int
    index: tuple[int, ...] | None
    value: str
    reference: str
    max_ulps: int | None
    numel: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    unrelated: int = 0


@dataclass(frozen=True, slots=True)
class Divergence:
    """One tensor that should be identical in one group of replicas, and is not.

    Attributes:
        name: of the tensor.
        what: name, dtype, shape and placements of the tensor.
        replicated: axes along which all ranks should hold the same.
        axes: those of ``replicated`` along which neighbouring ranks differ.
        reference: global rank that the others are compared with: of the largest class (of equally
            large ones, of the class with the lowest coordinate) the one with the lowest coordinate.
        classes: global ranks by their data; the first class is the reference's.
        coordinates: of ``classes``, in the same places.
        elements: for the first few divergences, one rank of each of the first classes that differ
            from the reference's.
    """

    name: str
    what: str
    replicated: tuple[str, ...]
    axes: tuple[str, ...]
    classes: tuple[tuple[int, ...], ...]
    coordinates: tuple[tuple[tuple[int, ...], ...], ...]
    elements: tuple[Elements, ...] = ()

    @property
    def reference(self) -> int:
        """As above."""
        return self.classes[0][0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that differ from the reference."""
        return tuple(rank for ranks in self.classes[1:] for rank in ranks)


class ReplicaDivergenceError(MeshplanError, RuntimeError):
    """Ranks that should hold the same replica of a tensor hold different bits.

    Raised on every rank of the mesh, with the same text.

    Attributes:
        divergences: the first of them, as in the message.
        tensors: number of all differing tensors.
        step: the number of the step, or ``None``.
    """

    code = "MP705"

    def __init__(
        self,
        message: str,
        *,
        divergences: tuple[Divergence, ...] = (),
        tensors: int = 0,
        step: int | None = None,
    ) -> None:
        super().__init__(message)
        self.divergences = divergences
        self.tensors = tensors
        self.step = step


class ShardError(MeshplanError, ValueError):
    """Shards, tokens, masks or options of ``meshplan.testing.tp`` that do not fit together."""

    code = "MP801"


class TokenCoverageError(ShardError):
    """An active token that no shard of the vocabulary holds, or more than one.

    ``token_id`` is the first such token, ``covered_by`` the number of shards that hold it.
    """

    code = "MP802"

    def __init__(self, message: str, *, token_id: int, covered_by: int) -> None:
        super().__init__(message)
        self.token_id = token_id
        self.covered_by = covered_by


class IntegrationError(MeshplanError, ValueError):
    """A model, a group or an option that an integration does not support."""

    code = "MP901"


class ElasticError(MeshplanError, ValueError):
    """A number of ranks, a model or a call that an elastic run does not support."""

    code = "MP902"
