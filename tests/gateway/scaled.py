"""A gateway whose emulated pool scales, in virtual time and without a socket."""

import asyncio
import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from headrace.config.schema import AdminSpec, JournalSpec, ServerSpec, Settings
from headrace.gateway.clock import LoopClock
from headrace.gateway.groups import Groups
from headrace.gateway.providing import emulated
from headrace.gateway.server import Gateway
from headrace.gateway.shadow import Beside
from headrace.model.deployment import ClassSpec, TenantSpec
from headrace.model.effect import Concluded
from headrace.model.ids import PoolName
from headrace.model.scaling_spec import Scaling
from headrace.model.stages import Spread, StageTimes
from headrace.plane.scale_state import PoolScale
from headrace.policy.catalog import PlaneConfig
from headrace.units import seconds
from tests.gateway.managed import ADMIN_KEY, SPEC
from tests.gateway.scenes import Caller, assert_books_closed, deployment, keys, reach

POOL = PoolName("p")
NONE, SECOND = Spread(), Spread(1.0, 1.0)
TIMES = StageTimes(
    provision=SECOND, node_held=SECOND, image=SECOND, weights=SECOND, ranks=NONE, compile=NONE,
    compile_cache=NONE, warm=SECOND, register=SECOND, unattributed=NONE, wake=SECOND, success=1.0,
)  # fmt: skip
"""A start takes 5 s, a waking 2."""
QUICK = Scaling(
    max=3, times=TIMES, tick_s=5.0, in_window_s=20.0, cancel_window_s=10.0, min_life_s=10.0,
    stale_s=30.0, forecast=None, drain_s=60.0,
)  # fmt: skip
LITTLE, MORE = 0.003, 0.05
"""Work rates of a group: two small requests a second take three groups by the first, none by the second."""


def scaling(
    settings: Scaling = QUICK, *, replicas: int = 1, each: float = LITTLE, others: int = 0
) -> PlaneConfig:
    """Return a deployment whose pool scales by little work, and refuses nobody for it."""
    base = deployment(replicas=replicas, tenants=(TenantSpec(name="free"),))
    pool = replace(base.pools[0], scaling=settings, work_rate=each)
    return replace(
        base,
        pools=(pool, replace(base.pools[1], replicas=others)),
        classes=(ClassSpec(name="interactive", ttft_ms=600_000),),
    )


class Scaled:
    """One process with its groups."""

    def __init__(  # noqa: PLR0913 - whatever a test may want otherwise
        self,
        settings: Scaling = QUICK,
        *,
        folder: Path | None = None,
        admin: AdminSpec = SPEC,
        replicas: int = 1,
        each: float = LITTLE,
        others: int = 0,
        beside: Beside | None = None,
        log: Path | None = None,
    ) -> None:
        self.rows: list[Concluded] = []
        self.clock = LoopClock(asyncio.get_running_loop())
        self.settings = Settings(
            deployment=scaling(settings, replicas=replicas, each=each, others=others),
            keys=keys()[:1],
            server=ServerSpec(trusted_replay=True),
            admin=admin,
            decision_log=None if log is None else str(log),
            journal=JournalSpec(path=None if folder is None else str(folder)),
        )
        actuator = emulated(self.settings, self.clock)
        assert actuator is not None
        self.actuator = actuator
        self.groups = Groups(actuator, self.clock, drain_ns=seconds(30))
        self.gateway = Gateway(self.settings, self.clock, self.rows.append, beside=beside)
        self.groups.attach(self.gateway)
        self.gateway.begin()

    @property
    def driver(self) -> Any:
        return self.gateway.driver

    @property
    def books(self) -> PoolScale:
        """What the plane knows of the pool's groups."""
        return self.gateway.driver.plane.state.pools[POOL]

    @property
    def ready(self) -> int:
        return self.gateway.driver.ready_replicas

    def ask(self, tokens: int = 100, **fields: Any) -> Caller:
        headers = {"x-headrace-replay-output": str(tokens)}
        return Caller(self.gateway.app, headers=headers, max_tokens=tokens, **fields)

    async def load(self, seconds_: int, per_s: int = 2, tokens: int = 100) -> list[Caller]:
        """Ask for answers at a steady rate; return all callers."""
        callers = []
        for _ in range(seconds_ * per_s):
            callers.append(self.ask(tokens))
            await self.wait(1.0 / per_s)
        return callers

    async def wait(self, seconds_: float) -> None:
        now = asyncio.get_running_loop().time()
        await reach(LoopClock(asyncio.get_running_loop()), (now + seconds_) * 1_000)

    async def look(self, path: str) -> Caller:
        assert self.gateway.admin is not None
        return await Caller(
            self.gateway.admin, path=path, method="GET", body=b"", key=ADMIN_KEY
        ).done()

    async def order(self, path: str, **body: Any) -> Caller:
        assert self.gateway.admin is not None
        return await Caller(
            self.gateway.admin, path=path, body=json.dumps(body).encode(), key=ADMIN_KEY
        ).done()

    def admin_changes(self) -> dict[tuple[str, str], int]:
        assert self.gateway.admin is not None
        return dict(self.gateway.admin._steward.counts)

    async def scrape(self) -> dict[str, list[Sample]]:
        content = (await self.look("/metrics")).content.decode()
        found: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(content):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample)
        return found

    def kill(self) -> None:
        """End as SIGKILL does: nothing is told or written any more."""
        self.groups.detach()
        self.gateway._files.close()  # the kernel lets go of the journal
        self.gateway.driver.stop()

    def finish(self) -> None:
        self.gateway.driver.stop()
        assert_books_closed(self.gateway.driver.plane)
