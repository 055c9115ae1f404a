"""``meshplan simulate``: tables, orders, options and their errors."""

from __future__ import annotations

import json
from functools import partial

from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from tests import cli
from tests.cli import meshplan, printed

simulate = partial(meshplan, "simulate")
show = partial(printed, "simulate")
refused = partial(cli.refused, "simulate")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


class TestText(TestCase):
    def test_all_orders_are_listed(self) -> None:
        self.assertExpectedInline(
            show("--mesh", "ddp=8,fsdp=5", "--domain-size", "8"),
            """\
mesh (ddp=8, fsdp=5), 5 nodes of 8, domains of 8; 16384 elements of float32, seed 0
order      algorithm  replicas  differ
---------  ---------  --------  ------
ddp, fsdp  tree       4         44.8%
ddp, fsdp  ring       5         34.8%
fsdp, ddp  tree       5         56.0%
fsdp, ddp  ring       1         0.0%
ddp+fsdp   tree       1         0.0%
ddp+fsdp   ring       1         0.0%
model of NCCL 2.30: 1 channel, hosts with NVSwitch, no NVLS; it shows what may happen and certifies nothing
""",
        )

    def test_given_orders_are_simulated(self) -> None:
        found = show(
            *("--mesh", "a=3,b=4,c=2", "--node-size", "5", "--numel", "500", "--algorithm", "tree"),
            *("--reduce-order", "c,a+b", "--reduce-order", "b", "--flat"),
        )
        self.assertExpectedInline(
            found,
            """\
mesh (a=3, b=4, c=2), 5 nodes of 5, the last of 4; 500 elements of float32, seed 0
order   algorithm  replicas  differ
------  ---------  --------  ------
c, a+b  tree       2         56.0%
b       tree       4         40.4%
a+b+c   tree       1         0.0%
model of NCCL 2.30: 1 channel, hosts with NVSwitch, no NVLS; it shows what may happen and certifies nothing
""",
        )

    def test_meshes_of_few_ranks_are_simulated(self) -> None:
        found = [
            show("--mesh", "1", "--domain-size", "8"),
            show("--mesh", "a=1,b=3", "--domain-size", "2", "--numel", "9"),
            show("--mesh", "4,1", "--hosts", "2", "--numel", "1", "--flat"),
            show("--mesh", "a=4,b=2", "--hosts", "2", "--from", "R,R", "--numel", "9"),
        ]
        self.assertExpectedInline(
            "".join(found),
            """\
mesh (axis0=1), 1 node of 1, domains of 1; 16384 elements of float32, seed 0
nothing is reduced: no partial axis has 2 ranks or more
model of NCCL 2.30: 1 channel, hosts with NVSwitch, no NVLS; it shows what may happen and certifies nothing
mesh (a=1, b=3), 2 nodes of 2, the last of 1, domains of 2; 9 elements of float32, seed 0
order  algorithm  replicas  differ
-----  ---------  --------  ------
b      tree       1         0.0%
b      ring       1         0.0%
model of NCCL 2.30: 1 channel, hosts with NVSwitch, no NVLS; it shows what may happen and certifies nothing
mesh (axis0=4, axis1=1), 2 nodes of 2; 1 element of float32, seed 0
order  algorithm  replicas  differ
-----  ---------  --------  ------
axis0  tree       1         0.0%
axis0  ring       1         0.0%
model of NCCL 2.30: 1 channel, hosts with NVSwitch, no NVLS; it shows what may happen and certifies nothing
mesh (a=4, b=2), 2 nodes of 4; 9 elements of float32, seed 0
nothing is reduced: no partial axis has 2 ranks or more
model of NCCL 2.30: 1 channel, hosts with NVSwitch, no NVLS; it shows what may happen and certifies nothing
""",
        )

    def test_json_of_one_mesh(self) -> None:
        found = show(
            *("--mesh", "ddp=8,fsdp=5", "--domain-size", "8", "--reduce-order", "ddp,fsdp"),
            *("--algorithm", "tree", "--numel", "1000", "--output-format", "json"),
        )
        row = {
            "order": [["ddp"], ["fsdp"]],
            "algorithm": "tree",
            "replicas": 4,
            "differing": 0.474,
            "ulps": 192,
            "steps": [
                {"axes": ["ddp"], "group_size": 8, "groups": 5, "orders": 5, "sums": 5},
                {"axes": ["fsdp"], "group_size": 5, "groups": 8, "orders": 4, "sums": 4},
            ],
        }
        written = json.loads(found)
        assert "certifies nothing" in written.pop("model")
        assert written == {
            "mesh": {"ddp": 8, "fsdp": 5},
            "topology": "5 nodes of 8, domains of 8",
            "dtype": "float32",
            "numel": 1000,
            "seed": 0,
            "rows": [row],
        }


class TestErrors(TestCase):
    def test_mesh_and_placement_are_required(self) -> None:
        mesh, place = ("--mesh", "ddp=8,fsdp=5"), ("--domain-size", "8")
        found = [refused(*place), refused("--mesh", "a=2;\nb", *place), refused(*mesh)]
        found += [refused(*mesh, option, "8,x") for option in ("--domain-size", "--hosts")]
        self.assertExpectedInline(
            "".join(found),
            """\
meshplan: MP402: no mesh; pass --mesh AXES, such as ddp=8,fsdp=5
meshplan: MP111: the size of axis 'a' must be a positive integer, got '2;'; use, for example, a=8
meshplan: MP211: the placement of ranks is unknown; use --domain-size 8, --node-size 8, --hosts 5, or --topology FILE with the output of nvidia-smi topo -m
meshplan: MP211: --domain-size: use an integer from 1 to 1000000000, got '8,x'
meshplan: MP211: --hosts: use an integer from 1 to 1000000000, got 'x'
""",
        )

    def test_invalid_options_are_refused(self) -> None:
        base = ("--mesh", "ddp=8,fsdp=5", "--domain-size", "8")
        options = (
            "--reduce-order fdsp",
            "--reduce-order ddp,ddp",
            "--reduce-order ddp,,fsdp",
            "--reduce-order +",
            "--reduce-order ddp,fs\x1bdp",
            "--reduce-order ddp --from R,P",
            "--from P",
            "--from P,Q",
            "--from P,P(max)",
            "--from P,S(\u00b2)",
            "--algorithm nvls",
            "--dtype fp8",
            "--dtype int32",
            "--numel 0",
            "--numel 1e6",
            "--numel 99999999",
            "--seed -1",
            "--output-format xml",
        )
        found = [refused(*base, *option.split()) for option in options]
        many = "--mesh a=2,b=2,c=2,d=2,e=2 --domain-size 8"
        found.append(refused(*many.split()))
        self.assertExpectedInline(
            "".join(found),
            """\
meshplan: MP112: no axis 'fdsp' in the mesh, it has ddp, fsdp (did you mean 'fsdp'?)
meshplan: MP401: step ['ddp'] names axis ddp (P(sum) -> R) a second time, where nothing is pending; name each axis to reduce once: ddp
meshplan: MP402: --reduce-order: use axes of the mesh, such as --reduce-order ddp,fsdp, or --reduce-order ddp+fsdp at once, got ''
meshplan: MP402: --reduce-order: use axes of the mesh, such as --reduce-order ddp,fsdp, or --reduce-order ddp+fsdp at once, got ''
meshplan: MP402: --reduce-order: use axes of the mesh, such as --reduce-order ddp,fsdp, or --reduce-order ddp+fsdp at once, got 'fs\\x1bdp'
meshplan: MP401: step ['ddp'] names axis ddp (R -> R), where nothing is pending; name each axis to reduce once: none
meshplan: MP401: a mesh of 2 axes needs 2 placements, got 1 from and 1 to; pass one placement per axis of (ddp=8, fsdp=5)
meshplan: MP401: invalid placement 'Q'; use R, S(0), P or P(op) with op one of sum, avg, max, min, product
meshplan: MP401: P(max) cannot be simulated, only sums; use P or P(avg)
meshplan: MP402: --from: use R, S(0), P or P(avg) for each axis, such as --from P,R, got 'S(\\xb2)'
meshplan simulate: argument --algorithm: use ring, tree or both, got 'nvls'; see meshplan simulate --help
meshplan: MP402: --dtype: use one of float32, bfloat16, float16, float64, int8, int16, int32, int64, uint8, got 'fp8'
meshplan: MP402: dtype int32 cannot be simulated; use one of float32, bfloat16, float16, float64
meshplan: MP402: --numel: use an integer from 1 to 1000000000, got '0'
meshplan: MP402: --numel: use an integer from 1 to 1000000000, got '1e6'
meshplan: MP402: 40 inputs of 99999999 elements of float32 exceed the limit (134217728 elements, 1024 MiB at once); use numel=3355443 or less
meshplan: MP402: --seed: use an integer from 0 to 1000000000, got '-1'
meshplan simulate: argument --output-format: use text or json, got 'xml'; see meshplan simulate --help
meshplan: MP402: 5 axes have more than 24 orders; use one, such as --reduce-order a,b,c,d,e, or --flat
""",
        )


def test_domains_across_hosts_are_nodes() -> None:
    mesh = ("--mesh", "ddp=9,fsdp=64", "--reduce-order", "ddp,fsdp", "--numel", "256")
    trays = simulate(*mesh, "--node-size", "4", "--domain-size", "72")
    assert trays == simulate(*mesh, "--domain-size", "72")
    assert trays != simulate(*mesh, "--node-size", "4")
    # Domains inside hosts do not matter to the order.
    pairs = simulate(*mesh, "--node-size", "8", "--domain-size", "2")[1].splitlines()[1:]
    assert pairs == simulate(*mesh, "--node-size", "8")[1].splitlines()[1:]


def test_equal_hosts_set_the_node_size() -> None:
    mesh = ("--mesh", "ddp=8,fsdp=5", "--numel", "256")
    assert simulate(*mesh, "--hosts", "5") == simulate(*mesh, "--node-size", "8")
    assert simulate(*mesh, "--hosts", "8,8,8,8,8") == simulate(*mesh, "--node-size", "8")
    uneven = simulate(*mesh, "--hosts", "8,8,8,12,4", "--domain-size", "4")[1].splitlines()[1:]
    assert uneven == simulate(*mesh, "--hosts", "8,8,8,12,4")[1].splitlines()[1:]


WORDS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["a=2,b=3", "3,3", "a,b", "b", "a\n,b", "P,R", "S(0),P", "2", "5", "1,2,3", "bf16"]
    ),
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "mesh",
                    "order",
                    "from",
                    "domain-size",
                    "node-size",
                    "hosts",
                    "algo",
                    "dtype",
                    "seed",
                ]
            ),
            WORDS,
        ),
        max_size=4,
    )
)
def test_any_words_are_simulated_or_refused(options: list[tuple[str, str]]) -> None:
    chosen = {"mesh": "a=2,b=3", "domain-size": "4", **dict(options)}
    code, out, said = simulate(*(f"--{name}={word}" for name, word in chosen.items()), "--numel=8")
    assert (code, said.count("\n"), out == "") in ((0, 0, False), (2, 1, True))
