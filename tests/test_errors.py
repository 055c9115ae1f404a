"""The codes are an interface: scripts match on them, the linter shares them."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from meshplan import errors
from meshplan.lint._rules._rule import ERRORS

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, Exception)
]


def test_codes_do_not_change() -> None:
    rows = []
    for cls in sorted(CLASSES, key=lambda cls: cls.code):
        parents = ", ".join(parent.__name__ for parent in cls.__bases__)
        rows.append(f"{cls.code} {cls.__name__}({parents})")
    assert_expected_inline(
        "\n".join(rows),
        """\
MP000 MeshplanError(Exception)
MP111 LayoutError(MeshplanError, ValueError)
MP112 AxisNameError(MeshplanError, ValueError)
MP211 TopologyError(MeshplanError, ValueError)
MP212 TopologyInputError(TopologyError)
MP401 PlacementError(MeshplanError, ValueError)
MP402 PolicyError(MeshplanError, ValueError)
MP403 ShardOrderError(MeshplanError, ValueError)
MP404 BackendTypeError(MeshplanError, TypeError)
MP411 ContractError(MeshplanError, ValueError)
MP412 ContractTypeError(MeshplanError, TypeError)
MP413 ContractStateError(MeshplanError, RuntimeError)
MP421 ReplicaInputError(MeshplanError, TypeError)
MP500 GroupError(MeshplanError, RuntimeError)
MP501 GroupAgreementError(GroupError)
MP502 GroupCreationError(GroupError)
MP503 GroupStateError(GroupError)
MP504 CollectiveError(GroupError)
MP505 BackendError(GroupError)
MP601 InstallError(MeshplanError, RuntimeError)
MP602 UnsupportedTorchError(InstallError)
MP603 PlanNotRunError(InstallError)
MP610 TorchMissingError(InstallError, ImportError)
MP701 FallbackRefusedError(MeshplanError, RuntimeError)
MP702 PeerTimeoutError(MeshplanError, RuntimeError)
MP703 SignatureMismatchError(MeshplanError, RuntimeError)
MP704 AuditError(MeshplanError, RuntimeError)
MP705 ReplicaDivergenceError(MeshplanError, RuntimeError)
MP706 ChecksumError(MeshplanError, RuntimeError)
MP707 BitwiseRequirementError(MeshplanError, RuntimeError)
MP801 ShardError(MeshplanError, ValueError)
MP802 TokenCoverageError(ShardError)
MP901 IntegrationError(MeshplanError, ValueError)
MP902 ElasticError(MeshplanError, ValueError)""",
    )


def test_every_error_class_can_be_explained() -> None:
    assert {*CLASSES} == {*ERRORS.values()}


@pytest.mark.parametrize("cls", CLASSES)
def test_the_message_starts_with_the_code(cls: type[errors.MeshplanError]) -> None:
    more = {errors.PeerTimeoutError: {"rank": 3, "block": 0, "phase": 1}}
    more[errors.SignatureMismatchError] = {"rank": 3}
    more[errors.TokenCoverageError] = {"token_id": 7, "covered_by": 0}
    error = cls("three ranks are missing", **more.get(cls, {}))
    assert str(error) == f"{cls.code}: three ranks are missing"
    assert isinstance(error, errors.MeshplanError)


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not errors.MeshplanError])
def test_builtin_parent_separates_caller_errors_from_job_errors(
    cls: type[errors.MeshplanError],
) -> None:
    builtin = [base for base in (ValueError, TypeError, RuntimeError) if issubclass(cls, base)]
    # 5xx to 7xx are the cluster's; of the others only the state of the process is.
    cluster = cls.code[2] in "567" or cls is errors.ContractStateError
    assert len(builtin) == 1
    assert (builtin[0] is RuntimeError) == cluster


def test_agreement_error_names_ranks() -> None:
    error = errors.GroupAgreementError("late", missing=(3, 5), differing=(1,))
    assert (error.missing, error.differing) == ((3, 5), (1,))
    plain = errors.GroupAgreementError("late")
    assert (plain.missing, plain.differing) == ((), ())


def test_divergence_error_carries_the_report() -> None:
    plain = errors.ReplicaDivergenceError("differ")
    assert (plain.divergences, plain.tensors, plain.step) == ((), 0, None)
    error = errors.ReplicaDivergenceError("differ", tensors=3, step=200)
    assert (error.tensors, error.step) == (3, 200)
