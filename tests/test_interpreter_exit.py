"""A process that has used gloo lets others of its threads finish before it ends."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests.programs import capture

pytestmark = [
    pytest.mark.skipif(sys.version_info >= (3, 14), reason="threads are not ended there"),
]

# In place of gloo's thread, which is to be met in a millisecond: one that is in torch's C++ when the
# main thread is at its end, and wants the interpreter a little later.
SCRIPT = textwrap.dedent(
    """
    import contextlib, threading
    from datetime import timedelta
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    import meshplan.backend
    from meshplan.flatten import registry
    from meshplan.layout import Layout
    from meshplan.record import Record
    from meshplan.testing import assert_replicas_equal

    def linger():
        with contextlib.suppress(Exception):
            store.wait(["nothing"], timedelta(milliseconds=10))

    store = dist.HashStore()
    {use}
    dist.destroy_process_group()
    threading.Thread(target=linger, daemon=True).start()
    """
)
USES = {
    "registry": """
dist.init_process_group("gloo", rank=0, world_size=1, store=store)
mesh = init_device_mesh("cpu", (1,))
for token in ("first", "second"):
    registry().get(mesh, Layout.from_mesh(mesh), (0,), token=Record.of(use=token))
""",
    "backend": 'dist.init_process_group("meshplan", rank=0, world_size=1, store=store)',
    "comparison": """
dist.init_process_group("gloo", rank=0, world_size=1, store=store)
assert_replicas_equal(torch.ones(3))
""",
}


@pytest.mark.full
@pytest.mark.parametrize("use", USES)
def test_interpreter_exit_waits_for_running_threads(use: str) -> None:
    script = SCRIPT.replace("{use}", USES[use])
    done = capture([sys.executable, "-c", script])
    assert (done.returncode, done.stderr) == (0, "")
