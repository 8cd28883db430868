"""Headers and body in, a request as the plane may know it out: for callers, and for deferred jobs."""

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from msgspec import Struct
from msgspec.structs import replace

from headrace.config.schema import ServerSpec
from headrace.gateway.asked import Asked, InvalidError, taken
from headrace.gateway.counting import Counting
from headrace.gateway.driver import Driver
from headrace.gateway.errors import Edge, Fault, edge
from headrace.gateway.limits import is_too_large
from headrace.gateway.prefix import CHUNK_BYTES, CHUNK_TOKENS, identities
from headrace.gateway.repeats import is_repeat
from headrace.gateway.wishes import Wishes, wishes
from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.model.ladder import LEVEL_MAX
from headrace.model.request import BY_BYTES, GIVEN, Request
from headrace.ports.engine import Ask, Route
from headrace.ports.tokens import Count
from headrace.units import NS_PER_MS, DurationNs, Tokens

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
USER = b"x-headrace-user"
_REPLAY_INPUT = b"x-headrace-replay-input"
_REPLAY_OUTPUT = b"x-headrace-replay-output"
_NUMBER_MAX = 10_000_000
_DEGRADE = b"x-headrace-degrade"
_LEVELS = {b"%d" % level: level for level in range(LEVEL_MAX + 1)}

LASTING = (*_TPOT, _DEGRADE, _REPLAY_INPUT, _REPLAY_OUTPUT)
"""Headers that still decide how a request is served when it is taken up later."""
Headers = Sequence[tuple[bytes, bytes]]


class RefusedError(Exception):
    """A request that the gateway itself turns away; becomes an answer, not a traceback."""

    def __init__(self, fault: Fault) -> None:
        """Hold the answer."""
        super().__init__(fault.face.message)
        self.fault = fault


class Letter(Struct, frozen=True):
    """A request as it came in."""

    tenant: TenantId
    route: Route
    headers: Headers
    """Names in lower case; of one that is told twice, the first counts."""
    told: Mapping[bytes, bytes]
    """The same, looked up by name."""
    body: bytes


class Taken(Struct, frozen=True):
    """A request as it is understood."""

    asked: Asked
    request: Request
    """What the plane may know."""
    ask: Ask
    """What only the engine may."""


class Intake:
    """Reads requests for one gateway."""

    def __init__(self, driver: Driver, limits: ServerSpec, counting: Counting | None) -> None:
        """Read for `driver`; `counting` counts prompts, without it all are estimated."""
        self._driver, self._limits, self._counting = driver, limits, counting
        self._secret = secrets.token_bytes(32)
        self.ignored: Counter[str] = Counter()
        """Headers that asked for what the key does not grant: `fairness`, `objective`, `rewrite`."""

    @property
    def token_counts(self) -> Mapping[tuple[str, str], int]:
        """Requests by model and what came of counting their tokens."""
        return {} if self._counting is None else self._counting.results

    async def take(self, letter: Letter) -> Taken:
        """Return a request as it is understood; raises `RefusedError`, blaming what is wrong."""
        asked, body = _read(letter.route, letter.body)
        if self._driver.closed is not None:
            raise RefusedError(self._driver.closed)
        counted, slo_class = self._counting, self.objective(letter.told, letter.tenant)
        if self._driver.turns_away(letter.tenant):  # cheap checks first: nobody looks at its prompt
            bare = replace(asked, prompt=b"")
            rough = self._understood(letter, bare, body, None, slo_class)
            if counted is None or not is_too_large(self._driver.plane, rough.request):
                return rough
        count = None if counted is None else await counted.count(asked, body)
        return self._understood(letter, asked, body, count, slo_class)

    def _understood(
        self,
        letter: Letter,
        asked: Asked,
        body: bytes,
        count: Count | None,
        slo_class: ClassName | None,
    ) -> Taken:
        tokens, margin, text = asked.input_tokens, asked.input_margin, asked.text
        revision = BY_BYTES if margin or text is not None else GIVEN
        if count is not None:
            tokens, margin, revision = count.tokens, count.margin, count.revision
        tenant, told = letter.tenant, letter.told
        scope = f"{asked.model}\0{asked.cache_salt}".encode()
        prefix = identities(self._secret, scope, asked.prompt)
        replay_input, replay_output = self._replayed(told)
        if replay_input is not None:
            tokens, margin, text, revision = Tokens(replay_input), Tokens(0), None, GIVEN
            prefix = prefix[: replay_input // CHUNK_TOKENS]
        wished, ttft_ms, tpot_ms = _wished(letter), _number(told, *_TTFT), _number(told, *_TPOT)
        request = Request(
            id=self._driver.mint(),
            tenant=tenant,
            model=ModelName(asked.model),
            input_tokens=tokens,
            input_margin=margin,
            input_revision=revision,
            text=text,
            max_output=asked.output_cap,
            user=self._user(tenant, told.get(USER), asked.user),
            session=self._session(tenant, wished.session),
            slo_class=slo_class,
            prefix=prefix,
            prefix_tokens=CHUNK_TOKENS,
            prefix_kept=min(len(prefix), asked.options.begin // CHUNK_BYTES),
            optional=_scaled(asked, tokens),
            lowest=lowest(told),
            stream=asked.stream,
            features=asked.features,
            fan_out=asked.fan_out,
            ttft_ns=None if ttft_ms is None else DurationNs(ttft_ms * NS_PER_MS),
            gap_ns=None if tpot_ms is None else DurationNs(tpot_ms * NS_PER_MS),
            repeat=is_repeat(told),
            ttl_ns=wished.ttl_ns,
        )
        ask = Ask(
            route=asked.route,
            body=body,
            stream=asked.stream,
            usage_shown=asked.usage_shown,
            each_usage_shown=asked.each_usage_shown,
            replay_input=None if replay_input is None else Tokens(replay_input),
            replay_output=None if replay_output is None else Tokens(replay_output),
            session=wished.session,
            adapter=self._adapter(asked.model),
            optional=asked.options.places,
        )
        return Taken(asked, request, ask)

    def _replayed(self, told: Mapping[bytes, bytes]) -> tuple[int | None, int | None]:
        """Return the tokens in and out of a request that is replayed, where that is trusted."""
        if not self._limits.trusted_replay:
            return None, None
        return _number(told, _REPLAY_INPUT), _number(told, _REPLAY_OUTPUT)

    def _adapter(self, name: str) -> str | None:
        """Return the adapter that a model's name stands for, if it does."""
        spec = self._driver.plane.settings.models.get(ModelName(name))
        return name if spec is not None and name in spec.adapters else None

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

    def lasting(self, told: Mapping[bytes, bytes]) -> tuple[tuple[str, str], ...]:
        """Return the headers that decide how what is taken up later is served, or blame the one that is wrong.

        None is longer than it must be: each of many requests is kept with them.
        """
        found = {_DEGRADE: lowest(told)} if _DEGRADE in told else {}
        replay = (_REPLAY_INPUT, _REPLAY_OUTPUT) if self._limits.trusted_replay else ()
        for name in (*_TPOT, *replay):
            if (number := _number(told, name)) is not None:
                found[name] = number
        return tuple((name.decode(), str(value)) for name, value in found.items())

    def objective(self, told: Mapping[bytes, bytes], tenant: TenantId) -> ClassName | None:
        """Return the class asked for if the key's tenant may have it; counts what is not believed."""
        for name in _UNTRUSTED.keys() & told.keys():
            self.ignored[_UNTRUSTED[name]] += 1
        value = first(told, *_OBJECTIVE)
        if not value:
            return None
        wanted, settings = ClassName(value.decode("latin-1")), self._driver.plane.settings
        spec = settings.tenants.get(tenant)
        known = settings.classes.get(wanted)
        if known is not None and (spec is None or spec.may_use(known)):
            return wanted
        self.ignored["objective"] += 1
        return None


def first(told: Mapping[bytes, bytes], *names: bytes) -> bytes | None:
    """Return the value of the leftmost of the names that is there."""
    for name in names:
        if (value := told.get(name)) is not None:
            return value
    return None


def invalid(message: str, param: str | None) -> RefusedError:
    """Return the refusal of a request in which something is wrong."""
    return RefusedError(edge(Edge.MALFORMED, message, param))


def _read(route: Route, content: bytes) -> tuple[Asked, bytes]:
    """Return what a body asks for, and it without what is ours; or blame the field that is wrong."""
    try:
        if not content.isascii():
            content.decode()  # fields that nobody here reads go on to the engine, and must be JSON too
        return taken(route, content)
    except UnicodeDecodeError:
        raise invalid("The body is not UTF-8.", None) from None
    except InvalidError as error:
        raise invalid(error.message, error.param) from None


def _scaled(asked: Asked, tokens: Tokens) -> tuple[Tokens, ...]:
    """Return the tokens of what may be left out, where all of the prompt has so many."""
    estimate = max(1, asked.input_tokens)
    return tuple(Tokens(one * tokens // estimate) for one in asked.options.tokens)


def lowest(told: Mapping[bytes, bytes]) -> int:
    """Return how far down the headers let a request go, or blame them; a tenant may have agreed to less."""
    value = told.get(_DEGRADE)
    if value is None:
        return LEVEL_MAX
    level = _LEVELS.get(value.strip())
    if level is None:
        raise invalid(f"Not a level from 0 to {LEVEL_MAX}.", _DEGRADE.decode())
    return level


def _wished(letter: Letter) -> Wishes:
    """Return what the headers ask for, or blame the one that is wrong."""
    try:
        return wishes(letter.headers, letter.tenant)
    except InvalidError as error:
        raise invalid(error.message, error.param) from None


def _number(told: Mapping[bytes, bytes], *names: bytes) -> int | None:
    """Return a header's positive number, or None if it is not there."""
    value = first(told, *names)
    if value is None:
        return None
    if not value.isdigit() or len(value) > len(str(_NUMBER_MAX)) or not int(value):
        raise invalid("Not a positive number.", names[0].decode())
    return min(int(value), _NUMBER_MAX)
