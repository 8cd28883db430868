"""What is each tenant served, to the token, and how far do two of them drift apart?

Service is w_p * input + w_d * output: a prompt counts in full when its prefill starts, each output
token at the end of the step that made it (FAIR-1). Spreading a prompt's cost over its decoding would
show differences that never were. The figures come from outside the engine, from who started and what
`progress` tells; the counters that decide whose turn it is are not asked.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import combinations

from msgspec import Struct

from headrace.model.ids import TenantId
from headrace.replica.job import Job
from headrace.report.fairness import WINDOW_NS, fairness
from headrace.report.run import ServiceSample
from headrace.units import NS_PER_S, DurationNs, InstantNs

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""Service of one input and of one output token: the published weights."""
SAMPLE_NS = DurationNs(NS_PER_S // 2)
"""Distance of the instants between which shares are compared."""


class Drift:
    """The largest |W_a - W_b| over any interval in which both tenants wait throughout.

    That is, over each such stretch, the highest less the lowest value of W_a(t) - W_b(t); W is
    service divided by weight.
    """

    def __init__(self) -> None:
        """Start with neither waiting."""
        self.most = 0.0
        self.stretches = 0
        self._low = self._high = 0.0
        self._open = False

    def look(self, both_wait: bool, difference: float) -> None:
        """Take what holds from now until the next look."""
        if not both_wait:
            self._open = False
            return
        if not self._open:
            self._open = True
            self.stretches += 1
            self._low = self._high = difference
            return
        self._low, self._high = min(self._low, difference), max(self._high, difference)
        self.most = max(self.most, self._high - self._low)


class Lending:
    """Who lends its turn: a tenant whose best request can wait for long, or that has only hopeless ones.

    Told by deadlines alone, not by asking the order that is measured.
    """

    def __init__(self, after_ns: DurationNs, token_ns: int) -> None:
        """Start empty. `after_ns`: slack beyond which turns are lent; `token_ns`: a prompt token's time."""
        self._after_ns, self._token_ns = after_ns, token_ns
        self._starts: dict[TenantId, list[int]] = {}

    def arrived(self, job: Job) -> None:
        """Let a job wait."""
        insort(self._starts.setdefault(job.tenant, []), self._start(job))

    def started(self, job: Job) -> None:
        """Let it wait no more."""
        starts = self._starts[job.tenant]
        del starts[bisect_left(starts, self._start(job))]

    def lends(self, tenant: TenantId, now: InstantNs) -> bool:
        """Return whether a tenant lends its turn now."""
        starts = self._starts.get(tenant, [])
        feasible = bisect_left(starts, now)
        return feasible == len(starts) or starts[feasible] - now > self._after_ns

    def _start(self, job: Job) -> int:
        return job.deadline - job.prompt_tokens * self._token_ns


class ServiceLog:
    """Service by tenant, who waits, and what the bounds of FAIR-3 are stated in.

    A tenant that lends its turn does not count as waiting.
    """

    def __init__(self, weights: Mapping[TenantId, int], lending: Lending | None = None) -> None:
        """Start with nobody waiting; `weights` names all tenants. No `lending`: nobody lends."""
        self.weights, self._lending = dict(weights), lending
        self.served: dict[TenantId, int] = dict.fromkeys(weights, 0)
        self.waiting: dict[TenantId, int] = dict.fromkeys(weights, 0)
        self.largest = 0
        """Most service of a single request that has started."""
        self.samples: list[ServiceSample] = []
        self.drifts: dict[tuple[TenantId, TenantId], Drift] = {
            (a, b): Drift() for a, b in combinations(sorted(weights), 2)
        }
        self._never_empty: dict[TenantId, int] = dict(self.waiting)

    def arrived(self, job: Job) -> None:
        """Count a request that waits from now on."""
        self.waiting[job.tenant] += 1
        if self._lending is not None:
            self._lending.arrived(job)

    def started(self, job: Job) -> None:
        """Count a request whose prefill starts: its prompt, at once."""
        self.waiting[job.tenant] -= 1
        prompt = INPUT_WEIGHT * job.prompt_tokens
        self.served[job.tenant] += prompt
        self.largest = max(self.largest, prompt + OUTPUT_WEIGHT * job.output_tokens)
        if self._lending is not None:
            self._lending.started(job)

    def made(self, tenant: TenantId, tokens: int) -> None:
        """Count output tokens."""
        self.served[tenant] += OUTPUT_WEIGHT * tokens

    def look(self, now: InstantNs) -> None:
        """Take the state that holds from `now` on; call it after each change of one instant."""
        served, weights = self.served, self.weights
        waiting = {
            tenant: 0 if self._lending is not None and self._lending.lends(tenant, now) else count
            for tenant, count in self.waiting.items()
        }
        for (a, b), drift in self.drifts.items():
            both = waiting[a] > 0 and waiting[b] > 0
            drift.look(both, served[a] / weights[a] - served[b] / weights[b] if both else 0.0)
        # A sample says who waited ever since the one before it, not who happens to wait at it.
        least = self._never_empty
        for tenant, count in waiting.items():
            least[tenant] = min(least[tenant], count)
        if not self.samples or now - self.samples[-1].at >= SAMPLE_NS:
            self.samples.append(ServiceSample(at=now, work_ns=dict(served), waiting=dict(least)))
            self._never_empty = waiting

    def difference(self) -> float:
        """Return the largest drift of any two tenants."""
        return max((drift.most for drift in self.drifts.values()), default=0.0)

    def apart(self) -> float:
        """Return how far two tenants were ever apart since the start, waiting or not, at a sample.

        The figure of the published tables; for weights of 1.
        """
        return max(max(one.work_ns.values()) - min(one.work_ns.values()) for one in self.samples)

    def shares(self, window_ns: DurationNs = WINDOW_NS) -> tuple[int, float]:
        """Return how many windows compare, and the largest |share - fair share| in any of them."""
        found = fairness((), (), self.samples, self.weights, window_ns)
        return found.windows, found.deviation_max or 0.0


def served_between(log: ServiceLog, begin: int, end: int) -> dict[TenantId, int]:
    """Return the service by tenant between the samples nearest after two instants (ns)."""
    first, last = _sample(log.samples, begin), _sample(log.samples, end)
    return {tenant: last.work_ns[tenant] - first.work_ns[tenant] for tenant in log.weights}


def _sample(samples: Sequence[ServiceSample], at: int) -> ServiceSample:
    return next((one for one in samples if one.at >= at), samples[-1])


class Bounds(Struct, frozen=True, kw_only=True):
    """The bounds that a drift is held against."""

    prompt_max: int
    """Longest prompt, in tokens."""
    resident_max: int
    """Most tokens resident in a batch."""

    @property
    def twice_u(self) -> int:
        """Return 2U, U = max(w_p * L_in, w_d * M) (Sheng et al., theorem 4.4)."""
        return 2 * max(INPUT_WEIGHT * self.prompt_max, OUTPUT_WEIGHT * self.resident_max)
