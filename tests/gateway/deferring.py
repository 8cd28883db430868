"""A gateway that defers, in virtual time: a store of jobs in memory, engines that the test chooses."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from headrace.config.schema import JobsSpec, ServerSpec
from headrace.gateway.jobs.batches import BatchDesk
from headrace.gateway.jobs.clerk import Clerk
from headrace.gateway.jobs.desk import JOBS, Desk
from headrace.gateway.jobs.dispatcher import Dispatcher
from headrace.gateway.jobs.files import FileDesk
from headrace.model.deployment import ClassSpec, Defer, TenantSpec
from headrace.policy.catalog import PlaneConfig
from headrace.policy.fairness.leftover import Leftover
from headrace.ports.batches import BatchStore
from headrace.ports.clock import Clock
from headrace.ports.job import UnixNs
from headrace.units import NS_PER_S
from tests.conformance.jobs.naive_batches import NaiveBatches
from tests.gateway.scenes import Caller, Gateway, deployment, emulated, reach

BORN = 1_700_000_000 * NS_PER_S
ASK = {"x-llm-d-inference-objective": "batch", "prefer": "respond-async"}


def config(**changed: Any) -> PlaneConfig:
    """Return a deployment in which `batch` is deferred where asked, `nightly` always."""
    tenants = (
        TenantSpec(name="free"),
        TenantSpec(name="slow", rpm_limit=1),
        TenantSpec(name="single", max_parallel_requests=1),
        TenantSpec(name="narrow", models=("other",)),
    )
    classes = (
        ClassSpec(name="interactive"),
        ClassSpec(name="batch", ttft_ms=None, expire=False, defer=Defer.ASKED),
        ClassSpec(name="nightly", ttft_ms=None, expire=False, defer=Defer.ALWAYS),
    )
    plain = deployment(tenants=tenants, **changed)
    return replace(plain, classes=classes)


class Deferring(Gateway):
    """The gateway of the other tests, with a desk and a dispatcher over a store."""

    def __init__(
        self,
        engines: Callable[[Clock], list[Any]] = lambda clock: [emulated(clock)],
        *,
        store: BatchStore | None = None,
        plane: PlaneConfig | None = None,
        owner: str = "one",
        running: bool = True,
        server: ServerSpec | None = None,
        **spec: Any,
    ) -> None:
        super().__init__(engines, config=plane or config(), server=server)
        self.store: BatchStore = store or NaiveBatches()
        self.spec = JobsSpec(file="none", **{"leftover": Leftover(at_once=8), **spec})
        self.aside = False
        self.dispatcher = Dispatcher(
            self.store,
            self.spec,
            self.driver,
            self.app.intake,
            self.clock,
            wall=self.wall,
            owner=owner,
            aside=lambda: self.aside,
        )
        self.app.desk = Desk(self.store, self.spec, self.driver, self.dispatcher, self.wall)
        limits = server or ServerSpec()
        self.clerk = Clerk(
            self.store,
            self.spec,
            self.driver,
            self.app.intake,
            self.dispatcher,
            self.clock,
            body_bytes=limits.body_limit_bytes,
            wall=self.wall,
            owner=owner,
            aside=lambda: self.aside,
        )
        files = FileDesk(self.store, self.spec, limits, self.wall)
        batches = BatchDesk(
            self.store,
            self.spec,
            limits,
            driver=self.driver,
            intake=self.app.intake,
            dispatcher=self.dispatcher,
            clerk=self.clerk,
            now=self.wall,
        )
        self.app.papers = (files.acts, batches.acts)
        if running:
            self.dispatcher.start()
            self.clerk.start()

    def wall(self) -> UnixNs:
        return UnixNs(BORN + self.clock.now())

    def defer(self, headers: dict[str, str] | None = None, **fields: Any) -> Caller:
        """Ask for an answer later."""
        return self.ask(headers={**ASK, **(headers or {})}, **fields)

    async def deferred(self, headers: dict[str, str] | None = None, **fields: Any) -> str:
        """Ask for an answer later; return where it will be."""
        caller = await self.defer(headers, **fields).done()
        assert caller.status == 202, caller.content
        assert caller.headers["location"].startswith(JOBS)
        return caller.headers["location"]

    async def look(self, place: str, wait: int | None = None, **fields: Any) -> Caller:
        """Ask for the answer."""
        headers = {} if wait is None else {"prefer": f"wait={wait}"}
        return await self.ask(path=place, method="GET", headers=headers, **fields).done()

    async def end(self) -> None:
        """Stop all of it, and check what must hold."""
        await self.clerk.close()
        await self.dispatcher.close()
        self.finish()

    async def until(self, ms: float) -> None:
        """Wait until so many ms after the start."""
        await reach(self.clock, ms)
