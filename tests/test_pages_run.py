"""README, tutorial and how-to pages do what they say, where their readers try them.

All runs from the wheel, outside the checkout, with an empty environment: blocks of Python under as
many processes as the page asks for, commands in a shell, and the code in lines and tables. What is
in a page and is not run has a line here that says why.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import SUITES
from meshplan.cli import main
from tests.installed import Installed
from tests.pages import ROOT, Block, blocks, commands, is_shown, prints, snippets
from tests.test_public_names import public
from tests.test_read_cluster import matrix

# Pages about the checkout itself: their figures and names have tests of their own.
_NOT_FOR_USERS = {
    "docs/performance.md": "tests/test_benchmarks.py",
    "docs/torch-versions.md": "tools/test_matrix.py",
    "docs/call-sites.md": "tests/test_call_sites.py",
}
PAGES = sorted(
    name
    for pattern in ("README.md", "docs/*.md", "docs/api/*.md", "docs/howto/*.md", "examples/*.md")
    for name in (path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
    if name not in _NOT_FOR_USERS
)
TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}

# What is shown and not run here: the page, the text, and why.
NOT_RUN = {
    ("docs/environment.md", "meshplan"): "the name of the plugin of vLLM",
    ("docs/train.md", "torchrun"): "the launcher, in words",
    (
        "docs/lint-a-cluster.md",
        "MESHPLAN_BUILD_KERNELS=0 pip install -e .",
    ): "installs a clone: tests/test_documents.py",
    ("docs/train.md", 'dist.init_process_group("meshplan")'): "the page's block runs it",
    ("docs/run.md", "meshplan run"): "a mention",
    ("docs/lint.md", "meshplan run --probe"): "tests/run/test_probe.py",
    ("docs/run.md", "meshplan compare plain.json fixed.json"): "tests/test_run_jobs.py",
    (
        "docs/lint.md",
        "meshplan lint --run train.py --world-size 40 --domain-size 8 -- ARGUMENTS",
    ): "tests/test_lint_run.py",
    ("docs/environment.md", "meshplan run"): "a mention",
    ("docs/howto/backend.md", "meshplan"): "the name of the backend",
    ("docs/glossary.md", "meshplan"): "the name of the backend",
    ("examples/torchtitan.md", "meshplan"): "the name of the backend",
    (
        "docs/howto/backend.md",
        "python -m tests.backend.torch_suite --world-size 4",
    ): "tests/backend/test_torch_suite.py",
    ("docs/environment.md", 'init_process_group("meshplan")'): "tests/backend/test_autoload.py",
    (
        "docs/howto/backend.md",
        'new_group(backend="meshplan")',
    ): "tests/backend/test_options.py",
    ("docs/howto/backend.md", "ProcessGroupNCCL.Options()"): "a class of builds with CUDA",
    (
        "docs/howto/backend.md",
        'DDPStrategy(process_group_backend="meshplan")',
    ): "tests/backend/test_trainers.py",
    (
        "docs/howto/backend.md",
        'ModelParallelStrategy(process_group_backend="meshplan")',
    ): "tests/backend/test_trainers.py",
    (
        "docs/howto/backend.md",
        'dist.init_process_group("meshplan")',
    ): "tests/backend/test_trainers.py",
    ("docs/howto/backend.md", "Accelerator(cpu=True)"): "tests/backend/test_trainers.py",
    (
        "docs/howto/backend.md",
        'Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="meshplan")])',
    ): "needs a GPU",
    (
        "docs/howto/backend.md",
        "torchft.Manager(pg=ProcessGroupMeshplan())",
    ): "tests/backend/test_torchft.py",
    ("docs/howto/backend.md", "wait()"): "a method of torch's Work",
    ("docs/howto/gpus.md", "pip install"): "a mention",
    (
        "docs/howto/gpus.md",
        "PYTHONPATH=CLONE python -m pytest -c CLONE/tests/gpu.ini CLONE/tests/test_gpu.py "
        "CLONE/tests/test_gpu_backend.py",
    ): "tests/test_gpu_environment.py",
    (
        "docs/howto/gpus.md",
        "python CLONE/tools/build_in_place.py",
    ): "tests/test_gpu_environment.py",
    ("docs/howto/lint-in-ci.md", "pip install"): "a mention",
    (
        "docs/howto/lint-in-ci.md",
        "meshplan lint ... | head",
    ): "a pattern: tests/test_cli_streams.py",
    ("docs/provenance.md", "meshplan"): "the name of a logger",
    ("docs/lint.md", "rocm-smi --showtopo"): "a program of AMD",
    ("docs/lint.md", "amd-smi topology"): "a program of AMD",
    ("docs/lint.md", "kubectl get nodes -o json"): "needs a cluster",
    (
        "docs/howto/deterministic-collectives.md",
        "NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_MIN_NCHANNELS=1 NCCL_MAX_NCHANNELS=1 torchrun ...",
    ): "a pattern: variables of NCCL",
    (
        "docs/howto/deterministic-collectives.md",
        "torchrun --standalone --nproc-per-node 2 tests/test_two_rank_smoke.py --backend nccl "
        "--path native --configure-nccl-env --dtype all",
    ): "needs two GPUs; tests/test_two_rank_smoke.py runs it over gloo",
    (
        "docs/faults.md",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv-backend c10d --max-restarts 3 ...",
    ): "a pattern: tests/multinode/test_restarts.py",
    (
        "docs/howto/elastic.md",
        "python examples/elastic.py --schedule 8:10,7:10,5:5,3:5,8:5 --micro-batches 16",
    ): "tests/test_elastic_training.py",
    ("docs/faults.md", "torchrun --max-restarts"): "a pattern: tests/multinode/test_restarts.py",
    ("docs/faults.md", "destroy_process_group()"): "torch's: tests/faults/test_remade.py",
    ("docs/faults.md", "init_process_group()"): "torch's: tests/faults/test_remade.py",
}
NOT_RUN |= {
    ("docs/howto/backend.md", text): "tests/backend/test_trainers.py"
    for text in (
        "TrainingArguments(use_cpu=True)",
        'TrainingArguments(ddp_backend="meshplan")',
    )
}
NOT_RUN |= {
    ("docs/lint.md", text): "what the linter reads or advises"
    for text in (
        "ParallelismConfig(...)",
        "MegatronStrategy(...)",
        "LLM(...)",
        "Engine(...)",
        'init_process_group("meshplan")',
        'init_process_group("meshplan", pg_options='
        'BackendOptions(contract=Contract("exact"), strict=True))',
        "torchrun --tee 3",
    )
}
NOT_RUN |= {
    ("examples/torchtitan.md", text): "tests/backend/test_torchtitan.py"
    for text in (
        "torchrun --nproc-per-node 8 -m torchtitan.train --module job --config llama3_8b "
        "--training.disable_cuda_graphs",
        "python -m tests.backend.torchtitan_jobs --job job.py rep=2,shard=3,tp=2,node=4",
    )
}
# Keywords of other libraries.
NOT_OURS = {
    "actor": "an override of Hydra",
    "find_unused_parameters": "DistributedDataParallel",
    "divide_by_initial_world_size": "torch.nn.Module.join of DDP",
    "fullgraph": "torch.compile",
    "process_group_backend": "strategies of Lightning",
    "kwargs_handlers": "Accelerator",
    "param_dtype": "MixedPrecisionPolicy of torch",
}
# Blocks in a language that is not run here, and which test reads them.
READ_BY = {
    ("examples/torchtitan.md", "python"): "tests/backend/test_torchtitan.py",
    ("docs/howto/lint-in-ci.md", "yaml"): "tests/test_commands_shown.py::test_ci_files_run_lint",
    (
        "docs/howto/lint-in-ci.md",
        "json",
    ): "tests/test_action.py::test_problem_matcher_reads_real_output",
    ("docs/lint.md", "bash"): "tests/test_diagnose.py",
    ("docs/run.md", "bash"): "tests/test_run_jobs.py",
    ("docs/howto/reproduce.md", "bash"): "tests/test_run_jobs.py",
    ("docs/release.md", "bash"): "tests/test_documents.py",
    ("docs/rl.md", "sh"): "tests/backend/test_vllm.py",
    ("docs/howto/rl-parity.md", "ini"): "tests/backend/test_sglang.py",
    ("docs/howto/rl-parity.md", "bash"): "tests/backend/test_vllm.py",
    ("docs/lint-a-cluster.md", "python"): "test_diff_of_a_mesh_removes_the_finding",
    ("docs/index.md", "sh"): "tests/test_documents.py",
    ("README.md", "sh"): "tests/test_documents.py::test_readme_sets_up_a_fresh_clone",
}
# Output that no block of its page prints.
PRINTED_BY = {
    **dict.fromkeys(("README.md", "docs/index.md", "docs/run.md"), "tests/test_run_jobs.py"),
    "docs/tutorial.md": "tests/test_demo.py::test_tutorial_shows_the_printed_table",
}
MARK = "---- block "
RANKS = re.compile(r"torchrun (?:--standalone )?--nproc-per-node (\d+)(?: \w+\.py)?[`\n]")


def scripts(page: str) -> list[tuple[int, list[Block]]]:
    """The programs of a page: how many ranks they need, and their blocks."""
    text = TEXT[page]
    found = blocks(text, "python")
    if "one script" in text or "at the end of a file" in text:
        (ranks,) = set(RANKS.findall(text)) or {"1"}
        return [(int(ranks), found)]
    programs = []
    for block in found:
        before = text[: block.start].rstrip().rpartition("\n\n")[2]
        ranks = RANKS.findall(before)
        programs.append((int(ranks[0]) if ranks else 1, [block]))
    return programs


WITH_BLOCKS = [
    page for page in PAGES if blocks(TEXT[page], "python") and (page, "python") not in READ_BY
]


@pytest.mark.timeout(1500)
@pytest.mark.processes
@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_blocks_print_the_shown_output(page: str, installed: Installed, tmp_path: Path) -> None:
    for number, (ranks, found) in enumerate(scripts(page)):
        folder = tmp_path / str(number)
        folder.mkdir()
        marked = [f"print('{MARK}')\n{block.text}" for block in found]
        (folder / "script.py").write_text("\n".join(marked))
        printed = run_script(installed, folder, ranks)
        for block, out in zip(found, printed.split(f"{MARK}\n")[1:], strict=True):
            shown = prints(TEXT[page], block)
            assert shown is None or is_shown(out, shown), f"{block.text}prints\n{out}\nnot\n{shown}"


def run_script(installed: Installed, folder: Path, ranks: int) -> str:
    """What rank 0 prints."""
    if ranks == 1:
        done = installed.run([installed.python, "script.py"], folder)
        assert done.returncode == 0, done.stderr
        return done.stdout
    words = f"torchrun --standalone --nproc-per-node {ranks} --redirects 3 --log-dir log script.py"
    done = installed.run(words, folder, timeout=800)
    errors = "".join(path.read_text() for path in sorted(folder.glob("log/*/*/*/stderr.log")))
    assert done.returncode == 0, done.stderr + errors
    (out,) = folder.glob("log/*/attempt_0/0/stdout.log")
    return out.read_text()


def test_every_shown_output_is_compared() -> None:
    """Every plain block is the output of a block of Python, but for those with a test elsewhere."""
    for page in PAGES:
        compared = [prints(TEXT[page], block) for block in blocks(TEXT[page], "python")]
        plain = [block.text for block in blocks(TEXT[page], "")]
        others = [text for text in plain if text not in compared]
        assert bool(others) == (page in PRINTED_BY), (page, others)


JOB = "[parallelism]\ndata_parallel_replicate_degree = 5\ndata_parallel_shard_degree = 8\n"
TRAIN = (
    'from torch.distributed.device_mesh import init_device_mesh\ninit_device_mesh("cuda", (5, 8))\n'
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files that commands of pages name, and a machine's nvidia-smi."""
    for name in ("FILE", "topo.txt"):
        (tmp_path / name).write_text(matrix(8, 8))
    for name in ("torchtitan_job.toml", "torchtitan.toml"):
        (tmp_path / name).write_text(JOB)
    (tmp_path / "train.py").write_text(TRAIN)
    shutil.copytree(ROOT / "examples" / "data", tmp_path / "examples" / "data")
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f'#!/bin/sh\n[ "$*" = "topo -m" ] && cat {tmp_path}/topo.txt\n')
    smi.chmod(0o755)
    return tmp_path


def shell_lines(page: str) -> Iterator[tuple[str, str, str]]:
    """Commands in the order of the page: kind of place, the command, and what it prints."""
    for block in blocks(TEXT[page]):
        if block.language == "toml":
            yield "file", block.text, ""
        elif block.language == "console":
            for command, shown in commands(block):
                yield "block", command, shown
    for one in snippets(TEXT[page]):
        if one.kind == "command" and (page, one.text) not in NOT_RUN:
            yield "line", one.text, ""


_seen: set[str] = set()


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("page", [page for page in PAGES if list(shell_lines(page))])
def test_commands_print_the_shown_output(page: str, installed: Installed, folder: Path) -> None:
    status = 0
    for place, command, shown in shell_lines(page):
        if place == "file":
            (folder / "meshplan.toml").write_text(command)
            command = "meshplan lint --no-env --domain-size 8"
        elif command == "echo $?":
            assert shown == f"{status}\n", command
            continue
        elif place == "line" and command in _seen:
            continue
        if in_the_checkout(command) or RANKS.search(f"{command}\n"):
            continue
        if place == "line":
            _seen.add(command)
            (folder / "meshplan.toml").unlink(missing_ok=True)
            if re.fullmatch(r"meshplan (?!doctor)\w+", command):
                command += " --help"  # a verb is named
        # The tools of the checkout are not in the wheel.
        place_to_run = ROOT if command.startswith("python tools/") else folder
        done = installed.run(command.replace("FILE...", "FILE"), place_to_run, timeout=600)
        status = done.returncode
        assert status in ((0, 1) if re.search("lint|doctor|diagnose", command) else (0,)), (
            done.stderr
        )
        if "torchrun" not in command:
            assert done.stderr == "", command
        if shown:
            assert done.stdout == shown, command


def in_the_checkout(command: str) -> bool:
    """Whether a command is one of the Makefile, or prepares the checkout: these have to exist."""
    if command == ". .venv/bin/activate":
        return "VENV := .venv" in (ROOT / "Makefile").read_text()
    if found := re.fullmatch(r"python -m benchmarks\.(\w+)", command):
        assert found[1] in SUITES, command  # tests/test_benchmarks.py runs them
    elif found := re.fullmatch(r"make ([a-z-]+)", command):
        assert re.search(rf"^{found[1]}:", (ROOT / "Makefile").read_text(), re.M), command
    return found is not None


def texts(kind: str) -> list[str]:
    """The lines of one kind in all pages, once each."""
    found = {
        one.text: None
        for page in PAGES
        for one in snippets(TEXT[page])
        if one.kind == kind and (page, one.text) not in NOT_RUN
    }
    return list(found)


@pytest.mark.timeout(900)
@pytest.mark.processes
def test_lines_of_python_run(installed: Installed, tmp_path: Path) -> None:
    shutil.copy2(ROOT / "tests" / "page_lines.py", tmp_path / "script.py")
    lines = texts("python")
    assert "meshplan.shutdown()" in lines
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    out = run_script(installed, tmp_path, 4)
    failed = json.loads(out.partition("failed: ")[2])
    assert not failed, "\n".join(f"{line}\n{why}" for line, why in failed.items())


RESOLVE = """\
import importlib, json, os, sys
import torch
import torch.distributed as dist
import meshplan
for name in json.load(open(sys.argv[1])):
    if not os.fork():
        first, *parts = name.split(".")
        found = globals()[first]
        try:
            for part in parts:
                if not hasattr(found, part) and first == "torch":
                    importlib.import_module(f"{found.__name__}.{part}")
                found = getattr(found, part)
        except Exception as error:
            print(name, repr(error), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.timeout(900)
def test_names_exist_after_a_plain_import(installed: Installed, tmp_path: Path) -> None:
    """Names with dots, and those that lines of Python call, each in a process of its own."""
    called = [re.match(r"meshplan(?:\.\w+)+", text) for text in texts("python")]
    names = {*texts("name"), *(one[0] for one in called if one)} - {"meshplan.toml"}
    assert {"meshplan.integrations.ddp.register", "meshplan.testing.tp"} <= names
    (tmp_path / "names.json").write_text(json.dumps(sorted(names)))
    done = installed.run([installed.python, "-c", RESOLVE, "names.json"], tmp_path)
    assert (done.stdout, done.stderr) == ("", "")


def test_named_options_exist() -> None:
    """A keyword that a page names is one of a public function or class."""
    known = set(NOT_OURS)
    for _, one in public():
        if callable(one) and not (inspect.isclass(one) and issubclass(one, Exception)):
            known |= set(inspect.signature(one).parameters)
    for text in texts("option"):
        assert text.partition("=")[0] in known, text


def test_every_block_belongs_to_a_test() -> None:
    """Every block and every line of code is of a kind that a test here runs; no exclusion is stale."""
    handled = {"command", "python", "name", "option"}
    shown = set()
    for page in PAGES:
        for block in blocks(TEXT[page]):
            assert (
                block.language in ("python", "console", "toml", "")
                or (page, block.language) in READ_BY
            ), (page, block.text)
        for one in snippets(TEXT[page]):
            shown.add((page, one.text))
            assert one.kind in handled, (page, one)
        fences = len(re.findall(r"^ *(?:```|~~~)", TEXT[page], re.M))
        assert fences == 2 * len(blocks(TEXT[page])), page
    assert set(NOT_RUN) <= shown
    assert all(NOT_RUN.values())


def test_diff_of_a_mesh_removes_the_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", TEXT["docs/lint-a-cluster.md"], re.S)
    found = []
    for removed in "+-":
        lines = [line[1:] for line in diff.splitlines() if not line.startswith(removed)]
        (tmp_path / "train.py").write_text("\n".join(lines))
        found.append(main(["lint", str(tmp_path / "train.py"), "--no-env", "--domain-size", "8"]))
    capsys.readouterr()
    assert found == [1, 0]
