"""Names of the package after a plain ``import meshplan``, at run time and for type checkers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import meshplan

PACKAGE = Path(meshplan.__file__).parent
# Each name in a fork of an interpreter that has imported meshplan and nothing of it: an import of
# one module would make attributes of others.
RESOLVE = """\
import json, os, sys, traceback
import torch
import meshplan

failed = {}
for name in json.load(sys.stdin):
    reading, writing = os.pipe()
    if not os.fork():
        found = meshplan
        try:
            for part in name.split(".")[1:]:
                assert part in dir(found), f"{part} is not in dir({found.__name__})"
                found = getattr(found, part)
            assert found.__name__ == name, found
        except Exception as error:
            os.write(writing, repr(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        failed[name] = said.read()
    os.wait()
print(json.dumps({name: why for name, why in failed.items() if why}))
"""
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
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def public_modules() -> list[str]:
    """Modules whose path has no part with a leading underscore, but for the readers of formats,
    which are internal: they are imported one at a time, by their names.
    """
    found = []
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            found.append(".".join(parts))
    return sorted(one for one in found if one != "meshplan" and ".formats." not in one)


@pytest.mark.full
def test_every_public_module_is_reached_by_a_plain_import() -> None:
    # vLLM alone imports its module, by an entry point (tests/backend/test_vllm.py).
    names = [name for name in public_modules() if name != "meshplan.integrations.vllm"]
    assert {"meshplan.integrations.fsdp", "meshplan.topology"} <= set(names)
    assert json.loads(run(RESOLVE, json.dumps(names))) == {}


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


@pytest.mark.full
def test_type_checkers_know_the_names(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script, config = tmp_path / "user.py", tmp_path / "mypy.ini"
    script.write_text(TYPED)
    # Torch's own types take most of the time, and have no part in this.
    config.write_text("[mypy]\nfollow_imports = silent\n[mypy-torch.*]\nfollow_imports = skip\n")
    words = [sys.executable, "-m", "mypy", "--config-file", str(config), "--ignore-missing-imports"]
    words += ["--cache-dir", str(tmp_path), str(script)]
    # In the folder of the package: type checkers do not see an editable install.
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=400, cwd=PACKAGE.parent, check=False
    )
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert lines[0] == 'note: Revealed type is "tuple[str, ...]"', done.stdout + done.stderr
    assert all('Revealed type is "def (' in line for line in lines[1:3]), lines
    assert lines[3:5] == [
        'error: Module has no attribute "fdsp"  [attr-defined]',
        'error: Module has no attribute "instal"; '
        'maybe "install", "installed", or "uninstall"?  [attr-defined]',
    ]
