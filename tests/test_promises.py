"""Sentences of the pages that promise something, each with the tests that show it.

A sentence with a word such as "never" or "same bits" that is in neither list fails here, and so
does an entry whose sentence or test is gone.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshplan
from meshplan import Layout
from meshplan.planner import Problem, plan
from meshplan.topology import Topology
from tests.pages import ROOT, remove_blocks
from tests.processes import run_ranks
from tools.site_cost import MESSAGES, predict_slowdown

# The promise, a part of its sentence; and the tests, of which those of one file follow it.
PROMISES = {
    "README.md": {
        "meshplan makes DTensor, FSDP2 and DDP replicas agree bit for bit": "test_demo::tutorial_shows_the_printed_table test_dtensor::jagged_mesh_replicas_have_equal_bits backend/test_hsdp::hsdp_gradients_have_one_rounding backend/test_ddp::gradients_are_averages_with_one_rounding",
        "each reduction adds in one fixed order": "test_hierarchical::topology_does_not_change_bits test_groups::group_ranks_follow_the_mesh_coordinate test_every_path::every_path_has_the_bits_of_the_definition test_device_build::cuda_kernels_compile_within_register_limits hip_kernels_compile_within_register_limits",
        "covers every reduction of the job": "backend/test_entry_points::every_entry_point_has_the_bits_of_the_contract native_code_and_operators_have_the_bits_of_the_contract backend/test_jobs::compiled_reductions_have_the_bits_of_the_contract",
        "plans one collective where DTensor reduces": "test_random_redistributions::random_redistributions_that_start_from_partial test_dtensor::implicit_redistributions_of_tensor_parallel_layers_are_exact backward_and_double_backward_are_exact clip_grad_norm_reduces_all_axes_at_once",
        "every reduction is under the contract or is named": "backend/test_entry_points::every_entry_point_has_the_bits_of_the_contract every_operator_that_adds_has_a_method test_coverage::every_form_of_a_reduction_is_counted_once each_reduction_has_its_kind",
        "ranks with the same replica hold the same bits": "test_demo::tutorial_shows_the_printed_table test_dtensor::jagged_mesh_replicas_have_equal_bits test_random_redistributions::random_redistributions_that_start_from_partial",
        "the same inputs give the same bits in every run": "test_collectives::every_path_matches_the_golden_file test_kernel::compiled_reductions_match_the_golden_file",
        "bits do not depend on message size, position or path": "test_collectives::bits_do_not_depend_on_message_size test_peers::size_never_changes_a_bit test_every_path::every_path_has_the_bits_of_the_definition",
        "hierarchical and flat reduction have the same bits": "test_hierarchical::topology_does_not_change_bits",
        "any world size, number of elements and strides": "test_collectives::any_number_of_elements_is_reduced any_strides_are_reduced_and_inputs_stay test_kernel::any_length_and_alignment_match_the_definition",
        "any power-of-two number of data-parallel ranks that divides the micro-batches has the same bits": "test_elastic_training::steps_do_not_depend_on_the_number_of_ranks sixty_steps_do_not_depend_on_the_number_of_ranks",
        "2.8 to 1.1 times NCCL": "test_promises::predicted_figures_are_the_planners",
        "0.82 to 1.10 times the time": "test_promises::measured_figures_match_the_data",
    },
    "SECURITY.md": {
        "Python is parsed (`ast`) and never imported, run or evaluated": "test_lint_reader_python::file_is_not_executed damaged_file_raises_one_line",
        "Nothing is unpickled": "test_promises::nothing_is_unpickled",
        "Document types and their entities are refused": "test_format_xml::entities_and_dtds_are_refused",
        "64 MB for a file of a cluster": "test_documents::file_size_limits_match_the_sources",
        "which is made with mode 0700": "test_device_code::images_in_shared_folders_are_not_used",
        "is not used: kernels are compiled": "test_device_code::images_in_shared_folders_are_not_used",
        "no segment in `/dev/shm` that could be left behind": "test_peers::killed_rank_leaves_nothing_behind",
    },
    "docs/api.md": {
        "with the same bits for any sharding": "test_norms::norm_and_clipped_gradients_of_any_mesh",
    },
    "docs/index.md": {
        "meshplan makes DTensor, FSDP2 and DDP replicas agree bit for bit": "test_demo::tutorial_shows_the_printed_table test_dtensor::jagged_mesh_replicas_have_equal_bits backend/test_hsdp::hsdp_gradients_have_one_rounding backend/test_ddp::gradients_are_averages_with_one_rounding",
    },
    "docs/i-see.md": {
        "The replicas never held the same weights": "test_replica_divergence::evidence_chooses_the_advice",
    },
    "docs/lint-a-cluster.md": {
        "Python is parsed, never run": "test_lint_reader_python::file_is_not_executed",
    },
    "docs/rl.md": {
        "An element has the same bits in a message of any size": "test_collectives::bits_do_not_depend_on_message_size test_peers::size_never_changes_a_bit",
    },
    "docs/environment.md": {
        "Importing meshplan reads nothing": "test_environment_table::imports_read_and_set_nothing",
        "All that meshplan reads": "test_environment_table::everything_that_is_read_is_in_the_table everything_in_the_table_is_read",
        "by `install` | how the data of reductions moves": "test_peers::environment_beats_the_argument",
        "The same on every rank, else MP501": "test_switches::different_switches_are_refused faults/test_mismatch::different_install_arguments_are_named_on_all_members",
        "never one-shot": "test_switches::switch_decides_the_executed_form",
        "which form `auto` takes, never a bit": "test_switches::switch_decides_the_executed_form test_peers::size_never_changes_a_bit",
        "the report shows a fallback and `strict=True` refuses": "test_switches::forced_one_shot_without_shared_memory_falls_back",
    },
    "docs/explanation/contract.md": {
        "two reductions with the same contract and the same inputs have the same bits": "test_all_ranks::every_plan_gives_the_bits_of_the_contract rejected_candidates_give_the_same_bits",
        "nothing is lost on the way": "test_explanations::blocks_print_the_shown_output",
        "Leaves are numbered by mesh coordinate, row-major, never by global rank": "test_groups::group_ranks_follow_the_mesh_coordinate test_contract::mesh_shape_sets_the_tree_shape",
        "every NaN in a result of any operation is the canonical quiet NaN": "test_contract::nans_of_any_payload_become_the_canonical_one",
        "whatever its axes are": "test_contract::axis_by_axis_innermost_first_equals_flat",
        "The partial of a set of leaves has the same bits": "test_exact::folds_equal_the_oracle_in_any_order",
        "Nothing is padded": "test_contract::equals_the_oracle test_collectives::any_number_of_elements_is_reduced",
        "from the exact rationals and never from the code that they test": "test_reference::golden_file_matches_its_script",
    },
    "docs/explanation/group-protocol.md": {
        "Nothing is registered on the user's mesh": "test_promises::nothing_is_registered_on_a_mesh",
        "each request runs on a thread that can be abandoned": "test_answering::silent_store_is_reported unanswered_request_does_not_keep_a_process_alive",
        "groups of its own for each mesh, never those of torch": "faults/test_threads::threads_on_separate_meshes_are_exact",
    },
    "docs/explanation/why-flattening-is-not-enough.md": {
        "siblings with the same inputs have the same bits on any placement": "test_dtensor::policies_have_their_bits_under_the_nccl_model test_demo::tutorial_shows_the_printed_table",
        "leaves a reduction to the backend if no siblings must agree": "test_planner::consistent_plans_hazards_only test_dtensor::policies_have_their_bits_under_the_nccl_model",
    },
    "docs/howto/check-replicas.md": {
        "Every rank raises the same text": "test_replicas::one_flipped_bit_of_one_rank_out_of_eight_is_found",
        "the result is an error that names the difference (MP703), not a hang": "test_replicas::ranks_with_other_tensors_are_named absent_rank_is_named_and_the_check_recovers",
        "128 bytes of each rank are sent": "test_replicas::equal_replicas_cost_one_all_gather_of_128_bytes",
        "the replicas never held the same weights": "test_replica_divergence::evidence_chooses_the_advice",
        "nothing is compared along an axis that the mesh of a DTensor does not have": "test_replica_scope::dense_layers_and_experts_are_checked_by_one_call",
        "All ranks raise an error if one slice of a mesh differs": "test_replica_scope::process_groups_declare_experts_and_stages",
        "its shards are left alone": "test_replicas::dtensors_on_a_permuted_mesh_are_compared_along_their_replicas hybrid_fsdp_shards_are_compared_along_replicas",
    },
    "docs/howto/choose-settings.md": {
        "Pass the same arguments on every rank. The first reduction of each group checks that": "test_dtensor::different_contracts_are_refused faults/test_mismatch::different_install_arguments_are_named_on_all_members",
        "how data moves; the same bits.": "test_every_path::every_path_has_the_bits_of_the_definition",
        "other bits are an error on every rank (MP704)": "test_audit::one_wrong_bit_is_an_error_on_every_rank",
        "the same bits, a fraction of the bytes between nodes": "test_collectives::hierarchical_equals_flat hierarchical_sends_less_between_nodes",
        "and refuses one in which something has moved (MP602)": "test_self_check::all_moved_names_are_listed all_missing_names_are_listed",
        "Reductions to `Replicate` are right on every mesh": "test_random_redistributions::random_redistributions_that_start_from_partial test_shard_order::shards_by_coordinate_are_not_gathered_by_rank",
        "gathering it warns, and is an error with `strict=True`": "test_shard_order::gathering_shards_of_unknown_origin_warns gathering_computed_shards_warns",
    },
    "docs/howto/deterministic-collectives.md": {
        "Reduce tensors with the same bits on every rank, every time": "test_all_reduce::every_path_op_and_dtype_has_the_contract_bits",
        "The same contract and the same inputs have the same bits": "test_all_reduce::every_path_op_and_dtype_has_the_contract_bits bits_depend_on_neither_message_size_nor_position test_every_path::every_path_has_the_bits_of_the_definition",
        "on every rank, in every run, whatever the message size, whatever the path": "test_all_reduce::bits_depend_on_neither_message_size_nor_position test_every_path::every_path_has_the_bits_of_the_definition test_collectives::every_path_matches_the_golden_file",
        "One flipped bit in the exponents, the integers or the exchanged elements raises MP706 on every rank": "test_integer_path::every_flipped_bit_is_an_error_on_every_rank",
        "No bit depends on `foreach`": "test_performance_options::clipping_rounds_once_with_every_option",
        "adds no DTensor again whose mesh has it": "test_totals::group_adds_other_ranks_and_never_a_mesh_again",
        "or an error is raised on all ranks": "test_totals::all_ranks_raise_the_error_of_one",
        "bucketing cannot change a bit": "test_all_reduce::coalesced_reductions_have_the_bits_of_single_ones",
        "If `WORLD_SIZE` is above 1 and there is no process group, an error is raised": "test_all_reduce::missing_default_group_of_a_launched_job_is_refused",
        "A shard has the bits of the all-reduce": "test_shards::a_shard_has_the_bits_of_the_all_reduce",
        "refuse tensors that require a gradient": "test_collective_options::tensors_with_gradient_are_refused",
        "compared with the contract, bit for bit": "test_two_rank_smoke::smoke_test_passes_under_torchrun wrong_result_fails",
        "raise MP703 on every rank over gloo and shared memory": "test_mismatched_inputs::any_difference_is_an_error_on_every_rank different_counts_on_all_ranks_are_errors",
    },
    "docs/howto/gpus.md": {
        "the results of the other ranks become NaN": "test_device_peers::a_missing_rank_is_named_at_the_next_call",
        "Otherwise plain torch operations add, with the same bits": "test_kernel::all_contracts_match_the_definition definition_replaces_the_library_and_the_reason_is_logged",
    },
    "docs/howto/lint-in-ci.md": {
        "`--exit-zero` turns status 1 into 0": "test_cli_lint::levels_decide_the_exit_status test_cli_streams::closed_pipe_keeps_the_exit_status",
        "The status stays the same if the output is closed early": "test_cli_streams::closed_pipe_keeps_the_exit_status",
        "warnings are failed tests whatever the exit status is": "test_lint_reporters::junit_report_is_printed junit_counts_match_the_findings",
        "is an error (status 2)": "test_lint_ignores::invalid_comments_are_refused",
        "An ignore comment that matches nothing is reported (MP190)": "test_lint_ignores::unused_comment_is_reported",
        "their schemas are stable": "test_lint_sarif::fingerprints_do_not_change test_lint_reporters::json_report_is_printed junit_report_is_printed",
    },
    "docs/howto/parallel-references.md": {
        "The bits are the same for any number of shards of any sizes": "test_tp_logprobs::any_shards_have_the_bits_of_one_tensor random_shards_have_the_bits_of_one_tensor test_segments::any_partition_has_the_bits_of_the_contract",
    },
    "docs/howto/plans-and-hazards.md": {
        "Decisions that ranks agree on never depend on the size of a tensor": "test_promises::plans_of_a_job_do_not_depend_on_sizes",
        "The bits are those of the plain exchange": "test_collectives::hierarchical_equals_flat",
        "error of a job is 20 to 45 %": "test_promises::predicted_figures_match_the_data",
    },
    "docs/howto/read-a-report.md": {
        "All paths but `native` have the same bits": "test_every_path::every_path_has_the_bits_of_the_definition",
        "there were more than 1024 kinds": "test_provenance::report_is_bounded_and_counts_dropped_entries",
    },
    "docs/howto/rl-parity.md": {
        "An element has these bits in a message of any size": "test_collectives::bits_do_not_depend_on_message_size test_peers::size_never_changes_a_bit",
        "`x2 + x3` get the same bits": "test_contract::two_parts_equal_flat test_pages_run::blocks_print_the_shown_output",
        "equal bits have equal digests on any machine": "test_digest::golden_digests all_implementations_agree compiled_and_plain_agree_at_any_size_and_address",
        "it lists the contract of each reduction": "test_provenance::report_is_printed",
    },
    "docs/howto/backend.md": {
        "The replicas have equal bits with the first line alone": "backend/test_frameworks::replicas_of_hsdp_have_equal_bits",
        "the replicas of plain DTensor have equal bits then": "test_demo::no_replica_differs_over_the_backend",
        "compare the first and then every `n`-th call of each reduction": "backend/test_options::audits_compare_the_first_and_then_every_nth_call an_audit_finds_a_wrong_bit_on_every_rank",
    },
    "docs/howto/elastic.md": {
        "Then 1, 2, 4, 8 or 16 data-parallel ranks train 16 micro-batches with the same bits": "test_elastic_training::steps_do_not_depend_on_the_number_of_ranks sixty_steps_do_not_depend_on_the_number_of_ranks test_elastic_gradients::gradients_are_those_of_all_micro_batches",
        "the same bits when the number of ranks changes": "test_elastic_combine::any_number_of_ranks_has_the_bits_of_all_micro_batches test_elastic_gradients::gradients_are_those_of_all_micro_batches",
    },
    "docs/howto/torch-compile.md": {
        "Compiled code runs the same reductions as eager code, under the same contract and with the same bits": "test_compile::compiled_training_has_eager_bits each_planned_reduction_is_one_graph_operator test_dtensor::compiled_and_eager_have_the_same_bits",
        "A graph from a cache on disk, which is never traced": "test_compile_cache::same_job_hits_the_cache test_compile::graph_with_an_unknown_group_is_refused",
        "torch compiles it again if the settings change": "test_compile::reinstall_recompiles policy_applies_to_its_thread_only destroyed_groups_are_created_again",
        "A job never finds a graph of a job without meshplan": "test_compile_cache::graphs_of_other_jobs_are_not_used",
        "The names of meshplan's groups are the same in every run": "test_groups::names_are_the_same_in_every_run",
        "With `fullgraph=True` they raise an error": "test_compile::untraceable_call_is_refused_with_fullgraph",
    },
    "docs/lint.md": {
        "It is read, never run": "test_lint_reader_python::file_is_not_executed",
        "Every fix was tried": "test_lint_fixes::every_proposed_mesh_is_clean",
        "It can show that groups may differ, never that they agree": "test_hazards::unknown_orders_are_always_reported a_hazard_is_reported_exactly_if_replicas_differ",
        "Facts that a file lacks stay unknown and are reported": "test_topo::missing_facts_stay_unknown test_cli_lint::partial_topology_is_a_finding",
    },
    "docs/provenance.md": {
        "at most 1024 kinds": "test_provenance::report_is_bounded_and_counts_dropped_entries",
        "and before anything is sent": "test_strict::unsupported_dtypes_are_refused custom_placements_are_refused native_path_is_refused",
        "Not refused are reductions that the policies": "test_strict::contract_and_policy_reductions_are_accepted",
        "gathered in pieces of 64 MiB": "test_audit::correct_results_pass_the_audit",
        "torch's own moves around a reduction under the contract, in whatever order": "test_executed_plans::sliced_axis_is_sliced_before_the_reduction test_torch_steps::reductions_within_the_policy_are_not_found",
        "all ranks of the reduction raise the same `AuditError`": "test_audit::one_wrong_bit_is_an_error_on_every_rank many_wrong_elements_are_counted",
        "call of each planned reduction with the reference": "test_audit::every_nth_call_of_each_reduction_is_audited",
        "every run of a reduction is a span": "test_spans::every_run_is_a_span",
        "see each reduction of meshplan as one collective, whatever its path": "test_announce::redistribution_counts_as_in_torch each_function_counts_as_one_collective each_call_of_the_backend_counts_as_one_collective",
    },
    "docs/tutorial.md": {
        "wherever the ranks are placed": "test_dtensor::jagged_mesh_replicas_have_equal_bits test_pages_run::blocks_print_the_shown_output",
        "Both paths have the same bits": "test_pages_run::blocks_print_the_shown_output",
        "Every rank raises the same text": "test_replicas::one_flipped_bit_of_one_rank_out_of_eight_is_found",
        "With meshplan they never do": "test_train_example::plain_replicas_differ_and_meshplan_replicas_agree",
        "Plain torch's replicas differ from step 4 on": "test_promises::training_figures_match_the_data",
    },
}  # fmt: skip

# Sentences with such a word that promise nothing of meshplan's: what you do, what others do, what
# is asked, what is not promised.
NO_PROMISES = {
    "README.md": [
        "What is guaranteed",
        "guarantee",
    ],
    "docs/environment.md": [],
    "docs/explanation/contract.md": ["Accuracy is not guaranteed"],
    "docs/explanation/why-flattening-is-not-enough.md": [
        "all ranks of one NCCL group hold the same bits",
        "all 40 ranks must have the same bits",
    ],
    "docs/howto/check-replicas.md": [
        "Check that replicas hold the same bits",
        "If one does not",
        "A plain tensor is a replica on every rank of the mesh",
    ],
    "docs/howto/backend.md": [
        "Destroy the group on every rank",
        "Pass the same options on every rank",
    ],
    "docs/howto/coverage.md": ["Pass `strict=True` on every rank"],
    "docs/howto/deterministic-collectives.md": ["whether repeats had the same bits"],
    "docs/howto/gpus.md": ["Then call `meshplan.shutdown()` on every rank"],
    "docs/howto/parallel-references.md": [
        "The docstrings list the guarantees",
        "It is the same for any number of ranks",
    ],
    "docs/howto/rl-parity.md": ["both should be equal, bit for bit"],
    # The exit status is in the list of docs/howto/lint-in-ci.md.
    "docs/lint.md": [
        "0 if nothing is found at `--fail-level`",
        "groups of ranks that must agree bit for bit",
        "equal bits prove nothing",
        "so a bounded number of lengths stands for all",
    ],
    "docs/provenance.md": ["the contract in plain torch, on every rank"],
    "docs/tutorial.md": ["(../README.md#what-is-guaranteed)"],
    "docs/index.md": [
        "have the same bits in siblings",
        "the installation, the guarantees",
        "trainer and generator with the same bits",
    ],
    "docs/glossary.md": ["ordered by mesh coordinate and never by global rank"],
    "docs/lint-a-cluster.md": ["groups that must agree bit for bit", "never that they agree"],
    "docs/explanation/alternatives.md": [
        "identical on every rank and in every group",
        "on every rank, path and vendor",
    ],
    "examples/torchtitan.md": ["For the same bits from run to run"],
}
# Pages about others, written by a script, or with a table of tests of their own.
_ELSEWHERE = {
    "docs/explanation/what-nccl-promises.md",
    "docs/explanation/kernel-memory-model.md",
    "docs/faults.md",  # tests/faults/README.md
    "docs/performance.md",
}
PAGES = sorted(
    page
    for pattern in ("README.md", "SECURITY.md", "docs/*.md", "docs/*/*.md", "examples/*.md")
    for page in (path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
    if page not in _ELSEWHERE and not page.startswith("docs/adr/")
)
_PROMISE = re.compile(
    r"\b([Nn]ever|[Aa]lways|guarantee[ds]?|bounded|bit for bit|in silence|whatever|same bits|equal bits"
    r"|not a hang|[Ee]very rank (raises|has|holds)|on every rank|without a limit|[Nn]othing is)\b"
)


@cache
def prose(page: str) -> str:
    return remove_blocks((ROOT / page).read_text(encoding="utf-8"))


def sentences(page: str) -> list[str]:
    """Also cells of tables, and parts of sentences that a colon or a semicolon ends."""
    found = []
    for part in re.split(r"\n\s*\n|\n(?=[*|#] ?)", prose(page)):
        found += re.split(r"(?<=[.:;?])\s+| \| ", " ".join(part.split()))
    return found


@cache
def defined_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES)
def test_every_promise_has_a_test(page: str) -> None:
    known = [*PROMISES.get(page, {}), *NO_PROMISES.get(page, [])]
    for one in sentences(page):
        if _PROMISE.search(one):
            one = one.strip(" |")
            assert any(part in one or one in part for part in known), one


@pytest.mark.parametrize("page", sorted(PROMISES | NO_PROMISES))
def test_every_promise_is_in_its_page(page: str) -> None:
    text = " ".join(prose(page).split())
    for part in [*PROMISES.get(page, {}), *NO_PROMISES.get(page, [])]:
        assert part in text, part


def test_every_test_of_a_promise_exists() -> None:
    for promises in PROMISES.values():
        for tests in promises.values():
            file = ""
            for word in tests.split():
                before, _, name = word.rpartition("::")
                file = before or file
                assert f"test_{name}" in defined_in(file), f"{file}::test_{name}"


def test_tests_named_by_the_readme_exist() -> None:
    module = ""
    named = re.findall(r"`(tests/\w+\.py(?:::\w+)?|::\w+)`", prose("README.md"))
    assert len(named) > 5
    for name in named:
        file, _, function = name.partition("::")
        module = file or module
        assert function in defined_in(module.removeprefix("tests/").removesuffix(".py")), name


def measured(name: str) -> list[dict[str, Any]]:
    """The cases of a benchmark, in docs/performance/performance.json."""
    path = ROOT / "docs" / "performance" / "performance.json"
    suites = json.loads(path.read_text())["benchmarks"]
    cases: list[dict[str, Any]] = next(one["cases"] for one in suites if one["name"] == name)
    return cases


def test_predicted_figures_match_the_data() -> None:
    """Errors of predictions, against the committed benchmark results."""
    errors = [
        one["runs"]["median error"]["median"]
        for one in measured("scaling")
        if "median error" in one["runs"]
    ]
    shown = f"{min(errors):.0f} to {max(errors):.0f} %"
    assert f"error of a job is {shown}" in prose("docs/howto/plans-and-hazards.md")
    assert f"error of a job was {shown}" in prose("docs/cost.md")


def ratios(suite: str, of: str, to: str) -> list[float]:
    runs = [one["runs"] for one in measured(suite) if {of, to} <= set(one["runs"])]
    return [one[of]["median"] / one[to]["median"] for one in runs]


def test_measured_figures_match_the_data() -> None:
    """Those of the README and of the pages about costs."""
    readme, cost = prose("README.md"), prose("docs/cost.md")
    steps = ratios("training", "meshplan", "plain")
    digests = ratios("replicas", "digest", "read")
    for text in (readme, cost, prose("docs/train.md")):
        assert f"{min(steps):.2f} to {max(steps):.2f} times" in text
    for text in (readme, cost):
        assert f"| {min(digests):.2f} to {max(digests):.2f} reads of the data |" in text
    dispatch = ratios("dispatch", "deterministic", "torch")[0]
    assert f"| {dispatch:.1f} times DTensor's |" in readme
    runs = measured("dispatch")[0]["runs"]
    us = {name: f"{run['median']:.0f} µs" for name, run in runs.items()}
    assert f"| {us['deterministic']} instead of {us['torch']} |" in cost
    for case in measured("training"):
        plain, ours = (f"{case['runs'][name]['median']:.0f} ms" for name in ("plain", "meshplan"))
        assert f"{case['name'].split(' = ')[1]} | {plain} | {ours} |" in cost
    lint = [one["runs"]["meshplan lint"]["median"] for one in measured("lint")[1::2]]
    for seconds in (lint[0], lint[-1]):
        assert f"| {seconds:.1f} s (measured" in prose("docs/lint-a-cluster.md")
    token = next(
        one["runs"]
        for one in measured("allreduce_cpu")
        if one["name"] == "all-reduce of 64 KiB, float32" and one["ranks"] == 2
    )
    peer, gloo = (f"{token[name]['median']:.2f} ms" for name in ("peer", "gloo"))
    shown = f"shared memory takes {peer} for 64 KiB and 2 ranks, and gloo takes {gloo}"
    assert shown in prose("docs/rl.md")
    path = ROOT / "docs" / "performance" / "performance.json"
    date = json.loads(path.read_text())["date"]
    assert readme.count(f", {date} |") == cost.count(f", {date} |") == 3


def test_predicted_figures_are_the_planners() -> None:
    shown = [
        f"{predict_slowdown(512, size):.1f} times {'the time ' * (size == 1 << 16)}for {name}"
        for name, (size, _) in MESSAGES.items()
    ]
    assert ", ".join(shown) in prose("docs/cost.md")
    ends = [predict_slowdown(512, MESSAGES[name][0]) for name in ("64 KiB", "1 GiB")]
    assert f"| {ends[0]:.1f} to {ends[1]:.1f} times NCCL's ring or tree |" in prose("README.md")


def test_training_figures_match_the_data() -> None:
    runs = json.loads((ROOT / "docs" / "training" / "hsdp_tp.json").read_text())
    first = next(n for n, step in enumerate(runs["plain"], 1) if any(step["differing"].values()))
    assert f"Plain torch's replicas differ from step {first} on" in prose("docs/tutorial.md")
    assert not any(any(step["differing"].values()) for step in runs["meshplan"])


_UNSAFE = {"pickle", "marshal", "shelve", "cloudpickle", "dill", "joblib"}
_CALLS = {
    "load",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
}


def unpickling(source: str) -> list[str]:
    """Imports of modules that unpickle, and calls of torch's functions that do."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [one.name for one in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in names if name.split(".")[0] in _UNSAFE]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if node.func.attr in _CALLS and owner in ("torch", "dist", "c10d", "torch.distributed"):
                found.append(ast.unparse(node.func))
    return found


def test_nothing_is_unpickled() -> None:
    assert unpickling("import pickle\ndist.all_gather_object(a, b)") == [
        "pickle",
        "dist.all_gather_object",
    ]
    for path in sorted((ROOT / "meshplan").rglob("*.py")):
        assert unpickling(path.read_text(encoding="utf-8")) == [], path


def redistributed(mesh: Any, size: int) -> None:
    partial = DTensor.from_local(torch.ones(size), mesh, (Partial(), Partial()), run_check=False)
    partial.redistribute(mesh, (Replicate(), Replicate()))


@pytest.mark.processes
def test_plans_of_a_job_do_not_depend_on_sizes() -> None:
    """On two nodes of two ranks the best plan for 3 elements is another than that for 4 Mi."""
    nodes = Topology.uniform(4, node_size=2, domain_size=2)

    def best(size: int) -> str:
        placements = (["P", "P"], ["R", "R"])
        problem = Problem.of(
            Layout.of(a=2, b=2), *placements, shape=(size,), topology=nodes, path="auto"
        )
        return str(plan(problem))

    assert best(3) != best(1 << 22)

    def ranks(rank: int) -> list[tuple[str, int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        with meshplan.installed(topology=nodes):
            for size in (3, 1 << 22, 1):
                redistributed(mesh, size)
            # Small and large messages issue other collectives, and have entries of their own.
            counts = Counter[str]()
            for one in meshplan.report().entries:
                counts[one["planned"]] += one["count"]
            return list(counts.items())

    nominal = f"{best(1 << 22)}, cheapest for {1 << 22} elements"
    assert run_ranks(ranks, 4) == [[(nominal, 3)]] * 4


@pytest.mark.processes
def test_nothing_is_registered_on_a_mesh() -> None:
    """A group over two of three axes is none that torch has, and is created."""

    def ranks(rank: int) -> tuple[list[str], str, str]:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        partial = (Partial(), Replicate(), Partial())
        hash(mesh)  # which torch keeps
        before = {name: repr(value) for name, value in vars(mesh).items()}
        with meshplan.installed():
            tensor = DTensor.from_local(torch.ones(3), mesh, partial, run_check=False)
            tensor.redistribute(mesh, (Replicate(),) * 3)
            entry = meshplan.report().entries[-1]
        after = {name: repr(value) for name, value in vars(mesh).items()}
        changed = [name for name in after if before.get(name) != after[name]]
        return changed, entry["planned"], entry["group"]

    for changed, planned, group in run_ranks(ranks, 8):
        assert changed == []
        assert planned.startswith("all_reduce sum over (a, c), groups of 4")
        assert group.startswith("created group meshplan:")
