"""``meshplan lint`` as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.cli import main
from meshplan.cli._options import find_cluster
from meshplan.topology import Cluster, Inputs
from tests import cli
from tests.test_read_cluster import matrix

# Commands run in folders of their own, and the project may not be installed.
HERE = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}

TITAN = """\
[model]
name = "llama3"

[parallelism]
data_parallel_replicate_degree = 8
data_parallel_shard_degree = 5  # five
tensor_parallel_degree = 1
"""
TRAIN = """\
from torch.distributed.device_mesh import init_device_mesh

DP = 8
mesh = init_device_mesh("cuda", (DP, 5, 1), mesh_dim_names=("ddp", "fsdp", "tp"))
"""
# Files that leave no axis open, of 16 ranks. Engines and meshes may have a part of a job's ranks.
DOORS = {
    "titan.toml": "[parallelism]\ndata_parallel_replicate_degree = 2\n"
    "data_parallel_shard_degree = 4\ntensor_parallel_degree = 2\n",
    "titan.py": "ParallelismConfig(data_parallel_shard_degree=8, tensor_parallel_degree=2)\n",
    "changed.py": "p = ParallelismConfig()\np.data_parallel_replicate_degree = 2\n"
    "p.data_parallel_shard_degree = 8\n",
    "strings.py": "import os\nos.system('train --dp_shard_size 8 --tp_size 2')\n",
    "lightning.py": "ModelParallelStrategy(data_parallel_size=8, tensor_parallel_size=2)\n",
    "plain.sh": "torchrun x.py --dp 8 --tp 2\n",
    "mesh.py": TRAIN.replace("DP, 5, 1", "DP, 2, 1"),
    "engine.py": "LLM('m', tensor_parallel_size=8, pipeline_parallel_size=2)\n",
    "meshplan.toml": 'mesh = "ddp=8,fsdp=2"\n',
}


@pytest.fixture(autouse=True)
def lint(no_scheduler: None) -> Any:
    return partial(cli.meshplan, "lint", "--no-env")


def findings(text: str) -> dict[str, list[dict[str, Any]]]:
    """Of a JSON report, by code."""
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(text)["findings"]:
        found.setdefault(finding["code"], []).append(finding)
    return found


def meshplan(*words: str, given: str = "") -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "meshplan", *words],
        input=given,
        env=HERE,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


class TestKnownMeshes:
    def test_jagged_mesh_is_reported_and_its_fix_is_clean(self, lint: Any) -> None:
        base = ("--domain-size", "8", "--output-format", "json")
        code, out, err = lint("--mesh", "ddp=8,fsdp=5,tp=1", *base)
        assert (code, err) == (1, "")
        found = findings(out)
        assert [f["data"]["axes"] for f in found["MP101"]] == [["fsdp"], ["ddp"]]
        meshes = [fix["mesh"] for fix in found["MP101"][0]["fixes"] if fix["mesh"]]
        assert "ddp=5,fsdp=8,tp=1" in meshes
        for mesh in meshes:
            code, out, _ = lint("--mesh", mesh, *base)
            assert code == 0
            assert not {"MP101", "MP102"} & findings(out).keys()

    def test_order_without_hazard_is_reported(self, lint: Any) -> None:
        words = ("--mesh", "ddp=4,fsdp=12", "--domain-size", "8")
        code, out, _ = lint(*words)
        assert code == 1
        assert "not shown to differ if fsdp is reduced first" in out
        assert "may differ if it is reduced last" in out
        code, out, _ = lint(*words, "--reduce-order", "fsdp,ddp")
        assert code == 0
        assert "MP102" in out


class TestInputs:
    def test_torchtitan_file_is_linted(self, lint: Any) -> None:
        Path("job.toml").write_text(TITAN)
        code, out, _ = lint("job.toml", "--domain-size", "8", "--output-format", "json")
        assert code == 1
        (finding,) = findings(out)["MP101"]
        assert (finding["file"], finding["line"]) == ("job.toml", 4)
        code, out, err = lint("job.toml", "--domain-size", "8", "--fix")
        assert code == 1
        assert "\n-data_parallel_shard_degree = 5  # five\n" in out
        assert "\n+data_parallel_shard_degree = 4  # five\n" in out
        assert err.startswith("job.toml:4: error MP101")
        # The file after the diff lints clean.
        subprocess.run(["git", "apply"], input=out, text=True, check=True, capture_output=True)
        assert lint("job.toml", "--domain-size", "8")[0] == 0

    def test_configuration_is_linted(self, lint: Any) -> None:
        Path("meshplan.toml").write_text(
            'mesh = "ddp=8,fsdp=5"\ndomain-size = 8\nignore = ["MP105"]\n'
        )
        code, out, _ = lint("--output-format", "json")
        assert code == 1
        assert findings(out).keys() == {"MP101"}
        # Options go before it.
        code, out, _ = lint("--mesh", "ddp=5,fsdp=8", "--output-format", "json")
        assert (code, findings(out)) == (0, {})
        code, out, _ = lint("--node-size", "5", "--output-format", "json")
        assert code == 0
        code, out, _ = lint("--ignore", "MP101", "--output-format", "json")
        assert (code, findings(out)) == (0, {})
        code, out, _ = lint(
            "--select", "MP105", "--framework", "dtensor", "--output-format", "json"
        )
        assert (code, findings(out).keys()) == (0, {"MP105"})
        Path("meshplan.toml").write_text('mesh = "ddp=8,fsdp=5"\nnode-size = 5\n')
        assert lint()[0] == 0
        code, _, err = lint("--isolated")
        assert (code, err) == (
            2,
            "meshplan: MP402: no mesh to check; pass --mesh ddp=8,fsdp=5, a job file or a meshplan.toml with a mesh\n",
        )

    @pytest.mark.parametrize(
        "start", ["[tool.meshplan]\n", "[ 'tool' . meshplan ]\n", "tool.meshplan."]
    )
    def test_each_spelling_of_the_table_in_a_pyproject_is_found(
        self, lint: Any, start: str
    ) -> None:
        Path("pyproject.toml").write_text(f'{start}mesh = "ddp=8,fsdp=5"\n')
        assert lint("--domain-size", "8")[0] == 1

    def test_paths_are_relative_to_the_configuration(self, lint: Any) -> None:
        Path("sub").mkdir()
        Path("sub/host").write_text(matrix(8, 8))
        Path("sub/meshplan.toml").write_text('mesh = "ddp=8,fsdp=5"\ntopology = ["host"]\n')
        assert lint("sub/meshplan.toml")[0] == 1

    def test_ignores_of_an_unchecked_mesh_are_not_unused(self, lint: Any) -> None:
        comment = "  # meshplan: ignore[MP101] two racks, agreed"
        Path("meshplan.toml").write_text(f'mesh = "ddp=8,fsdp=5"{comment}\ndomain-size = 8\n')
        words = ("--select", "MP1", "--ignore", "MP105", "--output-format", "json")
        for more, ignored in (((), 2), (("--mesh", "ddp=5,fsdp=8"), 0)):
            code, out, _ = lint(*words, *more)
            assert (code, findings(out), json.loads(out)["ignored"]) == (0, {}, ignored)

    def test_mesh_at_the_root_of_a_toml_file_is_read(self, lint: Any) -> None:
        Path("configs").mkdir()
        Path("configs/mesh.toml").write_text('mesh = "ddp=8,fsdp=5"\n')
        assert lint("configs/mesh.toml", "--domain-size", "8")[0] == 1
        # Below a table it belongs to another program.
        Path("configs/other.toml").write_text('[model]\nmesh = "ddp=8,fsdp=5"\n')
        code, out, _ = lint("configs/other.toml", "--domain-size", "8")
        assert code == 1
        assert "not judged: ddp = 8 is written in a format" in out
        assert "  at configs/other.toml:2\n" in out

    def test_ignore_comments_are_honoured(self, lint: Any) -> None:
        comment = "# meshplan: ignore[MP1] the loss is reduced elsewhere\n"
        Path("train.py").write_text(TRAIN.replace("mesh =", comment + "mesh ="))
        code, out, _ = lint("train.py", "--domain-size", "8", "--output-format", "json")
        assert code == 0
        assert (findings(out), json.loads(out)["ignored"]) == ({}, 2)
        Path("train.py").write_text(TRAIN.replace("mesh =", "# meshplan: ignore[MP1]\nmesh ="))
        code, _, err = lint("train.py", "--domain-size", "8")
        assert code == 2
        assert err.startswith("meshplan: MP402: train.py:4: ")

    def test_slurm_environment_places_ranks(
        self, lint: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-4]")
        monkeypatch.setenv("SLURM_TASKS_PER_NODE", "8(x5)")
        monkeypatch.setenv("SLURM_DISTRIBUTION", "cyclic")
        code, out, _ = lint("--mesh", "fsdp=8,ddp=5")
        assert code == 0
        assert "on 5 nodes of 8, ranks not consecutive" in out

    def test_open_sizes_are_filled_from_the_cluster(self, lint: Any) -> None:
        Path("job.toml").write_text(TITAN.replace("degree = 5", "degree = -1"))
        for words in (
            ("--world-size", "40", "--domain-size", "8"),
            ("--hosts", "5", "--node-size", "8"),
            ("--hosts", "5", "--domain-size", "8"),
            ("--hosts", "8,8,8,8,8"),
        ):
            code, out, _ = lint("job.toml", *words)
            assert code == 1
            assert "(dp_replicate=8, dp_shard=5, tp=1) on 5 nodes of 8" in out
        assert lint("job.toml", "--domain-size", "8")[0] == 1

    def test_ranks_of_a_file_beat_the_options(self, lint: Any) -> None:
        Path("rl.toml").write_text(
            "[trainer.model]\ndp_replicate = 8\n[deployment]\nnum_train_nodes = 5\n"
        )
        Path("job.sh").write_text("torchrun --nnodes 5 --nproc-per-node 8 x.py --dp 8 --fsdp 5\n")
        for name in ("rl.toml", "job.sh"):
            for words in (
                ("--hosts", "5", "--node-size", "8"),
                ("--hosts", "8", "--node-size", "8"),
                ("--hosts", "8", "--domain-size", "8"),
            ):
                code, out, _ = lint(name, *words, "--output-format", "json")
                differs = "8" in words[:2]
                assert code == 1
                assert "MP101" in findings(out)
                assert ("MP192" in findings(out)) == differs
                assert "on 5 nodes of 8" in out
        code, out, _ = lint("job.sh", "--world-size", "64", "--domain-size", "8")
        assert code == 1
        assert "40 ranks, but the options have 64 ranks; the numbers of the file are used" in out
        # The ranks of each host are the file's too.
        Path("job.sh").write_text("torchrun --nnodes 4 --nproc-per-node 4 x.py --dp 8 --fsdp 2\n")
        code, out, _ = lint("job.sh", "--node-size", "8")
        assert code == 0
        assert "on 4 nodes of 4" in out
        assert "but the options have --node-size 8" in out
        Path("meshplan.toml").write_text("hosts = 8\nnode-size = 4\n")
        code, out, _ = lint("job.sh")
        assert code == 0
        assert "but the options have --hosts 8;" in out

    def test_hosts_of_a_file_beat_a_list_of_hosts(self, lint: Any) -> None:
        Path("rl.toml").write_text(
            "[trainer.model]\ndp_replicate = 8\n[deployment]\nnum_train_nodes = 5\n"
        )
        for hosts in ("8,8,8,8", "8,8,4,4"):
            code, out, _ = lint("rl.toml", "--hosts", hosts)
            assert code == 1
            assert f"the file has 5 hosts, but the options have --hosts {hosts}; the" in out
            assert "(dp_replicate=8, dp_shard=5) on 5 nodes of 8" in out

        # The list has as many hosts and ranks as the file.
        Path("job.sh").write_text("torchrun --nnodes 2 --nproc-per-node 8 x.py --dp 8 --tp 2\n")
        code, out, _ = lint("job.sh", "--hosts", "12,4")
        assert (code, "the options have --hosts 12,4; the" in out) == (0, True)
        assert "(dp=8, tp=2) on 2 nodes of 8" in out

    def test_hosts_of_a_file_that_no_placement_has_are_refused(self, lint: Any) -> None:
        Path("job.sh").write_text("torchrun --nnodes 2 --nproc-per-node 8 x.py --dp 8 --tp 2\n")
        for name, gpus in (("eight", 8), ("four", 4)):
            Path(name).write_text(matrix(gpus, gpus))
        words = ("--topology", "eight", "--topology", "four", "--hosts", "1,2")
        code, _, err = lint("job.sh", *words)
        assert (code, "but the options have --hosts 1,2; correct one" in err) == (
            2,
            True,
        )

    def test_ranks_of_each_host_of_a_file_place_a_mesh_of_other_ranks(self, lint: Any) -> None:
        Path("job.sh").write_text("torchrun --nproc-per-node 8 x.py --dp 8 --fsdp 5\n")
        code, out, _ = lint("job.sh", "--hosts", "4")
        assert code == 1
        assert "8 ranks on each host and sizes of 40 ranks, but the options have --hosts 4;" in out
        assert "(ddp=8, fsdp=5) on 5 nodes of 8" in out.replace("(dp=8", "(ddp=8")

    @pytest.mark.parametrize("name", DOORS)
    def test_sizes_of_a_file_beat_the_options(self, lint: Any, name: str) -> None:
        Path(name).write_text(DOORS[name])
        is_part = name in ("mesh.py", "engine.py", "meshplan.toml")
        for words, ranks in (
            (("--world-size", "16"), 16),
            (("--world-size", "32"), 32),
            (("--hosts", "4"), 32),
            (("--hosts", "8,8,8,8"), 32),
            (("--world-size", "8"), 8),
        ):
            if is_part and "," in words[1]:
                continue  # the list places all ranks, and refuses some of them
            words += () if "," in words[1] else ("--node-size", "8")
            code, out, err = lint(name, *words, "--output-format", "json")
            report = json.loads(out)
            assert (code, err, len(report["judged"])) == (0, "", 1)
            assert report["judged"][0].endswith(" on 2 nodes of 8")
            texts = [one["message"] for one in findings(out).get("MP192", [])]
            differs = ranks != 16 if not is_part else ranks < 16
            assert texts == differs * [
                f"the file has sizes of 16 ranks, but the options have {ranks} ranks; the numbers "
                "of the file are used"
            ]

    def test_sizes_of_arguments_and_meshes_are_compared_with_the_options(self, lint: Any) -> None:
        words = ("--node-size", "8", "--world-size")
        for ranks, differs in (("8", True), ("16", False), ("32", True)):
            _, out, _ = lint(*words, ranks, "--", "--dp", "8", "--tp", "2")
            assert ("the arguments have sizes of 16 ranks, but the options" in out) == differs
        for ranks, differs in (("8", True), ("16", False), ("32", False)):
            _, out, _ = lint("--mesh", "dp=8,tp=2", *words, ranks)
            assert ("the mesh has sizes of 16 ranks, but the options" in out) == differs
        # A mesh of the user's own has to fit the hosts.
        code, _, err = lint("--mesh", "dp=8,tp=2", "--hosts", "1", "--node-size", "8")
        assert (code, "have 8 ranks, and the mesh has 16" in err) == (2, True)

    def test_live_ranks_are_the_ranks_of_the_job(
        self, lint: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def find(environ: Any, timeout: float) -> Cluster:
            found = find_cluster(Inputs(node_size=8), int(environ["WORLD_SIZE"]))
            assert found is not None
            return found

        monkeypatch.setattr("meshplan.cli._ranks.find_live_cluster", find)
        monkeypatch.setenv("WORLD_SIZE", "32")
        monkeypatch.setenv("RANK", "0")
        Path("job.toml").write_text(DOORS["titan.toml"])
        Path("rest.toml").write_text(DOORS["titan.toml"].replace("= 4", "= -1"))
        _, out, _ = lint("job.toml", "rest.toml", "--live", "--output-format", "concise")
        _, text, _ = lint("rest.toml", "--live")
        assert "job.toml: warning MP192 the file has sizes of 16 ranks, but the options" in out
        assert "(dp_replicate=2, dp_shard=8, tp=2) on 4 nodes of 8" in text

    def test_options_of_launchers_place_ranks(self, lint: Any) -> None:
        reports = {
            lint("--mesh", "ddp=8,fsdp=5", hosts, "5", ranks, "8", "--output-format", "json")
            for hosts in ("--hosts", "--nodes", "--nnodes")
            for ranks in ("--node-size", "--gpus-per-node", "--nproc-per-node")
        }
        ((code, out, err),) = reports
        assert (code, err) == (1, "")
        assert "on 5 nodes of 8" in out

    def test_configuration_above_is_used(self, lint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("src/deep").mkdir(parents=True)
        Path("meshplan.toml").write_text('node-size = 8\nignore = ["MP101"]\n')
        monkeypatch.chdir("src/deep")
        assert lint("--mesh", "ddp=8,fsdp=5")[0] == 2  # no repository: whose file is it?
        Path("../../.git").mkdir()
        assert lint("--mesh", "ddp=8,fsdp=5")[0] == 0
        assert lint("--mesh", "ddp=8,fsdp=5", "--isolated")[0] == 2

    def test_permuted_ranks_are_read(self, lint: Any) -> None:
        base = ("--mesh", "dp=2,fsdp=2", "--domain-size", "4", "--flatten", "dp,fsdp")
        for ranks in ("0,2,1,3", "[[0,2],[1,3]]", "[0, 2, 1, 3]"):
            code, out, _ = lint(*base, "--ranks", ranks, "--output-format", "json")
            assert code == 1
            assert findings(out)["MP106"][0]["data"]["ranks"] == [0, 2, 1, 3]
        assert lint(*base, "--ranks", "0,1,2,3")[0] == 0
        for ranks in ("", "0,1", "0,0,1,2", "x", "[", "[" * 100_000, "1e9,0,1,2", "null"):
            cli.refused("lint", "--no-env", *base, "--ranks", ranks)


class TestEnvironment:
    def test_variables_of_the_process_are_checked(
        self, lint: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        monkeypatch.setenv("NCCL_P2P_NET_DISABLE", "1")
        words = ["--mesh", "dp=4,tp=2", "--domain-size", "8", "--output-format", "json"]
        main(["lint", *words])
        assert "MP301" in findings(capsys.readouterr().out)
        assert "MP301" not in findings(lint(*words)[1])

    def test_versions_decide_findings(self, lint: Any) -> None:
        words = ("--mesh", "fsdp=8", "--framework", "fsdp2", "--domain-size", "8")
        profile = ("--env", "NCCL_ALGO=allreduce:tree")
        code, out, _ = lint(*words, *profile, "--nccl-version", "2.31.1", "--output-format", "json")
        assert code == 1
        assert {"MP303", "MP304"} <= findings(out).keys()
        assert lint(*words, "--nccl-version", "new")[0] == 2
        assert lint(*words, "--driver", "new")[0] == 2


class TestOutput:
    MESH = ("--mesh", "ddp=8,fsdp=5", "--domain-size", "8")

    def test_rules_are_selected(self, lint: Any) -> None:
        for words, expected in (
            (("--select", "MP105", "--framework", "dtensor"), {"MP105"}),
            (("--select", "MP1", "--ignore", "MP105"), {"MP101"}),
            (("--ignore", "ALL"), set()),
        ):
            code, out, _ = lint(*self.MESH, *words, "--output-format", "json")
            assert findings(out).keys() == expected
            assert code == ("MP101" in expected)
        code, _, err = lint(*self.MESH, "--select", "NOPE")
        assert code == 2
        assert err.count("\n") == 1

    def test_levels_decide_the_exit_status(self, lint: Any) -> None:
        clean = ("--mesh", "tp=8,dp=4", "--domain-size", "8")
        assert lint(*clean)[0] == 0
        assert lint(*clean, "--fail-level", "warning")[0] == 1
        assert lint(*self.MESH, "--exit-zero")[0] == 0

    @pytest.mark.parametrize("name", ["text", "concise", "json", "sarif", "github", "junit"])
    def test_reports_are_written_in_each_format(self, lint: Any, name: str) -> None:
        code, out, _ = lint(*self.MESH, "--output-format", name)
        assert code == 1
        assert "MP101" in out
        code, printed, _ = lint(*self.MESH, "--output-format", name, "--output-file", "report")
        assert (code, printed, Path("report").read_text()) == (1, "", out)

    def test_unwritable_output_is_an_error(self, lint: Any) -> None:
        for option in ("--output-file", "--html"):
            code, _, err = lint(*self.MESH, option, "missing/report")
            assert (code, err) == (
                2,
                "meshplan: MP402: missing/report: cannot be written: No such file or directory\n",
            )

    def test_page_draws_every_mesh_with_findings(self, lint: Any) -> None:
        Path("job.toml").write_text(TITAN + "# <b>\n")
        Path("a.py").write_text("x = 1\n")
        words = ("job.toml", "a.py", *self.MESH[:2], "--mesh", "ddp=5,fsdp=8")
        lint(*words, "--domain-size", "8", "--html", "b.html")
        page = Path("b.html").read_text()
        picture = page[page.index("<svg") : page.index("</svg>") + 6]
        root = xml.etree.ElementTree.fromstring(picture)
        titles = [one.text for one in root if one.get("font-size") == "15"]
        assert titles == [
            "(ddp=8, fsdp=5) on 5 nodes of 8, domains of 8",
            "(dp_replicate=8, dp_shard=5, tp=1) on 5 nodes of 8, domains of 8",
        ]
        assert "<td>--mesh ddp=5,fsdp=8</td><td>judged</td><td>0</td>" in page
        assert "no mesh in a.py" in page
        assert "<pre>--- a/job.toml\n+++ b/job.toml\n" in page
        assert "+data_parallel_replicate_degree = 10\n" in page
        assert "# &lt;b&gt;" in page
        # Ranks of unknown placement are not drawn.
        Path("partial").write_text(
            '<system version="1"><cpu numaid="0"><pci busid="0000:0f:00.0"/></cpu></system>'
        )
        words = ("--mesh", "ddp=8,fsdp=5", "--topology", "partial", "--html", "b.html")
        code, _, err = lint(*words)
        assert (code, err) == (1, "")
        assert "<svg" not in Path("b.html").read_text()

    def test_fix_of_an_option_is_a_sentence(self, lint: Any) -> None:
        code, out, err = lint(*self.MESH, "--fix")
        assert (code, out) == (1, "")
        assert "no change of a file; choose other sizes: --mesh ddp=10,fsdp=4 (" in err
        assert "MP101" in err
        code, out, err = lint(*self.MESH, "--fix", "--output-format", "json")
        assert (code, out) == (2, "")
        # No other mesh of 7 ranks is even on nodes of 3.
        code, out, err = lint("--mesh", "dp=2,tp=7", "--node-size", "3", "--fix")
        assert (code, out) == (1, "")
        assert "call torch.distributed.init_process_group('meshplan')" in err

    def test_diffs_apply_in_folders(self, lint: Any) -> None:
        folder = Path("conf/a b")
        folder.mkdir(parents=True)
        # Without a newline at the end, with a separator of lines that git does not know, and by an absolute name.
        files = [Path("conf/x.toml"), folder / "y.toml", Path("z.toml").absolute()]
        for file in files:
            file.write_bytes((TITAN + "# \u2028 end").encode())
        for file in files:
            code, out, _ = lint(str(file), "--domain-size", "8", "--fix")
            assert code == 1
            subprocess.run(["git", "apply"], input=out, text=True, check=True)
            assert lint(str(file), "--domain-size", "8")[0] == 0
            assert file.read_bytes().endswith("# \u2028 end".encode())

    def test_files_are_changed_by_write(self, lint: Any) -> None:
        text = "\ufeff" + TITAN.replace("\n", "\r\n")
        Path("job.toml").write_bytes(text.encode())
        code, out, err = lint("job.toml", "--domain-size", "8", "--fix", "--write")
        assert (code, out.endswith("\nno findings\n")) == (0, True)
        assert err.startswith("meshplan: job.toml: changed; choose other sizes")
        changed = Path("job.toml").read_bytes().decode()
        assert changed == text.replace("degree = 8", "degree = 10").replace(
            "degree = 5", "degree = 4"
        )
        assert lint("job.toml", "--domain-size", "8", "--write")[0] == 2

    def test_all_meshes_of_all_files_are_fixed_in_one_run(self, lint: Any) -> None:
        mesh = "init_device_mesh('cuda', (8, 5), mesh_dim_names=('ddp', 'fsdp'))\n"
        text = "from torch.distributed.device_mesh import init_device_mesh\n" + mesh * 2
        Path("src").mkdir()
        files = [Path("src/two.py"), Path("src/a b.py"), Path("job.toml")]
        for file in files:
            file.write_text(text if file.suffix == ".py" else TITAN)
        words = (".", "--domain-size", "8", "--fix")
        code, out, _ = lint(*words)
        assert (code, out.count("+++ ")) == (1, 3)
        subprocess.run(["git", "apply"], input=out, text=True, check=True)
        patched = [file.read_text() for file in files]
        for file in files:
            file.write_text(text if file.suffix == ".py" else TITAN)
        code, out, err = lint(*words, "--write")
        assert (code, err.count(": changed; ")) == (0, 3)
        assert out.endswith("checked 3 files, 5 meshes\n")
        assert "error" not in out
        assert [file.read_text() for file in files] == patched
        # What is left is reported, and fails.
        code, out, err = lint(*words, "--write", *self.MESH)
        assert (code, err) == (1, "")
        assert "error MP101" in out

    def test_files_in_other_encodings_are_not_written(self, lint: Any) -> None:
        content = (TITAN + "# caf\xe9\n").encode("latin-1")
        Path("job.toml").write_bytes(content)
        code, _, err = lint("job.toml", "--domain-size", "8", "--fix", "--write")
        assert code == 2
        assert "it is not the UTF-8 text that was linted" in err
        assert Path("job.toml").read_bytes() == content


def test_directories_are_searched(lint: Any) -> None:
    for name in ("a/job.toml", "a/b/train.py", ".venv/x.toml", "build/y.toml", "my/lib/z.toml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(TRAIN if name.endswith(".py") else TITAN)
    Path("a/tool.py").write_text("print()\n")
    Path("a/notes.txt").write_text("none\n")
    Path("a/large.json").write_text('{"parallel": 8}' + " " * (1 << 18))
    Path("my/pyvenv.cfg").touch()

    def files(*words: str) -> tuple[int, int, list[str]]:
        code, out, err = lint(*words, "--domain-size", "8", "--output-format", "json")
        assert err == ""
        report = json.loads(out)
        return code, report["files"], [one["name"] for one in report["inputs"]]

    both = ["a/job.toml", "a/b/train.py"]
    assert files(".") == files("a") == files("a", "a/b", "./a") == (1, 3, both)
    assert files("a/**/*.py") == (1, 2, ["a/b/train.py"])
    assert files("a/**/*.py", "--strict") == (1, 2, ["a/b/train.py", "a/tool.py"])
    assert files(".", "--exclude", "b") == (1, 2, both[:1])
    assert files(".", "--exclude", "a/*.toml", "--exclude", "t*.py") == (0, 0, [])
    assert files("a/job.toml", "--exclude", "*.toml") == (0, 0, [])
    assert files(".venv") == (1, 1, [".venv/x.toml"])
    Path("meshplan.toml").write_text('include = ["*.txt", "*.py"]\nexclude = ["a/b/"]\n')
    assert files(".") == (0, 2, [])
    Path("meshplan.toml").rename("a/meshplan.toml")
    assert files("a") == (1, 3, ["a/b/train.py"])
    Path("a/meshplan.toml").write_text('exclude = ["b/*"]\n')
    assert files("a") == (1, 3, ["a/job.toml"])


def test_files_that_git_ignores_are_left_out(lint: Any) -> None:
    for name in ("a/job.toml", "a/old/job.toml", "a/tracked.toml", "a/é\n.toml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(TITAN)

    def files(*words: str) -> list[str]:
        out = lint(*words, "--domain-size", "8", "--output-format", "json")[1]
        return [one["name"] for one in json.loads(out)["inputs"]]

    names = sorted(str(one) for one in Path("a").rglob("*.toml"))
    Path("a/.gitignore").write_text("old\ntracked.toml\né*\n")
    assert sorted(files("a")) == names  # not in a repository
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "-f", "a/tracked.toml"], check=True)
    Path("link").symlink_to("a")
    assert files("a") == files(".") == ["a/job.toml", "a/tracked.toml"]
    assert files("link") == ["link/job.toml", "link/tracked.toml"]
    assert files("a/old/job.toml") == ["a/old/job.toml"]
    assert files("a/old") == []


def test_one_broken_file_of_a_directory_does_not_hide_the_others(lint: Any) -> None:
    Path("a").mkdir()
    Path("a/broken.py").write_text("init_device_mesh('cuda', (8,\n")
    Path("a/comment.toml").write_text(TITAN + "# meshplan: ignore[MP101]\n")
    Path("a/job.toml").write_text(TITAN)
    small = "num_machines: 2\nparallelism_config: {dp_replicate_size: 8, dp_shard_size: 5}\n"
    Path("a/small.yaml").write_text(small)
    words = ("a", "--hosts", "5", "--node-size", "8", "--output-format", "concise")
    code, out, err = lint(*words, "--strict")
    assert "a/job.toml:4: error MP101" in out
    assert "a/broken.py:1: warning MP191 not judged: cannot be parsed as Python" in out
    assert "a/comment.toml:8: warning MP191 not judged: an ignore comment needs a reason" in out
    # The file's hosts do not suit its mesh, whoever named the file.
    assert "a/small.yaml:2: warning MP191 not judged: the file has 2 hosts and sizes of 40" in out
    assert (code, err.count("\n")) == (2, 1)
    assert lint("a", "--strict")[0] == 2
    code, out, err = lint(*words)
    assert (code, err) == (1, "")
    assert "a/job.toml:4: error MP101" in out
    assert out.endswith("checked 4 files, 1 mesh; 3 files not judged (--strict lists them)\n")
    Path("a/small.yaml").unlink()
    assert lint(*words, "--strict")[0] == lint(*words)[0] == 1


def test_files_of_directories_are_quiet(lint: Any) -> None:
    texts = {
        "src/mesh.py": TRAIN.replace("mesh =", "def make():\n    return") + "\n",
        "src/open.py": TRAIN.replace("DP = 8", "DP = int(input())"),
        "tests/test_mesh.py": TRAIN,
        "src/unit_tests/helpers.py": TRAIN,
        "configs/sizes.yaml": "tensor_parallel_size: 8\n",
        "configs/rest.toml": TITAN.replace("degree = 5", "degree = -1"),
    }
    for name, text in texts.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    for names in ((".",), ("src", "configs"), ("**/*.*",)):
        code, out, err = lint(*names, "--node-size", "8")
        assert (code, err) == (0, "")
        assert "configs/rest.toml:4: warning MP101" in out
        (summary,) = (line for line in out.splitlines() if not line.startswith("configs/rest"))
        assert summary.startswith("checked ")
        assert summary.endswith("; 2 files not judged (--strict lists them)")
        code, out, _ = lint(*names, "--node-size", "8", "--strict")
        assert code == 1
        assert "error MP101" in out
        assert "  at configs/sizes.yaml:1\n" in out
    # Only directories below the named one count.
    Path("tests/repo").mkdir()
    Path("tests/repo/train.py").write_text(TRAIN)
    for name in ("tests/repo", "tests/repo/*.py", str(Path("tests/repo").absolute())):
        assert lint(name, "--node-size", "8")[0] == 1
    # A named file is strict, whatever stands beside it.
    assert lint("configs/sizes.yaml", "src", "--node-size", "8")[0] == 1
    # Without a placement nothing is judged, and the summary tells why.
    code, out, err = lint(".")
    assert (code, err) == (0, "")
    assert out.endswith("(--strict lists them, --node-size 8 places the ranks)\n")


def test_arguments_of_a_named_program_are_read_once(lint: Any) -> None:
    Path("train.py").write_text(
        "parser = argparse.ArgumentParser()\n"
        'parser.add_argument("--tp", type=int, default=4)\n'
        "args = parser.parse_args()\n"
        'init_device_mesh("cuda", (8, args.tp), mesh_dim_names=("dp", "tp"))\n'
    )
    status, out, _ = lint("train.py", "--node-size", "8", "--", "--tp", "5")
    assert status == 1
    assert "train.py:4: (dp=8, tp=5)" in out
    assert "checked 1 file, 1 mesh\n" in out
    # Of another program: the words are a mesh of their own.
    status, out, _ = lint("train.py", "--node-size", "8", "--", "--dp", "8", "--tp", "5")
    assert "--dp 8 --tp 5" in out


def test_standard_input_has_a_name(lint: Any) -> None:
    words = ("-", "--domain-size", "8", "--output-format", "concise")
    for name, options in (("standard input", ()), ("src/x.py", ("--stdin-filename", "src/x.py"))):
        code, out, err = lint(*words, *options, given=TRAIN)
        assert (code, err) == (1, "")
        assert all(line.startswith(f"{name}:4: error MP101") for line in out.splitlines())
    code, out, _ = lint(*words, given='mesh = "ddp=8,fsdp=5"')
    assert code == 1
    assert "give the mesh with --mesh, or name the format with --stdin-filename job.toml" in out


class TestMessages(TestCase):
    def test_errors_are_one_line(self) -> None:
        commands = [
            "lint",
            "lint --mesh ddp=8",
            "lint --mesh ddp=8 --hosts 3 --node-size 2",
            "lint --mesh ddp=8 --domain-size 0",
            "lint --mesh ddp=8 --domain-size eight",
            "lint missing.toml",
            "lint - --topology -",
            "lint - --fix --write",
            "lint a.py --stdin-filename b.py",
            "lint *.cfg",
            "lint --mesh ddp=8 --domain-size 8 --reduce-order fsdp",
            "lint --mesh ddp=8 --domain-size 8 --flatten ddp,x",
            "lint --mesh ddp=8 --domain-size 8 --dim big",
            "lint --mesh ddp=8 --domain-size 8 --framework jax",
            "lint --mesh ddp=8 --topology missing",
            "lint --mesh ddp=8 --nonsense",
            "lint --mesh ddp=8 --live",
            "lint --mesh ddp=8 --live --hosts 2",
            "lint --mesh ddp=8 --domain-size 8 --timeout 3",
            "lint --mesh ddp=8 --mesh ddp=4 --ranks 0,1,2,3 --domain-size 8",
            "topo x -- y",
            "nonsense",
            "",
            "lint --mesh ddp=8 fsdp=5 --domain-size 8",
        ]
        self.assertExpectedInline(
            "".join(cli.refused(*command.split()) for command in commands),
            """\
meshplan: MP402: no mesh to check; pass --mesh ddp=8,fsdp=5, a job file or a meshplan.toml with a mesh
meshplan: MP211: the placement of ranks is unknown; use --domain-size 8, --node-size 8, --hosts 5, or --topology FILE with the output of nvidia-smi topo -m
meshplan: MP211: 3 hosts of 2 GPUs have 6 ranks, and the mesh has 8; pass --hosts 4, or a mesh of 6 ranks
meshplan: MP211: --domain-size: use an integer from 1 to 1000000000, got '0'
meshplan: MP211: --domain-size: use an integer from 1 to 1000000000, got 'eight'
meshplan: MP212: missing.toml: cannot be read: No such file or directory
meshplan: MP402: standard input is FILE and --topology; pass the name of one of them
meshplan: MP402: --write changes files, and - is standard input; leave out --write
meshplan: MP402: --stdin-filename needs the file -, which is standard input; add -
meshplan: MP402: *.cfg: no file matches this pattern
meshplan: MP112: no axis 'fsdp' in the mesh, it has ddp
meshplan: MP112: no axis 'x' in the mesh, it has ddp
meshplan: MP211: --dim: use an integer from 0 to 1000000000, got 'big'
meshplan lint: argument --framework: use dtensor, fsdp2 or ddp, got 'jax'; see meshplan lint --help
meshplan: MP212: missing: cannot be read: No such file or directory
meshplan lint: unknown argument '--nonsense' (did you mean '--node-size'?); see meshplan lint --help
meshplan: MP211: meshplan lint --live runs on all ranks of a job at once, and RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set; use torchrun --nproc-per-node 8 -m meshplan lint --live --mesh ddp=8,fsdp=5
meshplan: MP402: --live reads the placement from the ranks; leave out the placement options, and those of the configuration with --isolated
meshplan: MP402: --timeout needs --live; add it, or leave out --timeout
meshplan: MP402: --ranks needs exactly one --mesh, got 2
meshplan: only meshplan lint takes arguments after --, got 'y'; see meshplan --help
meshplan: argument verb: use compare, diagnose, doctor, links, lint, plan, rule, run, simulate or topo, got 'nonsense'; see meshplan --help
meshplan: pass a verb: compare, diagnose, doctor, links, lint, plan, rule, run, simulate or topo; see meshplan --help
meshplan: MP402: fsdp=5: no such file; pass all axes after --mesh, with commas: --mesh ddp=8,fsdp=5
""",
        )


AXES = st.sampled_from(["ddp", "fsdp", "tp", "pp", "dp", "cp", "ep", "x", "dp_shard"])
OPTIONS = {
    "--domain-size": st.sampled_from(["1", "2", "3", "4", "8", "72", "0"]),
    "--hosts": st.sampled_from(["1", "2", "3", "5", "8,8", "4,4,4", "x"]),
    "--node-size": st.sampled_from(["1", "3", "4", "8", "16"]),
    "--rank-order": st.sampled_from(["block", "cyclic", "plane=2", "plane=0", "missing"]),
    "--framework": st.sampled_from(["fsdp2", "ddp", "dtensor"]),
    "--flatten": st.sampled_from(["ddp,fsdp", "tp", "x,dp"]),
    "--reduce-order": st.sampled_from(["fsdp,ddp", "tp", "dp"]),
    "--dim": st.sampled_from(["0", "1", "5", "4096"]),
    "--env": st.sampled_from(["NCCL_ALGO=tree", "NCCL_ALGO=allreduce:tree", "NCCL_PROTO=LL", "A"]),
    "--output-format": st.sampled_from(["text", "concise", "json", "sarif", "github", "junit"]),
}


@given(
    st.dictionaries(AXES, st.sampled_from([1, 2, 3, 4, 5, 6, 8]), min_size=1, max_size=3),
    st.fixed_dictionaries({}, optional=OPTIONS),
)
def test_any_command_ends_without_a_traceback(
    mesh: dict[str, int], options: dict[str, str]
) -> None:
    words = [
        "lint",
        "--isolated",
        "--no-env",
        "--mesh",
        ",".join(f"{a}={s}" for a, s in mesh.items()),
    ]
    status, out, err = cli.meshplan(*words, *(word for pair in options.items() for word in pair))
    if status == 2:
        assert (out, err.count("\n")) == ("", 1)
    else:
        assert status in (0, 1)
        assert err == ""


@pytest.mark.parametrize(
    ("dp", "tp", "placed", "status"),
    [
        (8, 2, ("--node-size", "4"), 0),
        (8, 6, ("--node-size", "8"), 2),
        (2, 3, ("--node-size", "4"), 2),
        (9, 16, ("--node-size", "4", "--domain-size", "72"), 2),
    ],
)
def test_a_file_without_nodes_is_judged_on_usual_ones_unless_they_have_a_hazard(
    dp: int,
    tp: int,
    placed: tuple[str, ...],
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"parallelism: {{dp: {dp}, pp: 1, tp: {tp}, tp_mode: REDUCE_SCATTER}}\n")
    assert main(["lint", "--no-env", "--isolated", str(job)]) == status
    out, err = capsys.readouterr()
    note = "no hazard on nodes of 8, of 4 or in racks of 72; their size was not read"
    assert (note in out) == (status == 0)
    assert ("the placement of ranks is unknown" in err) == (status == 2)
    assert main(["lint", "--no-env", "--isolated", *placed, str(job)]) == int(status == 2)
    assert "was not read" not in capsys.readouterr().out
