"""Everything at a glance, for people: what `GET /state` answers and `headrace top` shows."""

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from headrace import __version__
from headrace.adapters.engines.kv.publishing import PublishingEngine
from headrace.gateway import health
from headrace.gateway.audit import written
from headrace.gateway.cost import CostState, Spell, cost_state
from headrace.gateway.driver import Driver
from headrace.gateway.feed import Feed, Rates
from headrace.gateway.jobs.office import JobsState, Office
from headrace.gateway.labels import SMALL_BYTES, Labels, kept, opened
from headrace.gateway.reading import fleet, waiting
from headrace.gateway.scale import ScaleState, scale_state
from headrace.model.effect import Concluded
from headrace.plane.accounts import Tally
from headrace.ports.clock import Clock
from headrace.units import InstantNs, to_ms, to_seconds


class QueueState(Struct, frozen=True, kw_only=True):
    """Who waits in one class of one model."""

    model: str
    slo_class: str
    waiting: int
    work_s: float
    age_s: float | None
    """Of the one that has waited longest; None: nobody waits."""
    earliest_slack_s: float | None
    """Until the most urgent one must be sent; None: none has a bound."""
    level: int = 0
    """Of the class's ladder, at which who agreed to less is served; 0: as asked."""


class ClassState(Struct, frozen=True, kw_only=True):
    """How one class fares just now."""

    slo_class: str
    rates: Rates
    recent: int
    """Ended requests that the percentiles are taken over; without one there are none."""
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    stall_p99_ms: float | None
    """99th percentile of the largest gap of each answer."""
    e2e_p50_ms: float | None


class TenantState(Struct, frozen=True, kw_only=True):
    """What one tenant asked for and got in one class, since the start."""

    tenant: str
    slo_class: str
    offered: int
    admitted: int
    """Those that were deferred are among them once they were sent."""
    rejected: dict[str, int]
    left_before: int
    live: int
    outcomes: dict[str, int]
    ended_early: dict[str, int]
    met: int
    met_output_tokens: int
    offered_work_s: float
    met_work_s: float
    deferred: int = 0
    """Of the offered, those put aside to be answered later."""
    taken_up: int = 0
    """Of the admitted, those that were deferred; one that an engine failed at is taken up again."""

    @property
    def refused(self) -> int:
        """How many were refused, for whatever reason."""
        return sum(self.rejected.values())


class ReplicaState(Struct, frozen=True, kw_only=True):
    """One ready replica."""

    replica: str
    model: str
    pool: str
    pending_prefill_s: float
    decodes: int
    kv_blocks_reserved: int
    kv_blocks_total: int
    report_age_s: float | None
    """None: it never reported."""
    kv_blocks_cached: int | None = None
    """Blocks that it told to be in its KV cache; None: it tells none."""
    kv_blocks_evicted: int | None = None
    """Blocks that it told to have left it, since the start."""


class GroupState(Struct, frozen=True, kw_only=True):
    """One group of engine processes that was asked for and not given back."""

    group: str
    pool: str
    life: int
    stage: str
    for_s: float
    """How long it has been at this stage."""
    seconds: dict[str, float]
    """By stage of this life, how long it took since the one before; its first also holds the pause since
    the last life was lost."""
    why: str
    """Of a stage that nobody asked for, as far as it is known."""


class State(Struct, frozen=True, kw_only=True):
    """The whole gateway at one instant."""

    at: str
    version: str
    uptime_s: float
    revision: int
    mode: str
    """What the gates of our own capacity do: `enforce` or `audit`."""
    ready: bool
    draining: bool
    frozen: bool
    live: int
    queues: list[QueueState]
    classes: list[ClassState]
    tenants: list[TenantState]
    replicas: list[ReplicaState]
    troubles: dict[str, str] = {}
    """Why replicas are not ready, by name, as far as that is known."""
    groups: list[GroupState] = []
    """Of a gateway that starts its engines itself."""
    jobs: JobsState | None = None
    """Of a gateway that defers requests."""
    cost: CostState | None = None
    """Of all replicas since the process began; None: an older one told it."""


class Taken(Struct, frozen=True, kw_only=True):
    """A state whose tenants are still to be added up, which any thread may do."""

    rest: State
    labels: Labels
    accounts: bytes

    @property
    def small(self) -> bool:
        """Whether that is over sooner than a thread is found."""
        return len(self.accounts) < SMALL_BYTES

    def state(self) -> State:
        """Return the whole state."""
        tallies = self.labels.tallies(opened(self.accounts))
        return replace(
            self.rest, tenants=[_tenant(*who, tally) for who, tally in sorted(tallies.items())]
        )


class Overview:
    """Takes the state of one gateway."""

    def __init__(
        self,
        driver: Driver,
        feed: Feed,
        clock: Clock,
        groups: Callable[[], list[GroupState]],
        jobs: Office | None = None,
    ) -> None:
        """Count the uptime from here."""
        self._driver, self._feed, self._clock, self._groups = driver, feed, clock, groups
        self._born, self._jobs = clock.now(), jobs
        feed.scale.begun = self._born

    def take(self, labels: Labels, *, frozen: bool) -> Taken:
        """Read what must be read at one instant."""
        driver = self._driver
        now = max(driver.plane.state.now, self._clock.now())
        rest = State(
            at=written(self._clock.wall()),
            version=__version__,
            uptime_s=to_seconds(now - self._born),
            revision=driver.revision,
            mode=driver.plane.settings.config.admission.summary(),
            ready=health.ready(driver).status == health.OK,
            draining=driver.draining,
            frozen=frozen,
            live=driver.live,
            queues=self._queues(now),
            classes=self._classes(now),
            tenants=[],
            replicas=self._replicas(now),
            troubles={one.name: one.trouble for one in driver.engines if one.trouble is not None},
            groups=self._groups(),
            jobs=None if self._jobs is None else self._jobs.state(),
            cost=self._cost(now),
        )
        return Taken(rest=rest, labels=labels, accounts=kept(driver.plane.state.accounts))

    def scale(self) -> ScaleState:
        """Return how the pools stand that scale, and what was decided of them lately."""
        now = max(self._driver.plane.state.now, self._clock.now())
        return scale_state(self._driver, self._feed.scale, now, self._cost(now))

    def _cost(self, now: InstantNs) -> CostState:
        feed = self._feed
        spell = Spell(begun=self._born, now=now, met=feed.met, decided=feed.scale.held)
        return cost_state(self._driver, spell)

    def _queues(self, now: InstantNs) -> list[QueueState]:
        levels = {
            (model, slo_class): one.level
            for model, known in self._driver.plane.state.models.items()
            for slo_class, one in known.standings.items()
        }
        return [
            QueueState(
                model=model,
                slo_class=slo_class,
                waiting=one.count,
                work_s=to_seconds(one.work_ns),
                age_s=None if one.oldest is None else to_seconds(now - one.oldest),
                earliest_slack_s=None if one.urgent is None else to_seconds(one.urgent - now),
                level=levels.get((model, slo_class), 0),
            )
            for (model, slo_class), one in waiting(self._driver.plane).classes.items()
        ]

    def _classes(self, now: InstantNs) -> list[ClassState]:
        rows = list(self._driver.recent)
        return [
            _class(name, one.window.rates(now), [row for row in rows if row.slo_class == name])
            for name, one in self._feed.classes.items()
            if name in self._driver.plane.settings.classes
        ]

    def _replicas(self, now: InstantNs) -> list[ReplicaState]:
        plane = self._driver.plane
        found: list[ReplicaState] = []
        caches = {e.name: e for e in self._driver.engines if isinstance(e, PublishingEngine)}
        for model, replica in fleet(plane.state.models):
            load, report = plane.state.ledger.loads[replica.incarnation], replica.snapshot
            cache = caches.get(replica.name)
            found.append(
                ReplicaState(
                    replica=replica.name,
                    model=model,
                    pool=replica.pool,
                    pending_prefill_s=to_seconds(load.pending_prefill_ns),
                    decodes=load.decodes,
                    kv_blocks_reserved=load.blocks,
                    kv_blocks_total=plane.settings.pools[replica.pool].blocks_total,
                    report_age_s=None if report is None else to_seconds(now - report.observed_at),
                    kv_blocks_cached=None if cache is None else cache.blocks,
                    kv_blocks_evicted=None if cache is None else cache.heard.removed,
                )
            )
        return found


def _tenant(tenant: str, slo_class: str, tally: Tally) -> TenantState:
    return TenantState(
        tenant=tenant,
        slo_class=slo_class,
        offered=tally.offered,
        admitted=tally.admitted,
        rejected={str(reason): count for reason, count in tally.rejected.items()},
        left_before=tally.left_before,
        live=tally.admitted - sum(tally.outcomes.values()),
        outcomes={str(outcome): count for outcome, count in tally.outcomes.items()},
        ended_early={str(reason): count for reason, count in tally.ended_early.items()},
        met=tally.met,
        met_output_tokens=tally.met_tokens,
        offered_work_s=to_seconds(tally.offered_work_ns),
        met_work_s=to_seconds(tally.met_work_ns),
        deferred=tally.deferred,
        taken_up=tally.taken_up,
    )


def _class(name: str, rates: Rates, rows: Iterable[Concluded]) -> ClassState:
    seen = [row.indicators for row in rows if row.indicators is not None]
    ttft = sorted(one.ttft_ns for one in seen)
    return ClassState(
        slo_class=name,
        rates=rates,
        recent=len(seen),
        ttft_p50_ms=_percentile(ttft, 50),
        ttft_p99_ms=_percentile(ttft, 99),
        stall_p99_ms=_percentile(sorted(one.max_stall_ns for one in seen), 99),
        e2e_p50_ms=_percentile(sorted(one.e2e_ns for one in seen), 50),
    )


def _percentile(ordered: Sequence[int], percent: int) -> float | None:
    """Return a percentile by nearest rank, in ms; None of nothing."""
    if not ordered:
        return None
    return to_ms(ordered[max(0, -(-len(ordered) * percent // 100) - 1)])
