"""Facts of a GPU from the kernel's files of AMD's driver, as trees of a few machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.topology._locate import Gpu, find_amd_gpu

PCIE, XGMI = 2, 11
# As a kernel 6.8 writes them for an MI300X; what is not read is left out in part.
PROPERTIES = """\
cpu_cores_count 0
simd_count 1216
mem_banks_count 1
caches_count 507
io_links_count {io_links}
p2p_links_count 0
vendor_id 4098
device_id 29857
location_id {location}
domain {domain}
drm_render_minor {minor}
hive_id 7143383418467516165
num_xcc 8
unique_id {unique}
"""
LINK = """\
type {type}
version_major 0
version_minor 0
node_from {node_from}
node_to {node_to}
weight 15
min_latency 0
max_latency 0
min_bandwidth 64000
max_bandwidth 64000
recommended_transfer_size 0
flags 1
"""


def tree(root: Path, gpus: int, links: dict[int, dict[int, int]]) -> Path:
    """Two CPUs are nodes 0 and 1, then the GPUs; ``links`` are types by node and node."""
    for number in range(gpus + 2):
        node = root / "nodes" / str(number)
        (node / "io_links").mkdir(parents=True)
        node.joinpath("gpu_id").write_text(f"{0 if number < 2 else 51110 + number}\n")
        mine = links.get(number, {})
        node.joinpath("properties").write_text(
            "cpu_cores_count 96\nsimd_count 0\n"
            if number < 2
            else PROPERTIES.format(
                io_links=len(mine),
                location=(number << 4 | 1) << 8,
                domain=0 if number < 6 else 1,
                minor=126 + number,
                unique=0x1000 + number,
            )
        )
        for place, (to, kind) in enumerate(mine.items()):
            (node / "io_links" / str(place)).mkdir()
            (node / "io_links" / str(place) / "properties").write_text(
                LINK.format(type=kind, node_from=number, node_to=to)
            )
    return root


def mi300x(root: Path) -> Path:
    gpus = range(2, 10)
    return tree(root, 8, {i: {0: PCIE, **{j: XGMI for j in gpus if j != i}} for i in gpus})


def gpu(root: Path, environ: dict[str, str] | None = None, index: int = 0) -> Gpu:
    found = find_amd_gpu(environ or {}, index, root)
    assert isinstance(found, Gpu), found
    return found


def test_eight_gpus_joined_all_to_all(tmp_path: Path) -> None:
    found = gpu(mi300x(tmp_path), index=5)
    others = [2, 3, 4, 5, 6, 8, 9]
    assert found == Gpu(
        id="GPU-0000000000001007",
        bus="0001:71:00.0",
        vendor="amd",
        links=7,
        peers=tuple(f"{0 if n < 6 else 1:04x}:{n:x}1:00.0" for n in others),
        on_host=8,
        domain=8,
    )


def test_linked_pairs_are_read(tmp_path: Path) -> None:
    root = tree(tmp_path, 4, {2: {3: XGMI}, 3: {2: XGMI}, 4: {5: XGMI}, 5: {4: XGMI}})
    found = gpu(root, index=3)
    assert (found.links, found.peers, found.domain, found.links_known) == (
        1,
        ("0000:41:00.0",),
        2,
        True,
    )


def test_links_to_cpus_do_not_join_gpus(tmp_path: Path) -> None:
    """As on machines where CPUs are reached through xGMI too."""
    root = tree(tmp_path, 2, {2: {0: XGMI}, 3: {0: XGMI}, 0: {2: XGMI, 3: XGMI}})
    found = gpu(root)
    assert (found.links, found.peers, found.domain) == (0, (), 1)


def test_a_chain_is_one_domain(tmp_path: Path) -> None:
    root = tree(tmp_path, 3, {2: {3: XGMI}, 3: {2: XGMI, 4: XGMI}, 4: {3: XGMI}})
    assert gpu(root).peers == ("0000:31:00.0",)
    assert gpu(root).domain == 3


@pytest.mark.parametrize(
    ("environ", "index", "node"),
    [
        ({"HIP_VISIBLE_DEVICES": "3,1"}, 1, 3),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, 0, 5),
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "3,1"}, 0, 4),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "2,0"}, 0, 8),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000000000001009"}, 6, 9),
    ],
)
def test_visible_devices_select_the_gpu(
    tmp_path: Path, environ: dict[str, str], index: int, node: int
) -> None:
    assert gpu(mi300x(tmp_path), environ, index).id == f"GPU-{0x1000 + node:016x}"


def test_missing_gpu_is_reported(tmp_path: Path) -> None:
    root = mi300x(tmp_path)
    assert find_amd_gpu({}, 8, root) == "no GPU 8 among 8 GPUs that are visible here"
    assert find_amd_gpu({"HIP_VISIBLE_DEVICES": "-1"}, 0, root) == (
        "no GPU 0 among 0 GPUs that are visible here"
    )


def test_missing_driver_is_no_gpu(tmp_path: Path) -> None:
    nowhere = tmp_path / "none"
    assert find_amd_gpu({}, 0, nowhere) == f"{nowhere}: No such file or directory"
    assert (
        find_amd_gpu({}, 0, tree(tmp_path / "cpus", 0, {})) == f"{tmp_path / 'cpus'} shows no GPU"
    )


def test_gpus_hidden_from_a_container_are_skipped(tmp_path: Path) -> None:
    """Their nodes are listed, and their files cannot be read."""
    root = mi300x(tmp_path)
    for hidden in (2, 3, 4, 5):
        for name in ("gpu_id", "properties"):
            (root / "nodes" / str(hidden) / name).unlink()
            (root / "nodes" / str(hidden) / name).mkdir()
    found = gpu(root)
    assert (found.id, found.links, found.on_host) == ("GPU-0000000000001006", 7, 4)
    assert found.peers[-1] == "node 5"
    assert found.domain is None


def test_unreadable_link_is_reported(tmp_path: Path) -> None:
    root = mi300x(tmp_path)
    broken = root / "nodes/2/io_links/3/properties"
    broken.unlink()
    found = gpu(root)
    assert (found.links, found.unread, found.links_known, found.domain) == (6, (3,), False, None)


def test_partitions_of_one_device_are_separate(tmp_path: Path) -> None:
    root = tree(tmp_path, 2, {2: {3: XGMI}, 3: {2: XGMI}})
    for part in ("2", "3"):
        path = root / "nodes" / part / "properties"
        path.write_text("location_id 4352\nunique_id 7\n")
    assert [gpu(root, index=i).id for i in (0, 1)] == [
        "0000:11:00.0 node 2",
        "0000:11:00.0 node 3",
    ]


@given(st.text(max_size=300))
def test_any_properties_are_read_or_refused(text: str) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        root = tree(Path(folder), 1, {2: {0: XGMI}})
        (root / "nodes/2/properties").write_text(text, encoding="utf-8")
        (root / "nodes/2/io_links/0/properties").write_text(text, encoding="utf-8")
        (root / "nodes/2/gpu_id").write_text(text, encoding="utf-8")
        assert isinstance(find_amd_gpu({}, 0, root), Gpu | str)
