"""README, tutorial and how-to pages do what they say, where their readers try them.

All blocks run from the wheel, outside the checkout, with an empty environment: Python under as
many processes as the page asks for, and commands in a shell. A block that is not run has a line here
that names its test.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import SUITES
from meshplan.cli import main
from tests.installed import Installed
from tests.pages import ROOT, Block, blocks, commands, is_shown, prints
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

# Blocks in a language that is not run here, and which test reads them.
READ_BY = {
    ("examples/torchtitan.md", "python"): "tests/backend/test_torchtitan.py",
    ("docs/howto/lint-in-ci.md", "yaml"): "tests/test_commands_shown.py::test_ci_files_run_lint",
    (
        "docs/howto/lint-in-ci.md",
        "json",
    ): "tests/test_action.py::test_problem_matcher_reads_real_output",
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
PRINTED_BY = dict.fromkeys(("README.md", "docs/index.md", "docs/run.md"), "tests/test_run_jobs.py")
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
    """Files and commands in the order of the page: which of both, its text, and what it prints."""
    for block in blocks(TEXT[page]):
        if block.language == "toml":
            yield "file", block.text, ""
        elif block.language == "console":
            for command, shown in commands(block):
                yield "command", command, shown


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("page", [page for page in PAGES if list(shell_lines(page))])
def test_commands_print_the_shown_output(page: str, installed: Installed, folder: Path) -> None:
    status = 0
    for kind, command, shown in shell_lines(page):
        if kind == "file":
            (folder / "meshplan.toml").write_text(command)
            command = "meshplan lint --no-env --domain-size 8"
        elif command == "echo $?":
            assert shown == f"{status}\n", command
            continue
        if in_the_checkout(command) or RANKS.search(f"{command}\n"):
            continue
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


def test_every_block_belongs_to_a_test() -> None:
    for page in PAGES:
        for block in blocks(TEXT[page]):
            assert (
                block.language in ("python", "console", "toml", "")
                or (page, block.language) in READ_BY
            ), (page, block.text)
        fences = len(re.findall(r"^ *(?:```|~~~)", TEXT[page], re.M))
        assert fences == 2 * len(blocks(TEXT[page])), page


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
