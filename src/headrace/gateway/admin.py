"""The admin listener: what is going on, and the few things that may be changed while it does.

An application and a listener of its own, so that neither callers' keys nor callers' load reach it.
Whoever gets past the guard may do everything; probes of health alone need no key.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.config.changes import public
from headrace.config.errors import ConfigError
from headrace.gateway import health
from headrace.gateway.driver import Driver
from headrace.gateway.guard import Denied, Guard
from headrace.gateway.http import (
    CallerGoneError,
    Message,
    Receive,
    Scope,
    Send,
    TooLargeError,
    TooSlowError,
    read_body,
)
from headrace.gateway.limits import balances, budgets
from headrace.gateway.litellm import Keys
from headrace.gateway.metrics import Metrics, text
from headrace.gateway.overview import Overview
from headrace.gateway.steward import Applied, Reread, Steward
from headrace.gateway.wanted import ChangeRefusedError, PolicyChange
from headrace.model.budget import written_amount
from headrace.model.ids import TenantId
from headrace.policy.catalog import POLICY
from headrace.units import to_seconds

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
BODY_LIMIT = 65_536
PAGE = 1_000
"""Rows of one answer of `/tenants` and `/keys`; `?offset=` asks for those that follow."""
_WHO = "headrace.who"

T = TypeVar("T")


class Freeze(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /freeze` and `POST /scale`."""

    frozen: bool = True


class Nothing(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a call that takes none."""


class Admin:
    """An ASGI application over one gateway."""

    def __init__(  # noqa: PLR0913 - the neighbours it stands between
        self,
        driver: Driver,
        guard: Guard,
        steward: Steward,
        metrics: Metrics,
        overview: Overview,
        *,
        patience_s: float | None = None,
        reread: Reread | None = None,
    ) -> None:
        """Show and change what it is given; `reread` reads the configuration anew, if it can be.

        `patience_s`: seconds that the body of a call may take.
        """
        self._driver, self._guard, self._steward = driver, guard, steward
        self._metrics, self._overview, self._reread = metrics, overview, reread
        self._patience_s = patience_s
        self._keys = keys = Keys(steward, driver.plane, steward.wall)
        self._app = Starlette(
            routes=[
                Route("/metrics", self._show_metrics),
                Route("/config", self._show_config),
                Route("/policy", self._show_policy, methods=["GET"]),
                Route("/policy", self._change_policy, methods=["POST"]),
                Route("/reload", self._reload, methods=["POST"]),
                Route("/tenants", self._show_tenants),
                Route("/keys", self._show_keys),
                Route("/freeze", self._freeze, methods=["POST"]),
                Route("/scale", self._show_scale, methods=["GET"]),
                Route("/scale", self._freeze_scale, methods=["POST"]),
                Route("/drain", self._drain, methods=["POST"]),
                Route("/key/generate", self._key(keys.generate), methods=["POST"]),
                Route("/key/update", self._key(keys.update), methods=["POST"]),
                Route("/key/delete", self._key(keys.delete), methods=["POST"]),
                Route("/key/info", self._show_key),
                Route("/state", self._show_state),
                *(Route(path, self._live) for path in health.LIVE),
                *(Route(path, self._ready) for path in health.READY),
            ],
            exception_handlers={
                HTTPException: _http_error,
                ChangeRefusedError: self._refused,
                TooLargeError: _too_large,
                TooSlowError: _too_slow,
                CallerGoneError: _gone,
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, if its sender may ask."""
        assert scope["type"] == "http", "only HTTP is served"
        send = self._closing(send)
        if scope["path"] not in health.PATHS:
            found = self._guard.admit(scope)
            if isinstance(found, Denied):
                await _denied(found)(scope, receive, send)
                return
            scope[_WHO] = found
        await self._app(scope, receive, send)

    def stand_aside(self, *, aside: bool) -> None:
        """Refuse every change, or allow them again: another process may have keys and record.

        Meanwhile each answer is the last on its connection.
        """
        self._steward.aside = aside

    def _closing(self, send: Send) -> Send:
        """Have the connection closed after its answer if another process answers the next."""

        async def last(message: Message) -> None:
            if message["type"] == "http.response.start" and self._steward.aside:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        return last

    def begin(self) -> None:
        """Have what is frozen from the start be so for the plane too, now that it runs."""
        self._steward.begin()

    @property
    def frozen(self) -> bool:
        """Whether changes are frozen; a successor takes it over, and nobody changed it then."""
        return self._steward.frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self._steward.frozen = frozen

    # What is going on -------------------------------------------------------------------------

    async def _show_metrics(self, _: Request) -> Response:
        taken = self._metrics.take()
        content = text(taken) if taken.small else await asyncio.to_thread(text, taken)
        return Response(content, headers={"content-type": PROMETHEUS})

    async def _show_config(self, _: Request) -> Response:
        return _json({"revision": self._driver.revision, **public(self._steward.settings)})

    async def _show_policy(self, _: Request) -> Response:
        config = self._steward.settings.deployment
        return _json(
            {
                "revision": self._driver.revision,
                "frozen": self._steward.frozen,
                "policy": {name: getattr(config, name) for name in POLICY},
                "revisions": list(self._steward.revisions),
            }
        )

    async def _show_tenants(self, request: Request) -> Response:
        tenants = self._steward.settings.deployment.tenants
        quotas = self._driver.plane.state.ledger.quotas
        rows = []
        for spec in _page(request, tenants):
            name = TenantId(spec.name)
            quota = quotas.get(name)
            left = {
                word: {
                    "limit": balance.limit,
                    "remaining": balance.remaining,
                    "full_in_s": to_seconds(balance.reset_ns),
                }
                for word, balance in balances(self._driver.plane, name).items()
            }
            rows.append(
                {
                    **msgspec.to_builtins(spec),
                    "balances": left,
                    "spent": [
                        {
                            "budget": one.name,
                            "taken": written_amount(one.unit, one.taken),
                            "ends_in_s": to_seconds(one.wait_ns),
                        }
                        for one in budgets(self._driver.plane, name)
                    ],
                    "parallel": 0 if quota is None else quota.parallel,
                    "reserved_tokens": 0 if quota is None else quota.reserved,
                }
            )
        return _json({"total": len(tenants), "tenants": rows})

    async def _show_keys(self, request: Request) -> Response:
        settings = self._steward.settings
        admins = () if settings.admin is None else settings.admin.keys
        rows = [{"name": key.name, "tenant": key.tenant} for key in _page(request, settings.keys)]
        return _json(
            {"total": len(settings.keys), "keys": rows, "admin": [key.name for key in admins]}
        )

    async def _show_key(self, request: Request) -> Response:
        return _json(self._keys.info(request.query_params.get("key")))

    async def _show_state(self, _: Request) -> Response:
        taken = self._overview.take(self._metrics.labels(), frozen=self._steward.frozen)
        return _json(taken.state() if taken.small else await asyncio.to_thread(taken.state))

    async def _show_scale(self, _: Request) -> Response:
        return _json(self._overview.scale())

    async def _live(self, _: Request) -> Response:
        return _probe(health.live(self._driver))

    async def _ready(self, _: Request) -> Response:
        return _probe(health.ready(self._driver))

    # What may be changed ----------------------------------------------------------------------

    async def _change_policy(self, request: Request) -> Response:
        asked = request.state.asked = await self._body(request, PolicyChange)
        return _json(self._steward.change(request.scope[_WHO], asked))

    async def _reload(self, request: Request) -> Response:
        await self._body(request, Nothing)
        if self._reread is None:
            raise ChangeRefusedError(409, "no_file", "The gateway was started without a file.")
        try:
            settings = await asyncio.to_thread(self._reread)
        except (ConfigError, OSError) as error:
            raise ChangeRefusedError(400, "invalid_value", str(error)) from None
        applied: Applied = self._steward.reload(request.scope[_WHO], settings)
        return _json(applied)

    async def _freeze(self, request: Request) -> Response:
        asked = await self._body(request, Freeze)
        self._steward.freeze(request.scope[_WHO], frozen=asked.frozen)
        return _json({"frozen": self._steward.frozen})

    async def _freeze_scale(self, request: Request) -> Response:
        asked = await self._body(request, Freeze)
        self._steward.freeze_scale(request.scope[_WHO], frozen=asked.frozen)
        return _json({"frozen": self._driver.plane.state.scale_frozen})

    async def _drain(self, request: Request) -> Response:
        await self._body(request, Nothing)
        self._steward.drain(request.scope[_WHO])
        return _json({"draining": self._driver.draining, "live": self._driver.live})

    def _refused(self, request: Request, error: Exception) -> Response:
        """Answer a refusal, and write down whose change it was, if it was to be made."""
        assert isinstance(error, ChangeRefusedError)
        asked = getattr(request.state, "asked", None)
        if request.method == "POST" and not (asked is not None and asked.dry_run):
            what = request.url.path.strip("/").replace("/", " ") if asked is None else asked.what
            self._steward.refused(request.scope[_WHO], what, error)
        return _error(error.status, error.code, str(error))

    def _key(self, act: Callable[[str, dict[str, Any]], Any]) -> Callable[[Request], Any]:
        """Return what answers a change of keys."""

        async def change(request: Request) -> Response:
            asked = await self._body(request, dict[str, Any])
            return _json(act(request.scope[_WHO], asked))

        return change

    async def _body(self, request: Request, type_: type[T]) -> T:
        """Return a body of JSON; none at all asks for the defaults."""
        content = await read_body(request.scope, request.receive, BODY_LIMIT, self._patience_s)
        self._steward.ready()
        try:
            return msgspec.json.decode(content or b"{}", type=type_)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ChangeRefusedError(400, "invalid_value", str(error)) from None
        except RecursionError:
            message = "The body is nested too deeply."
            raise ChangeRefusedError(400, "invalid_value", message) from None


def _page(request: Request, rows: tuple[T, ...]) -> tuple[T, ...]:
    asked = request.query_params.get("offset", "0")
    if not (asked.isascii() and asked.isdecimal() and len(asked) <= len(str(10**9))):
        raise ChangeRefusedError(400, "invalid_value", "`offset` is a count of rows.")
    return rows[int(asked) : int(asked) + PAGE]


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _probe(found: health.Health) -> Response:
    return Response(found.body, found.status, media_type="application/json")


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """Return an error in the words of the traffic's own."""
    kind = "invalid_request_error" if status < 500 else "server_error"  # noqa: PLR2004 - by HTTP
    error = {"message": message, "type": kind, "param": None, "code": code}
    response = _json({"error": error}, status)
    response.headers.update(headers or {})
    return response


def _denied(why: Denied) -> Response:
    headers = {"www-authenticate": "Bearer"} if why.status == 401 else {}  # noqa: PLR2004 - by HTTP
    if why.retry_after_s is not None:
        headers["retry-after"] = str(why.retry_after_s)
    return _error(why.status, why.code, why.message, headers)


def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    headers = dict(error.headers or {})
    return _error(
        error.status_code, codes.get(error.status_code, "invalid_value"), error.detail, headers
    )


def _too_large(_: Request, __: Exception) -> Response:
    return _error(413, "request_too_large", "The body is too large.")


def _too_slow(_: Request, __: Exception) -> Response:
    message = "The request took too long to arrive."
    return _error(408, "request_timeout", message, {"connection": "close"})


def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
