"""The installed configuration: policy, contract, path, strictness. One frozen value per process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshplan.contract import Contract
from meshplan.errors import PolicyError, TopologyError
from meshplan.execute import PathChoice, check_path, sharing_of
from meshplan.execute._choose import check_contract
from meshplan.flatten import Sharing
from meshplan.layout import Layout
from meshplan.planner import (
    CONTRACT_PATHS,
    POLICIES,
    ContractPath,
    Policy,
    check_audit,
    check_policy,
)
from meshplan.record import Record
from meshplan.topology import Topology

PolicyChoice = Policy | Mapping[str, Policy]


@dataclass(frozen=True, slots=True)
class Config:
    """The arguments of ``install``, checked.

    Attributes:
        policy: as for ``install``; of a mapping, its (axis name, policy) pairs.
        contract, path, strict, timeout, debug, audit: as for ``install``.
        topology: as for ``install``; ``None`` until it is gathered. Plans are compared by it.
        worker_thread: for threads other than the main thread, whose groups are their own.
        token: the values that members of a group must share before they reduce together.
        key: all values as one string; equal configurations have equal keys.

    Raises:
        PolicyError: an unknown policy or path, or a timeout or an audit that is not positive.
        ContractError: ``contract`` is not a ``Contract``.
        TopologyError: ``topology`` is not a ``Topology``.
    """

    policy: Policy | tuple[tuple[str, Policy], ...] = "deterministic"
    contract: Contract = Contract()
    path: PathChoice = "auto"
    strict: bool = False
    timeout: float | None = None
    topology: Topology | None = None
    debug: bool = False
    audit: int | None = None
    worker_thread: bool = False
    token: Record = field(init=False, repr=False)
    key: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for policy in [self.policy] if isinstance(self.policy, str) else dict(self.policy).values():
            check_policy(policy, "exchange")
        check_path(self.path)
        check_audit(self.audit)
        check_contract(self.contract)
        if self.timeout is not None and not (
            isinstance(self.timeout, int | float) and 0 < self.timeout < math.inf
        ):
            raise PolicyError(f"timeout={self.timeout!r} is not a positive number of seconds")
        if self.topology is not None and not isinstance(self.topology, Topology):
            raise TopologyError(
                f"topology={self.topology!r} is not a topology; "
                'pass topology=Topology.uniform(world_size, node_size=8), or "live"'
            )
        object.__setattr__(self, "token", self._record())
        # Every redistribution looks it up, and a string caches its hash.
        object.__setattr__(
            self,
            "key",
            f"{self.token}, {self.strict}, {self.timeout}, {self.worker_thread}",
        )

    @staticmethod
    def policy_of(choice: PolicyChoice) -> Policy | tuple[tuple[str, Policy], ...]:
        """The ``policy`` argument of ``install``, made hashable.

        Args:
            choice: a policy, or policies by axis name.

        Raises:
            PolicyError: another type.
        """
        if not isinstance(choice, str | Mapping):
            raise PolicyError(
                f"policy={choice!r} is not a policy; pass {', '.join(map(repr, POLICIES))}, or a "
                "mapping of axes to them"
            )
        return tuple(sorted(choice.items())) if isinstance(choice, Mapping) else choice

    def policy_over(self, layout: Layout, axes: Iterable[int]) -> Policy:
        """The policy of a reduction over ``axes``: the strictest of theirs.

        Args:
            layout: of the mesh.
            axes: positions; those of size 1 do not count.
        """
        if isinstance(self.policy, str):
            return self.policy
        named = dict(self.policy)
        wide = [layout.axes[i] for i in axes if layout.sizes[i] > 1]
        found = {named.get(label, "deterministic") for label in wide}
        return min(found, key=POLICIES.index, default="deterministic")

    @property
    def contract_path(self) -> ContractPath:
        """The path that the planner assumes; the final one is chosen when the group is known."""
        return self.path if self.path in ("auto", *CONTRACT_PATHS) else "exchange"

    def sharing(self, device_type: str) -> Sharing:
        """When groups share memory, if their ranks can.

        Args:
            device_type: of the mesh: ``cpu``, ``cuda``.
        """
        return sharing_of(self.path, device_type)

    def _record(self) -> Record:
        policy = self.policy
        if not isinstance(policy, str):
            policy = "{" + ", ".join(f"{axis}: {name}" for axis, name in policy) + "}"  # type: ignore[assignment]
        return Record.of(
            policy=policy,
            contract=self.contract.id,
            path=self.path,
            topology="unknown" if self.topology is None else self.topology.id,
            audit=self.audit,
            debug=self.debug or None,
        )
