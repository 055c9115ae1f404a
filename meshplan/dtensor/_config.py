"""What is installed: policy, contract, path, strictness. One frozen value per process."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshplan.contract import Contract
from meshplan.errors import ContractError, PolicyError
from meshplan.planner import ContractPath, Policy, check_policy

__all__ = ["Config"]


@dataclass(frozen=True, slots=True)
class Config:
    """The arguments of ``install``, checked.

    Attributes:
        policy: ``deterministic``, ``consistent`` or ``fast``.
        contract: what fixes the bits of every reduction under ``deterministic``.
        path: how contract reductions move their data, ``exchange`` or ``reference``.
        strict: raise instead of running a reduction outside the contract.
        timeout: seconds to wait for the other members before the first reduction of a group;
            ``None``: as long as the default group allows its own collectives.
        key: all of it as one string; equal configurations have equal keys.

    Raises:
        PolicyError: an unknown policy or path, or a timeout that is not positive.
        ContractError: ``contract`` is not a ``Contract``.
    """

    policy: Policy = "deterministic"
    contract: Contract = Contract()
    path: ContractPath = "exchange"
    strict: bool = False
    timeout: float | None = None
    key: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_policy(self.policy, self.path)
        if not isinstance(self.contract, Contract):
            raise ContractError(
                f"contract={self.contract!r} is not a contract; "
                "write contract=meshplan.Contract(order='tree')"
            )
        if self.timeout is not None and not self.timeout > 0:
            raise PolicyError(f"timeout={self.timeout} is not a positive number of seconds")
        # Part of a look-up in every redistribution: a string remembers its hash.
        object.__setattr__(self, "key", f"{self.token}, strict {self.strict}, {self.timeout}")

    @property
    def token(self) -> str:
        """What the members of a group must have in common before they reduce together."""
        return f"policy {self.policy}, contract {self.contract.id}, path {self.path}"
