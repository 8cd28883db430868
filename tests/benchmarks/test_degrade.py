"""The benchmark of lesser forms: what counts as served and intact, and how a course is read."""

import pytest
from msgspec.structs import replace

from benchmarks import degrade
from benchmarks.mixes import Load
from headrace.model.engine import Usage
from headrace.model.ids import DecisionId
from headrace.trace.mix import Fixed, Poisson
from headrace.units import Tokens
from tests.plane.scenes import Driver, S, usage
from tests.plane.test_degrade import asked, ladder, overload

FEW = Load(lengths=Fixed(2_000, 100), warm_s=5.0, span_s=15.0)


def test_consent_brings_more_at_the_same_trace() -> None:
    more, less = degrade.beside(FEW, 4.0, 0)
    assert more.offered == less.offered > 50
    assert more.served > less.served
    assert less.by_level[1] == less.by_level[2] == 0
    assert sum(more.by_level.values()) == pytest.approx(more.served)
    assert more.intact == less.intact == 1
    assert more.met <= more.served


def test_a_prompt_is_intact_where_the_most_useful_parts_and_all_that_is_fixed_are_there() -> None:
    (row, *_) = degrade.offered(FEW, Poisson(1.0), 20.0, 0)
    assert row.optional == (200,) * 4
    made = Driver(ladder())
    request = asked(made)
    made.serve(request)
    (ended,) = made.rows()

    def sent(tokens: int) -> bool:
        told: Usage = usage(tokens, 1)
        return degrade.is_intact(row, replace(ended, usage=told))

    assert [sent(tokens) for tokens in (2_000, 1_800, 1_200, 1_199, 1_900)] == [
        *(True, True, True, False, False)
    ]


def test_a_course_is_read_off_the_decisions() -> None:
    made = Driver(ladder())
    asked(made, tokens=100, optional=())
    made.wait(S)
    overload(made, 10)
    made.wait(60 * S)
    asked(made, tokens=100, optional=())
    seen = degrade.Levels()
    for record in made.entries():
        seen(record)
    course = seen.course(1.0, 11.0, 0.5)
    assert course.changes >= 2
    assert course.down_s is not None
    assert 0 <= course.down_s < 5
    assert course.back_s is not None
    assert 55 < course.back_s <= 60.5
    assert course.served == 0.5
    first = replace(made.entries()[0], decision_id=DecisionId(9))
    calm = degrade.Levels()
    calm(first)
    assert calm.course(0.0, 1.0, 1.0).down_s is None


def test_who_never_comes_back_has_no_time_and_holds_no_claim() -> None:
    never = degrade.Course(down_s=1.0, back_s=None, changes=1, served=1.0)
    one = degrade.beside(FEW, 2.0, 0)
    claims = {each.claim: each.holds for each in degrade.claimed([one], [never])}
    assert claims["degraded: seconds until all is as asked again, worst"] is False
    assert claims["degraded: protected parts intact"] is True


def test_tokens_kept_are_whole() -> None:
    rows = degrade.offered(FEW, Poisson(2.0), 20.0, 1)
    assert all(sum(row.optional) <= Tokens(row.input_tokens * 2 // 5) for row in rows)
