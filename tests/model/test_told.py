"""What a gateway tells an engine of a request comes back as it was, and nothing else comes through."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.ids import ClassName, TenantId
from headrace.model.paths import Level, Link, path
from headrace.model.told import PREFIX, Told, heard
from headrace.units import NS_PER_MS, DurationNs

NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=64)
NUMBERS = st.integers(0, 2**63 - 1)


@st.composite
def tolds(draw: st.DrawFn) -> Told:
    """Draw what may be told; whole milliseconds, since those travel."""
    levels = sorted({*draw(st.sets(st.sampled_from(Level))), Level.TENANT})
    way = path(*(Link(one, draw(NAMES), draw(st.integers(1, 1_000))) for one in levels))
    return Told(
        tenant=TenantId(draw(NAMES)),
        slo_class=ClassName(draw(NAMES)),
        way=way,
        counters=tuple(draw(NUMBERS) for _ in levels),
        left_ns=DurationNs(draw(st.integers(-(10**9), 10**9)) * NS_PER_MS),
        gap_ns=DurationNs(draw(st.integers(0, 10**7)) * NS_PER_MS),
        relegated=draw(st.booleans()),
    )


@given(tolds())
def test_what_is_told_is_heard(told: Told) -> None:
    scalars = told.scalars()
    assert all(name.startswith(PREFIX) for name in scalars)
    assert all(isinstance(value, str | int) for value in scalars.values())
    assert heard({"theirs": [1, 2], **scalars}) == told


@pytest.mark.parametrize("scalars", [None, {}, {"theirs": 1}, {"headrace_tenant": "t"}])
def test_who_was_told_nothing_hears_nothing(scalars: dict[str, Any] | None) -> None:
    assert heard(scalars) is None


WHOLE: dict[str, Any] = {
    "headrace_tenant": "t",
    "headrace_class": "c",
    "headrace_way": '[[1,"c",4,7],[3,"t",1,9]]',
    "headrace_left_ms": 1_000,
    "headrace_gap_ms": 80,
    "headrace_relegated": 0,
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"headrace_tenant": 5},
        {"headrace_class": None},
        {"headrace_way": [1]},
        {"headrace_way": "secret"},
        {"headrace_way": "[]"},
        {"headrace_way": '[[3,"t",1,9],[1,"c",4,7]]'},  # up the tree
        {"headrace_way": '[[3,"t",1,9],[3,"u",1,9]]'},  # twice at one level
        {"headrace_way": '[[9,"t",1,9]]'},
        {"headrace_way": '[[0,"l",1,9]]'},  # no tenant
        {"headrace_way": '[[1,"c",4,7],[4,"u",1,9]]'},
        {"headrace_way": '[[3,"t\\n",1,9]]'},
        {"headrace_tenant": "t\n"},
        {"headrace_tenant": "\x9b2J"},
        {"headrace_class": "\ud800"},
        {"headrace_way": '[[3,"t",0,9]]'},
        {"headrace_way": '[[3,"t",1,-9]]'},
        {"headrace_way": f'[[3,"{"t" * 5_000}",1,9]]'},
        {"headrace_way": '[[3,"t\\u001f4u",1,9]]'},  # two nodes in one name
        {"headrace_left_ms": 1.5},
        {"headrace_left_ms": 10**15},
        {"headrace_gap_ms": -1},
        {"headrace_relegated": 2},
    ],
)
def test_what_cannot_be_read_is_refused_without_being_repeated(wrong: dict[str, Any]) -> None:
    assert heard(WHOLE) is not None
    with pytest.raises(ValueError, match=r".") as refused:
        heard(WHOLE | wrong)
    assert "secret" not in str(refused.value)


@given(st.dictionaries(st.sampled_from(list(WHOLE)), st.none() | st.integers() | st.text()))
def test_nothing_but_a_value_error_comes_of_rubbish(rubbish: dict[str, Any]) -> None:
    try:
        heard(rubbish)
    except (ValueError, msgspec.ValidationError):
        return
