"""A whole gateway from its settings: clock, engines, driver, HTTP server, and their end."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

import uvicorn
from msgspec.structs import replace

from headrace.adapters.journal.held import HeldJournal
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.schema import AdminSpec, JournalSpec, Settings, UpstreamSpec
from headrace.gateway.admin import Admin
from headrace.gateway.app import App
from headrace.gateway.audit import Audit
from headrace.gateway.auth import KeyRing
from headrace.gateway.clock import LoopClock
from headrace.gateway.connection import Connection, patient
from headrace.gateway.control import AdminServer, Parts, admin
from headrace.gateway.decisions import DecisionLog
from headrace.gateway.differences import DifferenceLog
from headrace.gateway.driver import Driver
from headrace.gateway.feed import Feed
from headrace.gateway.fleet import LIVES_BITS, engines, grown, hosted, joining, prices
from headrace.gateway.grants import Grants, with_tenants
from headrace.gateway.hand import wanted
from headrace.gateway.jobs.office import office, working
from headrace.gateway.overview import GroupState
from headrace.gateway.past import recall
from headrace.gateway.shadow import Beside, Shadow
from headrace.gateway.steward import Reread
from headrace.gateway.tokenizers import counting
from headrace.gateway.traffic import Server
from headrace.gateway.wall import WallWatch
from headrace.model.effect import Concluded
from headrace.model.event import ScaleFrozen
from headrace.model.ids import PoolName, ReplicaName, RequestId, TenantId
from headrace.policy.catalog import PlaneConfig, canonical, digest
from headrace.units import MIB

T = TypeVar("T")

_log = logging.getLogger(__name__)
REVISION = 1
"""Of the configuration that the first process on a journal starts with."""
_JOINED = 1 << 19
"""Engines that come while others serve are counted above it, those of the configuration below."""
_BACKLOG = 4_096
_GIB_IN_MIB = 1_024
_CLOSING_S = 5
"""What connections get to flush their last bytes after every request was ended."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that callers may connect before the server runs.

    Its connections send small pieces at once: asyncio would see to that only for sockets that were
    made with the protocol's number.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _tell_dropped(what: str, dropped: int) -> None:
    if dropped:
        _log.warning("%d %s could not be written", dropped, what)


def _refuse_fan_out(settings: Settings) -> None:
    """Refuse several answers a request where no engine is there that would give them."""
    config = settings.deployment
    real = settings.real
    emulated = {pool.model for pool in config.pools if pool.name not in real}
    faults = [
        Fault(
            Origin("configuration"),
            "an emulated engine gives one answer a request",
            f"$.deployment.models[{nth}].fan_out_limit",
        )
        for nth, model in enumerate(config.models)
        if model.fan_out_limit > 1 and model.name in emulated
    ]
    if faults:
        raise ConfigError(faults)


def _each(*wanted: Callable[[T], None] | None) -> Callable[[T], None] | None:
    """Return what tells each of those that want to be told; None if nobody does."""
    calls = tuple(call for call in wanted if call is not None)
    if len(calls) < 2:  # noqa: PLR2004 - one needs no going between
        return calls[0] if calls else None

    def tell(what: T) -> None:
        for call in calls:
            call(what)

    return tell


def _sinks(
    journal: HeldJournal | None,
    unread: int,
    decisions: DecisionLog | None,
    spec: AdminSpec,
    audit: Audit,
) -> dict[str, Callable[[], int]]:
    """Return, by family, what each sink that there is could not keep, or not be read from."""
    found: dict[str, Callable[[], int]] = {}
    if journal is not None:
        found["journal_dropped_frames"] = lambda: journal.dropped
        found["journal_unread_segments"] = lambda: unread
    if decisions is not None:
        found["decision_log_dropped_lines"] = lambda: decisions.dropped
    if spec.audit_log is not None:
        found["audit_dropped_lines"] = lambda: audit.dropped
    return found


def _told(shadow: Shadow | None, beside: Beside | None) -> Callable[[RequestId], str | None] | None:
    """Return what answers are to tell of a shadow's decisions."""
    return shadow.verdict if shadow is not None and beside is not None and beside.shown else None


def _granted(
    settings: Settings, beside: Beside | None, journal: HeldJournal | None
) -> tuple[Settings, Beside | None, Grants]:
    """Add the keys that were made while earlier processes ran, to a shadow's tenants as well."""
    grants = Grants(None if journal is None else journal.folder)
    if beside is not None:
        beside = replace(beside, config=with_tenants(beside.config, grants.all))
    return grants.beside(settings), beside, grants


@asynccontextmanager
async def _answering(server: AdminServer | None, sock: socket.socket | None) -> AsyncIterator[None]:
    """Answer on the admin socket, if there is one, for as long as the block lasts."""
    if server is None or sock is None:
        yield
        return
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[sock]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


class Gateway:
    """Everything one process serves with; made inside its event loop."""

    admin: Admin | None = None
    socks: tuple[socket.socket, socket.socket | None] | None = None
    """Where callers and operators come in, while it serves."""
    groups: Callable[[], list[GroupState]] = list
    """What tells the groups of processes that become its engines."""
    _admin_server: AdminServer | None = None
    _aside = False  # another process may have listeners and record
    _joined = 0
    _was_frozen = False  # the scale, before this process stood aside

    def __init__(
        self,
        settings: Settings,
        clock: LoopClock,
        concluded: Callable[[Concluded], None] | None = None,
        reread: Reread | None = None,
        beside: Beside | None = None,
        provided: Collection[str] = (),
    ) -> None:
        """Compose; raises OSError if journal, decision, audit or shadow log cannot be opened.

        Raises ConfigError for what is not served yet, and for kept keys that do not fit. `concluded` is told of each
        request that is over; `reread` reads the configuration anew; `beside` has another plane decide without
        effect; the first replicas of the pools `provided` are groups.
        """
        _refuse_fan_out(settings)
        self._source, self._clock = digest(settings.deployment), clock
        self._files = ExitStack()
        self._kept = journal = self._journal(settings.journal)
        filed, beside, grants = _granted(settings, beside, journal)
        past = recall(journal, clock, filed.deployment, self._source)
        config = self._config = past.in_force(filed.deployment, self._source)
        self._settings = settings = replace(filed, deployment=config)
        self._revision, self._first_life = past.revision(config), past.first_id
        observing = beside is not None and beside.observed
        self._log = decisions = self._decisions(beside.config if beside and observing else config)
        logged = None if decisions is None or observing else decisions.decided
        feed = None if settings.admin is None else Feed(config, prices(settings))
        self.driver = Driver(
            clock,
            engines(grown(settings, wanted(past.plane)), clock, past.first_id, provided),
            journal=journal,
            past=past,
            segment_bytes=settings.journal.segment_mib * MIB,
            decided=_each(logged, None if feed is None else feed.decided),
            concluded=_each(concluded, None if feed is None else feed.concluded),
            on_broken=self._stop_hard,
            shadow=None if beside is None else self._shadow(beside, decisions),
        )
        clock.on_error = self.driver.fail
        keys = KeyRing(settings.keys, anonymous=TenantId(config.tenants[0].name))
        self.app = self._app(keys, clock, _told(self.driver.shadow, beside))
        self.server = Server(self._uvicorn(), self.driver, settings.server, self._rest)
        if settings.admin is not None and feed is not None:
            parts = Parts(
                driver=self.driver,
                app=self.app,
                keys=keys,
                feed=feed,
                audit=(audit := self._audit(settings.admin)),
                decisions=None if observing else decisions,
                grants=grants,
                groups=lambda: self.groups(),  # noqa: PLW0108 - they come later
                jobs=self.jobs,
                filed=filed,
                observing=observing,
                dropped=_sinks(journal, past.unread, decisions, settings.admin, audit),
            )
            self.admin = admin(settings, clock, parts, revision=self._revision, reread=reread)
            self._admin_server = AdminServer(self.admin)

    async def serve(
        self,
        sock: socket.socket,
        admin_sock: socket.socket | None = None,
        *,
        accepting: Callable[[], None] | None = None,
    ) -> bool:
        """Serve until a signal or `stop`; return whether it ended well.

        `admin_sock`: where the admin side answers, if there is one, until the last stream is over.
        `accepting` is called once callers are let in.
        """

        def let_in() -> None:
            self.socks = sock, admin_sock
            if accepting is not None:
                accepting()

        self.server.on_accepting = let_in
        self.begin()
        try:
            async with _answering(self._admin_server, admin_sock), working(self.jobs):
                await self.server.serve(sockets=[sock])
        finally:
            self.driver.stop()
            self.driver.unrecord()
            self._files.close()
            self._close()
        return self.driver.broken is None

    def begin(self) -> None:
        """Have the plane go on or begin, and the engines announced."""
        self.driver.start(self._config, self._revision, self._source)
        WallWatch(self._clock, self.driver)
        if self.admin is not None:
            self.admin.begin()

    def join(self, spec: UpstreamSpec) -> None:
        """Serve by one more engine, of a name that no other has; see `driver.drain` and `remove`."""
        self.driver.add(joining(self._settings, spec, self._clock, self._next_life()))

    def host(self, name: ReplicaName, pool: PoolName) -> None:
        """Serve by one more emulated engine, as `join` does."""
        driver, spec = self.driver, self._settings.emulator
        config = driver.plane.settings.config if driver.runs else self._config
        self.driver.add(hosted(config, spec, name, pool, self._clock, self._next_life()))

    def _next_life(self) -> int:
        self._joined += 1
        return self._first_life + (_JOINED + self._joined << LIVES_BITS)

    def stop(self) -> None:
        """Have `serve` end: newcomers are refused, who is in may finish within the drain time."""
        self.server.should_exit = True

    # Handing over -----------------------------------------------------------------------------

    @property
    def ending(self) -> bool:
        """Whether it takes no more callers."""
        return self.server.should_exit

    @property
    def frozen(self) -> bool:
        """Whether changes are frozen."""
        return self.admin is not None and self.admin.frozen

    def freeze(self) -> None:
        """Have changes frozen from the start, as they were in the process before."""
        if self.admin is not None:
            self.admin.frozen = True

    def step_back(self) -> None:
        """Accept nobody for now, and end the record: another process may go on with both.

        Nothing may be changed here meanwhile: it would be lost, or undo what is changed there.
        """
        assert self.socks is not None, "serve first"
        sock, admin_sock = (None if one is None else one.dup() for one in self.socks)
        assert sock is not None
        self.socks = sock, admin_sock
        for server in (self.server, self._admin_server):
            for one in server.servers if server is not None and server.started else ():
                one.close()
        if self.admin is not None and self._admin_server is not None:
            self.admin.stand_aside(aside=True)
            self._admin_server.hang_up()
        self.driver.unrecord()
        self._scale_aside(aside=True)
        if self._kept is not None:
            self._kept.close()
        if self._log is not None:
            self._log.pause()
        self._aside = True

    async def come_back(self) -> None:
        """Accept and record again, after `step_back`; else do nothing."""
        if not self._aside or self.socks is None or self.driver.broken is not None:
            return
        self._aside = False
        if self.admin is not None:
            self.admin.stand_aside(aside=False)
        if self._kept is not None:
            try:
                self._kept.reopen()
            except OSError as error:
                _log.warning("the journal ends here: %s", error)
            else:
                self.driver.record(self._kept, resumed=True)
        self._scale_aside(aside=False)
        if self._log is not None:
            self._log.go_on()
        for server, sock in zip((self.server, self._admin_server), self.socks, strict=True):
            if server is not None and sock is not None:
                await server.startup(sockets=[sock])

    def _scale_aside(self, *, aside: bool) -> None:
        """Leave the number of groups to whoever serves on; unrecorded, so that they do not inherit it."""
        plane = self.driver.plane
        if aside:
            self._was_frozen = plane.state.scale_frozen
        if plane.settings.scaled and not self._was_frozen:
            self.driver.tell(ScaleFrozen(aside))

    def bow_out(self) -> None:
        """End, now that another process has both: who is in may finish within the drain time."""
        self._close()
        self.server.succeeded = True
        self.stop()

    def _close(self) -> None:
        for sock in self.socks or ():
            if sock is not None:
                sock.close()

    def kill(self) -> None:
        """End as a killed process does: nothing is recorded any more, and connections are cut unanswered."""
        if self._log is not None:
            self._log.pause()
        self._files.close()  # the kernel lets go of the journal
        for server in self.server.servers if self.server.started else ():
            server.close()
        for connection in tuple(self.server.server_state.connections):
            assert isinstance(connection, Connection)
            connection.cut()
        self.driver.stop()
        self._stop_hard()

    async def _rest(self, hurry: Callable[[], bool]) -> None:
        """Wait for what is worked on without a connection, or for a reason to hurry."""
        if self.jobs is not None:
            await self.jobs.dispatcher.rest(hurry)

    def _stop_hard(self) -> None:
        self.server.should_exit = self.server.force_exit = True

    def _app(
        self,
        keys: KeyRing,
        clock: LoopClock,
        told: Callable[[RequestId], str | None] | None,
    ) -> App:
        tokenizers = counting(self._settings, lambda: self.driver.engines, clock)
        if tokenizers is not None:
            self._files.callback(tokenizers.close)
        app = App(
            self.driver,
            keys,
            clock,
            models=self._config.models,
            server=self._settings.server,
            observed=told,
            counting=tokenizers,
        )
        aside = lambda: self._aside or self.ending  # noqa: E731 - it is a question
        self.jobs = office(self._settings, self.driver, app.intake, clock, aside)
        if self.jobs is not None:
            app.desk, app.papers = self.jobs.desk, self.jobs.papers
        return app

    def _journal(self, spec: JournalSpec) -> HeldJournal | None:
        if spec.path is None:
            return None
        keep_bytes = int(spec.keep_gib * _GIB_IN_MIB) * MIB
        kept = HeldJournal(Path(spec.path), keep_bytes=keep_bytes)
        self._files.callback(lambda: _tell_dropped("frames of the journal", kept.dropped))
        self._files.callback(kept.close)
        return kept

    def _decisions(self, config: PlaneConfig) -> DecisionLog | None:
        if self._settings.decision_log is None:
            return None
        log = DecisionLog(Path(self._settings.decision_log))
        self._files.callback(lambda: _tell_dropped("lines of the decision log", log.dropped))
        self._files.callback(log.close)
        log.configured(self._revision, canonical(config))
        return log

    def _shadow(self, beside: Beside, decisions: DecisionLog | None) -> Shadow:
        """Return what decides beside the plane; the decision log has its decisions if all may pass."""
        log = None if beside.log is None else DifferenceLog(beside.log)
        if log is not None:
            self._files.callback(lambda: _tell_dropped("lines of the shadow log", log.dropped))
            self._files.callback(log.close)
        return Shadow(
            beside.config,
            revision=self._revision,
            decided=decisions.observed if decisions is not None and beside.observed else None,
            differing=None if log is None else log.put,
        )

    def _audit(self, spec: AdminSpec) -> Audit:
        audit = Audit(None if spec.audit_log is None else Path(spec.audit_log))
        self._files.callback(lambda: _tell_dropped("lines of the audit log", audit.dropped))
        self._files.callback(audit.close)
        return audit

    def _uvicorn(self) -> uvicorn.Config:
        tls = self._settings.server.tls
        config = uvicorn.Config(
            self.app,
            http=patient(
                self._settings.server.header_timeout_s, self._settings.server.write_stall_s
            ),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="error",  # outsiders must not fill the log with what cannot be read
            server_header=False,
            backlog=_BACKLOG,  # it listens anew
            proxy_headers=False,  # a caller's word for its address would unlock the wrong-key limit
            ssl_certfile=None if tls is None else tls.cert_file,
            ssl_keyfile=None if tls is None else tls.key_file,
            timeout_graceful_shutdown=int(self._settings.server.drain_s) + _CLOSING_S,
        )
        try:
            config.load()
        except OSError as error:
            assert tls is not None, "only certificates are read"
            message = f"{tls.cert_file}, {tls.key_file}: {error.strerror or error}".lower()
            raise ConfigError([Fault(Origin("certificate"), message, "$.server.tls")]) from error
        return config
