"""A whole engine process from its settings: replica, listener, HTTP server, and their end."""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import uvicorn
from msgspec import Meta, Struct
from msgspec.structs import replace
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.adapters.engines.answer import lengths
from headrace.adapters.engines.emulated import EmulatedEngine
from headrace.adapters.engines.server.app import App, Face
from headrace.adapters.engines.server.asgi import CUT
from headrace.adapters.engines.server.attempts import Attempts
from headrace.adapters.engines.server.faults import Faults
from headrace.adapters.engines.server.metrics import Metrics
from headrace.config.schema import EmulatorSpec
from headrace.model.ids import Incarnation, PoolName, ReplicaName
from headrace.model.profile import Profile
from headrace.ports.clock import Clock
from headrace.replica.core import Replica
from headrace.units import BLOCK_TOKENS, Tokens

_log = logging.getLogger(__name__)
_NAME = "engine"
_CONTEXT = 131_072  # of the models that the packaged profiles are of
_CLOSING_S = 5


class EngineSpec(Struct, frozen=True, kw_only=True):
    """What one engine process is started with."""

    profile: Profile
    model: str | None = None
    """The name it serves. None: that of the profile's model."""
    speed: Annotated[float, Meta(gt=0, le=100_000)] = 1.0
    """Every engine step takes its time divided by this."""
    emulator: EmulatorSpec = EmulatorSpec()
    """Seed and noise; also of lengths, and of what goes wrong by chance."""
    max_num_queued_reqs: Annotated[int, Meta(ge=1)] | None = None
    """Most requests inside, running or waiting; more get 503. None: as many as come."""
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    """Tokens of prompt and output together. None: 131,072, or what the KV pool holds."""
    faults: Faults = Faults()

    def __post_init__(self) -> None:
        """Refuse what no engine could serve."""
        if self.max_model_len is not None and self.max_model_len > self._pool_tokens:
            raise ValueError(
                f"max_model_len {self.max_model_len} is above the {self._pool_tokens} tokens "
                "of the KV pool"
            )

    @property
    def served(self) -> str:
        """The name of the model."""
        return self.profile.model if self.model is None else self.model

    @property
    def context(self) -> Tokens:
        """The most tokens of one request."""
        return Tokens(self.max_model_len or min(_CONTEXT, self._pool_tokens))

    @property
    def _pool_tokens(self) -> int:
        return self.profile.kv_capacity_tokens // BLOCK_TOKENS * BLOCK_TOKENS


class EngineServer:
    """Everything one engine process serves with; made inside its event loop."""

    def __init__(self, spec: EngineSpec, clock: Clock) -> None:
        """Compose."""
        profile = spec.profile.paced(1 / spec.speed)
        offers = spec.emulator.preemption
        replica = Replica(
            ReplicaName(_NAME),
            Incarnation(1),
            profile,
            spec.emulator.batching,
            ordering=spec.emulator.ordering,
            noise_seed=spec.emulator.seed,
            noise_ppm=spec.emulator.noise_ppm(),
            offers=replace(offers, host_gb_per_s=offers.host_gb_per_s * spec.speed),
        )
        self._engine = EmulatedEngine(replica, PoolName(_NAME), clock, lengths(spec.emulator.seed))
        metrics = Metrics(spec.served, offers.mechanisms)
        self.attempts = Attempts(
            self._engine, clock, spec.served, metrics, spec.max_num_queued_reqs
        )
        self.app = App(
            self.attempts,
            metrics,
            clock,
            Face(model=spec.served, max_model_len=spec.context, seed=spec.emulator.seed),
            lambda pace: self._engine.reprice(profile.paced(pace)),
        )
        self.app.set_faults(spec.faults)
        self._server = _Server(self.app)
        self.broken = False

    async def serve(self, sock: socket.socket) -> bool:
        """Serve until `stop`; return whether it ended well."""
        try:
            await self._server.serve(sockets=[sock])
        finally:
            self._engine.close()
        return not self.broken

    def stop(self) -> None:
        """Have `serve` end; like an engine that is told to, it lets go of whoever is being served."""
        self._server.should_exit = True

    def fail(self, error: Exception) -> None:
        """Something of ours is broken: say so and stop."""
        _log.critical("the emulated engine is broken", exc_info=error)
        self.broken = True
        self.stop()


class _Protocol(HttpToolsProtocol):
    """HTTP whose connections can be cut by the application."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CUT: {"close": self.transport.close}}


class _Server(uvicorn.Server):
    """A server that leaves signals to whoever runs it, and that cuts its streams at its end."""

    def __init__(self, app: App) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=_CLOSING_S,
            )
        )
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close every connection, then the rest."""
        self._app.close_all()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield
