"""Which path does what, as vLLM's server would.

A plain ASGI callable. What goes wrong on purpose goes wrong here, on the way in or out; the engine
itself only ever gets slower.
"""

from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from secrets import token_hex

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headrace import __version__
from headrace.adapters.engines import words
from headrace.adapters.engines.server import asked
from headrace.adapters.engines.server.asgi import (
    EVENTS,
    CallerGoneError,
    Exchange,
    Receive,
    Scope,
    Send,
)
from headrace.adapters.engines.server.attempts import Answer, Attempts, Work
from headrace.adapters.engines.server.faults import FaultError, Faults, draws_error, from_json
from headrace.adapters.engines.server.metrics import CONTENT_TYPE, Metrics
from headrace.adapters.engines.server.outgoing import Outgoing
from headrace.adapters.engines.words import errors
from headrace.ports.clock import Clock
from headrace.units import REQUEST_TOKENS_MAX, Tokens

EMULATES = "0.32.0"
"""The vLLM whose surface this is."""
_REPLAY_INPUT = b"x-headrace-replay-input"
_ENCODE = msgspec.json.Encoder().encode

Act = Callable[[Exchange], Awaitable[None]]
"""What a path does."""


class RefusedError(Exception):
    """A request that is turned away; becomes an answer, not a traceback."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        """Hold what is told to the caller; `param` is the field to blame."""
        super().__init__(message)
        self.status, self.param = status, param


class Face(Struct, frozen=True, kw_only=True):
    """How the engine presents itself."""

    model: str
    max_model_len: Tokens
    """Tokens of prompt and output together."""
    seed: int = 0


class App:
    """An ASGI application over one emulated engine."""

    def __init__(
        self,
        attempts: Attempts,
        metrics: Metrics,
        clock: Clock,
        face: Face,
        set_pace: Callable[[float], None],
    ) -> None:
        """Serve; `set_pace` makes every engine step take so many times as long."""
        self._attempts, self._metrics, self._clock = attempts, metrics, clock
        self._face, self._set_pace = face, set_pace
        self._born = clock.wall()
        self._faults = Faults()
        self._generations = 0
        self._load = 0
        self._exchanges: set[Exchange] = set()
        self._routes: dict[tuple[str, str], Act] = {
            **{("POST", path): self._generate for path in asked.KINDS},
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/load"): self._told_load,
            ("GET", "/metrics"): self._told_metrics,
            ("GET", "/version"): self._version,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/abort_requests"): self._abort,
            ("POST", "/inference/v1/abort_requests"): self._abort,
            ("GET", "/faults"): self._told_faults,
            ("POST", "/faults"): self._take_faults,
        }
        self._paths = {path for _, path in self._routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http", "only HTTP is served"
        exchange = Exchange(scope, receive, send)
        self._exchanges.add(exchange)
        try:
            await self._route(exchange)
        except CallerGoneError:
            pass
        except asked.AskedError as fault:
            told = errors.error(exchange.path, 400, str(fault), fault.param)
            await exchange.whole(400, told)
        except RefusedError as refused:
            status = refused.status
            told = errors.error(exchange.path, status, str(refused), refused.param)
            await exchange.whole(status, told)
        finally:
            self._exchanges.discard(exchange)

    def set_faults(self, faults: Faults) -> None:
        """Have other things go wrong from now on."""
        if faults.slow != self._faults.slow:
            self._set_pace(faults.slow)
        self._faults = faults

    def close_all(self) -> None:
        """Close every connection that has a request on it."""
        for exchange in list(self._exchanges):
            exchange.close()

    async def _route(self, exchange: Exchange) -> None:
        act = self._routes.get((exchange.method, exchange.path))
        if act is not None:
            await act(exchange)
        elif exchange.path in self._paths:
            await exchange.whole(405, b'{"detail":"Method Not Allowed"}')
        else:
            await exchange.whole(404, b'{"detail":"Not Found"}')

    # Generation -----------------------------------------------------------------------------------

    async def _generate(self, exchange: Exchange) -> None:
        self._load += 1
        try:
            body = await exchange.body()
            if await self._befallen(exchange):
                return
            ask = asked.decoded(body, asked.KINDS[exchange.path])
            self._check_model(ask.model)
            ask.check()
            told = exchange.header(b"x-request-id") or token_hex(16)
            exchange.headers.append((b"x-request-id", told.encode("latin-1")))
            name = f"{ask.named}{told}"
            answer = self._attempts.submit(self._work(exchange, ask, name))
            if answer is None:
                await self._overloaded(exchange, stream=ask.streams)
                return
            with exchange.watched(lambda: self._attempts.leave(answer)):
                try:
                    await self._answer(exchange, ask, answer, name)
                finally:
                    self._attempts.leave(answer)
        finally:
            self._load -= 1

    async def _befallen(self, exchange: Exchange) -> bool:
        """Return whether something befell the request on its way in."""
        nth, faults = self._generations, self._faults
        self._generations += 1
        if faults.stall:
            self._faults = replace(faults, stall=faults.stall - 1)
            await _never(exchange)
            return True
        if draws_error(self._face.seed, nth, faults.error_rate):
            raise RefusedError(500, "EngineCore encountered an issue.")
        return False

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._face.model:
            raise RefusedError(404, f"The model `{model}` does not exist.", "model")

    def _work(self, exchange: Exchange, ask: asked.Common, name: str) -> Work:
        """Return what the engine gets."""
        prompt = ask.prompt()
        told = _replayed(exchange)
        tokens = asked.count(prompt) if told is None else told
        room = self._face.max_model_len - tokens
        limit = ask.cap or max(room, 1)
        if limit > room:
            raise asked.AskedError(
                f"This model's maximum context length is {self._face.max_model_len} tokens. "
                f"However, you requested {limit} output tokens and your prompt contains {tokens} "
                f"input tokens, for a total of {tokens + limit} tokens. Please reduce the length "
                "of the input prompt or the number of requested output tokens.",
                "input_tokens",
            )
        return Work(
            name=ask.engine_name(name),
            prompt_tokens=tokens,
            prefix=asked.chunks(prompt, ask.cache_salt, told),
            prefix_tokens=asked.CHUNK_TOKENS,
            limit=Tokens(limit),
            to_the_limit=ask.ignore_eos,
            told=ask.told,
        )

    async def _overloaded(self, exchange: Exchange, *, stream: bool) -> None:
        """Turn a request away; a stream has its head already, so it gets an event."""
        message = "The engine has as many requests as it may have."
        if stream:
            await exchange.begin(200, (b"content-type", EVENTS))
            await exchange.send(errors.streamed(exchange.path, 503, message), more=False)
        else:
            raise RefusedError(503, message)

    async def _answer(
        self, exchange: Exchange, ask: asked.Common, answer: Answer, name: str
    ) -> None:
        writer = words.writer(
            exchange.path,
            name,
            self._clock.wall(),
            self._face.model,
            answer.work.prompt_tokens,
            usage_at_end=ask.usage_at_end,
            usage_always=ask.usage_always,
            usage=not self._faults.drop_usage,
            vectors=ask.vectors,
        )
        outgoing = Outgoing(exchange, answer, writer, self._faults)
        await (outgoing.stream() if ask.streams else outgoing.whole())

    # Everything else ------------------------------------------------------------------------------

    async def _models(self, exchange: Exchange) -> None:
        row = {
            "id": self._face.model,
            "object": "model",
            "created": self._born,
            "owned_by": "vllm",
            "root": self._face.model,
            "parent": None,
            "max_model_len": self._face.max_model_len,
            "permission": [],
        }
        await exchange.whole(200, _ENCODE({"object": "list", "data": [row]}))

    async def _health(self, exchange: Exchange) -> None:
        if self._faults.hang_health:
            await _never(exchange)
        else:
            await exchange.whole(200, b"")

    async def _told_load(self, exchange: Exchange) -> None:
        await exchange.whole(200, _ENCODE({"server_load": self._load}))

    async def _told_metrics(self, exchange: Exchange) -> None:
        content = self._metrics.text(self._attempts.snapshot(), self._attempts.yielded())
        await exchange.whole(200, content, CONTENT_TYPE)

    async def _version(self, exchange: Exchange) -> None:
        version = f"{EMULATES}+headrace{__version__}"
        await exchange.whole(200, _ENCODE({"version": version}))

    async def _tokenize(self, exchange: Exchange) -> None:
        ask = asked.decoded(await exchange.body(), asked.Tokenize)
        self._check_model(ask.model)
        tokens = asked.token_ids(ask.text())
        told = {
            "count": len(tokens),
            "max_model_len": self._face.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }
        await exchange.whole(200, _ENCODE(told))

    async def _abort(self, exchange: Exchange) -> None:
        ask = asked.decoded(await exchange.body(), asked.Abort)
        self._attempts.abort(set(ask.request_ids))
        # As vLLM: how many were named, known or not.
        await exchange.whole(200, _ENCODE({"aborted": len(ask.request_ids)}))

    async def _told_faults(self, exchange: Exchange) -> None:
        _from_here(exchange)
        await exchange.whole(200, _ENCODE(self._faults))

    async def _take_faults(self, exchange: Exchange) -> None:
        _from_here(exchange)
        try:
            self.set_faults(from_json(await exchange.body()))
        except FaultError as fault:
            raise asked.AskedError(str(fault)) from None
        await exchange.whole(200, _ENCODE(self._faults))


async def _never(exchange: Exchange) -> None:
    """Answer nothing, until the caller has had enough."""
    with exchange.watched(lambda: None):
        await exchange.gone.wait()


def _replayed(exchange: Exchange) -> Tokens | None:
    """Return how long a replayed prompt is said to be, whatever its text."""
    told = exchange.header(_REPLAY_INPUT)
    if told is None:
        return None
    if not told.isdecimal() or not 0 < int(told) <= REQUEST_TOKENS_MAX:
        raise asked.AskedError("Not a number of tokens.", _REPLAY_INPUT.decode())
    return Tokens(int(told))


def _from_here(exchange: Exchange) -> None:
    """Refuse whoever calls from another machine."""
    if not ip_address(exchange.peer).is_loopback:
        raise RefusedError(403, "Faults are set from this machine only.")
