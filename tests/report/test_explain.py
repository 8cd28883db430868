"""Stories in words and figures: whose turn it was, what is missing, and journals in many segments."""

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.model.budget import Per, Unit, WindowSpec
from headrace.model.decision import Reason
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.effect import Effect
from headrace.model.event import Event
from headrace.model.evidence import EntryEvidence
from headrace.model.ids import DecisionId, RequestId
from headrace.model.ladder import LadderSpec
from headrace.model.price import PriceSpec
from headrace.plane.journal import Gap, Recorder, frame_bytes
from headrace.policy.admission.gates import Gates, Mode, Modes
from headrace.policy.ordering.orders import (
    EarliestDeadline,
    Fifo,
    LeastSlack,
    Niyama,
    Ordering,
    Score,
    ShortestFirst,
    TenantFirst,
    VtcOrder,
)
from headrace.report.explain import explained, sentences, wait_rows
from headrace.report.rows import Row, figures
from headrace.report.story import Story, Untold, of_journal, request_of
from headrace.report.tables import render
from headrace.report.turn import turn_rows
from headrace.report.words import NONE
from headrace.units import InstantNs, Tokens
from tests.plane.scenes import H100, MS, Driver, S, config, patient, small
from tests.policy.evidence import entry, lengths

ONE_AT_A_TIME = (PoolSpec(name="p", model="m", profile=small(8_192, running=1)),)


ORDERS: dict[str, Ordering] = {
    type(order).__name__: order
    for order in (
        Fifo(),
        ShortestFirst(),
        EarliestDeadline(),
        LeastSlack(),
        Niyama(),
        VtcOrder(),
        TenantFirst(),
        Score(),
    )
}


class Recorded(Driver):
    """A driver whose plane writes a journal of small segments."""

    def __init__(self, settings: Any, segment_bytes: int = 10**9) -> None:
        self.segments: list[bytearray] = []
        self.recorder: Recorder | None = None
        self.limit = segment_bytes
        super().__init__(settings)

    def sink(self, frame: bytes, opens: bool) -> None:
        if opens:
            self.segments.append(bytearray())
        self.segments[-1] += frame

    def tell(self, event: Event) -> list[Effect]:
        if self.recorder is None:
            self.recorder = Recorder(self.plane, self.sink, segment_bytes=self.limit)
        effects = self.recorder.handle(event, now=self.now)
        self.seen += effects
        return effects

    def read(self) -> Iterator[bytes]:
        yield from (bytes(segment) for segment in self.segments)

    def story(self, request: int) -> Story:
        return of_journal(self.read, RequestId(request))


def test_a_lent_turn_is_told_as_such() -> None:
    made = Recorded(config(pools=ONE_AT_A_TIME))
    start = made.arrive("a", 100)
    made.arrive("b", 100, slo_class="batch")
    lucky = made.arrive("a", 100)
    made.first(made.live(start).attempt)
    made.tick((made.live(start).attempt, 1_000))
    made.end(made.live(start).attempt)
    story = made.story(lucky)
    assert "a tenant further under its share can wait, and lent its turn" in sentences(story)[1]
    rows = {row.name: row for row in turn_rows(story.sent[0])}
    assert (rows["lent"].value, rows["patient"].value, rows["relegated"].value) == (
        "yes",
        "no",
        "no",
    )
    assert rows["class interactive"].meaning.endswith("weight 4")
    assert rows["tenant a"].value == rows["tenant a"].meaning.split(": ")[1].split(";")[0]
    assert story.notes == [
        "its end is not told: the journal, or the process that wrote it, ended first"
    ]


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (Fifo(), "it was first in line"),
        (ShortestFirst(), "it was first in line"),
        (Score(), "it had the best score of those that a replica was open for"),
        (VtcOrder(), "nobody who competes is further under its share"),
    ],
)
def test_why_it_was_its_turn_is_told_as_its_order_has_it(order: Ordering, why: str) -> None:
    made = Recorded(config(pools=ONE_AT_A_TIME, ordering=order))
    start = made.arrive("a", 100)
    first = made.arrive("b", 100)
    made.arrive("c", 100)
    made.now = InstantNs(made.now + MS)
    made.first(made.live(start).attempt)
    made.end(made.live(start).attempt)
    assert why in sentences(made.story(first))[1]


def test_a_story_over_many_segments_is_replayed_from_its_arrival() -> None:
    made = Recorded(config(pools=ONE_AT_A_TIME, classes=(patient(),)), segment_bytes=1)
    requests = [made.arrive("a", 100) for _ in range(4)]
    for _ in range(4):
        made.now += S  # type: ignore[assignment]
        made.serve(made.sent()[-1].request)
    for nth, request in enumerate(requests):
        story = made.story(request)
        assert story.over
        assert story.notes == []
        assert len(story.sent) == 1
        assert story.sent[0].dispatch == made.sent()[nth]
        assert request_of(made.read, story.sent[0].record.decision_id) == request
    with pytest.raises(Untold, match="its last is 8"):
        request_of(made.read, DecisionId(9))


def test_records_lost_in_a_gap_are_told_as_missing() -> None:
    made = Recorded(config(pools=ONE_AT_A_TIME, classes=(patient(),)), segment_bytes=1)
    first = made.arrive("a", 100)
    kept = len(made.segments)
    made.serve(first)
    gone = frame_bytes(Gap(records=2))
    last = gone + bytes(made.segments[-1])
    segments = [*(bytes(one) for one in made.segments[:kept]), last]
    story = of_journal(lambda: iter(segments), first)
    assert not story.over
    assert story.notes == ["records are missing in the journal: what happened then is not told"]


def test_strangers_and_what_ends_early_are_told() -> None:
    limited = TenantSpec(name="a", tpm_limit=2_000)
    made = Recorded(config(tenants=(limited,)))
    stranger, big = made.arrive("nobody", 100), made.arrive("a", 1_900)
    told = explained(made.story(stranger))
    assert "refused by the contract gate: tenant unknown; repeating does not help" in told
    assert "the other gates were not asked" in told
    assert "Its slack" not in told
    told = explained(made.story(big))
    assert f"refused by the budget gate: {Reason.TOKEN_LIMIT.replace('_', ' ')}" in told
    lost = made.arrive("a", 100)
    made.down("r0", 1)
    assert "It ended with error at r0: replica lost." in sentences(made.story(lost))


def test_what_a_gate_only_recorded_is_told_beside_what_was_decided() -> None:
    modes = Modes(budget=Mode.AUDIT, deadline=Mode.AUDIT)
    limited = TenantSpec(name="a", tpm_limit=2_000)
    made = Recorded(config(tenants=(limited,), admission=Gates(modes=modes)))
    told = explained(made.story(made.arrive("a", 1_900, ttft_ns=1)))
    assert (
        "Only recorded: the budget gate (token limit) and the deadline gate (deadline impossible) "
        "would have refused it."
    ) in told
    assert "token limit, recorded" in told
    refused = explained(made.story(made.arrive("a", 200_000)))
    assert "refused by the contract gate" in refused
    assert "recorded" not in refused


def test_what_less_a_request_is_given_and_why_is_told() -> None:
    ladder = LadderSpec(level=3, model="small", keep=1)
    made = Recorded(
        config(
            models=(ModelSpec(name="m"), ModelSpec(name="small")),
            pools=(*config().pools, PoolSpec(name="q", model="small", profile=H100)),
            tenants=(TenantSpec(name="a", degrade=3), TenantSpec(name="b")),
            classes=(ClassSpec(name="c", ttft_ms=500.0, degrade=ladder),),
        )
    )
    made.up("r0")

    def asked(*optional: int, **more: Any) -> str:
        parts = tuple(map(Tokens, optional))
        request = made.arrive("a", 7_000, optional=parts, max_output=Tokens(1_000), **more)
        return " ".join(explained(made.story(request)).split())

    assert "ladder" not in asked().partition("Gates")[0]
    told = asked(2_000, 3_000)
    assert "at level 2 of its ladder with 4,000 tokens of its prompt, at most 500 of answer" in told
    assert "with more it would have been refused: deadline queue" in told
    assert "0 7,000 480 1,000" in told  # the form that was refused
    assert "its tenant agreed to level 3, its caller to 3" in told
    assert "comes in at level 2" in told
    told = asked(lowest=1)
    assert "refused by the deadline gate: deadline queue, at level 1 of its ladder too;" in told
    made.up("small-0", "q")
    told = asked(10)
    assert "at level 3 of its ladder with its whole prompt" in told
    assert ", by small: " in told
    for _ in range(3):
        asked(lowest=1)
    for request in list(made.plane.state.live):
        made.serve(request)
    told = asked()
    assert "its class is at that level, since more comes in than can be served as asked" in told


def test_budgets_are_told_in_their_own_unit() -> None:
    budgets = (
        WindowSpec(unit=Unit.USD, per=Per.DAY, hard=0.0125, soft=0.001),
        WindowSpec(unit=Unit.REQUESTS, per=Per.HOUR, soft=9),
    )
    models = (ModelSpec(name="m", price=PriceSpec(input=5.0, output=5.0)),)
    limited = TenantSpec(name="a", budgets=budgets)
    made = Recorded(config(models=models, tenants=(limited,)))
    told = explained(made.story(made.arrive("a", 1_000, max_output=1_000)))
    assert "It goes beyond the soft limit of usd/day." in told
    told = explained(made.story(made.arrive("a", 1_000, max_output=1_000)))
    assert "refused by the budget gate: budget spent; repeating can help after" in told
    assert "0.01" in told
    assert "usd/day" in told


def test_figures_are_a_table_of_rows() -> None:
    rows = [Row("minimum share", "0.3", "", "reserved"), Row("boost", "12.0", "ms")]
    assert render(figures("Class", rows)).splitlines() == [
        "Class",
        "                 value",
        "  minimum share    0.3      reserved",
        "  boost           12.0  ms",
    ]


@pytest.mark.parametrize("ordering", [*ORDERS.values()], ids=ORDERS)
def test_every_order_tells_what_it_sorts_by(ordering: Ordering) -> None:
    made = Recorded(config(pools=ONE_AT_A_TIME, ordering=ordering))
    made.arrive("a", 100)
    second = made.arrive("b", 100)
    made.end(made.live(1).attempt)
    story = made.story(second)
    rows = {row.name: row for row in turn_rows(story.sent[0])}
    (key,) = (row for name, row in rows.items() if name.startswith("key of "))
    assert key.value != NONE
    assert key.meaning


def test_a_tenants_long_prompts_are_told_where_any_was_refused() -> None:
    assert "longest tenth let in" not in told(entry())
    facts = lengths(long_admitted=40)
    assert " ".join(told(entry(lengths=facts)).split()) == "longest tenth let in 40 % of all: 80 %"
    mine = told(entry(lengths=lengths(is_long=True)))
    assert mine.endswith("; this is one of it")


def told(evidence: EntryEvidence) -> str:
    return " ".join(" ".join(row) for row in wait_rows(evidence, None) if "tenth" in row.name)
