"""The job files for Slurm and Kubernetes lint, train and probe, here on two nodes of one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT
from tests.programs import capture
from tests.test_cli_live import free_port

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.full

_TRAIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("meshplan")
x = torch.ones(3)
dist.all_reduce(x)
os.write(1, f"trained with the sum {x[0].item()}\\n".encode())
dist.destroy_process_group()
"""
# Two nodes, as the commands of Slurm would start them.
_SLURM = {
    "scontrol": "#!/bin/sh\necho localhost\necho localhost\n",
    "srun": '#!/bin/sh\n"$@" & first=$!\n"$@" & second=$!\nwait $first && wait $second\n',
}


def environment(folder: Path, **settings: str) -> dict[str, str]:
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **settings}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(_TRAIN)
    for name, text in _SLURM.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def slurm(folder: Path, mesh: str) -> subprocess.CompletedProcess[str]:
    settings = {
        "MESH": mesh,
        "PORT": str(free_port()),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "2",
    }
    return capture(
        ["bash", str(ROOT / "examples" / "slurm_job.sh")],
        cwd=folder,
        env=environment(folder, **settings),
    )


def test_slurm_job_lints_trains_and_probes(folder: Path) -> None:
    done = slurm(folder, "ddp=2,fsdp=2")
    assert done.returncode == 0, done.stderr
    assert "probe: ranks 0-3 (1 group of 4 ranks): v1/tree/wide/once" in done.stderr
    assert done.stdout.count("trained with the sum 4.0") == 4


def test_slurm_job_does_not_train_on_a_jagged_mesh(folder: Path) -> None:
    done = slurm(folder, "ddp=2,fsdp=3")
    assert done.returncode == 1
    assert "MP101" in done.stdout
    assert "trained" not in done.stdout


def containers() -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Container that lints, container that trains, and its variables."""
    documents = yaml.safe_load_all((ROOT / "examples" / "kubernetes_job.yaml").read_text())
    service, job = documents
    pod = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (lint,), (train,) = pod["initContainers"], pod["containers"]
    variables = {one["name"]: one["value"] for one in train["env"]}
    # What the file repeats is the same everywhere.
    assert str(job["spec"]["completions"]) == str(job["spec"]["parallelism"]) == variables["NODES"]
    assert str(train["resources"]["limits"]["nvidia.com/gpu"]) == variables["GPUS"]
    assert lint["command"][-2:] == ["--node-size", variables["GPUS"]]
    assert lint["image"] == train["image"]
    # A pod of an indexed job has the job's name and its index as its name.
    host = variables["HEAD"].split(":")[0]
    assert host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    return lint, train, variables


def test_kubernetes_job_lints_trains_and_probes(folder: Path) -> None:
    lint, train, _ = containers()
    linted = subprocess.run(lint["command"], cwd=folder, env=environment(folder), timeout=300)
    assert linted.returncode == 0
    settings = {
        "NODES": "2",
        "GPUS": "2",
        "HEAD": f"localhost:{free_port()}",
    }
    pods = [
        subprocess.Popen(
            train["command"],
            cwd=folder,
            env=environment(folder, **settings),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    printed = "".join(pod.communicate(timeout=300)[0] for pod in pods)
    assert [pod.returncode for pod in pods] == [0, 0], printed
    assert "probe: ranks 0-3 (1 group of 4 ranks): v1/tree/wide/once" in printed
    assert printed.count("trained with the sum 4.0") == 4
