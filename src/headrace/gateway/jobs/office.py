"""Everything that one gateway defers requests with, from its settings to its end."""

import asyncio
import logging
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct

from headrace.adapters.jobs.presence import Presence
from headrace.adapters.jobs.sqlite import SqliteJobs
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.schema import JobsSpec, ServerSpec, Settings
from headrace.gateway.clock import LoopClock
from headrace.gateway.driver import Driver
from headrace.gateway.intake import Intake
from headrace.gateway.jobs.batches import BatchDesk
from headrace.gateway.jobs.clerk import Clerk
from headrace.gateway.jobs.desk import Desk
from headrace.gateway.jobs.dispatcher import Dispatcher
from headrace.gateway.jobs.files import FileDesk
from headrace.ports.job import State, UnixNs
from headrace.ports.jobs import JobStoreError, Limits, Swept
from headrace.units import MIB, NS_PER_S, Bytes

_GIB_IN_MIB = 1_024
_log = logging.getLogger(__name__)


class JobsState(Struct, frozen=True, kw_only=True):
    """Deferred requests at a glance."""

    queued: int
    running: dict[str, int]
    """Jobs under way in this process, by model."""
    limit: dict[str, int]
    """How many live traffic leaves room for, by model."""
    oldest_s: float | None
    """For how long the oldest one has waited; None: none waits."""
    ended: dict[str, int]
    """Jobs that ended in this process, by how."""
    returned: int
    batches: dict[str, int]
    """Batches that are kept, by where they are."""
    files: int
    files_bytes: int
    trouble: str | None


@asynccontextmanager
async def working(jobs: "Office | None") -> AsyncIterator[None]:
    """Work on deferred requests, if any are, for as long as the block lasts."""
    if jobs is None:
        yield
        return
    await jobs.start()
    try:
        yield
    finally:
        await jobs.close()


class Office:
    """One process's part in a file of jobs."""

    def __init__(
        self,
        spec: JobsSpec,
        server: ServerSpec,
        driver: Driver,
        intake: Intake,
        clock: LoopClock,
        aside: Callable[[], bool],
    ) -> None:
        """Open the file; raises ConfigError if it cannot be had. Nothing is taken up while `aside`."""
        self._clock = clock
        self._store, self._presence = _opened(spec, server)
        owner = f"{os.getpid()}-{secrets.token_hex(8)}"
        self.dispatcher = dispatcher = Dispatcher(
            self._store,
            spec,
            driver,
            intake,
            clock,
            wall=self._wall,
            owner=owner,
            aside=aside,
        )
        self.desk = Desk(self._store, spec, driver, dispatcher, self._wall)
        self.clerk = Clerk(
            self._store,
            spec,
            driver,
            intake,
            dispatcher,
            clock,
            body_bytes=server.body_limit_bytes,
            wall=self._wall,
            owner=owner,
            aside=aside,
        )
        files = FileDesk(self._store, spec, server, self._wall)
        batches = BatchDesk(
            self._store,
            spec,
            server,
            driver=driver,
            intake=intake,
            dispatcher=dispatcher,
            clerk=self.clerk,
            now=self._wall,
        )
        self.papers = (files.acts, batches.acts)

    def _wall(self) -> UnixNs:
        return UnixNs(self._clock.wall_ns())

    @property
    def trouble(self) -> str | None:
        """What the store is in trouble with; None: nothing."""
        return self._store.trouble

    async def start(self) -> None:
        """Begin; jobs of processes that are gone are taken back at once if no other is there."""
        alone = self._presence.alone()
        try:
            if alone:
                await self._recover()
        finally:
            await asyncio.to_thread(self._presence.share)
        self.dispatcher.start()
        self.clerk.start()

    async def _recover(self) -> None:
        try:
            found: Swept | None = None
            while found is None or found.more:
                found = await self._store.recover(self._wall(), frozenset())
        except JobStoreError as error:
            _log.warning("jobs of earlier processes wait for their leases to end: %s", error)

    async def close(self) -> None:
        """Give back what is not done, and let go of the file."""
        await self.clerk.close()
        await self.dispatcher.close()
        try:
            await self._store.close()
        except JobStoreError as error:
            _log.warning("%s", error)
        self._presence.leave()

    def age_s(self) -> float | None:
        """Return for how long the oldest job has waited; None: none waits."""
        since = self.dispatcher.standing.oldest_ns
        return None if since is None else max(0, self._wall() - since) / NS_PER_S

    def state(self) -> JobsState:
        """Return everything at a glance."""
        dispatcher, kept = self.dispatcher, self.clerk.kept
        states: Counter[State] = Counter()
        for one in dispatcher.standing.tallies:
            states[one.state] += one.jobs
        return JobsState(
            queued=states[State.QUEUED],
            running={str(model): count for model, count in dispatcher.running().items()},
            limit={str(model): limit for model, limit in dispatcher.limits().items()},
            oldest_s=self.age_s(),
            ended={state.value: count for state, count in dispatcher.ended.items()},
            returned=dispatcher.returned,
            batches={stage.value: count for stage, count in kept.batches.items()},
            files=kept.files,
            files_bytes=kept.bytes,
            trouble=self.trouble,
        )


def _opened(spec: JobsSpec, server: ServerSpec) -> tuple[SqliteJobs, Presence]:
    path = Path(spec.file)
    limits = Limits(
        tenant_jobs=spec.tenant_jobs,
        tenant_files=spec.tenant_files,
        tenant_batches=spec.tenant_batches,
        body_bytes=Bytes(server.body_limit_bytes),
        result_bytes=Bytes(spec.result_mib * MIB),
        store_bytes=Bytes(round(spec.store_gib * _GIB_IN_MIB) * MIB),
    )
    try:
        return SqliteJobs(path, limits=limits, tell=_log.warning), Presence(path)
    except (JobStoreError, OSError) as error:
        raise ConfigError([Fault(Origin("file of jobs"), str(error), "$.jobs.file")]) from error


def office(
    settings: Settings,
    driver: Driver,
    intake: Intake,
    clock: LoopClock,
    aside: Callable[[], bool],
) -> Office | None:
    """Return what requests are deferred with, None if none are; raises ConfigError."""
    spec = settings.jobs
    return None if spec is None else Office(spec, settings.server, driver, intake, clock, aside)
