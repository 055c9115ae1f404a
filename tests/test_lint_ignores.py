"""Ignore comments."""

from __future__ import annotations

import time

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import PolicyError
from meshplan.lint._finding import Finding, Source
from meshplan.lint._select import Ignore, read_ignores, remove_ignored

TRAIN = """\
import torch
# meshplan: ignore[MP101] agreed with the cluster team
# and a word about it
mesh = init_device_mesh("cuda", (8, 5))

other = init_device_mesh("cuda", (4, 6))  # meshplan: ignore[MP104, MP3] all of a rack is ours
last = init_device_mesh("cuda", (3,))  # meshplanner is a word
# meshplan: ignore[MP] nothing follows"""


def finding(code: str, line: int | None, file: str = "train.py") -> Finding:
    return Finding(code, "error", "may differ", Source(file, line))


def refusal(text: str) -> str:
    try:
        read_ignores(text, file="train.py")
    except PolicyError as error:
        return str(error)
    return ""


def test_comments_apply_to_their_line() -> None:
    assert read_ignores(TRAIN) == (
        Ignore(2, ("MP101",), "agreed with the cluster team", target=4),
        Ignore(6, ("MP104", "MP3"), "all of a rack is ours", target=6),
        Ignore(8, ("MP",), "nothing follows", target=8),
    )


def test_one_comment_may_name_several_rules() -> None:
    text = "mesh  # meshplan: ignore[MP101] a # b  #meshplan:ignore[MP105] c\r\n"
    first, second = read_ignores(text)
    assert first == Ignore(1, ("MP101",), "a # b", target=1)
    assert second == Ignore(1, ("MP105",), "c", target=1)
    given = {"train.py": (first, second)}
    assert remove_ignored([finding("MP101", 1), finding("MP105", 1)], given) == ((), 2, ())
    _, _, (unused,) = remove_ignored([finding("MP105", 1)], given)
    assert unused.data["codes"] == ["MP101"]


@pytest.mark.parametrize(
    "line",
    [
        "x#meshplan: ignore[MP101]",
        "# meshplan ignore MP101",
        "# meshplan: ignores tp",
        "# meshplan: our settings",
        "",
    ],
)
def test_other_comments_are_not_read(line: str) -> None:
    assert read_ignores(line) == ()


def test_windows_line_ends_are_read() -> None:
    assert read_ignores("# meshplan:ignore[MP101]why\r\nmesh\r\n") == (
        Ignore(1, ("MP101",), "why", 2),
    )


class TestFindings(TestCase):
    def test_invalid_comments_are_refused(self) -> None:
        texts = (
            "x = 1\nmesh  # meshplan: ignore[MP101]\n",
            "# meshplan: ignore[MP101, MP3]   \r\nmesh\n",
            "# meshplan: ignore MP101 because\n",
            "# meshplan: ignore[] because\n",
            "# meshplan: ignore[E501] because\n",
            "# meshplan: ignore[MP1011] because\n",
            "# meshplan: ignore[MP999] because\n",
            "# meshplan: ignore[MP7] because\n",
            "# meshplan: ignore[MP101,] because\n",
            "# meshplan:ignore\n",
            "# meshplan: ignore[MP101] # meshplan: ignore[MP105] because\n",
        )
        self.assertExpectedInline(
            "".join(f"{refusal(text)}\n" for text in texts),
            """\
MP402: train.py:2: an ignore comment needs a reason; use # meshplan: ignore[MP101] REASON
MP402: train.py:1: an ignore comment needs a reason; use # meshplan: ignore[MP101, MP3] REASON
MP402: train.py:1: this comment has no rule code to ignore; use, for example, # meshplan: ignore[MP101] REASON
MP402: train.py:1: '' is not the code of a rule; use, for example, # meshplan: ignore[MP101] REASON
MP402: train.py:1: 'E501' is not the code of a rule; use, for example, # meshplan: ignore[MP101] REASON
MP402: train.py:1: 'MP1011' is not the code of a rule; use, for example, # meshplan: ignore[MP101] REASON
MP402: train.py:1: 'MP999' is not the code of a rule; use, for example, # meshplan: ignore[MP101] REASON
MP402: train.py:1: 'MP7' is not the code of a rule; use, for example, # meshplan: ignore[MP101] REASON
MP402: train.py:1: '' is not the code of a rule; use, for example, # meshplan: ignore[MP101] REASON
MP402: train.py:1: this comment has no rule code to ignore; use, for example, # meshplan: ignore[MP101] REASON
MP402: train.py:1: an ignore comment needs a reason; use # meshplan: ignore[MP101] REASON
""",
        )

    def test_finding_on_another_line_is_kept(self) -> None:
        text = "[parallelism]\ntp = 5  # meshplan: ignore[MP101] two racks\n"
        kept, count, unused = remove_ignored(
            [finding("MP101", 1)], {"train.py": read_ignores(text)}
        )
        assert (len(kept), count) == (1, 0)
        self.assertExpectedInline(
            unused[0].message,
            """no finding of MP101 on line 2 matches this comment; one is on line 1: move the comment there, or remove it""",
        )

    def test_unused_comment_is_reported(self) -> None:
        kept, count, unused = remove_ignored(
            [finding("MP101", 4)], {"train.py": read_ignores(TRAIN)}
        )
        assert (kept, count) == ((), 1)
        said = [f"{one.source} {one.severity} {one.code} {one.message}\n" for one in unused]
        self.assertExpectedInline(
            "".join(said),
            """\
train.py:6 warning MP190 no finding of MP104, MP3 on line 6 matches this comment; remove it
train.py:8 warning MP190 no finding of MP on line 8 matches this comment; remove it
""",
        )


def test_unmatched_findings_are_kept() -> None:
    here = [
        finding("MP101", 4),
        finding("MP102", 4),
        finding("MP101", 5),
        finding("MP301", 6),
        finding("MP104", 6),
        finding("MP101", None),
        finding("MP101", 4, file="other.py"),
        Finding("MP301", "warning", "no effect", Source(option="NCCL_NTHREADS=1")),
    ]
    kept, count, unused = remove_ignored(here, {"train.py": read_ignores(TRAIN)})
    assert kept == (here[1], here[2], here[5], here[6], here[7])
    assert count == 3
    assert [one.source.line for one in unused] == [8]
    assert remove_ignored(here, {}) == (tuple(here), 0, ())


def test_long_texts_are_read_in_linear_time() -> None:
    started = time.process_time()
    assert len(read_ignores("# meshplan: ignore[MP1] so\nx\n" * 10000)) == 10000
    assert len(read_ignores("# meshplan: ignore[MP1] so\n" * 10000 + "x")) == 10000
    assert read_ignores("# " * 200000 + "meshplan") == ()
    assert time.process_time() - started < 30


@given(
    st.lists(
        st.sampled_from(["#", " meshplan", ":", " ignore", "[", "MP101", ",", "]", " why", "\n"])
        | st.text(max_size=3),
        max_size=20,
    ).map("".join)
)
def test_any_text_is_read_or_refused(text: str) -> None:
    assert "\n" not in refusal(text)
