"""Where callers hand in batches, look at them and cancel them (`/v1/batches`)."""

import re
import secrets
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from headrace.config.schema import JobsSpec, ServerSpec
from headrace.gateway.asked import InvalidError, blame
from headrace.gateway.driver import Driver
from headrace.gateway.errors import Edge, edge
from headrace.gateway.exchange import Exchange
from headrace.gateway.http import read_body
from headrace.gateway.intake import Intake, RefusedError, invalid
from headrace.gateway.jobs.clerk import Clerk
from headrace.gateway.jobs.desk import asked
from headrace.gateway.jobs.dispatcher import Dispatcher
from headrace.gateway.jobs.files import expires_ns
from headrace.gateway.jobs.lines import ENDPOINTS
from headrace.gateway.jobs.papers import (
    BATCHES,
    ID_MAX,
    Acts,
    below,
    ident,
    listed,
    page,
    query,
    seconds,
    taken,
)
from headrace.gateway.prefer import idempotency_key
from headrace.model.deployment import Defer
from headrace.model.ids import ClassName, TenantId
from headrace.ports.batch import Batch, FileId, Stage
from headrace.ports.batches import BATCHES_PAGE_MAX, BatchStore, Progress
from headrace.ports.engine import Route
from headrace.ports.job import BatchId, UnixNs
from headrace.units import NS_PER_S, DurationNs

_ID_BYTES = 18
_BODY_BYTES_MAX = 262_144
"""Of a request for a batch: sixteen pairs of metadata, each character of them six bytes long."""
_LIST = 20
"""Batches of a page where that is not told, as in OpenAI's API."""
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([smh])")
_UNITS_S = {"s": 1, "m": 60, "h": 3_600}
_WINDOW_MAX_S = 86_400
_OBJECTIVE = "x-llm-d-inference-objective"
_WANTED = frozenset({Stage.CANCELLING, Stage.CANCELLED})


class _Expires(Struct):
    anchor: str
    seconds: int


class _Asked(Struct):
    input_file_id: Annotated[str, Meta(max_length=ID_MAX)]
    endpoint: str
    completion_window: str
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: _Expires | None = None


class BatchDesk:
    """The callers' side of the batches of one store."""

    def __init__(  # noqa: PLR0913 - the neighbours it stands between
        self,
        store: BatchStore,
        spec: JobsSpec,
        server: ServerSpec,
        *,
        driver: Driver,
        intake: Intake,
        dispatcher: Dispatcher,
        clerk: Clerk,
        now: Callable[[], UnixNs],
    ) -> None:
        """Hand batches over to `clerk`; `now`: the wall clock."""
        self._store, self._driver, self._intake = store, driver, intake
        self._dispatcher, self._clerk, self._now = dispatcher, clerk, now
        self._keep_ns = DurationNs(round(spec.keep_s * NS_PER_S))
        self._patience_s = server.header_timeout_s

    def acts(self, path: str) -> Acts | None:
        """Return what can be done at a path; None: nothing."""
        match below(path, BATCHES):
            case []:
                return {"GET": self._list, "POST": self._take}
            case [_]:
                return {"GET": self._tell}
            case [_, "cancel"]:
                return {"POST": self._cancel}
            case _:
                return None

    async def _take(self, exchange: Exchange, tenant: TenantId) -> None:
        content = await read_body(
            exchange.scope, exchange.receive, _BODY_BYTES_MAX, self._patience_s
        )
        if self._driver.closed is not None:
            raise RefusedError(self._driver.closed)
        try:
            batch = self._batch(exchange, tenant, _read(content))
        except InvalidError as error:
            raise invalid(error.message, error.param) from None
        found = taken(await asked(self._store.put_batch(batch)))
        self._clerk.wake()
        await exchange.content(_told(found))

    def _batch(self, exchange: Exchange, tenant: TenantId, told: _Asked) -> Batch:
        if told.endpoint not in list(ENDPOINTS):
            known = ", ".join(ENDPOINTS)
            raise InvalidError(f"Batches are made of requests for one of {known}.", "endpoint")
        expires, keep_ns = told.output_expires_after, self._keep_ns
        if expires is not None:
            keep_ns = expires_ns(expires.anchor, expires.seconds)
        now = self._now()
        return Batch(
            id=BatchId("batch_" + secrets.token_urlsafe(_ID_BYTES)),
            tenant=tenant,
            slo_class=self._class(exchange, tenant),
            endpoint=Route(told.endpoint),
            input_file=FileId(told.input_file_id),
            window=told.completion_window,
            headers=self._intake.lasting(exchange.told),
            metadata=told.metadata,
            key=idempotency_key(exchange.scope["headers"]),
            created_ns=now,
            deadline_ns=UnixNs(now + _window_ns(told.completion_window)),
            keep_ns=keep_ns,
        )

    def _class(self, exchange: Exchange, tenant: TenantId) -> ClassName:
        """Return the class that a batch is of: the one asked for, else the first that is ever deferred."""
        settings = self._driver.plane.settings
        wanted = self._intake.objective(exchange.told, tenant)
        spec = settings.tenants.get(tenant)
        names = settings.classes if spec is None or not spec.classes else spec.classes
        for name in names if wanted is None else (wanted,):
            known = settings.classes.get(ClassName(name))
            if known is None or (spec is not None and not spec.may_use(known)):
                continue
            if known.defer is not Defer.NEVER:
                return ClassName(name)
        which = "No class that the key may use" if wanted is None else "Not the class asked for"
        raise InvalidError(f"{which} takes work that need not be answered now.", _OBJECTIVE)

    async def _list(self, exchange: Exchange, tenant: TenantId) -> None:
        told = query(exchange)
        told.pop("order", None)  # it is not known of batches
        part = page(told, limit_max=BATCHES_PAGE_MAX, limit=_LIST)
        found = await asked(self._store.batches(tenant, part))
        await exchange.content(listed([_shown(one) for one in found], part))

    async def _found(self, exchange: Exchange, tenant: TenantId) -> Progress:
        found = await asked(self._store.batch(tenant, BatchId(ident(exchange))))
        if found is None:
            raise RefusedError(edge(Edge.NO_SUCH_BATCH))
        return found

    async def _tell(self, exchange: Exchange, tenant: TenantId) -> None:
        await exchange.content(_told(await self._found(exchange, tenant)))

    async def _cancel(self, exchange: Exchange, tenant: TenantId) -> None:
        """Cancel a batch; what of it waits will never run once this is answered."""
        batch = (await self._found(exchange, tenant)).batch
        while await asked(self._store.cancel_batch(tenant, batch.id, self._now())):
            pass
        found = await self._found(exchange, tenant)
        if found.batch.stage not in _WANTED:
            raise RefusedError(edge(Edge.BATCH_OVER))
        self._dispatcher.cancel_batch(batch.id)
        self._clerk.wake()
        await exchange.content(_told(found))


def _read(content: bytes) -> _Asked:
    try:
        return msgspec.json.decode(content, type=_Asked)
    except msgspec.ValidationError as error:
        raise blame(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidError("The body is not JSON.") from None


def _window_ns(told: str) -> DurationNs:
    """Return how long a batch has; OpenAI's API knows `24h` alone."""
    found = _WINDOW.fullmatch(told)
    window_s = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 0 < window_s <= _WINDOW_MAX_S:
        raise InvalidError(
            "Not `24h`, nor a shorter time as `90m` or `3600s`.", "completion_window"
        )
    return DurationNs(window_s * NS_PER_S)


def _told(progress: Progress) -> bytes:
    return msgspec.json.encode(_shown(progress))


def _shown(progress: Progress) -> dict[str, Any]:
    """Return a batch as its caller sees it: files of answers once they are whole."""
    batch = progress.batch
    ended = {
        f"{stage}_at": seconds(batch.ended_ns) if batch.stage is stage else None
        for stage in (Stage.COMPLETED, Stage.FAILED, Stage.EXPIRED, Stage.CANCELLED)
    }
    errors = {"object": "list", "data": batch.errors} if batch.errors else None
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file,
        "completion_window": batch.window,
        "status": batch.stage,
        "output_file_id": batch.output_file if batch.is_over else None,
        "error_file_id": batch.error_file if batch.is_over else None,
        "created_at": seconds(batch.created_ns),
        "in_progress_at": seconds(batch.in_progress_ns),
        "expires_at": seconds(batch.deadline_ns),
        "finalizing_at": seconds(batch.finalizing_ns),
        "cancelling_at": seconds(batch.cancelling_ns),
        **ended,
        "request_counts": {
            "total": batch.lines,
            "completed": progress.completed,
            "failed": progress.failed,
        },
        "metadata": batch.metadata,
    }
