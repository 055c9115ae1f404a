"""The verdict on an observed job: its lines, their number, and the exit status."""

from __future__ import annotations

from copy import deepcopy
from difflib import ndiff
from typing import Any

import expecttest

from meshplan.run._verdict import MOST_LINES, find_status, format_verdict

OUTSIDE = {
    "call": "all_reduce",
    "op": "sum",
    "dtype": "float32",
    "group": "dp",
    "group_size": 4,
    "site": "job/train.py:41 main (C++, such as DDP's reducer)",
    "calls": 1200,
    "elements": 4096,
    "contract": None,
}
REPORT: dict[str, Any] = {
    "version": 1,
    "state": "ended",
    "error": None,
    "world_size": 4,
    "torch": "2.13.0",
    "backend": "gloo",
    "hosts": {"a": [0, 1], "b": [2, 3]},
    "not_observed": ["NVLink domains: no GPU"],
    "meshes": [{"axes": {"dp": 4}, "ranks": [0, 1, 2, 3]}],
    "reductions": [OUTSIDE],
    "steps": {
        "taken": {"0": 20, "1": 20, "2": 20, "3": 20},
        "compared": 5,
        "not_compared": 15,
        "every": 100,
    },
    "replicas": {"compared": 60, "first_difference": None},
    "hazards": [],
    "settings_that_differ": {},
}
HAZARD = {
    "code": "MP101",
    "severity": "error",
    "text": "replicas may differ: the 8 groups are placed on nodes in 5 different ways",
    "fix": "order the axes as --mesh fsdp=5,ddp=8 (no GPU is left out)",
}
PROBE = {
    "group": "dp",
    "group_size": 4,
    "backend": "nccl",
    "groups": 1,
    "contracts": ["v1/tree/wide/once"],
    "members_agree": True,
    "size_changes_bits": False,
    "siblings_agree": True,
}
DIFFERENCE = {
    "step": 4,
    "kind": "parameter",
    "tensor": "layers.0.weight",
    "ranks": {"agree": [[1], [0, 2, 3]]},
    "elements": 1,
    "of": 4096,
    "largest": "1 ulp",
    "cause": "one rank",
    "text": "",
}


def report(difference: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    found = deepcopy(REPORT) | changes
    found["replicas"]["first_difference"] = difference
    return found


def changes(plain: dict[str, Any], found: dict[str, Any]) -> str:
    """The lines that the second verdict has more, and fewer, than the first."""
    texts = (format_verdict(one).splitlines() for one in (plain, found))
    return "\n".join(line for line in ndiff(*texts) if line[0] in "+-")


class VerdictTest(expecttest.TestCase):
    def test_equal_replicas_outside_the_contract(self) -> None:
        found = report()
        self.assertExpectedInline(
            format_verdict(found, "run.json"),
            """\
[meshplan] not shown to be affected: replicas agreed in 60 comparisons of tensors
  job: 4 ranks on 2 hosts, mesh dp=4, backend gloo, torch 2.13.0
  steps: 20 on each rank; 5 compared, 15 not (pass --every 1 to compare more)
  outside the contract: 1 call site
    all_reduce sum of float32 over dp (4 ranks): 1,200 calls, job/train.py:41 main (C++, such as DDP's reducer)
  not observed: NVLink domains: no GPU
  fix: run the same command with --backend meshplan, and compare the two verdicts
  fix: then call torch.distributed.init_process_group('meshplan') in the training script (one word, the layout stays; every reduction adds in one fixed order)
  report: run.json
""",
        )
        assert find_status(found) == 3

    def test_hazards_of_placements(self) -> None:
        info = HAZARD | {"code": "MP102", "severity": "info", "fix": None}
        more = [HAZARD | {"code": code, "fix": None} for code in ("MP106", "MP301", "MP301")]
        lines = format_verdict(report(hazards=[HAZARD, *more, info])).splitlines()
        self.assertExpectedInline(
            "\n".join(one for one in lines if "hazard" in one or " more: " in one or "or " in one),
            """\
  hazard MP101: replicas may differ: the 8 groups are placed on nodes in 5 different ways
  hazard MP106: replicas may differ: the 8 groups are placed on nodes in 5 different ways
    and 2 more: MP301
  fix: or order the axes as --mesh fsdp=5,ddp=8 (no GPU is left out)""",
        )

    def test_probes_without_a_contract_are_named_first(self) -> None:
        none = {"group": "fsdp", "groups": 2, "contracts": [], "size_changes_bits": True}
        rows = [
            PROBE,
            PROBE | none | {"siblings_agree": False},
            PROBE | {"groups": 3, "contracts": ["v1/tree/wide/once", "v1/rank/wide/once"]},
            PROBE | {"group": "ep", "contracts": [], "members_agree": False},
        ]
        lines = format_verdict(report(probes=rows)).splitlines()
        found = format_verdict(report(probes=[rows[0]])).splitlines()
        self.assertExpectedInline(
            "\n".join(one for one in lines + found if "probe" in one),
            """\
  probe: fsdp (2 groups of 4 ranks): no contract, size changes bits, siblings differ; ep (1 group of 4 ranks): no contract, members differ; dp (1 group of 4 ranks): v1/tree/wide/once; dp ...
  probe: dp (1 group of 4 ranks): v1/tree/wide/once""",
        )

    def test_job_under_the_contract(self) -> None:
        found = report(backend="meshplan", reductions=[OUTSIDE | {"contract": "v1/tree/wide/once"}])
        self.assertExpectedInline(
            format_verdict(found),
            """\
[meshplan] not shown to be affected: replicas agreed in 60 comparisons of tensors
  job: 4 ranks on 2 hosts, mesh dp=4, backend meshplan, torch 2.13.0
  steps: 20 on each rank; 5 compared, 15 not (pass --every 1 to compare more)
  every reduction of floating-point numbers ran under the contract
  not observed: NVLink domains: no GPU
""",
        )
        assert find_status(found) == 0

    def test_one_rank_that_differs(self) -> None:
        self.assertExpectedInline(
            changes(report(), report(DIFFERENCE)),
            """\
- [meshplan] not shown to be affected: replicas agreed in 60 comparisons of tensors
+ [meshplan] affected: replicas differ, first seen at step 4: parameter layers.0.weight
+   ranks 0, 2-3 against rank 1; 1 of 4,096 elements; largest difference 1 ulp
+   cause: one rank holds other bits than all others
+   fix: run the job again: another step of the same rank points to its hardware, the same step to the job""",
        )
        assert find_status(report(DIFFERENCE, reductions=[])) == 3

    def test_what_sums_show(self) -> None:
        call = {"number": 2, "op": "avg", "dtype": "float32", "shape": [64, 8], "ranks": [0, 1]}
        kept = {"since": 3, "compared": 5, "not_kept": {}, "wrong": [], "changed": []}
        differs = kept | {"call": call}
        values = {"element": 7, "expected": "0.5", "got": {"0": "0.5", "1": "0.25"}}
        wrong = differs | values | {"wrong": [1]}
        lost = {"outside the contract": 3, "over the limit": 1}
        cases: tuple[dict[str, Any], ...] = (
            wrong,
            wrong | {"wrong": [1, 2], "call": call | {"ranks": [0, 1, 2]}},
            wrong | {"wrong": [0, 1]},
            differs,
            differs | {"failed": "leaves of more than 8 ranks are not added"},
            kept | {"changed": [1]},
            kept,
            kept | {"since": 2, "not_kept": lost},
            kept | {"compared": 0, "not_kept": lost},
            {"since": 3},
        )
        lines = (format_verdict(report(DIFFERENCE | {"sums": one})) for one in cases)
        self.assertExpectedInline(
            "\n".join(text.splitlines()[4] for text in lines),
            """\
  sums: rank 1 has a wrong sum: 0.25 instead of 0.5 in element 7 of all_reduce 2 of step 4 (avg of float32[64, 8] over ranks 0-1)
  sums: ranks 1-2 have wrong sums: 0.25 instead of 0.5 in element 7 of all_reduce 2 of step 4 (avg of float32[64, 8] over ranks 0-2)
  sums: no rank has the sum of the leaves of all_reduce 2 of step 4 (avg of float32[64, 8] over ranks 0-1)
  sums: the results of all_reduce 2 of step 4 (avg of float32[64, 8] over ranks 0-1) differ; a rank has ended, or has dropped its leaves; pass a higher --keep-leaves
  sums: the results of all_reduce 2 of step 4 (avg of float32[64, 8] over ranks 0-1) differ; leaves of more than 8 ranks are not added
  sums: rank 1 changed the gradient after its sum: each kept all_reduce of step 4 (5) has one result
  sums: the difference arose outside of reductions: each kept all_reduce of step 4 (5) has one result
  sums: the difference arose outside of the kept reductions, or before step 4: each kept all_reduce of step 4 (5) has one result; 3 not kept: outside the contract; 1 not kept: over the limit
  sums: no all_reduce of step 4 was kept on all ranks; 3 not kept: outside the contract; 1 not kept: over the limit
  sums: ranks ended before they answered""",
        )

    def test_orders_that_differ(self) -> None:
        difference = DIFFERENCE | {
            "cause": "order",
            "kind": "gradient",
            "ranks": {"agree": [[0, 1], [2, 3]]},
            "text": "gradients agreed before their sum",
        }
        site = "job/train.py:9 main (FSDP2, backward)"
        found = report(difference, reductions=[OUTSIDE | {"site": site}])
        self.assertExpectedInline(
            changes(report(), found),
            """\
- [meshplan] not shown to be affected: replicas agreed in 60 comparisons of tensors
+ [meshplan] affected: replicas differ, first seen at step 4: gradient layers.0.weight
+   ranks 0-1 against ranks 2-3; 1 of 4,096 elements; largest difference 1 ulp
+   cause: the same summands were added in different orders
-     all_reduce sum of float32 over dp (4 ranks): 1,200 calls, job/train.py:41 main (C++, such as DDP's reducer)
+     all_reduce sum of float32 over dp (4 ranks): 1,200 calls, job/train.py:9 main (FSDP2, backward)""",
        )

    def test_rank_that_skipped_a_step(self) -> None:
        unequal = [{"tensors": 2, "taken": {"20": [0, 2, 3], "19": [1]}}]
        steps = {"taken": {"0": 20, "1": 19, "2": 20, "3": 20}, "unequal": unequal}
        found = report(DIFFERENCE, steps=steps | {"compared": 19, "not_compared": 1})
        self.assertExpectedInline(
            changes(report(DIFFERENCE), found),
            """\
-   cause: one rank holds other bits than all others
-   steps: 20 on each rank; 5 compared, 15 not (pass --every 1 to compare more)
+   cause: ranks that hold the same parameters took different numbers of optimizer steps
+   steps: 20 on ranks 0, 2-3, 19 on rank 1, though these hold the same parameters; 19 compared, 1 not
+   fix: skip a step on all ranks or on none: all-reduce the flag that decides it
-   fix: run the job again: another step of the same rank points to its hardware, the same step to the job
-   fix: run the same command with --backend meshplan, and compare the two verdicts
-   fix: then call torch.distributed.init_process_group('meshplan') in the training script (one word, the layout stays; every reduction adds in one fixed order)""",
        )

    def test_stages_with_different_steps(self) -> None:
        steps = {"taken": {"0": 20, "1": 20, "2": 20, "3": 19}, "compared": 19, "not_compared": 1}
        differing = {
            "threads": {"1": [0, 1], "2": [2, 3]},
            "allow_tf32": {"True": [0], "False": [1, 2, 3]},
        }
        found = report(steps=steps, reductions=[], settings_that_differ=differing)
        self.assertExpectedInline(
            format_verdict(found),
            """\
[meshplan] not shown to be affected: replicas agreed in 60 comparisons of tensors
  job: 4 ranks on 2 hosts, mesh dp=4, backend gloo, torch 2.13.0
  steps: 20 on ranks 0-2, 19 on rank 3; 19 compared, 1 not
  settings differ: threads=1 on ranks 0-1, 2 on ranks 2-3; allow_tf32=True on rank 0, False on ranks 1-3
  not observed: NVLink domains: no GPU
""",
        )
        assert find_status(found) == 0

    def test_failed_job_in_which_nothing_was_compared(self) -> None:
        found = report(state="failed", error="ValueError: a\nb", reductions=[], meshes=[])
        found["replicas"] = {"compared": 0, "first_difference": None}
        found["steps"] = {"taken": {}, "compared": 0, "not_compared": 0}
        self.assertExpectedInline(
            changes(report(reductions=[]), found),
            """\
- [meshplan] not shown to be affected: replicas agreed in 60 comparisons of tensors
+ [meshplan] not shown to be affected: no replicas were compared
-   job: 4 ranks on 2 hosts, mesh dp=4, backend gloo, torch 2.13.0
+   job: 4 ranks on 2 hosts, backend gloo, torch 2.13.0
-   steps: 20 on each rank; 5 compared, 15 not (pass --every 1 to compare more)
+   the job failed: ValueError: a b
+   steps: no optimizer step was seen""",
        )

    def test_call_sites_that_are_not_shown_are_counted(self) -> None:
        rows = [OUTSIDE | {"calls": calls} for calls in (1, 3, 2)]
        lines = format_verdict(report(reductions=rows)).splitlines()
        self.assertExpectedInline(
            "\n".join(one for one in lines if "outside" in one or " calls" in one),
            """\
  outside the contract: 3 call sites, 1 of them only in the report
    all_reduce sum of float32 over dp (4 ranks): 3 calls, job/train.py:41 main (C++, such as DDP's reducer)
    all_reduce sum of float32 over dp (4 ranks): 2 calls, job/train.py:41 main (C++, such as DDP's reducer)""",
        )

    def test_requirement_that_stopped_the_job(self) -> None:
        refused = {"rank": 3, "what": "train.py:3 main: all_reduce is outside", "fix": "use it"}
        error = "BitwiseRequirementError: MP707: --require bitwise: train.py:3 main: ..."
        found = report(state="failed", error=error, reductions=[], refused=refused)
        self.assertExpectedInline(
            changes(report(reductions=[]), found),
            """\
+   stopped by --require bitwise, first on rank 3: train.py:3 main: all_reduce is outside
+   fix: use it""",
        )

    def test_fix_is_the_row_of_the_program(self) -> None:
        rows = {
            "dtensor": [OUTSIDE | {"site": "train.py:3 main (DTensor)"}],
            "mixed": [OUTSIDE | {"site": "train.py:3 main (DTensor)"}, OUTSIDE],
            "lightning": [OUTSIDE | {"site": "lightning/ddp.py:3 reduce"}],
            "vllm": [OUTSIDE | {"site": "vllm/parallel_state.py:3 all_reduce"}],
        }
        lines = []
        for name, found in rows.items():
            fixes = [
                one
                for one in format_verdict(report(reductions=found)).split("\n")
                if ": then " in one
            ]
            lines += [f"{name}: {one.strip()}" for one in fixes or ["none"]]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
dtensor: fix: then call meshplan.install() in the training script (two lines, the layout stays; every reduction adds in one fixed order)
mixed: fix: then call torch.distributed.init_process_group('meshplan') in the training script (one word, the layout stays; every reduction adds in one fixed order)
lightning: fix: then use DDPStrategy or ModelParallelStrategy with process_group_backend='meshplan' in the training script (one line, the layout stays; every reduction adds in one fixed order)
vllm: fix: then set VLLM_PLUGINS=meshplan where vLLM starts (one variable, the layout stays; every reduction adds in one fixed order; passes of torch.compile that fuse all-reduces bypass it)""",
        )

    def test_full_report_fits_a_terminal(self) -> None:
        found = report(
            DIFFERENCE | {"text": "z" * 500, "tensor": "a\nb\x1b[31m", "sums": {"since": 3}},
            state="failed",
            error="ValueError: " + "e" * 500,
            meshes=REPORT["meshes"] * 50,
            reductions=[OUTSIDE] * 50,
            hazards=[HAZARD | {"text": "h" * 500}] * 50,
            steps={
                "taken": {str(n): n for n in range(500)},
                "compared": 1,
                "not_compared": 1,
                "every": 2,
            },
            settings_that_differ={str(n): {"1": [0], "2": [1, 2, 3]} for n in range(50)},
            not_observed=["w" * 100] * 50,
            probes=[PROBE] * 50,
            certificate={"file": "c", "ended": [], "not_certified": [], "links": 1, "tensors": 1}
            | {"last": "0" * 32},
        )
        lines = format_verdict(found, "run.json").splitlines()
        assert len(lines) == MOST_LINES
        assert max(map(len, lines)) <= 200
        assert lines[0].endswith(r"parameter a\nb\x1b[31m")
        assert lines[-1] == "  report: run.json"
