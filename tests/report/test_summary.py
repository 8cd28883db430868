"""A run in figures: every denominator is there, and they add up."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.model.decision import Reason
from headrace.model.engine import Yielded
from headrace.model.ids import ClassName, ModelName, PoolName, ReplicaName, RequestId
from headrace.model.slo import Indicator, Objective, Outcome, Per, Population, Slo
from headrace.report.groups import EntryResult, Group
from headrace.report.objectives import ObjectiveVerdict, sentence
from headrace.report.run import ReplicaTotals, RunRecord, Victim
from headrace.report.summary import Summary, summarise
from headrace.report.tables import render_summary
from headrace.units import DurationNs, Tokens, ms
from tests.report.making import Pair, lost, refused, run, served


def mixed() -> list[Pair]:
    return [
        served(0, tenant="a", cached=40),
        served(1, tenant="a", prefill_ms=2_500, slo_class="batch"),
        served(2, tenant="b", outcome=Outcome.CLIENT_CANCEL),
        served(3, tenant="b", outcome=Outcome.ERROR, reason=Reason.REPLICA_LOST),
        lost(4, tenant="a"),
        lost(5, tenant="b", replica="r0", outcome=Outcome.ERROR, reason=Reason.UPSTREAM_ERROR),
        refused(6, tenant="a"),
        refused(7, tenant="b", reason=Reason.TOKEN_RATE),
        refused(8, tenant="b", reason=Reason.TOKEN_RATE),
        refused(9, tenant="b", reason=None),
    ]


def test_every_offered_request_has_one_entry_result_and_every_admitted_one_outcome() -> None:
    total = summarise(run(mixed())).total
    assert total.offered == 10
    assert total.entry == {
        EntryResult.ADMITTED: 6,
        EntryResult.DEGRADED: 0,
        EntryResult.DEFERRED: 0,
        EntryResult.REJECTED: 3,
        EntryResult.LEFT_BEFORE: 1,
    }
    assert total.outcomes == {
        Outcome.SUCCESS: 2,
        Outcome.CLIENT_CANCEL: 1,
        Outcome.TIMEOUT: 1,
        Outcome.ERROR: 2,
    }
    assert list(total.rejected_by.items()) == [("token_rate", 2), ("deadline_queue", 1)]
    assert total.ended_by == {"expired": 1, "replica_lost": 1, "upstream_error": 1}
    assert total.missed_by == {"ttft": 1}


def test_deferred_ones_are_an_entry_of_their_own_and_admitted_once_they_were_sent() -> None:
    pairs = mixed()
    for nth, pair in (
        (10, served(10)),
        (11, lost(11, replica="r0")),
        (12, refused(12, reason=None)),
    ):
        offered, row = pair
        pairs.append((offered, replace(row, deferred=True)))
        assert offered.request == nth
    found = summarise(run(pairs))
    total = found.total
    assert total.offered == 13 == sum(total.entry.values())
    assert total.entry[EntryResult.DEFERRED] == 3
    assert total.entry[EntryResult.ADMITTED] == 6
    assert total.entry[EntryResult.LEFT_BEFORE] == 1
    assert (total.admitted, total.waiting, sum(total.outcomes.values())) == (8, 1, 8)
    assert "3 deferred" in render_summary(found)
    assert sum(part.waiting for part in found.by_tenant_class) == 1


def test_whatever_ends_after_admission_stays_in_the_denominator() -> None:
    total = summarise(run(mixed())).total
    assert (total.met, total.admitted) == (1, 6)
    assert total.attained_admitted == 0.166667
    assert total.attained_offered == 0.1
    assert total.success_per_request == 0.2
    assert total.retry_amplification == 1.0


def test_goodput_is_per_second_of_the_span_in_requests_tokens_and_work() -> None:
    total = summarise(run(mixed(), span_s=2.0)).total
    assert total.request_goodput == 0.5
    assert total.token_goodput == 2.0
    assert total.work_goodput == 0.005
    assert total.work_rate == 0.05
    assert total.work_attained == 0.1
    assert total.admitted_work_ns == ms(60)


def test_a_span_of_nothing_has_no_offered_rate() -> None:
    total = summarise(run([served(0)], span_s=0)).total
    assert total.work_rate is None
    assert total.request_goodput == pytest.approx(1 / 0.161, rel=1e-5)  # its own time
    assert summarise(run([lost(0)], span_s=0)).total.request_goodput is None


def test_what_drains_after_the_last_arrival_takes_its_time() -> None:
    burst = [served(n, at_s=n / 10, queue_ms=100 * n, work_ms=1_000) for n in range(11)]
    told = summarise(run(burst, span_s=1.0))
    assert told.span_ns == ms(1_000)
    assert told.served_ns == ms(2_000 + 151)  # the last came at 1 s and waited another
    assert told.total.work_rate == 11.0
    assert told.total.work_goodput == pytest.approx(11 / 2.151, rel=1e-5)
    assert told.total.work_attained == 1.0
    parts = [group.work_goodput or 0.0 for group in told.by_tenant]
    assert sum(parts) == pytest.approx(told.total.work_goodput, rel=1e-5)


def test_what_did_not_meet_its_bounds_prolongs_nothing() -> None:
    pairs = [served(0), served(1, prefill_ms=60_000), lost(2, after_ms=90_000)]
    assert summarise(run(pairs, span_s=1.0)).served_ns == ms(1_000)


def test_what_was_cut_off_is_told() -> None:
    told = summarise(replace(run([lost(0, reason=None)]), cut_off=1))
    assert told.cut_off == 1
    assert "1 request cut off at the end of the run" in render_summary(told)
    assert "cut off" not in render_summary(summarise(run(mixed())))


def test_a_run_without_requests_is_a_run() -> None:
    summary = summarise(run([]))
    assert summary.total.offered == 0
    assert summary.total.attained_offered is None
    assert summary.deciles == ()
    assert summary.little == ()


def test_queue_times_count_those_who_never_left_the_queue() -> None:
    told = summarise(run(mixed())).total.latency
    assert told.queue is not None
    assert told.queue.count == 5  # one went out and was lost before its first token
    assert told.queue.max_ns == ms(3_000)
    assert told.ttft is not None
    assert told.ttft.count == 4
    assert told.e2e is not None
    assert told.e2e.count == 2
    assert told.gaps is not None
    assert told.gaps.count == 12


def test_cached_tokens_stand_beside_the_input_they_are_a_share_of() -> None:
    total = summarise(run(mixed())).total
    assert (total.cached_tokens, total.usage_input_tokens) == (40, 400)


def test_a_request_that_never_ended_is_a_bug() -> None:
    whole = run(mixed())
    with pytest.raises(AssertionError, match="10 offered, 9 ended"):
        summarise(replace(whole, rows=whole.rows[:-1]))
    with pytest.raises(AssertionError, match="ended twice"):
        summarise(replace(whole, rows=[*whole.rows[:-1], whole.rows[0]]))
    stranger = replace(whole.rows[-1], request=RequestId(99))
    with pytest.raises(AssertionError, match="never ended"):
        summarise(replace(whole, rows=[*whole.rows[:-1], stranger]))


FATES = st.sampled_from(["met", "late", "cancel", "expired", "lost", "refused", "left"])


def pair(number: int, fate: str, tenant: str, slo_class: str, tokens: int) -> Pair:
    if fate in {"met", "late", "cancel"}:
        outcome = Outcome.CLIENT_CANCEL if fate == "cancel" else Outcome.SUCCESS
        prefill = 3_000 if fate == "late" else 50
        return served(
            number,
            outcome=outcome,
            prefill_ms=prefill,
            tenant=tenant,
            slo_class=slo_class,
            input_tokens=tokens,
            gaps_ms=[20] * (number % 3),
        )
    if fate in {"expired", "lost"}:
        return lost(number, tenant=tenant, slo_class=slo_class, input_tokens=tokens)
    reason = Reason.DEADLINE_QUEUE if fate == "refused" else None
    return refused(number, reason=reason, tenant=tenant, slo_class=slo_class, input_tokens=tokens)


RUNS = st.lists(
    st.tuples(FATES, st.sampled_from("abc"), st.sampled_from(["chat", "batch"]), st.integers(1, 99))
).map(lambda told: run([pair(number, *one) for number, one in enumerate(told)]))


def sums(group: Group) -> tuple[int, ...]:
    return (
        group.offered,
        group.input_tokens,
        group.output_tokens,
        group.work_ns,
        group.admitted,
        group.rejected,
        group.met,
        group.met_work_ns,
        *group.entry.values(),
        *group.outcomes.values(),
    )


@given(RUNS.map(summarise))
def test_entry_results_sum_to_offered_and_parts_sum_to_the_whole(summary: Summary) -> None:
    total = summary.total
    assert sum(total.entry.values()) == total.offered
    assert sum(total.outcomes.values()) == total.admitted
    assert sum(total.rejected_by.values()) == total.rejected
    assert total.met <= total.outcomes[Outcome.SUCCESS] <= total.admitted <= total.offered
    assert total.met_work_ns <= total.admitted_work_ns <= total.work_ns
    for parts in (summary.by_class, summary.by_tenant, summary.by_tenant_class):
        told = [sums(part) for part in parts]
        assert [sum(column) for column in zip(*told, strict=True)] == list(sums(total))[
            : len(told[0]) if told else 0
        ]
    assert sum(one.offered for one in summary.deciles) == total.offered
    assert sum(one.rejected for one in summary.deciles) == total.rejected
    for one in summary.little:
        assert one.mean_inside == pytest.approx(one.rate * one.mean_time_s, abs=1e-4)


@given(RUNS)
def test_a_summary_survives_json_and_its_bytes_do_not_depend_on_the_order_of_rows(
    told: RunRecord,
) -> None:
    content = msgspec.json.encode(summarise(told))
    assert msgspec.json.encode(msgspec.json.decode(content, type=Summary)) == content
    backwards = replace(told, rows=list(reversed(told.rows)))
    assert msgspec.json.encode(summarise(backwards)) == content


def test_deciles_are_those_of_the_offered_population() -> None:
    pairs = [served(i, input_tokens=i + 1) for i in range(90)]
    pairs += [refused(i, input_tokens=i + 1) for i in range(90, 100)]
    told = summarise(run(pairs)).deciles
    assert [one.input_tokens_max for one in told] == list(range(10, 101, 10))
    assert [one.rejected for one in told] == [0] * 9 + [10]
    assert told[9].rejected_share == 1.0
    assert told[0].met == 10


def replica(name: str, busy_ms: int) -> ReplicaTotals:
    return ReplicaTotals(
        name=ReplicaName(name),
        pool=PoolName("p"),
        up_ns=ms(100),
        busy_ns=ms(busy_ms),
        steps=3,
        prefill_tokens=Tokens(1),
        output_tokens=Tokens(2),
        preemptions=4,
        prefix_tokens_queried=Tokens(100),
        prefix_tokens_hit=Tokens(25),
        yielded=Yielded(
            swapped=1,
            recomputed=3,
            pauses=4,
            paused_ns=ms(busy_ms),
            longest_pause_ns=ms(busy_ms),
            tokens_recomputed=Tokens(7),
        ),
    )


def test_replicas_are_shown_singly_and_together() -> None:
    told = summarise(run(mixed(), replicas=[replica("r1", 50), replica("r0", 100)])).engines
    assert [(one.name, one.busy_share) for one in told.replicas] == [("r0", 1.0), ("r1", 0.5)]
    assert told.busy_share == 0.75
    assert told.preemptions == 8
    assert told.prefix_hit_share == 0.25


def test_requests_that_gave_way_are_judged_by_their_bounds() -> None:
    pairs = [served(0), refused(1), served(2), served(3)]
    victims = [Victim(request=RequestId(n), times=n, paused_ns=ms(n)) for n in (1, 2)]
    replicas = [replica("r1", 50), replica("r0", 100)]
    told = summarise(replace(run(pairs, replicas=replicas), victims=victims)).engines
    assert (told.victims, told.victims_met, told.victims_met_share) == (2, 1, 0.5)
    assert (told.yielded.swapped, told.yielded.recomputed, told.yielded.pauses) == (2, 6, 8)
    assert told.yielded.paused_ns == ms(150)
    assert told.yielded.longest_pause_ns == ms(100)
    assert told.yielded.tokens_recomputed == 14
    assert summarise(run(pairs)).engines.victims_met_share is None


GAP = Objective(indicator=Indicator.GAP, threshold_ms=80, per=Per.GAP)
TTFT = Objective(indicator=Indicator.TTFT, threshold_ms=2_000)


def slo(**population: str) -> Slo:
    chosen = msgspec.convert(population, Population)
    return Slo(name="s", objectives=(TTFT, GAP), population=chosen)


@pytest.mark.parametrize(
    ("one", "verdicts", "counted"),
    [
        (slo(), ("missed", "holds"), (6, 12)),
        (slo(tenant="a", slo_class="batch"), ("missed", "holds"), (1, 3)),
        (slo(tenant="nobody"), ("no_data", "no_data"), (0, 0)),
        (slo(model="llama"), ("missed", "holds"), (6, 12)),
        (slo(region="north"), ("unknown", "unknown"), (6, 12)),
        (slo(model_revision="2"), ("unknown", "unknown"), (6, 12)),
    ],
)
def test_an_objective_is_about_its_population(
    one: Slo, verdicts: tuple[str, str], counted: tuple[int, int]
) -> None:
    told = summarise(run(mixed(), slos=(one,))).objectives
    assert tuple(result.verdict for result in told) == tuple(map(ObjectiveVerdict, verdicts))
    assert tuple(result.over_admitted.counted for result in told) == counted
    assert told[1].over_offered is None


def test_objectives_are_spoken() -> None:
    assert sentence(GAP) == "99 % of gaps <= 80 ms"
    assert sentence(TTFT) == "99 % of requests: TTFT <= 2000 ms"


def test_records_without_a_dispatch_time_are_left_out_and_counted() -> None:
    whole = run([served(0), lost(1, replica="r0")])
    system, queue = summarise(whole).little
    assert (system.requests, system.unknown) == (2, 0)
    assert (queue.requests, queue.unknown) == (1, 1)


def test_names_stand_for_what_they_are() -> None:
    row = served(0)[1]
    assert (row.model, row.slo_class) == (ModelName("llama"), ClassName("interactive"))
    assert DurationNs(row.ended_at - row.entry.arrived_at) == ms(161)
