"""The admin side of one gateway, composed: guard, steward, metrics, and the server they answer on."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import uvicorn
from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.config.schema import Settings
from headrace.gateway.admin import Admin
from headrace.gateway.app import App
from headrace.gateway.audit import Audit
from headrace.gateway.auth import KeyRing
from headrace.gateway.decisions import DecisionLog
from headrace.gateway.driver import Driver
from headrace.gateway.feed import Feed
from headrace.gateway.fleet import restep
from headrace.gateway.grants import Grants
from headrace.gateway.guard import Guard
from headrace.gateway.jobs.office import Office
from headrace.gateway.metrics import Metrics, Sources
from headrace.gateway.overview import GroupState, Overview
from headrace.gateway.steward import Reread, Steward
from headrace.ports.clock import Clock

_CLOSING_S = 2
"""What an answer on its way out gets when the process ends."""


class Parts(Struct, frozen=True, kw_only=True):
    """What of a gateway the admin side looks at and changes."""

    driver: Driver
    app: App
    keys: KeyRing
    feed: Feed
    audit: Audit
    decisions: DecisionLog | None
    """None as well where it holds the decisions of another plane than the driver's."""
    dropped: Mapping[str, Callable[[], int]]
    """By family, what a sink could not keep."""
    grants: Grants
    """Keys that were made while earlier processes ran."""
    groups: Callable[[], list[GroupState]] = list
    """Groups of processes that become its engines."""
    jobs: Office | None = None
    """What requests are deferred with."""
    filed: Settings | None = None
    """What the configuration file says, where the policy of an earlier process goes on instead."""
    observing: bool = False
    """All may pass, and the configuration only watches."""


class Followers:
    """Those who must know of a new configuration beside the plane."""

    def __init__(self, parts: Parts) -> None:
        """Tell the decision log, the feed, the keys and the emulated engines."""
        self._parts = parts

    def prepare(self, revision: int, config: bytes) -> None:
        """Write the configuration before the decisions that are made under it."""
        if self._parts.decisions is not None:
            self._parts.decisions.configured(revision, config)

    def adopt(self, settings: Settings) -> None:
        """Go by new classes, keys and steps."""
        self._parts.feed.configure(settings.deployment)
        self._parts.keys.rekey(settings.keys)
        restep(self._parts.driver.engines, settings.deployment)


def admin(
    settings: Settings,
    clock: Clock,
    parts: Parts,
    *,
    revision: int,
    reread: Reread | None = None,
) -> Admin:
    """Return the admin application over a gateway that starts with `settings` as `revision`."""
    spec = settings.admin
    assert spec is not None, "there is an admin side"
    guard = Guard(spec, clock)
    steward = Steward(
        parts.driver,
        settings,
        clock,
        parts.audit,
        Followers(parts),
        revision=revision,
        told=parts.filed,
        grants=parts.grants,
    )
    steward.observing = parts.observing
    sources = Sources(
        refusals=lambda: parts.app.refusals,
        ignored=lambda: parts.app.ignored,
        token_counts=lambda: parts.app.token_counts,
        frozen=lambda: steward.frozen,
        denied=lambda: guard.denied,
        changes=lambda: steward.counts,
        dropped=parts.dropped,
        jobs=parts.jobs,
    )
    return Admin(
        parts.driver,
        guard,
        steward,
        Metrics(parts.driver, parts.feed, clock, sources, spec.tenant_series),
        Overview(parts.driver, parts.feed, clock, parts.groups, parts.jobs),
        patience_s=settings.server.header_timeout_s,
        reread=reread,
    )


class AdminServer(uvicorn.Server):
    """A server beside the traffic's own, which alone takes the signals."""

    def __init__(self, app: Admin) -> None:
        """Serve the application; addresses are believed as the socket gives them."""
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_CLOSING_S,
            )
        )

    def hang_up(self) -> None:
        """Close the connections on which somebody was answered, once nothing is asked there.

        Who has not asked yet is answered once.
        """
        for connection in self.server_state.connections:
            assert isinstance(connection, HttpToolsProtocol), "as configured"
            if connection.cycle is not None:
                connection.shutdown()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield
