"""Callers' files in a SQLite file: one row each, and their content in pieces of one size.

A file is `open` while it comes, `kept` when it can be seen. What is deleted or past its time is not seen any
more, and goes piece by piece.
"""

from collections.abc import Iterator
from typing import Any

from headrace.adapters.jobs.rows import Rows
from headrace.model.ids import TenantId
from headrace.ports.batch import File, FileId, Purpose
from headrace.ports.batches import FILES_PAGE_MAX, PIECE_BYTES, Declined, Page
from headrace.ports.job import UnixNs

_FILE = "select seq, id, tenant, purpose, name, bytes, created_ns, until_ns from file "
_PLACE = "select seq from file as begun where begun.tenant = file.tenant and id = ?"
_SEEN = "tenant = ? and state = 'kept' and until_ns > ?"
_GONE_PIECES = 64
"""Pieces that one purge forgets: 16 MiB, which are overwritten."""
_EVER = (1 << 63) - 1
"""The time of files of answers that are still being written."""


class FileTables(Rows):
    """The operations of `BatchStore` on files, without waiting."""

    def open_file(self, file: File) -> Declined | None:
        """See `BatchStore`."""
        with self._transaction():
            query = "select count(*) from file where tenant = ? and purpose = ? and until_ns > ?"
            had = self._one(query, file.tenant, Purpose.BATCH, file.created_ns)[0]
            if had >= self._limits.tenant_files:
                return Declined.TENANT_FILES
            self._begin(file)
        return None

    def _begin(self, file: File) -> None:
        values = (file.id, file.tenant, file.purpose, file.name, file.created_ns, file.until_ns)
        self._sql.execute(
            "insert into file (id, tenant, purpose, state, name, bytes, created_ns, until_ns)"
            " values (?, ?, ?, 'open', ?, 0, ?, ?)",
            values,
        )

    def _begin_lasting(self, file: File) -> None:
        """Begin a file that nobody gives up."""
        self._begin(file)
        self._sql.execute("update file set until_ns = ? where id = ?", (_EVER, file.id))

    def append(self, file: FileId, data: bytes) -> Declined | None:
        """See `BatchStore`."""
        with self._transaction():
            if not self._has_room(len(data)):
                return Declined.STORE_FULL
            return None if self._append(file, data) else Declined.NO_FILE

    def _append(self, file: FileId, data: bytes) -> bool:
        row = self._sql.execute("select seq, bytes from file where id = ?", (file,)).fetchone()
        if row is None:
            return False
        seq, size = row
        nth, over = divmod(size, PIECE_BYTES)
        if over:
            query = "select bytes from piece where file = ? and nth = ?"
            data = self._one(query, seq, nth)[0] + data
        self._sql.executemany("insert or replace into piece values (?, ?, ?)", _cut(seq, nth, data))
        values = (size + len(data) - over, seq)
        self._sql.execute("update file set bytes = ? where seq = ?", values)
        return True

    def keep_file(self, file: File) -> Declined | None:
        """See `BatchStore`."""
        with self._transaction(told=True):
            return None if self._keep(file) else Declined.NO_FILE

    def _keep(self, file: File) -> bool:
        """Have a file be seen; one that was given up meanwhile is not: some of it may be gone already."""
        query = (
            "update file set state = 'kept', name = ?, created_ns = ?, until_ns = ?"
            " where id = ? and until_ns > ?"
        )
        values = (file.name, file.created_ns, file.until_ns, file.id, file.created_ns)
        return self._sql.execute(query, values).rowcount > 0

    def _give_up(self, now: UnixNs) -> None:
        """Give up all that is still coming: whoever took it is gone."""
        query = (
            "update file set until_ns = ? where state = 'open' and until_ns > ? and until_ns < ?"
        )
        self._sql.execute(query, (now, now, _EVER))

    def file(self, tenant: TenantId, file: FileId, now: UnixNs) -> File | None:
        """See `BatchStore`."""
        row = self._sql.execute(f"{_FILE}where {_SEEN} and id = ?", (tenant, now, file)).fetchone()
        return None if row is None else _from_row(row)

    def files(
        self, tenant: TenantId, page: Page, purpose: Purpose | None, now: UnixNs
    ) -> list[File]:
        """See `BatchStore`."""
        where, behind_values = behind(page, _PLACE)
        values: tuple[object, ...] = (tenant, now, *behind_values)
        if purpose is not None:
            where, values = f"{where} and purpose = ?", (*values, purpose)
        order = "asc" if page.ascending else "desc"
        query = f"{_FILE}where {_SEEN}{where} order by seq {order} limit ?"
        rows = self._sql.execute(query, (*values, min(page.limit, FILES_PAGE_MAX + 1))).fetchall()
        return [_from_row(row) for row in rows]

    def piece(self, file: FileId, nth: int) -> bytes | None:
        """See `BatchStore`."""
        query = "select piece.bytes from piece join file on piece.file = file.seq where id = ? and nth = ?"
        row = self._sql.execute(query, (file, nth)).fetchone()
        return None if row is None else bytes(row[0])

    def delete_file(self, tenant: TenantId, file: FileId, now: UnixNs) -> bool:
        """See `BatchStore`."""
        with self._transaction(told=True):
            query = "update file set until_ns = ? where tenant = ? and id = ? and until_ns > ? and until_ns < ?"
            return self._sql.execute(query, (now, tenant, file, now, _EVER)).rowcount > 0

    def _purge_pieces(self, now: UnixNs) -> bool:
        """Forget what nobody sees or reads any more; return whether there is more."""
        query = (
            "select seq from file where until_ns <= ? and not exists"
            " (select 1 from batch where input = file.id and reads = 1) order by until_ns limit 1"
        )
        row = self._sql.execute(query, (now,)).fetchone()
        if row is None:
            return False
        self._sql.execute(
            "delete from piece where file = ?1 and nth in"
            " (select nth from piece where file = ?1 limit ?2)",
            (row[0], _GONE_PIECES),
        )
        left = self._sql.execute("select 1 from piece where file = ? limit 1", row).fetchone()
        if left is None:
            self._sql.execute("delete from file where seq = ?", row)
        return True


def behind(page: Page, place: str) -> tuple[str, tuple[object, ...]]:
    """Return the condition for rows behind where a page begins; none is behind what is not there.

    `place`: the query for the number of the row by its tenant and id.
    """
    if page.after is None:
        return "", ()
    return f" and seq {'>' if page.ascending else '<'} ({place})", (page.after,)


def _cut(seq: int, nth: int, data: bytes) -> Iterator[tuple[int, int, bytes]]:
    for begin in range(0, len(data), PIECE_BYTES):
        yield seq, nth + begin // PIECE_BYTES, data[begin : begin + PIECE_BYTES]


def _from_row(row: tuple[Any, ...]) -> File:
    _seq, ident, tenant, purpose, name, size, created_ns, until_ns = row
    return File(
        id=ident,
        tenant=tenant,
        purpose=Purpose(purpose),
        name=name,
        bytes=size,
        created_ns=created_ns,
        until_ns=until_ns,
    )
