"""Takes deferred jobs up while live traffic leaves room, and gives back what it cannot send.

Some twenty times a second it looks at each model for which jobs wait, and the rule (`policy/fairness/leftover`)
says how many may run. Leases are renewed meanwhile; whatever the store is in trouble with is tried again.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TypeVar

from msgspec import Struct

from headrace.config.schema import JobsSpec
from headrace.gateway.driver import Driver
from headrace.gateway.intake import Intake
from headrace.gateway.jobs.watch import Watch
from headrace.gateway.jobs.worker import Run, Stop, Worker
from headrace.model.ids import ModelName, TenantId
from headrace.model.paths import Path
from headrace.policy.fairness.claims import ClaimOrder, Line
from headrace.policy.fairness.leftover import Pace
from headrace.ports.clock import Clock
from headrace.ports.job import BatchId, JobId, JobSpec, Lease, State, UnixNs
from headrace.ports.jobs import (
    SWEEP_MAX,
    ClaimAsk,
    Ending,
    JobStore,
    JobStoreError,
    Renewal,
    Tally,
)
from headrace.units import MIB, NS_PER_MS, NS_PER_S, DurationNs, InstantNs, later

T = TypeVar("T")

LOOK_NS = DurationNs(50 * NS_PER_MS)
"""Between two looks at live traffic, while jobs run or wait: a third of the default dispatch window."""
KEEP_NS = DurationNs(NS_PER_S)
"""Between two looks at the store: what others put there, what time did to it."""
_PURGE_EVERY = 60
"""Looks at the store from one purge to the next."""
_RENEWALS = 3
"""Renewals within a lease."""
_REST_MAX_NS = 5 * NS_PER_S
"""Longest that a refusal for want of capacity keeps a model's jobs waiting: it is looked at all the time."""
_ENDS = 100
_DRAIN_NS, _DRAIN_MAX_NS = 60 * NS_PER_S, 3_600 * NS_PER_S
"""How soon there is taken to be room again where nothing ended of late, and at most."""
_log = logging.getLogger(__name__)


class Standing(Struct, frozen=True, kw_only=True):
    """The store as it was last looked at."""

    tallies: tuple[Tally, ...] = ()
    oldest_ns: UnixNs | None = None
    """When the job came that has waited longest."""


class Dispatcher:
    """Works on the jobs of one store, for one life of a process."""

    def __init__(  # noqa: PLR0913 - the neighbours it stands between
        self,
        store: JobStore,
        spec: JobsSpec,
        driver: Driver,
        intake: Intake,
        clock: Clock,
        *,
        wall: Callable[[], UnixNs],
        owner: str,
        aside: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take jobs up as `owner`, a name that no other life has; none while `aside`."""
        self._store, self._spec, self._driver, self._clock = store, spec, driver, clock
        self._wall, self._owner, self._aside = wall, owner, aside
        self._watch = Watch(driver, spec.leftover.reserve)
        self._worker = Worker(
            driver,
            intake,
            self._watch,
            tries=spec.tries,
            result_bytes=spec.result_mib * MIB,
        )
        self._lease_ns = round(spec.lease_s * NS_PER_S)
        self._runs: dict[Lease, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._hungry: set[ModelName] = set()
        """Models for which jobs may wait."""
        self._claiming: set[ModelName] = set()
        self._paces: dict[ModelName, Pace] = {}
        self._resting: dict[ModelName, InstantNs] = {}
        self._over_limit: dict[TenantId, InstantNs] = {}
        """Whose jobs are not to be taken up, and until when."""
        self._wake = asyncio.Event()
        self._listeners: list[Callable[[JobId | None], None]] = []
        self._ends: deque[InstantNs] = deque(maxlen=_ENDS)
        self.standing = Standing()
        self.ended: Counter[State] = Counter()
        """Jobs that this process has ended, by state."""
        self.returned = 0
        """Jobs that went back without an answer."""

    # What others tell and ask -----------------------------------------------------------------

    def over(self, told: Callable[[JobId | None], None]) -> None:
        """Have somebody told of each job that is over; None: look at all of them."""
        self._listeners.append(told)

    def came(self, spec: JobSpec) -> None:
        """Know of a job that is in the store now."""
        self._hungry.add(spec.model)
        if not self._runs:
            self._wake.set()

    def gone(self, job: JobId | None) -> None:
        """Know of a job that is over; None: perhaps any."""
        for told in self._listeners:
            told(job)

    def cancel(self, job: JobId) -> None:
        """Stop work on a job whose caller does not want it; another process's hears by its renewal."""
        for lease, run in self._runs.items():
            if lease.job == job:
                self._worker.stop(run, Stop.CANCELLED)

    def cancel_batch(self, batch: BatchId) -> None:
        """Stop work on a batch whose caller does not want it; as above."""
        for run in self._runs.values():
            if run.claim.job.spec.batch == batch:
                self._worker.stop(run, Stop.CANCELLED)

    def drain_ns(self) -> DurationNs:
        """Return about how long it takes until one of a tenant's jobs is over."""
        ends, now = self._ends, self._clock.now()
        if len(ends) < 2 or now - ends[-1] > _DRAIN_NS:  # noqa: PLR2004 - a gap has two ends
            return DurationNs(_DRAIN_NS)
        each = (ends[-1] - ends[0]) // (len(ends) - 1)
        tenants = len({one.tenant for one in self.standing.tallies if one.state is State.QUEUED})
        return DurationNs(min(max(NS_PER_S, each * max(1, tenants)), _DRAIN_MAX_NS))

    def running(self) -> Counter[ModelName]:
        """Return how many jobs are under way here, by model."""
        return Counter(run.claim.job.spec.model for run in self._runs.values())

    def limits(self) -> dict[ModelName, int]:
        """Return how many may be, by model."""
        return {model: pace.limit for model, pace in self._paces.items()}

    # Its life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._spawn(self._feed())
        self._spawn(self._keep())

    async def rest(self, hurry: Callable[[], bool]) -> None:
        """Wait until nothing is under way, or there is no time; whoever waits sees that nothing new comes."""
        while self._runs and not hurry():
            await self._pause(LOOK_NS)

    async def close(self) -> None:
        """End, and give back what is not done; the driver must still be there."""
        leases = list(self._runs)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if leases:
            try:
                await self._store.release(leases, self._wall())
            except JobStoreError as error:
                _log.warning(
                    "%d deferred jobs wait for their leases to end: %s", len(leases), error
                )
        self.gone(None)

    def _spawn(self, doing: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._ended_task)

    def _ended_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):  # our bug: stop, as for any other
            self._driver.fail(error)

    async def _pause(self, pause_ns: DurationNs) -> None:
        done = asyncio.Event()
        timer = self._clock.call_at(later(self._clock.now(), pause_ns), done.set)
        try:
            await done.wait()
        finally:
            timer.cancel()

    # Feeding ----------------------------------------------------------------------------------

    async def _feed(self) -> None:
        while True:
            if not self._runs and not self._hungry:
                await self._wake.wait()
            self._wake.clear()
            if self._driver.closed is None and not self._aside():
                self._watch.look()
                for model in list(self._driver.plane.state.models):
                    self._look(model)
            await self._pause(LOOK_NS)

    def _look(self, model: ModelName) -> None:
        """Take up as many of a model's jobs as live traffic leaves room for."""
        runs = [run for run in self._runs.values() if run.claim.job.spec.model == model]
        busy = model in self._claiming or model in self._still(self._resting)
        more = model in self._hungry and not busy
        seen = self._watch.seen(model, [run.request for run in runs], more=more)
        if not runs and model not in self._hungry:
            return
        room = self._spec.leftover.room(self._paces.get(model, Pace()), seen)
        self._paces[model] = room.pace
        if room.withdraw:
            for run in runs:
                if run.request is not None and self._watch.is_stuck(run.request):
                    self._worker.stop(run, Stop.WITHDRAWN)
        if room.take:
            self._claiming.add(model)
            self._spawn(self._claim(model, room.take))

    def _still(self, resting: dict[T, InstantNs]) -> frozenset[T]:
        """Return whose jobs are not to be taken up yet, and forget all others."""
        now = self._clock.now()
        for who in [who for who, until in resting.items() if until <= now]:
            del resting[who]
        return frozenset(resting)

    async def _claim(self, model: ModelName, limit: int) -> None:
        try:
            now = self._wall()
            until = UnixNs(now + self._lease_ns)
            ask = ClaimAsk(model=model, owner=self._owner, limit=limit, until_ns=until)
            self._hungry.discard(model)  # what comes meanwhile is seen
            claims = await self._store.claim(ask, self._order(model), now)
        except JobStoreError:
            return  # told by the store; `_keep` finds that they still wait
        finally:
            self._claiming.discard(model)
        if len(claims) == limit:
            self._hungry.add(model)
        for claim in claims:
            run = self._runs[claim.lease] = Run(claim)
            self._spawn(self._work(run))

    def _order(self, model: ModelName) -> ClaimOrder:
        """Return who shares with whom now; who is gone, or over a limit of its own, has no turn."""
        settings = self._driver.plane.settings
        resting = self._still(self._over_limit)

        def way(line: Line) -> Path | None:
            tenant = settings.tenants.get(line.tenant)
            if tenant is None or line.tenant in resting:
                return None
            if settings.pool_for(model, line.slo_class) is None:
                return None
            return settings.way(tenant, line.slo_class, None)

        return ClaimOrder(way=way, rules=settings.rules[model])

    async def _work(self, run: Run) -> None:
        lease = run.claim.lease
        try:
            ending = await self._worker.work(run, self._wall())
            if run.stop is Stop.LOST:
                return
            if ending is None:
                await self._give_back(run)
            else:
                await self._finish(run, ending)
        finally:
            del self._runs[lease]
            self.gone(lease.job)

    async def _give_back(self, run: Run) -> None:
        spec = run.claim.job.spec
        self.returned += 1
        if run.back is not None:
            self._rest(spec, run.back.retry_after_ns or 0, own=run.back.face.status == _OWN_LIMIT)
        try:
            await self._store.release([run.claim.lease], self._wall())
        except JobStoreError:
            return  # its lease will end
        self._hungry.add(spec.model)

    def _rest(self, spec: JobSpec, wait_ns: int, *, own: bool) -> None:
        """Leave a tenant over its own limit, or a model without room, alone for a while."""
        now = self._clock.now()
        if own:
            self._over_limit[spec.tenant] = later(now, max(wait_ns, NS_PER_S))
            return
        pace = self._paces.get(spec.model, Pace())
        self._paces[spec.model] = Pace(max(1, pace.limit // 2), disturbed=True)
        self._resting[spec.model] = later(now, min(max(wait_ns, LOOK_NS), _REST_MAX_NS))

    async def _finish(self, run: Run, ending: Ending) -> None:
        """Store how a job ended, as soon as the store can: its lease is renewed until then."""
        while run.stop is not Stop.LOST:
            try:
                await self._store.finish([(run.claim.lease, ending)], self._wall())
            except JobStoreError:
                await self._pause(KEEP_NS)
            else:
                self.ended[ending.state] += 1
                self._ends.append(self._clock.now())
                return

    # Keeping ----------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Renew leases, and see to what time and other processes do."""
        nth, renewed_at = 0, self._clock.now()
        while True:
            # Its troubles are told by the store, and what failed is tried again: none keeps the next from its turn.
            if self._clock.now() - renewed_at >= self._lease_ns // _RENEWALS - KEEP_NS:
                with suppress(JobStoreError):
                    await self._renew()
                    renewed_at = self._clock.now()
            if nth % _PURGE_EVERY == 0:
                with suppress(JobStoreError):  # in a full store this makes the room for all others
                    while await self._store.purge(self._wall()) == SWEEP_MAX:
                        pass
            with suppress(JobStoreError):
                await self._look_after()
            nth += 1
            await self._pause(KEEP_NS)

    async def _look_after(self) -> None:
        swept = await self._store.sweep(self._wall())
        if swept.expired or swept.failed or swept.cancelled:
            self.gone(None)
        tallies = tuple(await self._store.counts())
        self.standing = Standing(tallies=tallies, oldest_ns=await self._store.oldest())
        waiting = {one.model for one in tallies if one.state is State.QUEUED}
        self._hungry |= waiting
        if waiting:
            self._wake.set()

    async def _renew(self) -> None:
        runs = dict(self._runs)
        if not runs:
            return
        until = UnixNs(self._wall() + self._lease_ns)
        found = await self._store.renew(list(runs), until)
        for run, renewal in zip(runs.values(), found, strict=True):
            if renewal is not Renewal.HELD:
                why = Stop.CANCELLED if renewal is Renewal.STOP else Stop.LOST
                self._worker.stop(run, why)


_OWN_LIMIT = 429
"""The status of who is over a limit of its own."""
