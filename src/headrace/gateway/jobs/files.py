"""Where callers put the files that batches are made of, and fetch the files of answers (`/v1/files`)."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from headrace.config.schema import JobsSpec, ServerSpec
from headrace.gateway.asked import InvalidError
from headrace.gateway.errors import Edge, edge
from headrace.gateway.exchange import Exchange
from headrace.gateway.http import CallerGoneError, TooLargeError, TooSlowError, cut, pieces
from headrace.gateway.intake import RefusedError, invalid
from headrace.gateway.jobs.clerk import file_id
from headrace.gateway.jobs.desk import asked
from headrace.gateway.jobs.form import Form, Ruler
from headrace.gateway.jobs.lines import ENVELOPE_BYTES
from headrace.gateway.jobs.papers import (
    FILES,
    Acts,
    below,
    ident,
    listed,
    page,
    query,
    seconds,
    taken,
)
from headrace.model.ids import TenantId
from headrace.ports.batch import LINES_MAX, File, FileId, Purpose
from headrace.ports.batches import FILES_PAGE_MAX, PIECE_BYTES, BatchStore
from headrace.ports.job import UnixNs
from headrace.ports.jobs import JobStoreError
from headrace.units import MIB, NS_PER_S, DurationNs

FORM_BYTES = 65_536
"""What a form may have beside its file."""
EXPIRES_S = range(3_600, 2_592_001)
"""How long a caller may have a file kept, in seconds: as in OpenAI's API."""
_SPARE_S = 3_600
"""How much longer than the slowest caller may take a file is still believed to be coming: then its process must
have died."""
_EXPIRES = "expires_after"


class FileDesk:
    """The callers' side of the files of one store."""

    def __init__(
        self, store: BatchStore, spec: JobsSpec, server: ServerSpec, now: Callable[[], UnixNs]
    ) -> None:
        """Serve the files of a store; `now`: the wall clock."""
        self._store, self._now = store, now
        self._keep_ns = DurationNs(round(spec.keep_s * NS_PER_S))
        self._bytes_max = spec.file_mib * MIB + FORM_BYTES
        self._patience_s = server.header_timeout_s
        whole_s = self._patience_s * (self._bytes_max // MIB + 1)
        self._coming_ns = round((_SPARE_S + whole_s) * NS_PER_S)
        self._line_bytes_max = server.body_limit_bytes + ENVELOPE_BYTES

    def acts(self, path: str) -> Acts | None:
        """Return what can be done at a path; None: nothing."""
        match below(path, FILES):
            case []:
                return {"GET": self._list, "POST": self._take}
            case [_]:
                return {"GET": self._tell, "DELETE": self._delete}
            case [_, "content"]:
                return {"GET": self._give}
            case _:
                return None

    # Coming -----------------------------------------------------------------------------------

    async def _take(self, exchange: Exchange, tenant: TenantId) -> None:
        """Keep a file as it comes, never more than some of it in memory."""
        now = self._now()
        file = File(
            id=file_id(),
            tenant=tenant,
            purpose=Purpose.BATCH,
            name="",
            created_ns=now,
            until_ns=UnixNs(now + self._coming_ns),
        )
        try:
            form = Form(exchange.header(b"content-type") or b"")
            taken(await asked(self._store.open_file(file)))
            file = await self._whole(exchange, form, file)
        except InvalidError as error:
            await self._forget(file)
            raise invalid(error.message, error.param) from None
        except (RefusedError, TooLargeError, TooSlowError, CallerGoneError):
            await self._forget(file)
            raise
        await exchange.content(msgspec.json.encode(_told(file)))

    async def _whole(self, exchange: Exchange, form: Form, file: File) -> File:
        ruler = Ruler(LINES_MAX, self._line_bytes_max)
        waiting, size = bytearray(), 0
        coming = pieces(exchange.scope, exchange.receive, self._bytes_max, self._patience_s)
        async for data in coming:
            content = form.feed(data)
            ruler.feed(content)
            waiting += content
            size += len(content)
            while len(waiting) >= PIECE_BYTES:
                part = bytes(memoryview(waiting)[:PIECE_BYTES])
                del waiting[:PIECE_BYTES]
                taken(await asked(self._store.append(file.id, part)))
        name = form.end()
        ruler.end()
        if form.fields.get("purpose") != Purpose.BATCH:
            raise InvalidError("Files are for batches alone (`batch`).", "purpose")
        keep_ns = self._kept_ns(form)
        if waiting:
            taken(await asked(self._store.append(file.id, bytes(waiting))))
        now = self._now()
        until = UnixNs(now + keep_ns)
        changed = {"name": name, "bytes": size, "created_ns": now, "until_ns": until}
        file = msgspec.structs.replace(file, **changed)
        taken(await asked(self._store.keep_file(file)))
        return file

    def _kept_ns(self, form: Form) -> DurationNs:
        anchor = form.fields.get(f"{_EXPIRES}[anchor]")
        told = form.fields.get(f"{_EXPIRES}[seconds]")
        if anchor is None and told is None:
            return self._keep_ns
        return expires_ns(anchor, int(told) if told is not None and told.isdecimal() else None)

    async def _forget(self, file: File) -> None:
        """Let go of what came of a file that is not to be."""
        with suppress(JobStoreError):  # then it goes when it is given up
            await self._store.delete_file(file.tenant, file.id, self._now())

    # Looking ----------------------------------------------------------------------------------

    async def _list(self, exchange: Exchange, tenant: TenantId) -> None:
        told = query(exchange)
        part = page(told, limit_max=FILES_PAGE_MAX, limit=FILES_PAGE_MAX)
        purpose = told.get("purpose")
        found: list[File] = []
        if purpose is None or purpose in list(Purpose):
            wanted = None if purpose is None else Purpose(purpose)
            found = await asked(self._store.files(tenant, part, wanted, self._now()))
        await exchange.content(listed([_told(one) for one in found], part))

    async def _found(self, exchange: Exchange, tenant: TenantId) -> File:
        name = FileId(ident(exchange))
        found = await asked(self._store.file(tenant, name, self._now()))
        if found is None:
            raise RefusedError(edge(Edge.NO_SUCH_FILE))
        return found

    async def _tell(self, exchange: Exchange, tenant: TenantId) -> None:
        file = await self._found(exchange, tenant)
        await exchange.content(msgspec.json.encode(_told(file)))

    async def _delete(self, exchange: Exchange, tenant: TenantId) -> None:
        file = await self._found(exchange, tenant)
        await asked(self._store.delete_file(tenant, file.id, self._now()))
        told = {"id": file.id, "object": "file", "deleted": True}
        await exchange.content(msgspec.json.encode(told))

    async def _give(self, exchange: Exchange, tenant: TenantId) -> None:
        """Send a file's content piece by piece, as fast as it is taken."""
        file = await self._found(exchange, tenant)
        fields = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", b"%d" % file.bytes),
            *exchange.headers,
        ]
        await exchange.send({"type": "http.response.start", "status": 200, "headers": fields})
        sent = nth = 0
        while sent < file.bytes and not exchange.wire.is_gone:
            piece = await self._piece(file, nth)
            if piece is None:  # deleted meanwhile: the caller sees that it is not whole
                await cut(exchange.wire, exchange.receive)
                return
            sent, nth = sent + len(piece), nth + 1
            await exchange.send({"type": "http.response.body", "body": piece, "more_body": True})
        await exchange.send({"type": "http.response.body", "body": b""})

    async def _piece(self, file: File, nth: int) -> bytes | None:
        try:
            return await self._store.piece(file.id, nth)
        except JobStoreError:
            return None


def expires_ns(anchor: object, seconds_: int | None) -> DurationNs:
    """Return how long a file is to be kept by a caller's word; raises `InvalidError`."""
    if anchor != "created_at":
        raise InvalidError("Only `created_at` is known.", f"{_EXPIRES}.anchor")
    if seconds_ is None or seconds_ not in EXPIRES_S:
        message = f"Not a number from {EXPIRES_S.start} to {EXPIRES_S.stop - 1}."
        raise InvalidError(message, f"{_EXPIRES}.seconds")
    return DurationNs(seconds_ * NS_PER_S)


def _told(file: File) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": seconds(file.created_ns),
        "expires_at": seconds(file.until_ns),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }
