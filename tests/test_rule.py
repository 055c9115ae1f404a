"""``meshplan rule``: pages of rules and errors."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence

import pytest
from expecttest import TestCase

from meshplan.cli._rule import explain_rules
from meshplan.errors import PolicyError
from meshplan.lint._rules import ERRORS, RULES, format_rule_page


def rule(codes: Sequence[str], all_: bool = False, output_format: str = "text") -> str:
    return explain_rules(Namespace(codes=codes, all=all_, output_format=output_format))


class TestRule(TestCase):
    def test_page_of_a_rule_is_printed(self) -> None:
        self.assertExpectedInline(
            rule(["MP190"]),
            """\
# unused-ignore (MP190)

Severity: warning. An ignore comment matches no finding.

## What

An ignore comment in a file matches no finding.

## Why

The finding that it once excused has been fixed. If the comment stays, the same finding may come back
unseen.

## Example

A comment that outlived its finding, `meshplan.toml`:

```toml
mesh = "ddp=5,fsdp=8" # meshplan: ignore[MP101] replicas are averaged every step
```

```console
$ meshplan lint meshplan.toml --domain-size 8 --select MP190 --output-format concise
meshplan.toml:1: warning MP190 no finding of MP101 on line 1 matches this comment; remove it
```

After the fix, without a finding, `meshplan.toml`:

```toml
mesh = "ddp=5,fsdp=8"
```

```console
$ meshplan lint meshplan.toml --domain-size 8 --select MP190 --output-format concise
```

## Fix

Remove the comment, or remove the code from its list.

## Source

* The same in ruff: <https://docs.astral.sh/ruff/rules/unused-noqa/>
""",
        )

    def test_page_of_an_error_is_printed(self) -> None:
        self.assertExpectedInline(
            rule(["mp212"]),
            """\
# TopologyInputError (MP212)

Raised as `meshplan.errors.TopologyInputError`, a kind of `ValueError`.

## What

An invalid description of a cluster: a file, an output or variables.

`line` counts from 1; `None` if it is about the whole input.

## Why

An argument or an input is invalid. No message has been sent.

## Fix

Follow the message, or see [When something fails](../faults.md).
""",
        )

    def test_all_pages_are_printed(self) -> None:
        self.assertExpectedInline(
            rule([], True),
            """\
rules of meshplan lint
  MP101  error    jagged-reduction         Groups that must agree are placed on nodes in different ways; replicas may differ.
  MP102  info     jagged-not-shown-to-differ  Groups of an axis are placed on nodes in different ways; replicas are not shown to differ.
  MP103  warning  group-spans-domains      Groups of an axis span NVLink domains; in another order of axes fewer do.
  MP104  warning  power-of-two-on-72       An axis whose size is a power of two does not fit domains of 36, 72 or 144 GPUs.
  MP105  warning  sequential-reductions    Axes are reduced sequentially; over one flattened group it would be one all-reduce.
  MP106  error    permuted-flatten         A mesh whose ranks do not ascend is flattened; shards may be swapped.
  MP107  error    uneven-flatten           A dim is sharded unevenly over flattened axes; gathering it may corrupt data.
  MP108  warning  group-crosses-blocks     Groups of an axis cross NVLink blocks of the real hosts, though each would fit into one.
  MP190  warning  unused-ignore            An ignore comment matches no finding.
  MP191  warning  not-judged               A mesh could not be read from its file; it was not judged, which fails.
  MP192  warning  ranks-contradict         A file and the options specify different numbers of ranks; those of the file are used.
  MP201  warning  asymmetric-links         GPUs have different numbers of links, or two ends disagree; a link may be down.
  MP202  warning  partial-topology         An input does not report which GPUs are joined; unknown does not mean separate.
  MP203  warning  tray-only                An input shows one tray of a rack that NVLink may join as a whole.
  MP204  warning  hosts-differ             Hosts of one job are not identical.
  MP301  warning  no-effect                A variable is set that does not have the intended effect.
  MP302  warning  nvls-driver              NVLS may add in another order from run to run with this driver.
  MP303  warning  allreduce-only           NCCL_ALGO names all-reduce only; NCCL 2.31 leaves the others without an algorithm.
  MP304  error    reduce-scatter-unpinned  The order of all-reduces is pinned, the order of reduce-scatters is not.
  MP305  error    conflicting-variables    Variables contradict each other.
errors of meshplan
  MP000           MeshplanError            Base of all errors of meshplan. `str(error)` starts with the code.
  MP111           LayoutError              Axis sizes, names and ranks do not describe a mesh.
  MP112           AxisNameError            The mesh has no axis of this name or position.
  MP211           TopologyError            Invalid nodes or domains of ranks, or a rank outside the topology.
  MP212           TopologyInputError       An invalid description of a cluster: a file, an output or variables.
  MP401           PlacementError           Placements that do not fit the mesh or the local tensor, or cannot be reduced together.
  MP402           PolicyError              A policy, path or option that does not exist.
  MP403           ShardOrderError          Shards would be gathered in the order of sorted ranks, but are ordered by mesh coordinate.
  MP404           BackendTypeError         The `pg_options` of a group of the backend `meshplan` are of another type or backend.
  MP411           ContractError            A malformed contract, or malformed leaves for it.
  MP412           ContractTypeError        The contract does not define this operation on this dtype.
  MP413           ContractStateError       The floating-point mode of the process breaks the contract's bits.
  MP421           ReplicaInputError        A compared value is not a tensor, or is a tensor without data of its own.
  MP500           GroupError               Base of the process-group errors.
  MP501           GroupAgreementError      The members of a group did not agree to create it: ranks missing, or plans that differ.
  MP502           GroupCreationError       All members agreed, but a group could not be created or warmed up on all of them.
  MP503           GroupStateError          The state of the job does not allow the creation of a group.
  MP504           CollectiveError          A collective of a reduction failed in the backend: a member ended, or timed out.
  MP505           BackendError             The backend `meshplan` does not support this call, or its options are invalid.
  MP601           InstallError             The plugin cannot be installed, or cannot be removed exactly.
  MP602           UnsupportedTorchError    This torch version has not been tested with the plugin.
  MP603           PlanNotRunError          Torch received a plan and returned without running its reduction: the result is wrong.
  MP610           TorchMissingError        The called function needs torch, which is not installed. The linter and planner do not.
  MP701           FallbackRefusedError     `strict=True` and a reduction would have run outside the contract.
  MP702           PeerTimeoutError         A rank timed out in a reduction over mapped memory.
  MP703           SignatureMismatchError   Ranks called one reduction with different sizes, dtypes, operations or contracts.
  MP704           AuditError               An audit found bits other than those of the contract in the result of a reduction.
  MP705           ReplicaDivergenceError   Ranks that should hold the same replica of a tensor hold different bits.
  MP706           ChecksumError            The checksum of a reduction is wrong: a bit changed on its way or in memory.
  MP801           ShardError               Shards, tokens, masks or options of `meshplan.testing.tp` that do not fit together.
  MP802           TokenCoverageError       An active token that no shard of the vocabulary holds, or more than one.
  MP901           IntegrationError         A model, a group or an option that an integration does not support.
  MP902           ElasticError             A number of ranks, a model or a call that an elastic run does not support.
""",
        )

    def test_json_of_a_rule_is_printed(self) -> None:
        found = json.loads(rule(["MP204"], False, "json"))
        found["page"] = found["page"][:40]
        self.assertExpectedInline(
            json.dumps(found, indent=1),
            """\
{
 "code": "MP204",
 "kind": "rule",
 "name": "hosts-differ",
 "severity": "warning",
 "summary": "Hosts of one job are not identical.",
 "page": "# hosts-differ (MP204)\\n\\nSeverity: warnin"
}""",
        )

    def test_invalid_arguments_are_refused(self) -> None:
        said = []
        for codes, all_ in (
            ([], False),
            (["MP101"], True),
            (["MP101", "MP1O2"], False),
            (["MP110"], False),
        ):
            with pytest.raises(PolicyError) as caught:
                rule(codes, all_)
            said.append(str(caught.value))
        self.assertExpectedInline(
            "\n".join(said),
            """\
MP402: no code; use, for example, meshplan rule MP101, or --all
MP402: no code; use, for example, meshplan rule MP101, or --all
MP402: no rule or error 'MP1O2'; similar: MP102, MP101, MP103
MP402: no rule or error 'MP110'; similar: MP101, MP111, MP108""",
        )


def test_all_as_json_is_a_list_of_all_pages() -> None:
    found = json.loads(rule([], True, "json"))
    assert [one["code"] for one in found] == [*RULES, *ERRORS]
    assert all(one["page"] == format_rule_page(one["code"]) for one in found)
    assert {one["kind"] for one in found} == {"rule", "error"}
