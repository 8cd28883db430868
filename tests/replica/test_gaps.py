"""The log of gaps tells each stream what a meter beside it would have counted."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.model.meter import Meter
from headrace.replica.gaps import Account, GapLog
from headrace.units import DurationNs, InstantNs, ps_to_ns

# (alpha, beta, steps); the growth of real engines, of hardly any, and of none.
SEGMENTS = st.lists(
    st.tuples(
        st.one_of(st.integers(1_000_000, 60_000_000_000), st.sampled_from([2_000_000_000, 10**10])),
        st.one_of(
            st.integers(0, 3), st.integers(0, 3_000), st.integers(1_000, 50_000_000), st.just(1_000)
        ),
        st.integers(1, 60),
    ),
    min_size=1,
    max_size=8,
)


def ticks(start: int, segments: list[tuple[int, int, int]]) -> list[int]:
    """Return the boundaries of segments in ps, the first one included."""
    out = [start]
    for alpha, beta, steps in segments:
        for nth in range(steps):
            out.append(out[-1] + alpha + beta * nth)
    return out


def note(log: GapLog, start: int, segments: list[tuple[int, int, int]]) -> int:
    """Give segments to a log; return where they end in ps."""
    for alpha, beta, steps in segments:
        log.note(start, alpha, beta, steps)
        start = ticks(start, [(alpha, beta, steps)])[-1]
    return start


@given(
    start=st.integers(0, 10**13),
    before=SEGMENTS,
    during=SEGMENTS,
    bound=st.one_of(st.integers(0, 70_000_000), st.sampled_from([2_000_000, 10_000_000])),
)
def test_account_equals_meter(
    start: int,
    before: list[tuple[int, int, int]],
    during: list[tuple[int, int, int]],
    bound: int,
) -> None:
    log, other, account = GapLog(), Account(1_000), Account(bound)
    log.open(other, InstantNs(0))
    joined = note(log, start, before)
    log.open(account, InstantNs(0))
    note(log, joined, during)
    log.close(account, InstantNs(0))
    meter = Meter(DurationNs(bound))
    for at in ticks(joined, during):
        meter.note(InstantNs(ps_to_ns(at)))
    timing = meter.timing()
    assert tuple(account.counts) == timing.gap_counts
    assert account.over == timing.gaps_over
    assert account.max_gap == timing.max_gap_ns


@given(
    start=st.integers(0, 10**13),
    parts=st.lists(st.tuples(SEGMENTS, st.booleans()), min_size=1, max_size=6),
    joins=st.integers(0, 6),
    leaves=st.integers(0, 6),
    bound=st.one_of(st.integers(0, 70_000_000), st.sampled_from([2_000_000, 10_000_000])),
)
def test_account_equals_meter_where_decodes_stand_still(
    start: int,
    parts: list[tuple[list[tuple[int, int, int]], bool]],
    joins: int,
    leaves: int,
    bound: int,
) -> None:
    log, account, meter = GapLog(), Account(bound), Meter(DurationNs(bound))
    log.open(Account(1_000), InstantNs(ps_to_ns(start)))
    last, joins = None, joins % len(parts)
    for nth, (segments, stands) in enumerate(parts):
        now = InstantNs(ps_to_ns(start))
        if nth == joins:
            log.open(account, now)
            meter.note(now)
        if joins < nth == leaves:
            last = log.close(account, now)
        if stands:
            log.stand(now)
            start = ticks(start, segments)[-1]
            continue
        if joins <= nth and last is None:
            for at in ticks(start, segments)[1:]:
                meter.note(InstantNs(ps_to_ns(at)))
        start = note(log, start, segments)
    if last is None:
        last = log.close(account, InstantNs(ps_to_ns(start)))
    timing = meter.timing()
    assert (tuple(account.counts), account.over) == (timing.gap_counts, timing.gaps_over)
    assert account.max_gap == timing.max_gap_ns
    assert last == timing.last_at


def test_pause_counts_as_one_gap_of_the_stream_alone() -> None:
    log, paused, other = GapLog(), Account(10_000_000), Account(10_000_000)
    log.open(paused, InstantNs(0))
    log.open(other, InstantNs(0))
    log.note(0, 5_000_000_000, 0, 2)
    log.close(paused, InstantNs(0))
    paused.add(700_000_000)
    log.note(10_000_000_000, 5_000_000_000, 0, 1)
    log.open(paused, InstantNs(0))
    log.note(15_000_000_000, 5_000_000_000, 0, 1)
    log.close(paused, InstantNs(0))
    log.close(other, InstantNs(0))
    assert (sum(paused.counts), paused.max_gap, paused.over) == (4, 700_000_000, 1)
    assert (sum(other.counts), other.max_gap, other.over) == (4, 5_000_000, 0)


def test_stream_that_leaves_where_it_joined_has_no_gap() -> None:
    log, account = GapLog(), Account(0)
    log.note(0, 5_000_000_000, 0, 1)
    log.open(account, InstantNs(0))
    log.close(account, InstantNs(0))
    assert (sum(account.counts), account.max_gap, account.over) == (0, 0, 0)
    log.clear()
    log.open(account, InstantNs(0))
    log.note(10**10, 6_000_000_000, 0, 1)
    log.close(account, InstantNs(0))
    assert (sum(account.counts), account.max_gap, account.over) == (1, 6_000_000, 1)
