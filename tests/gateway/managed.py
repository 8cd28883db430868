"""A gateway with its admin side, in virtual time and without a socket."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from headrace.config.schema import AdminKeySpec, AdminSpec, ServerSpec, Settings
from headrace.gateway.app import App
from headrace.gateway.audit import Audit
from headrace.gateway.auth import KeyRing
from headrace.gateway.clock import LoopClock
from headrace.gateway.control import Parts, admin
from headrace.gateway.decisions import DecisionLog
from headrace.gateway.driver import Driver
from headrace.gateway.feed import Feed
from headrace.gateway.grants import Grants
from headrace.gateway.server import REVISION, _each
from headrace.gateway.shadow import Shadow
from headrace.gateway.steward import Reread
from headrace.policy.catalog import PlaneConfig, canonical
from headrace.ports.clock import Clock
from tests.gateway.scenes import (
    Caller,
    Pages,
    assert_books_closed,
    deployment,
    emulated,
    keys,
    sha256,
)

ADMIN_KEY = "sk-hr-admin-of-the-test"
SPEC = AdminSpec(keys=(AdminKeySpec(name="ops", hash=f"sha256:{sha256(ADMIN_KEY)}"),))


class Managed:
    """Driver, application and admin application over given engines."""

    def __init__(  # noqa: PLR0913 - whatever a test may want otherwise
        self,
        engines: Callable[[Clock], list[Any]] = lambda clock: [emulated(clock)],
        *,
        config: PlaneConfig | None = None,
        spec: AdminSpec = SPEC,
        server: ServerSpec | None = None,
        folder: Path | None = None,
        reread: Reread | None = None,
        shadow: Shadow | None = None,
        observing: bool = False,
        keyed: bool = True,
    ) -> None:
        grants = Grants(folder)
        self.settings = grants.beside(
            Settings(
                deployment=config or deployment(),
                server=server or ServerSpec(),
                keys=keys() if keyed else (),
                admin=spec,
            )
        )
        config = self.settings.deployment
        self.clock = LoopClock(asyncio.get_running_loop())
        self.engines = engines(self.clock)
        self.pages = Pages()
        self.feed = Feed(config)
        self.decisions = None if folder is None else DecisionLog(folder / "decisions.jsonl")
        self.audit = Audit(None if folder is None else folder / "audit.jsonl")
        if self.decisions is not None:
            self.decisions.configured(REVISION, canonical(config))
        self.driver = Driver(
            self.clock,
            self.engines,
            journal=self.pages,
            decided=_each(
                self.feed.decided, None if self.decisions is None else self.decisions.decided
            ),
            concluded=self.feed.concluded,
            shadow=shadow,
        )
        ring = KeyRing(self.settings.keys)
        self.app = App(
            self.driver,
            ring,
            self.clock,
            models=config.models,
            server=self.settings.server,
            below=lambda bound: bound - 1,
        )
        self.lost = 0
        parts = Parts(
            driver=self.driver,
            app=self.app,
            keys=ring,
            feed=self.feed,
            audit=self.audit,
            decisions=self.decisions,
            dropped={"journal_dropped_frames": lambda: self.lost},
            grants=grants,
            observing=observing,
        )
        self.admin = admin(self.settings, self.clock, parts, revision=REVISION, reread=reread)
        self.driver.start(config, REVISION)

    def ask(self, **fields: Any) -> Caller:
        """Send a chat request."""
        return Caller(self.app, **fields)

    async def look(self, path: str, *, key: str | None = ADMIN_KEY, **told: Any) -> Caller:
        """Ask the admin side to show something."""
        return await Caller(self.admin, path=path, method="GET", body=b"", key=key, **told).done()

    async def order(
        self, path: str, body: Any = None, *, key: str | None = ADMIN_KEY, **told: Any
    ) -> Caller:
        """Ask the admin side to change something."""
        content = body if isinstance(body, bytes) else b"" if body is None else _json(body)
        return await Caller(self.admin, path=path, body=content, key=key, **told).done()

    async def scrape(self) -> dict[str, list[Sample]]:
        """Return the samples of `/metrics` by the name of their series."""
        caller = await self.look("/metrics")
        assert caller.status == 200
        found: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(caller.content.decode()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample)
        return found

    def finish(self) -> None:
        """Stop, and check what must hold at the end of every run."""
        self.driver.stop()
        assert_books_closed(self.driver.plane)
        assert self.pages.verified()
        self.audit.close()
        if self.decisions is not None:
            self.decisions.close()


def value(samples: dict[str, list[Sample]], name: str, **labels: str) -> float | None:
    """Return a sample's value, or None if there is no such series."""
    found = [s.value for s in samples.get(name, ()) if labels.items() <= s.labels.items()]
    assert len(found) <= 1, f"{name} {labels} names {len(found)} series"
    return found[0] if found else None


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()
