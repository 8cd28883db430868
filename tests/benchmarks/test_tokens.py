"""How runs of one engine are judged, and that the comparison offers everybody the same."""

from benchmarks.served import Served, serve
from benchmarks.tokens import CHUNK, arxiv, percentile, ratios, traces
from headrace.policy.batching import PacedPrefill, PrefillFirst
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_MS, DurationNs, InstantNs, Tokens

GAP = DurationNs(80 * NS_PER_MS)
TTFT = DurationNs(1_000 * NS_PER_MS)


def row(at_ms: int, given: int, made: int) -> TraceRow:
    """Return a request."""
    return TraceRow(
        at=InstantNs(at_ms * NS_PER_MS),
        input_tokens=Tokens(given),
        output_tokens=Tokens(made),
    )


ROWS = [row(0, 100, 40), row(200, 8_000, 1), row(210, 100, 5)]


def test_a_run_tells_what_each_request_waited_for() -> None:
    whole = serve(PrefillFirst(), ROWS, ttft_ns=TTFT, gap_ns=GAP)
    assert [len(gaps) for gaps in whole.gaps] == [39, 0, 4]
    assert whole.over() == 1, "it stood still for both prompts at once"
    assert max(whole.pauses) == max(whole.every_gap()) > 400 * NS_PER_MS
    # One late gap of 39 is more than one in a hundred; an answer of one token has no gap.
    assert whole.met() == [False, True, True]
    assert whole.met_requests() == 2 / 3
    assert 0 < whole.met_work() < 1

    paced = serve(PacedPrefill(), ROWS, ttft_ns=TTFT, gap_ns=GAP)
    assert paced.over() == 0
    assert paced.met() == [True] * 3
    assert paced.met_work() == 1


def test_waits_count_from_arrival() -> None:
    run = serve(CHUNK, ROWS, ttft_ns=TTFT, gap_ns=GAP)
    assert run.waits[0] < run.waits[2]
    assert run.waits[1] == run.waits[2] + 10 * NS_PER_MS, (
        "the last of its chunks took the short one along"
    )
    late = serve(CHUNK, ROWS, ttft_ns=DurationNs(run.waits[1] - 1), gap_ns=GAP)
    assert late.waits == run.waits
    assert late.met()[1] is False


def test_every_policy_gets_the_same_trace() -> None:
    offered = traces(1.2, arxiv())
    assert offered(3) == offered(3) != offered(4)


def test_figures_are_compared_seed_by_seed() -> None:
    def ran(wait: int) -> Served:
        return Served(
            rows=ROWS[:1], ttft_ns=TTFT, gap_ns=GAP, waits=[wait], gaps=[[1]], pauses=[1], work=[1]
        )

    runs = {"paced": [ran(2), ran(30)], "other": [ran(4), ran(10)]}
    assert ratios(runs, "other", lambda run: run.waits[0])["mean"] == (0.5 + 3) / 2
    assert percentile([5, 1, 4, 2, 3], 50) == 3
    assert percentile(range(1, 101), 99) == 99
