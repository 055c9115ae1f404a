"""Which rules ``--select``, ``--extend-select`` and ``--ignore`` leave."""

from __future__ import annotations

from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import PolicyError
from meshplan.lint._rules._rule import RULES
from meshplan.lint._select import Selection
from tests.refusals import refusal

SELECTORS = st.lists(
    st.sampled_from(["ALL", "MP", "MP1", "MP10", "MP101", "MP2", "MP203"]), max_size=3
)


def list_selected(**given: list[str]) -> str:
    selection = Selection.of(**given)
    return " ".join(code for code in RULES if selection.wants(code))


def test_selections_keep_the_named_rules() -> None:
    cases: list[dict[str, list[str]]] = [
        {"select": ["MP101"]},
        {"select": ["mp2"]},
        {"select": ["MP10"]},
        {"select": ["MP101,MP2", " MP305 "]},
        {"ignore": ["MP1", "MP3"]},
        {"select": ["MP1"], "ignore": ["MP10"]},
        {"select": ["MP101"], "ignore": ["MP1"]},
        {"select": ["MP1"], "ignore": ["MP1"]},
        {"ignore": ["ALL"]},
        {"ignore": ["ALL"], "extend_select": ["MP104"]},
        {"ignore": ["MP1"], "extend_select": ["MP104"]},
        {"select": ["MP3"], "extend_select": ["MP101"]},
    ]
    rows = [
        " ".join(f"{key}={','.join(value)}" for key, value in case.items())
        + f": {list_selected(**case) or 'none'}"
        for case in cases
    ]
    assert_expected_inline(
        "\n".join(rows),
        """\
select=MP101: MP101
select=mp2: MP201 MP202 MP203 MP204
select=MP10: MP101 MP102 MP103 MP104 MP105 MP106 MP107 MP108
select=MP101,MP2, MP305 : MP101 MP201 MP202 MP203 MP204 MP305
ignore=MP1,MP3: MP201 MP202 MP203 MP204
select=MP1 ignore=MP10: MP190 MP191 MP192
select=MP101 ignore=MP1: MP101
select=MP1 ignore=MP1: none
ignore=ALL: none
ignore=ALL extend_select=MP104: MP104
ignore=MP1 extend_select=MP104: MP104 MP201 MP202 MP203 MP204 MP301 MP302 MP303 MP304 MP305
select=MP3 extend_select=MP101: MP101 MP301 MP302 MP303 MP304 MP305""",
    )


def test_all_rules_are_selected_by_default() -> None:
    assert list_selected().split() == list(RULES)
    assert list_selected(select=["ALL"]) == list_selected(select=["MP"]) == list_selected()


def test_unknown_selectors_are_refused() -> None:
    said = []
    for word in (
        "MP12",
        "MP9",
        "JAGGED",
        "MP1O1",
        "jagged-reduction",
        "MP212",
        "",
        "MP1,",
        "M",
        "*",
        "E501",
        "x\n" * 99,
    ):
        for option in ("select", "extend_select", "ignore"):
            text = refusal(PolicyError, Selection.of, **{option: [word]})
        said.append(text)
    assert_expected_inline(
        "\n".join(said),
        """\
MP402: no rule has the selector 'MP12'; use a code (MP101), a prefix (MP1) or ALL; similar: MP192, MP102
MP402: no rule has the selector 'MP9'; use a code (MP101), a prefix (MP1) or ALL; similar: MP192, MP191, MP190
MP402: no rule has the selector 'JAGGED'; use a code (MP101), a prefix (MP1) or ALL; similar: MP101, MP102
MP402: no rule has the selector 'MP1O1'; use a code (MP101), a prefix (MP1) or ALL; similar: MP101, MP102, MP103
MP402: no rule has the selector 'jagged-reduction'; use a code (MP101), a prefix (MP1) or ALL; similar: MP101
MP402: no rule has the selector 'MP212'; MP212 is an error, which cannot be ignored; use a code (MP101), a prefix (MP1) or ALL
MP402: no rule has the selector ''; use a code (MP101), a prefix (MP1) or ALL
MP402: no rule has the selector ''; use a code (MP101), a prefix (MP1) or ALL
MP402: no rule has the selector 'M'; use a code (MP101), a prefix (MP1) or ALL
MP402: no rule has the selector '*'; use a code (MP101), a prefix (MP1) or ALL
MP402: no rule has the selector 'E501'; use a code (MP101), a prefix (MP1) or ALL
MP402: no rule has the selector 'x\\nx\\nx\\nx\\nx\\nx\\nx\\nx\\nx\\nx\\nx\\nx\\nx\\nx\\nx\\nx\\nx\\nx\\nx\\nx\\n'; use a code (MP101), a prefix (MP1) or ALL""",
    )


@given(SELECTORS, SELECTORS, SELECTORS)
def test_the_longest_prefix_decides(
    select: list[str], extend_select: list[str], ignore: list[str]
) -> None:
    selection = Selection.of(select, extend_select, ignore)
    chosen = ["" if one == "ALL" else one for one in (select or ["ALL"]) + extend_select]
    against = ["" if one == "ALL" else one for one in ignore]
    for code in RULES:
        verdict = False
        for length in range(len(code) + 1):
            if code[:length] in chosen:
                verdict = True
            if code[:length] in against:
                verdict = False
        assert selection.wants(code) == verdict


def test_selections_compare_by_value() -> None:
    assert Selection.of(["MP1", "MP2"]) == Selection.of(["MP2,MP1"])
    assert Selection.of() == Selection()
    assert not Selection.of(["MP1"]).wants("MP201")
