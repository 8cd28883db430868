"""The HTTP surface: which path does what, and how a request becomes one of the plane's.

A plain ASGI callable.
"""

import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from headrace.config.schema import ServerSpec
from headrace.gateway import health, outlook
from headrace.gateway.auth import KeyRing
from headrace.gateway.counting import Counting
from headrace.gateway.driver import Driver
from headrace.gateway.errors import Edge, Fault, edge, unknown_key
from headrace.gateway.exchange import Exchange, Instead
from headrace.gateway.failures import Failures
from headrace.gateway.http import (
    CallerGoneError,
    Receive,
    Scope,
    Send,
    TooLargeError,
    TooSlowError,
    read_body,
    watching,
)
from headrace.gateway.intake import Intake, Letter, RefusedError
from headrace.gateway.jobs.desk import JOBS, Desk
from headrace.gateway.jobs.papers import Acts, missing
from headrace.gateway.limits import rate_headers
from headrace.gateway.outlook import LADDER
from headrace.gateway.stream import Stream
from headrace.model.deployment import ModelSpec
from headrace.model.ids import RequestId, TenantId
from headrace.model.request import Request
from headrace.ports.clock import Clock
from headrace.ports.engine import Route
from headrace.units import NS_PER_S, DurationNs, to_ms

Act = Callable[[Exchange], Awaitable[None]]
"""What a path does."""


class _Slots:
    """So many requests at once; one more is refused."""

    def __init__(self, limit: int) -> None:
        self._free = limit

    def __enter__(self) -> None:
        if not self._free:
            raise RefusedError(edge(Edge.OPEN_REQUESTS))
        self._free -= 1

    def __exit__(self, *_: object) -> None:
        self._free += 1


class App:
    """An ASGI application over a driver."""

    def __init__(  # noqa: PLR0913 - the neighbours it stands between
        self,
        driver: Driver,
        keys: KeyRing,
        clock: Clock,
        *,
        models: Sequence[ModelSpec],
        server: ServerSpec | None = None,
        below: Callable[[int], int] = secrets.randbelow,
        observed: Callable[[RequestId], str | None] | None = None,
        counting: Counting | None = None,
    ) -> None:
        """Serve `models` to whom `keys` know; `below(n)` draws from 0 to n-1.

        `observed` says what a configuration that only watches decided; answers then tell it.
        `counting` counts prompts before they are decided on; without it all are estimated.
        """
        self._driver, self._keys, self._clock = driver, keys, clock
        self._models = tuple(models)
        self._limits = server or ServerSpec()
        self._below = below
        self._observed = observed
        self.intake = Intake(driver, self._limits, counting)
        """Reads what is asked."""
        self.desk: Desk | None = None
        """Where requests are deferred, if they are."""
        self.papers: Sequence[Callable[[str], Acts | None]] = ()
        """Where files and batches are, if they are: what can be done at a path."""
        self._born = clock.wall()
        self._failures = Failures(clock)
        self._reading = _Slots(self._limits.concurrency)
        self._open = _Slots(self._limits.concurrency)
        self.refusals: Counter[str] = Counter()
        """Requests that never reached the plane, by reason."""
        self._routes: dict[str, tuple[tuple[str, ...], Act]] = {
            **{route: (("POST",), partial(self._generate, route)) for route in Route},
            "/v1/models": (("GET", "HEAD"), self._list),
            LADDER: (("GET", "HEAD"), self._ladder),
            **dict.fromkeys(health.LIVE, (("GET", "HEAD"), self._live)),
            **dict.fromkeys(health.READY, (("GET", "HEAD"), self._ready)),
        }

    @property
    def ignored(self) -> Counter[str]:
        """Headers that asked for what the key does not grant."""
        return self.intake.ignored

    @property
    def token_counts(self) -> Mapping[tuple[str, str], int]:
        """Requests by model and what came of counting their tokens."""
        return self.intake.token_counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http", "only HTTP is served"
        exchange = Exchange(scope, receive, send, self._below)
        try:
            await self._route(exchange)
        except CallerGoneError:
            pass
        except TooLargeError:
            await self._refuse(exchange, edge(Edge.BODY_TOO_LARGE))
        except TooSlowError:
            await self._refuse(exchange, edge(Edge.REQUEST_TIMEOUT), (b"connection", b"close"))
        except RefusedError as refused:
            await self._refuse(exchange, refused.fault)
        finally:
            self._count(exchange.refused)

    async def _refuse(self, exchange: Exchange, fault: Fault, *more: tuple[bytes, bytes]) -> None:
        """Turn away what the plane never saw; a known key is told its limits all the same."""
        if exchange.route is None:
            exchange.route = _spoken(exchange.scope["path"])
        if exchange.tenant is not None:
            exchange.headers += rate_headers(self._driver.plane, exchange.tenant)
        await exchange.refuse(fault, *more)

    def _count(self, fault: Fault | None) -> None:
        """Count what was refused without a decision."""
        if fault is not None:
            self.refusals[fault.detail.reason] += 1

    async def _route(self, exchange: Exchange) -> None:
        known = self._routes.get(exchange.scope["path"])
        if known is None and self.desk is not None and exchange.scope["path"].startswith(JOBS):
            known = (("GET", "DELETE"), self._job)
        if known is None:
            known = self._paper(exchange.scope["path"])
        if known is None:
            raise RefusedError(edge(Edge.NO_SUCH_PATH))
        methods, act = known
        if exchange.scope["method"] in methods:
            await act(exchange)
        else:
            allowed = b"allow", ", ".join(methods).encode()
            await self._refuse(exchange, edge(Edge.METHOD), allowed)

    async def _live(self, exchange: Exchange) -> None:
        found = health.live(self._driver)
        await exchange.content(found.body, found.status)

    async def _ready(self, exchange: Exchange) -> None:
        found = health.ready(self._driver)
        await exchange.content(found.body, found.status)

    async def _list(self, exchange: Exchange) -> None:
        """List the models that the key may use."""
        tenant = self._tenant(exchange)
        known = self._driver.plane.settings.tenants.get(tenant)
        rows = [
            {"id": name, "object": "model", "created": self._born, "owned_by": "headrace"}
            for spec in self._models
            for name in (spec.name, *spec.adapters)
            if known is None or known.may_ask(spec, name)
        ]
        listed = msgspec.json.encode({"object": "list", "data": rows})
        await exchange.content(listed)

    async def _ladder(self, exchange: Exchange) -> None:
        """Tell in what form a request would be served now."""
        tenant = exchange.tenant = self._tenant(exchange)
        with self._open:
            query = exchange.scope["query_string"]
            found = outlook.told(self._driver, self.intake, tenant, exchange.told, query)
            exchange.headers += rate_headers(self._driver.plane, tenant)
            await exchange.content(found)

    async def _job(self, exchange: Exchange) -> None:
        """Tell of a deferred request, or cancel it."""
        assert self.desk is not None, "as routed"
        tenant = exchange.tenant = self._tenant(exchange)
        with self._open:
            await self.desk.answer(exchange, tenant)

    def _paper(self, path: str) -> tuple[tuple[str, ...], Act] | None:
        """Return what can be done at a path of files and batches; says if they are not served."""
        if not self.papers and (fault := missing(path)) is not None:
            raise RefusedError(fault)
        acts = next((found for one in self.papers if (found := one(path)) is not None), None)
        return None if acts is None else (tuple(acts), partial(self._on_paper, acts))

    async def _on_paper(self, acts: Acts, exchange: Exchange) -> None:
        tenant = exchange.tenant = self._tenant(exchange)
        with self._open:
            await acts[exchange.scope["method"]](exchange, tenant)

    async def _generate(self, route: Route, exchange: Exchange) -> None:
        """Answer a request that an engine is needed for."""
        exchange.route = route
        tenant = exchange.tenant = self._tenant(exchange)
        with self._reading:
            content = await read_body(
                exchange.scope,
                exchange.receive,
                self._limits.body_limit_bytes,
                self._limits.header_timeout_s,
            )
        exchange.read_at = self._clock.now()
        with self._open:
            letter = Letter(tenant, route, exchange.scope["headers"], exchange.told, content)
            del content  # it is large, and a long stream need not keep it
            taken = await self.intake.take(letter)
            if self.desk is not None and await self.desk.take(exchange, letter, taken):
                return
            instead = None if self.desk is None else self.desk.instead(exchange, letter, taken)
            del letter
            exchange.told.clear()  # nobody asks for them any more
            stream = self._driver.offer(taken.request, taken.ask)
            del taken
            await self._answer(exchange, stream, instead)

    async def _answer(
        self, exchange: Exchange, stream: Stream, instead: Instead | None = None
    ) -> None:
        """Pass the answer on, and have nobody work on it longer than it is waited for."""
        request, told = stream.request, exchange.headers
        try:
            spent = to_ms(self._clock.now() - exchange.read_at)
            told.append((b"x-headrace-overhead-ms", b"%.3f" % spent))
            told.append((b"x-headrace-policy-revision", b"%d" % stream.revision))
            told += rate_headers(self._driver.plane, request.tenant)
            if self._observed is not None and (would := self._observed(request.id)) is not None:
                told.append((b"x-headrace-observed", would.encode()))
            with watching(exchange.wire, lambda: self._driver.leave(request.id)):
                if not stream.streamed:
                    await exchange.whole(stream, instead)
                elif self._is_early(request):
                    await exchange.early(stream)
                else:
                    await exchange.stream(stream)
        finally:
            self._driver.leave(request.id)

    def _is_early(self, request: Request) -> bool:
        """Return whether the request's class has its streams begin before admission (ADM-5)."""
        settings = self._driver.plane.settings
        spec = settings.classes.get(
            settings.class_of(request.slo_class, settings.tenants.get(request.tenant))
        )
        return spec is not None and spec.early_200

    def _tenant(self, exchange: Exchange) -> TenantId:
        """Return whose key it is; a right key is heard whatever others at its address show."""
        tenant = self._keys.tenant(exchange.header(b"authorization"), exchange.header(b"x-api-key"))
        if tenant is not None:
            return tenant
        client = exchange.scope.get("client")
        address = client[0] if client else ""
        wait_s = self._failures.wait_s(address)
        if wait_s is not None:
            wait = DurationNs(wait_s * NS_PER_S)
            raise RefusedError(replace(edge(Edge.WRONG_KEYS), retry_after_ns=wait))
        self._failures.note(address)
        raise RefusedError(unknown_key())


def _spoken(path: str) -> Route | None:
    """Return the route whose callers' words are spoken at a path, though nothing may be served there."""
    inside = path == Route.MESSAGES or path.startswith(f"{Route.MESSAGES}/")
    return Route.MESSAGES if inside else None
