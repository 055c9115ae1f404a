"""The options of a group of the backend, and the environment variables that stand for them."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from meshplan._message_text import shorten
from meshplan._torch import BackendOptionsBase, default_pg_timeout
from meshplan._variables import check_variables
from meshplan.contract import Contract
from meshplan.errors import BackendError, BackendTypeError, PolicyError
from meshplan.execute._choose import check_contract
from meshplan.execute.paths import check_path
from meshplan.planner import check_audit

NAME = "meshplan"
"""The name of the backend, for ``init_process_group`` and ``new_group``."""

_POLICIES = ("deterministic", "fast")


class BackendOptions(BackendOptionsBase):  # type: ignore[misc] # a class of C++
    """How the groups of the backend ``meshplan`` reduce; pass it as ``pg_options``.

    Args:
        contract: the order and the rounding of additions; ``None``: ``MESHPLAN_CONTRACT``, or
            ``Contract()``.
        path: how data moves, one of ``meshplan.execute.PATHS`` but ``"native"``; ``None``:
            ``MESHPLAN_PATH``, or ``"auto"``. No bit depends on it.
        policy: ``"deterministic"``: reductions under the contract; ``"fast"``: all of them by the
            inner backend, in its own order. ``None``: ``MESHPLAN_POLICY``, or the former.
        inner: the backend that moves the data, as ``init_process_group`` accepts it; ``None``:
            ``MESHPLAN_INNER``, or the default backend of each device.
        audit: compare the first and then every ``audit``-th call of each reduction with the plain
            definition, which gathers all summands; other bits raise ``AuditError`` on every rank.
            ``None``: ``MESHPLAN_AUDIT``, or never.
        strict: raise an error instead of a fallback outside the contract, or to another path.
            ``None``: ``MESHPLAN_STRICT=1``, or no.
        timeout: of reductions; ``None``: that of the group.

    Raises:
        ContractError, PolicyError: an invalid contract, path, policy or audit; or ``strict``, and a
            variable ``MESHPLAN_*`` that does not exist. Without ``strict`` it is a warning.
        BackendError: an invalid ``inner`` or ``timeout``.
    """

    def __init__(
        self,
        contract: Contract | None = None,
        path: str | None = None,
        policy: str | None = None,
        inner: str | None = None,
        audit: int | None = None,
        strict: bool | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        if timeout is not None and not isinstance(timeout, timedelta):
            raise BackendError(
                f"timeout={timeout!r} is not a timedelta; pass datetime.timedelta(seconds=...)"
            )
        super().__init__(NAME, default_pg_timeout if timeout is None else timeout)
        if contract is not None:
            check_contract(contract)
        name = os.environ.get("MESHPLAN_CONTRACT")
        self.contract = contract or (Contract.of_id(name) if name else Contract())
        self.path = path or os.environ.get("MESHPLAN_PATH") or "auto"
        check_path(self.path)
        if self.path == "native":
            raise PolicyError(
                "path='native' is outside every contract; pass another path, or policy='fast' for "
                "the inner backend's own order"
            )
        self.policy = policy or os.environ.get("MESHPLAN_POLICY") or "deterministic"
        if self.policy not in _POLICIES:
            raise PolicyError(
                f"policy={self.policy!r} is not a policy of a process group; pass "
                f"{' or '.join(map(repr, _POLICIES))}, and 'consistent' to meshplan.install, which "
                "knows the mesh"
            )
        self.audit = _number(os.environ.get("MESHPLAN_AUDIT")) if audit is None else audit
        check_audit(self.audit)
        self.inner = inner or os.environ.get("MESHPLAN_INNER") or None
        if self.inner is not None and (not isinstance(self.inner, str) or NAME in self.inner):
            raise BackendError(
                f"inner={self.inner!r} is not another backend; pass e.g. inner='gloo' or "
                "inner='cpu:gloo,cuda:nccl'"
            )
        self.strict = _switch(os.environ.get("MESHPLAN_STRICT")) if strict is None else strict
        self.timeout = timeout
        check_variables(self.strict)

    def replace(
        self, *, timeout: timedelta | None = None, inner: str | None = None
    ) -> BackendOptions:
        """The same options but for those that are given.

        Args:
            timeout, inner: as for the class; ``None``: as they are.
        """
        return BackendOptions(
            self.contract,
            self.path,
            self.policy,
            inner or self.inner,
            self.audit,
            self.strict,
            timeout or self.timeout,
        )

    def __repr__(self) -> str:
        return (
            f"BackendOptions(contract={self.contract.id!r}, path={self.path!r}, "
            f"policy={self.policy!r}, inner={self.inner!r}, audit={self.audit}, "
            f"strict={self.strict}, timeout={self.timeout})"
        )


def check_inner_options(options: Any, inner: str) -> None:
    """Refuse ``pg_options`` that are neither ``None`` nor of a backend in ``inner``. Raises
    BackendTypeError: they would have no effect.
    """
    names = [part.rpartition(":")[2] for part in inner.split(",")]
    if options is not None and getattr(options, "backend", None) not in names:
        raise BackendTypeError(
            f"pg_options={shorten(repr(options))} has no effect on this group; pass "
            f"meshplan.BackendOptions(...), options of the inner backend {inner!r}, or None"
        )


def _number(value: str | None) -> int | None:
    if not value:
        return None
    if not value.isascii() or not value.isdigit():
        raise PolicyError(
            f"MESHPLAN_AUDIT={value!r} is not a number of calls; set e.g. 100 to compare every "
            "100th call of each reduction with the reference, or unset it"
        )
    return int(value)


def _switch(value: str | None) -> bool:
    if value not in (None, "", "0", "1"):
        raise BackendError(
            f"MESHPLAN_STRICT={value!r} is not a switch; set 1 to refuse reductions outside the "
            "contract, 0 to allow them, or unset it"
        )
    return value == "1"
