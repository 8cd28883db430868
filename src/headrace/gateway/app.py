"""The HTTP surface: which path does what, and how a request becomes one of the plane's.

A plain ASGI callable.
"""

import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from headrace.config.schema import ServerSpec
from headrace.gateway import health
from headrace.gateway.asked import Asked, InvalidError, read
from headrace.gateway.auth import KeyRing
from headrace.gateway.counting import Counting
from headrace.gateway.driver import Driver
from headrace.gateway.errors import Edge, Fault, edge, unknown_key
from headrace.gateway.exchange import Exchange
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
from headrace.gateway.limits import rate_headers
from headrace.gateway.prefix import CHUNK_TOKENS, identities
from headrace.gateway.stream import Stream
from headrace.gateway.wishes import Wishes, wishes
from headrace.model.deployment import ModelSpec
from headrace.model.ids import ClassName, ModelName, RequestId, TenantId
from headrace.model.request import BY_BYTES, GIVEN, Request
from headrace.ports.clock import Clock
from headrace.ports.engine import Ask, Route
from headrace.ports.tokens import Count
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs, Tokens, to_ms

_OBJECTIVE = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
_TTFT = (b"x-llm-d-slo-ttft-ms", b"x-slo-ttft-ms")
_TPOT = (b"x-llm-d-slo-tpot-ms", b"x-slo-tpot-ms")
_UNTRUSTED = {
    b"x-llm-d-inference-fairness-id": "fairness",
    b"x-gateway-inference-fairness-id": "fairness",
    b"x-llm-d-model-name-rewrite": "rewrite",
    b"x-gateway-model-name-rewrite": "rewrite",
}
"""Headers that would choose a tenant or a model: here the key and the body do."""
_USER = b"x-headrace-user"
_REPLAY_INPUT = b"x-headrace-replay-input"
_REPLAY_OUTPUT = b"x-headrace-replay-output"
_NUMBER_MAX = 10_000_000


Act = Callable[[Exchange], Awaitable[None]]
"""What a path does."""


class RefusedError(Exception):
    """A request that the gateway itself turns away; becomes an answer, not a traceback."""

    def __init__(self, fault: Fault) -> None:
        """Hold the answer."""
        super().__init__(fault.face.message)
        self.fault = fault


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
        self._revisions = {
            name: spec.revision.encode()
            for spec in models
            for name in spec.names
            if spec.revision.isascii() and spec.revision.isprintable()
        }
        self._adapters = frozenset(name for spec in models for name in spec.adapters)
        self._limits = server or ServerSpec()
        self._below = below
        self._observed = observed
        self._counting = counting
        self._secret = secrets.token_bytes(32)
        self._born = clock.wall()
        self._failures = Failures(clock)
        self._reading = _Slots(self._limits.concurrency)
        self._open = _Slots(self._limits.concurrency)
        self.refusals: Counter[str] = Counter()
        """Requests that never reached the plane, by reason."""
        self.ignored: Counter[str] = Counter()
        """Headers that asked for what the key does not grant: `fairness`, `objective`, `rewrite`."""
        self._routes: dict[str, tuple[tuple[str, ...], Act]] = {
            **{route: (("POST",), partial(self._generate, route)) for route in Route},
            "/v1/models": (("GET", "HEAD"), self._list),
            **dict.fromkeys(health.LIVE, (("GET", "HEAD"), self._live)),
            **dict.fromkeys(health.READY, (("GET", "HEAD"), self._ready)),
        }

    @property
    def token_counts(self) -> Mapping[tuple[str, str], int]:
        """Requests by model and what came of counting their tokens."""
        return {} if self._counting is None else self._counting.results

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
            stream = await self._offered(exchange, tenant, route, content)
            del content  # it is large, and a long stream need not keep it
            await self._answer(exchange, stream)

    async def _offered(
        self, exchange: Exchange, tenant: TenantId, route: Route, content: bytes
    ) -> Stream:
        """Ask the plane for an answer."""
        asked = _read(route, content)
        if self._driver.closed is not None:
            raise RefusedError(self._driver.closed)
        count = None if self._counting is None else await self._counting.count(asked, content)
        request, ask = self._request(exchange, tenant, asked, content, count)
        exchange.told.clear()  # nobody asks for them any more
        revision = self._revisions.get(asked.model)
        if revision is not None:
            exchange.headers.append((b"x-headrace-model-revision", revision))
        return self._driver.offer(request, ask)

    async def _answer(self, exchange: Exchange, stream: Stream) -> None:
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
                    await exchange.whole(stream)
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

    def _request(
        self,
        exchange: Exchange,
        tenant: TenantId,
        asked: Asked,
        content: bytes,
        count: Count | None,
    ) -> tuple[Request, Ask]:
        """Return the request as the plane may know it, and what only the engine may."""
        tokens, margin, text = asked.input_tokens, asked.input_margin, asked.text
        revision = BY_BYTES if margin or text is not None else GIVEN
        if count is not None:
            tokens, margin, revision = count.tokens, count.margin, count.revision
        scope = f"{asked.model}\0{asked.cache_salt}".encode()
        prefix = identities(self._secret, scope, asked.prompt)
        replay_input = replay_output = None
        if self._limits.trusted_replay:
            replay_input = _number(exchange, _REPLAY_INPUT)
            replay_output = _number(exchange, _REPLAY_OUTPUT)
            if replay_input is not None:
                tokens, margin, text, revision = Tokens(replay_input), Tokens(0), None, GIVEN
                prefix = prefix[: replay_input // CHUNK_TOKENS]
        wished = _wished(exchange, tenant)
        ttft_ms, tpot_ms = _number(exchange, *_TTFT), _number(exchange, *_TPOT)
        request = Request(
            id=self._driver.mint(),
            tenant=tenant,
            model=ModelName(asked.model),
            input_tokens=tokens,
            input_margin=margin,
            input_revision=revision,
            text=text,
            max_output=asked.output_cap,
            user=self._user(tenant, exchange.header(_USER), asked.user),
            session=self._session(tenant, wished.session),
            slo_class=self._objective(exchange, tenant),
            prefix=prefix,
            prefix_tokens=CHUNK_TOKENS,
            stream=asked.stream,
            features=asked.features,
            fan_out=asked.fan_out,
            ttft_ns=None if ttft_ms is None else DurationNs(ttft_ms * NS_PER_MS),
            gap_ns=None if tpot_ms is None else DurationNs(tpot_ms * NS_PER_MS),
            ttl_ns=wished.ttl_ns,
        )
        ask = Ask(
            route=asked.route,
            body=content,
            stream=asked.stream,
            usage_shown=asked.usage_shown,
            each_usage_shown=asked.each_usage_shown,
            replay_input=None if replay_input is None else Tokens(replay_input),
            replay_output=None if replay_output is None else Tokens(replay_output),
            session=wished.session,
            adapter=asked.model if asked.model in self._adapters else None,
        )
        return request, ask

    def _user(self, tenant: TenantId, header: bytes | None, told: str) -> str | None:
        """Return a name of our own for a tenant's user, if it shares by users: nobody else's is kept."""
        spec = self._driver.plane.settings.tenants.get(tenant)
        user = header or told.encode()
        if spec is None or not spec.by_user or not user:
            return None
        return self._own_name(tenant, user)

    def _session(self, tenant: TenantId, told: bytes | None) -> str | None:
        """Return a name of our own for a session, if its tenant's are limited."""
        spec = self._driver.plane.settings.tenants.get(tenant)
        if spec is None or spec.max_parallel_sessions is None or told is None:
            return None
        return self._own_name(tenant, told)

    def _own_name(self, tenant: TenantId, told: bytes) -> str:
        content = tenant.encode() + b"\0" + told
        return blake2b(content, key=self._secret, digest_size=8).hexdigest()

    def _objective(self, exchange: Exchange, tenant: TenantId) -> ClassName | None:
        """Return the class asked for if the key's tenant may have it; counts what is not believed."""
        for name in _UNTRUSTED.keys() & exchange.told.keys():
            self.ignored[_UNTRUSTED[name]] += 1
        value = exchange.header(*_OBJECTIVE)
        if not value:
            return None
        wanted, settings = ClassName(value.decode("latin-1")), self._driver.plane.settings
        spec = settings.tenants.get(tenant)
        known = settings.classes.get(wanted)
        if known is not None and (spec is None or spec.may_use(known)):
            return wanted
        self.ignored["objective"] += 1
        return None


def _spoken(path: str) -> Route | None:
    """Return the route whose callers' words are spoken at a path, though nothing may be served there."""
    inside = path == Route.MESSAGES or path.startswith(f"{Route.MESSAGES}/")
    return Route.MESSAGES if inside else None


def _invalid(message: str, param: str | None) -> RefusedError:
    return RefusedError(edge(Edge.MALFORMED, message, param))


def _read(route: Route, content: bytes) -> Asked:
    """Return what a body asks for, or blame the field that is wrong."""
    try:
        if not content.isascii():
            content.decode()  # fields that nobody here reads go on to the engine, and must be JSON too
        return read(route, content)
    except UnicodeDecodeError:
        raise _invalid("The body is not UTF-8.", None) from None
    except InvalidError as error:
        raise _invalid(error.message, error.param) from None


def _wished(exchange: Exchange, tenant: TenantId) -> Wishes:
    """Return what the headers ask for, or blame the one that is wrong."""
    try:
        return wishes(exchange.scope["headers"], tenant)
    except InvalidError as error:
        raise _invalid(error.message, error.param) from None


def _number(exchange: Exchange, *names: bytes) -> int | None:
    """Return a header's positive number, or None if it is not there."""
    value = exchange.header(*names)
    if value is None:
        return None
    if not value.isdigit() or len(value) > len(str(_NUMBER_MAX)) or not int(value):
        raise _invalid("Not a positive number.", names[0].decode())
    return min(int(value), _NUMBER_MAX)
