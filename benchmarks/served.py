"""One engine, driven step by step: what every request waited for, to the ns.

Without a gateway, for comparing what happens inside an engine. Not fast: jumps are not taken, so that
each gap is seen as it comes.
"""

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from headrace.model.ids import AttemptId, Incarnation, ReplicaName, TenantId
from headrace.model.profile import Profile
from headrace.policy.batching.knobs import BatchingPolicy
from headrace.replica.core import Replica
from headrace.replica.job import FirstTokenMade, Job
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_S, PS_PER_NS, DurationNs, InstantNs, later

NOISE_PPM = 20_000
"""Step times vary by 2 %, as one engine's do from run to run."""


class Served(Struct, frozen=True, kw_only=True):
    """What a trace came to on one engine. Durations in ns."""

    rows: Sequence[TraceRow]
    ttft_ns: DurationNs
    gap_ns: DurationNs
    """The bounds of every request."""
    waits: list[int]
    """To the first token, by row."""
    gaps: list[list[int]]
    """Between the tokens of each answer, by row."""
    steps: list[int]
    late_steps: int
    """Steps that computed a prompt beside decodes and took longer than a gap may be."""
    work: list[int]
    """Predicted GPU time of each row, in ns."""

    def every_gap(self) -> list[int]:
        """Return the gaps of all answers."""
        return [gap for gaps in self.gaps for gap in gaps]

    def met(self) -> list[bool]:
        """Say of each row whether its first token and 99 % of its gaps came in time."""
        return [
            wait <= self.ttft_ns and 100 * sum(gap > self.gap_ns for gap in gaps) <= len(gaps)
            for wait, gaps in zip(self.waits, self.gaps, strict=True)
        ]

    def attainment(self) -> float:
        """Return met over offered, by requests."""
        return sum(self.met()) / len(self.rows)

    def met_work(self) -> float:
        """Return met over offered, by work."""
        met = self.met()
        done = sum(work for work, well in zip(self.work, met, strict=True) if well)
        return done / sum(self.work)


def serve(
    profile: Profile,
    batching: BatchingPolicy,
    rows: Sequence[TraceRow],
    *,
    ttft_ns: DurationNs,
    gap_ns: DurationNs,
    seed: int = 0,
) -> Served:
    """Run a trace to its end; the pool must be large enough that nobody is refused."""
    return _Run(profile, batching, rows, ttft_ns, gap_ns, seed).served()


class _Run:
    def __init__(
        self,
        profile: Profile,
        batching: BatchingPolicy,
        rows: Sequence[TraceRow],
        ttft_ns: DurationNs,
        gap_ns: DurationNs,
        seed: int,
    ) -> None:
        self._replica = Replica(
            ReplicaName("r"),
            Incarnation(1),
            profile,
            batching,
            noise_seed=seed,
            noise_ppm=NOISE_PPM,
            fast_forward=False,
        )
        self._rows, self._ttft_ns, self._gap_ns = rows, ttft_ns, gap_ns
        self._tokens: list[list[int]] = [[] for _ in rows]  # when each was made
        self._steps: list[int] = []
        self._late = 0

    def served(self) -> Served:
        for nth, row in enumerate(self._rows):
            self._pass_to(row.at)
            refused = self._replica.submit(self._job(nth, row), row.at)
            assert refused is None, refused
        self._pass_to(InstantNs(self._rows[-1].at + 100_000 * NS_PER_S))
        made = [len(tokens) for tokens in self._tokens]
        assert made == [row.output_tokens for row in self._rows], "an answer is not whole"
        profile = self._replica.profile
        return Served(
            rows=self._rows,
            ttft_ns=self._ttft_ns,
            gap_ns=self._gap_ns,
            waits=[at[0] - row.at for row, at in zip(self._rows, self._tokens, strict=True)],
            gaps=[[later - at for at, later in pairwise(tokens)] for tokens in self._tokens],
            steps=self._steps,
            late_steps=self._late,
            work=[profile.work_ns(row.input_tokens, 0, row.output_tokens) for row in self._rows],
        )

    def _job(self, nth: int, row: TraceRow) -> Job:
        return Job(
            attempt=AttemptId(nth),
            prompt_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            gap_bound_ns=self._gap_ns,
            tenant=row.tenant or TenantId(""),
            deadline=later(row.at, self._ttft_ns),
        )

    def _pass_to(self, now: InstantNs) -> None:
        """Take the steps that end by `now`."""
        replica, tokens = self._replica, self._tokens
        while (due := replica.next_event()) is not None and due <= now:
            batch = replica._batch  # noqa: SLF001 - the only way to see a step from inside
            step = due - replica._start // PS_PER_NS  # noqa: SLF001
            self._steps.append(step)
            self._late += bool(batch.plan and batch.decodes and step > self._gap_ns)
            for event in replica.advance(due):
                # The end of an answer of one token tells of no token that the first did not.
                if isinstance(event, FirstTokenMade) or event.usage.output_tokens > 1:
                    tokens[event.attempt].append(due)
            for attempt, made in replica.progress(due):
                if made > len(tokens[attempt]):
                    tokens[attempt].append(due)
