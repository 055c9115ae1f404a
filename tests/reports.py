"""Reports of the linter for tests: a plain one, a hostile one, and any."""

from __future__ import annotations

from hypothesis import strategies as st

from meshplan.lint._finding import Finding, Fix, LintInput, LintReport, Source
from meshplan.lint._rules._rule import RULES

PLAIN = LintReport(
    findings=(
        Finding(
            code="MP101",
            severity="error",
            message="5 groups of ddp must agree and lie on nodes in 2 ways; replicas may differ",
            source=Source(file="configs/mesh.toml", line=3),
            subject="(ddp=8, fsdp=5, tp=1)",
            details=("ranks per node: {0-7} {8-15}\n  (2, 2, 1)", "tree: ((0+5)+35)"),
            fixes=(
                Fix(
                    title="write ddp=5,fsdp=8",
                    cost="no GPU is left out",
                    mesh="ddp=5,fsdp=8",
                    diff="--- configs/mesh.toml\n+++ configs/mesh.toml\n-ddp = 8\n+ddp = 5\n",
                ),
                Fix(title="call meshplan.install()", cost="one line", mesh="ddp=8,fsdp=5,tp=1"),
            ),
            data={"axis": "ddp", "signatures": ((2, 2, 1), (2, 1, 2)), "share": 0.25},
        ),
        Finding(
            code="MP203",
            severity="warning",
            message="4 GPUs as in one tray of a rack",
            source=Source(file="-", line=1),
        ),
        Finding(
            code="MP102",
            severity="info",
            message="groups of fsdp lie on nodes in 2 ways",
            source=Source(option="--mesh ddp=4,fsdp=12"),
            fixes=(Fix(title="leave it", cost=""),),
        ),
    ),
    judged=("(ddp=8, fsdp=5, tp=1): 5 nodes of 8, domains of 8",),
    ignored=2,
    inputs=(
        LintInput("configs/mesh.toml", "file", "judged"),
        LintInput("a.py", "file", "no mesh"),
        LintInput("open.py", "file", "not judged", ("line 3: n is not a constant", "line 4: m")),
        LintInput("b.py", "file", "no mesh"),
        LintInput("--mesh dp=8", "mesh", "not judged", ("the node of each rank is unknown",)),
    ),
    files=4,
    meshes=2,
)
EMPTY = LintReport(findings=(), judged=("(dp=8): 1 node of 8",))
# What could break a format: its own escapes, tags, commands, links, controls of a terminal, bytes
# that are not UTF-8, and marks that turn the direction of writing.
HOSTILE = LintReport(
    findings=(
        Finding(
            code="MP101",
            severity="error",
            message="a\r\n::error::b %0A <b>&\"' ]]> {0} [x](http://y) \x1b[31m\x00\u202e\udcff\ufffe",
            source=Source(file="./d,r:/e\udcffg \n<&>.toml", line=1),
            subject="\x9b\u2028",
            details=("a\t::stop-commands::x\r", ""),
            fixes=(Fix(title="a\nb", cost="\x07", mesh="\n", diff="\x1b\n+\u202e"),),
            data={"\udcff": float("nan"), "set": {2, 1}, "far": float("inf"), "other": Source()},
        ),
        Finding("MP\n1", "warning", "m", Source()),
    ),
    judged=("\x1b]0;title\x07\nnext",),
)

TEXTS = st.text(
    st.one_of(
        st.characters(),
        st.sampled_from("\n\r\t\x00\x1b\x85\u2028\u202e\udc80\ud800%:,<>&\"'{}[]()"),
    ),
    max_size=12,
)
FIXES = st.builds(Fix, title=TEXTS, cost=TEXTS, mesh=TEXTS, diff=TEXTS)
FINDINGS = st.builds(
    Finding,
    code=st.one_of(st.sampled_from([*RULES, "MP212"]), TEXTS),
    severity=st.sampled_from(["info", "warning", "error"]),
    message=TEXTS,
    source=st.builds(
        Source, file=TEXTS, line=st.one_of(st.none(), st.integers(-1, 10**6)), option=TEXTS
    ),
    subject=TEXTS,
    details=st.lists(TEXTS, max_size=3).map(tuple),
    fixes=st.lists(FIXES, max_size=2).map(tuple),
    data=st.dictionaries(TEXTS, st.one_of(st.none(), st.floats(), TEXTS), max_size=3),
)
REPORTS = st.builds(
    LintReport,
    findings=st.lists(FINDINGS, max_size=4).map(tuple),
    judged=st.lists(TEXTS, max_size=2).map(tuple),
    ignored=st.integers(0, 3),
)
