"""Names of the package after a plain ``import meshplan``, at run time and for type checkers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import meshplan
from tests.programs import capture

PACKAGE = Path(meshplan.__file__).parent
TYPED = """\
import torch

import meshplan

reveal_type(meshplan.integrations.fsdp.apply(torch.nn.Linear(1, 1)))
reveal_type(meshplan.integrations.ddp.register)
reveal_type(meshplan.collectives.functional.all_reduce)
meshplan.integrations.fdsp
meshplan.instal()
"""


def run(code: str, stdin: str = "") -> str:
    done = capture([sys.executable, "-c", code], input=stdin, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_import_loads_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import meshplan; dir(meshplan)\n"
    code += "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))\n"
    code += "print([m for m in sys.modules if m.startswith('meshplan.')])\n"
    names, modules = run(code).splitlines()
    assert modules == "['meshplan._lazy_imports']"
    assert not {"torch", "networkx", "spmd_types", "numpy"} & set(
        json.loads(names.replace("'", '"'))
    )


@pytest.mark.full
def test_one_integration_does_not_need_the_libraries_of_another() -> None:
    code = "import sys, meshplan\n"
    code += "print(meshplan.integrations.ddp.register.__name__)\n"
    code += "print({'ddp', 'fsdp'} <= set(dir(meshplan.integrations)))\n"
    code += "print('meshplan.integrations.fsdp' in sys.modules)"
    assert run(code) == "register\nTrue\nFalse\n"


@pytest.mark.parametrize(
    "module",
    ["meshplan", "meshplan.integrations", "meshplan.topology"],
)
def test_unknown_names_are_attribute_errors(module: str) -> None:
    found = sys.modules.get(module) or __import__(module, fromlist=["x"])
    with pytest.raises(AttributeError, match=f"^module '{module}' has no attribute 'fdsp'$"):
        _ = found.fdsp


def test_folder_of_the_same_name_hides_nothing(tmp_path: Path) -> None:
    # People run jobs beside their clone of the repository, which has no __init__.py.
    (tmp_path / "meshplan").mkdir()
    done = capture([sys.executable, "-m", "meshplan", "--version"], cwd=tmp_path)
    assert done.stdout == f"meshplan {meshplan.__version__}\n", done.stderr


@pytest.mark.full
def test_type_checkers_know_the_names(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script, config = tmp_path / "user.py", tmp_path / "mypy.ini"
    script.write_text(TYPED)
    # Torch's own types take most of the time, and have no part in this.
    config.write_text("[mypy]\nfollow_imports = silent\n[mypy-torch.*]\nfollow_imports = skip\n")
    words = [sys.executable, "-m", "mypy", "--config-file", str(config), "--ignore-missing-imports"]
    words += ["--cache-dir", str(tmp_path), str(script)]
    done = capture(words, timeout=400, cwd=PACKAGE.parent)
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert lines[0] == 'note: Revealed type is "tuple[str, ...]"', done.stdout + done.stderr
    assert all('Revealed type is "def (' in line for line in lines[1:3]), lines
    assert lines[3:5] == [
        'error: Module has no attribute "fdsp"  [attr-defined]',
        'error: Module has no attribute "instal"; '
        'maybe "install", "installed", or "uninstall"?  [attr-defined]',
    ]
