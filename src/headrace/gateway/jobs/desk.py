"""Where callers hand requests over to be answered later, ask for the answers, and cancel them."""

import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headrace.config.schema import JobsSpec
from headrace.gateway.asked import Asked, InvalidError
from headrace.gateway.driver import Driver
from headrace.gateway.errors import Edge, Fault, Headers, edge, unfit
from headrace.gateway.exchange import LEVEL, REASON, Exchange, Instead
from headrace.gateway.intake import LASTING, USER, Letter, RefusedError, Taken, invalid
from headrace.gateway.jobs.dispatcher import Dispatcher
from headrace.gateway.jobs.waiters import Waiters
from headrace.gateway.prefer import Preference, idempotency_key, preference
from headrace.model.deployment import ClassSpec, Defer
from headrace.model.ids import TenantId
from headrace.model.ladder import LEVEL_MAX
from headrace.plane.quote import Quote
from headrace.ports.job import Job, JobId, JobSpec, State, UnixNs
from headrace.ports.jobs import Cancel, JobStore, JobStoreError, Put, Refused, StoreFullError
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs

T = TypeVar("T")

JOBS = "/v1/headrace/jobs/"
"""Before a job's id: where it is looked at, and cancelled."""
_ID_BYTES = 18
_ID_MAX = 64
_PRIORITY_MAX = 1_000_000
_ACCEPTED = 202
_DEFERRED = LEVEL_MAX + 1
"""The level of what is answered later."""
_WORDS = {State.CLAIMED: "running"}
"""States that callers know by another name."""
_APPLIED = (b"preference-applied", b"respond-async")

_REFUSED: dict[Refused, Edge] = {
    Refused.KEY_MISMATCH: Edge.KEY_MISMATCH,
    Refused.ID_TAKEN: Edge.INTERNAL,  # ids are drawn from 144 bits
    Refused.TENANT_FULL: Edge.JOBS_OF_TENANT,
    Refused.STORE_FULL: Edge.JOBS_FULL,
    Refused.BODY_TOO_LARGE: Edge.BODY_TOO_LARGE,
}
_WITHOUT_RESULT: dict[State, Edge] = {
    State.CANCELLED: Edge.JOB_CANCELLED,
    State.EXPIRED: Edge.JOB_EXPIRED,
    State.FAILED: Edge.JOB_FAILED,
}


class Told(Struct, frozen=True, kw_only=True):
    """A job as its caller sees it."""

    id: JobId
    object: str = "headrace.job"
    status: str
    model: str
    slo_class: str
    created_at: int
    """Seconds since 1970, as the next one."""
    begin_by: int
    """Work on it begins by then, or never."""


class Desk:
    """The callers' side of one store."""

    def __init__(
        self,
        store: JobStore,
        spec: JobsSpec,
        driver: Driver,
        dispatcher: Dispatcher,
        now: Callable[[], UnixNs],
    ) -> None:
        """Hand jobs over to `dispatcher`; `now`: the wall clock."""
        self._store, self._spec, self._driver = store, spec, driver
        self._dispatcher, self._now = dispatcher, now
        self._waiters = Waiters(dispatcher.over, lambda: driver.closed is not None)

    # Handing over -----------------------------------------------------------------------------

    async def take(self, exchange: Exchange, letter: Letter, taken: Taken) -> bool:
        """Keep a request for later, if it is one that is deferred; else return False."""
        settings = self._driver.plane.settings
        tenant = settings.tenants.get(letter.tenant)
        spec = settings.classes.get(settings.class_of(taken.request.slo_class, tenant))
        if spec is None or spec.defer is Defer.NEVER:
            return False
        wanted = preference(letter.headers)
        if spec.defer is Defer.ASKED and not wanted.later:
            return False
        if taken.request.stream:
            raise invalid("An answer that is deferred is not streamed.", "stream")
        quote = self._driver.plane.quote(taken.request)
        if quote.verdict.reason is not None:
            raise RefusedError(unfit(quote.verdict))
        put = await self._put(self._job(letter, taken, quote, self._window_ns(spec)), letter, taken)
        exchange.told.clear()
        await self._accept(exchange, put.job, wanted)
        return True

    def instead(self, exchange: Exchange, letter: Letter, taken: Taken) -> Instead | None:
        """Return what keeps a request for later where it is refused for want of capacity (DEG-1).

        None for a stream, and where its class keeps none: then nothing of it need be held meanwhile.
        """
        settings = self._driver.plane.settings
        tenant = settings.tenants.get(letter.tenant)
        spec = settings.classes.get(settings.class_of(taken.request.slo_class, tenant))
        if taken.request.stream or spec is None or spec.degrade is None or not spec.degrade.defer:
            return None
        told = {name: letter.told[name] for name in LASTING if name in letter.told}
        letter = replace(letter, told=told)  # the exchange lets go of its own meanwhile
        return partial(self._keep, exchange, letter, taken, self._window_ns(spec))

    async def _keep(
        self, exchange: Exchange, letter: Letter, taken: Taken, window_ns: int, fault: Fault
    ) -> bool:
        """Keep a request that was refused; if that cannot be, the refusal stands."""
        quote = self._driver.plane.quote(taken.request)
        try:
            put = await self._put(self._job(letter, taken, quote, window_ns), letter, taken)
        except RefusedError:
            return False
        wanted = preference(letter.headers)
        told = [(LEVEL, b"%d" % _DEFERRED), (REASON, fault.detail.reason.encode())]
        told.append((b"x-headrace-decision-id", b"%d" % (fault.detail.decision_id or 0)))
        await self._accept(exchange, put.job, wanted, *told)
        return True

    def _window_ns(self, spec: ClassSpec) -> int:
        """Return how soon work on a job of a class begins, or never."""
        if spec.completion_ms is not None:
            return round(spec.completion_ms * NS_PER_MS)
        return round(self._spec.window_s * NS_PER_S)

    def _job(self, letter: Letter, taken: Taken, quote: Quote, window_ns: int) -> JobSpec:
        """Return what is kept of a request beside its body."""
        try:
            key = idempotency_key(letter.headers)
        except InvalidError as error:
            raise invalid(error.message, error.param) from None
        request, now = taken.request, self._now()
        ttl = request.ttl_ns
        kept = [(name, letter.told[name]) for name in LASTING if name in letter.told]
        if request.user is not None:  # our name for it, not the caller's own
            kept.append((USER, request.user.encode()))
        return JobSpec(
            id=JobId("job_" + secrets.token_urlsafe(_ID_BYTES)),
            tenant=letter.tenant,
            slo_class=quote.slo_class,
            model=quote.model,
            route=letter.route,
            headers=tuple((name.decode(), value.decode("latin-1")) for name, value in kept),
            priority=priority(taken.asked),
            service=quote.service,
            created_ns=now,
            deadline_ns=UnixNs(now + (window_ns if ttl is None else min(window_ns, ttl))),
            keep_ns=DurationNs(round(self._spec.keep_s * NS_PER_S)),
            key=key,
        )

    async def _put(self, job: JobSpec, letter: Letter, taken: Taken) -> Put:
        (put,) = await asked(self._store.put([(job, letter.body)]))
        if isinstance(put, Refused):
            raise RefusedError(self._refused(put))
        if put.fresh:
            # After a refusal this is a second offer, as a retry would be.
            self._driver.defer(replace(taken.request, prefix=()))
            self._dispatcher.came(job)
        return put

    def _refused(self, why: Refused) -> Fault:
        """Return the refusal, with how long it takes until there is room."""
        fault = edge(_REFUSED[why])
        if fault.retry_after_ns is None:
            return fault
        return replace(fault, retry_after_ns=self._dispatcher.drain_ns())

    async def _accept(
        self, exchange: Exchange, job: Job, wanted: Preference, *more: tuple[bytes, bytes]
    ) -> None:
        """Say where the answer will be; if the caller waits for a while, it may be here by then."""
        applied = [_APPLIED, *more] if wanted.later else [*more]
        if wanted.wait_s:
            job = await self._wait(exchange, job, wanted.wait_s)
            if job.is_over:
                await self._settled(exchange, job)
                return
        await self._pending(exchange, job, *applied)

    # Looking ----------------------------------------------------------------------------------

    async def answer(self, exchange: Exchange, tenant: TenantId) -> None:
        """Tell of a job, or cancel it."""
        ident = JobId(exchange.scope["path"].removeprefix(JOBS))
        job = await self._found(tenant, ident)
        exchange.route = job.spec.route
        if exchange.scope["method"] == "DELETE":
            await self._cancel(exchange, job)
            return
        wanted = preference(exchange.scope["headers"])
        if wanted.wait_s and not job.is_over:
            job = await self._wait(exchange, job, wanted.wait_s)
        if job.is_over:
            await self._settled(exchange, job)
        else:
            await self._pending(exchange, job)

    async def _found(self, tenant: TenantId, ident: JobId) -> Job:
        job = None
        if len(ident) <= _ID_MAX:
            job = await asked(self._store.get(tenant, ident))
        if job is None:
            raise RefusedError(edge(Edge.NO_SUCH_JOB))
        return job

    async def _wait(self, exchange: Exchange, job: Job, wait_s: int) -> Job:
        """Return a job as it stands once it is over, or the time is."""
        spec = job.spec
        bound_s = min(float(wait_s), self._spec.wait_s)

        async def look() -> Job:
            return await self._found(spec.tenant, spec.id)

        return await self._waiters.wait(exchange, spec.id, bound_s, look)

    async def _pending(self, exchange: Exchange, job: Job, *more: tuple[bytes, bytes]) -> None:
        location = (b"location", (JOBS + job.spec.id).encode())
        await exchange.content(_told(job), _ACCEPTED, location, *more)

    async def _settled(self, exchange: Exchange, job: Job) -> None:
        """Give the answer of a job that is over, as it would have been given at once."""
        result = await asked(self._store.result(job.spec.tenant, job.spec.id))
        if result is None:
            cause = _WITHOUT_RESULT.get(job.state)
            if cause is None:  # purged since it was looked at
                raise RefusedError(edge(Edge.NO_SUCH_JOB))
            await exchange.tell(edge(cause))
            return
        fields: Headers = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in result.headers]
        await exchange.content(result.body, result.status, *fields)

    async def _cancel(self, exchange: Exchange, job: Job) -> None:
        spec = job.spec
        (found,) = await asked(self._store.cancel(spec.tenant, [spec.id], self._now()))
        match found:
            case Cancel.UNKNOWN:
                raise RefusedError(edge(Edge.NO_SUCH_JOB))
            case Cancel.ASKED:
                self._dispatcher.cancel(spec.id)
            case Cancel.CANCELLED:
                self._dispatcher.gone(spec.id)
            case Cancel.OVER:
                pass
        job = await self._found(spec.tenant, spec.id)
        if job.is_over:
            await exchange.content(_told(job))
        else:
            await self._pending(exchange, job)


def _told(job: Job) -> bytes:
    spec = job.spec
    word = "cancelling" if job.cancel_asked and not job.is_over else _WORDS.get(job.state)
    told = Told(
        id=spec.id,
        status=word or job.state.value,
        model=spec.model,
        slo_class=spec.slo_class,
        created_at=spec.created_ns // NS_PER_S,
        begin_by=spec.deadline_ns // NS_PER_S,
    )
    return msgspec.json.encode(told)


def priority(asked: Asked) -> int:
    """Return how soon a request is wanted, of those of its tenant and class; lower is sooner."""
    return max(-_PRIORITY_MAX, min(asked.priority, _PRIORITY_MAX))


async def asked(asking: Awaitable[T]) -> T:
    """Return what the store says; its troubles are a refusal to the caller."""
    try:
        return await asking
    except StoreFullError:
        raise RefusedError(edge(Edge.JOBS_FULL)) from None
    except JobStoreError:
        raise RefusedError(edge(Edge.JOBS_TROUBLE)) from None
