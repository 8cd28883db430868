"""Takes batches from their file to their answers, a step at a time.

A step checks a whole file, or makes some of its lines jobs, or writes some answers. Between two of them nothing is
remembered here: the store says which batch is next and how far it is, so that any process may take the next step.
Jobs are run by the dispatcher, as all others are.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from hashlib import blake2b

from msgspec.structs import replace

from headrace.config.schema import JobsSpec
from headrace.gateway.driver import Driver
from headrace.gateway.errors import unfit
from headrace.gateway.intake import Intake, Letter, RefusedError, Taken
from headrace.gateway.jobs.desk import priority
from headrace.gateway.jobs.dispatcher import KEEP_NS, Dispatcher
from headrace.gateway.jobs.lines import FaultError, Line, read
from headrace.model.decision import Reason
from headrace.model.ids import ModelName
from headrace.model.request import Request
from headrace.plane.quote import Quote
from headrace.ports.batch import ERRORS_MAX, Batch, FileId, LineError, Stage
from headrace.ports.batches import PIECE_BYTES, STEP_BYTES, STEP_JOBS, BatchStore, Entry, Hold, Kept
from headrace.ports.clock import Clock
from headrace.ports.job import JobId, JobSpec, State, UnixNs
from headrace.ports.jobs import JobStoreError
from headrace.units import NS_PER_S, Service, later

_REST_NS = 5 * NS_PER_S
"""How long a batch waits that the store has no room for."""
_BREATH = 64
"""Lines that are read before others have a turn on the loop."""
_REQUESTS = 8
"""Lines that are understood as requests before others have a turn: each costs what a live one does."""
_RENEWALS = 3
"""Renewals within a lease."""
_ID_BYTES = 18
_MODEL_FAULTS = frozenset({Reason.MODEL_UNKNOWN, Reason.MODEL_NOT_ALLOWED})
"""What is wrong with a whole file; whatever else a line is refused for is told as its answer."""


class _LostError(Exception):
    """Another process has the batch, or none may go on with it now."""


def _check_name(line: Line, named: set[bytes]) -> None:
    """Refuse a line that is called as one before it; of names, which may be long, only hashes are held."""
    name = blake2b(line.custom_id.encode(), digest_size=16).digest()
    if name in named:
        message = "An earlier line has the same custom_id."
        raise FaultError("duplicate_custom_id", message, "custom_id")
    named.add(name)


async def _breathe() -> None:
    """Let others have a turn on the loop."""
    loop = asyncio.get_running_loop()
    turn = loop.create_future()
    loop.call_soon(turn.set_result, None)
    await turn


def file_id() -> FileId:
    """Return an id that no other file has."""
    return FileId("file-" + secrets.token_urlsafe(_ID_BYTES))


class Clerk:
    """Works on the batches of one store, for one life of a process."""

    def __init__(  # noqa: PLR0913 - the neighbours it stands between
        self,
        store: BatchStore,
        spec: JobsSpec,
        driver: Driver,
        intake: Intake,
        dispatcher: Dispatcher,
        clock: Clock,
        *,
        body_bytes: int,
        wall: Callable[[], UnixNs],
        owner: str,
        aside: Callable[[], bool],
    ) -> None:
        """Take steps as `owner`, a name that no other life has; none while `aside`.

        `body_bytes`: of the longest request.
        """
        self._store, self._driver, self._intake = store, driver, intake
        self._dispatcher, self._clock, self._wall = dispatcher, clock, wall
        self._body_bytes, self._owner, self._aside = body_bytes, owner, aside
        self._lease_ns = round(spec.lease_s * NS_PER_S)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.kept = Kept()
        """Files and batches as they were last looked at."""
        self.lines: Counter[str] = Counter()
        """Lines of batches, by what this process did: made them jobs, wrote them as output or errors."""

    # Its life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._work())
        self._task.add_done_callback(self._ended)

    def wake(self) -> None:
        """Look at the store at once."""
        self._wake.set()

    async def close(self) -> None:
        """End; what was begun is another's, or is begun anew."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):  # our bug: stop, as for any other
            self._driver.fail(error)

    async def _work(self) -> None:
        while True:
            with suppress(JobStoreError):  # told by the store, and tried again
                while self._may() and await self._step():
                    pass
            with suppress(JobStoreError):  # in a full store this makes the room for such a step
                while await self._store.purge_files(self._wall()):
                    pass
                self.kept = await self._store.kept()
            await self._pause()

    def _may(self) -> bool:
        return self._driver.closed is None and not self._aside()

    async def _pause(self) -> None:
        timer = self._clock.call_at(later(self._clock.now(), KEEP_NS), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()
        self._wake.clear()

    # Steps ------------------------------------------------------------------------------------

    async def _step(self) -> bool:
        """Take one step with the batch whose turn it is; return whether there was one."""
        now = self._wall()
        hold = await self._store.take_batch(self._owner, UnixNs(now + self._lease_ns), now)
        if hold is None:
            return False
        try:
            if hold.batch.stage is Stage.VALIDATING:
                await self._check(hold)
            elif hold.batch.left:
                await self._enqueue(hold)
            else:
                await self._write(hold)
        except (_LostError, asyncio.CancelledError) as error:
            with suppress(JobStoreError):  # then others have it when its lease is over
                await self._store.leave_batch(hold)
            if isinstance(error, asyncio.CancelledError):
                raise
            return False
        return True

    async def _check(self, hold: Hold) -> None:
        """Read the whole file, so that one with a fault is told before anything of it runs."""
        batch, lines = hold.batch, 0
        errors: list[LineError] = []
        known: dict[str, FaultError | None] = {}
        named: set[bytes] = set()
        async with aclosing(self._lines(hold, 0)) as found:
            async for content, _end in found:
                lines += 1
                try:
                    line = read(content, batch.endpoint, self._body_bytes)
                    _check_name(line, named)
                    await self._check_model(batch, line, known)
                except FaultError as fault:
                    errors.append(fault.at(lines))
                if len(errors) == ERRORS_MAX:
                    break
        if not lines:
            errors.append(LineError(code="empty_file", message="The file has no lines."))
        await self._store.check_batch(hold, lines, tuple(errors), self._wall())

    async def _check_model(
        self, batch: Batch, line: Line, known: dict[str, FaultError | None]
    ) -> None:
        """Refuse a line whose model its tenant may not use; the same question is asked once."""
        if line.model not in known:
            quoted = await self._quoted(batch, line)
            if quoted is None:
                return  # its body is at fault, and its answer will say so
            verdict, found = quoted[1].verdict, None
            if verdict.reason in _MODEL_FAULTS:
                face = unfit(verdict).face
                found = FaultError(face.code, face.message, "body.model")
            known[line.model] = found
        if (fault := known[line.model]) is not None:
            raise fault

    async def _quoted(self, batch: Batch, line: Line) -> tuple[Taken, Quote] | None:
        """Return a request as live ones are understood; None: its body is at fault."""
        told = [(n.encode(), v.encode("latin-1")) for n, v in batch.headers]
        letter = Letter(batch.tenant, batch.endpoint, told, dict(reversed(told)), line.body)
        try:
            taken = await self._intake.take(letter)
        except RefusedError:
            if not self._may():
                raise _LostError from None
            return None
        taken = replace(taken, request=replace(taken.request, slo_class=batch.slo_class))
        return taken, self._driver.plane.quote(taken.request)

    async def _enqueue(self, hold: Hold) -> None:
        batch, size = hold.batch, 0
        entries: list[Entry] = []
        understood: dict[JobId, Request] = {}
        async with aclosing(self._lines(hold, batch.read)) as found:
            async for content, end in found:
                line = read(content, batch.endpoint, len(content))
                quoted = await self._quoted(batch, line)
                spec = self._spec(batch, line, batch.put + len(entries) + 1, quoted)
                if quoted is not None:
                    understood[spec.id] = replace(quoted[0].request, prefix=())
                entries.append(Entry(spec=spec, body=line.body, end=end))
                size += len(line.body)
                if len(entries) % _REQUESTS == 0:
                    await _breathe()
                full = len(entries) == STEP_JOBS or size > STEP_BYTES
                if full or len(entries) == batch.left:
                    break
        now = self._wall()
        jobs = await self._store.enqueue(hold, entries, UnixNs(now + _REST_NS), now)
        for job in jobs or ():
            self.lines["put"] += 1
            if job.state is State.QUEUED:
                if (request := understood.get(job.spec.id)) is not None:
                    self._driver.defer(request)
                self._dispatcher.came(job.spec)

    def _spec(
        self, batch: Batch, line: Line, nth: int, quoted: tuple[Taken, Quote] | None
    ) -> JobSpec:
        """Return the job of a line; who works on it finds what is wrong with it, if anything is."""
        models = self._driver.plane.settings.models
        if quoted is not None:
            model, service, rank = quoted[1].model, quoted[1].service, priority(quoted[0].asked)
        else:
            asked = ModelName(line.model)
            model, service, rank = asked, Service(0), 0
            if asked in models:
                model = ModelName(models[asked].name)
        return JobSpec(
            id=JobId(f"job_{batch.id.removeprefix('batch_')}_{nth}"),
            tenant=batch.tenant,
            slo_class=batch.slo_class,
            model=model,
            route=batch.endpoint,
            headers=batch.headers,
            priority=rank,
            service=service,
            created_ns=batch.created_ns,
            deadline_ns=batch.deadline_ns,
            keep_ns=batch.keep_ns,
            batch=batch.id,
            custom_id=line.custom_id,
        )

    async def _write(self, hold: Hold) -> None:
        names = file_id(), file_id()
        batch = await self._store.write_out(hold, names, self._wall())
        if batch is not None:
            self.lines["output"] += batch.completed - hold.batch.completed
            self.lines["error"] += batch.failed - hold.batch.failed

    async def _lines(self, hold: Hold, at: int) -> AsyncGenerator[tuple[bytes, int]]:
        """Yield each line from a place of the file on, and where the next begins; holds the batch meanwhile."""
        held_at, read_lines = self._clock.now(), 0
        parts: list[bytes] = []
        async with aclosing(self._pieces(hold.batch.input_file, at)) as pieces:
            async for piece in pieces:
                if self._clock.now() - held_at >= self._lease_ns // _RENEWALS:
                    held_at = self._clock.now()
                    await self._hold(hold)
                *whole, rest = piece.split(b"\n")
                for end in whole:
                    line = b"".join((*parts, end))
                    parts.clear()
                    at += len(line) + 1
                    yield line, at
                    read_lines += 1
                    if read_lines % _BREATH == 0:
                        await _breathe()
                parts.append(rest)
        if line := b"".join(parts):
            yield line, at + len(line)

    async def _hold(self, hold: Hold) -> None:
        until = UnixNs(self._wall() + self._lease_ns)
        if not self._may() or not await self._store.hold_batch(hold, until):
            raise _LostError

    async def _pieces(self, file: FileId, at: int) -> AsyncGenerator[bytes]:
        nth, skip = divmod(at, PIECE_BYTES)
        while (piece := await self._store.piece(file, nth)) is not None:
            yield piece[skip:]
            nth, skip = nth + 1, 0
