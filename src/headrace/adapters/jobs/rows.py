"""One connection to a file of jobs: transactions over it, and how full it is."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace.ports.jobs import Limits


class Rows:
    """What all tables have in common."""

    def __init__(self, connection: sqlite3.Connection, limits: Limits) -> None:
        """Work on a connection that nobody else uses."""
        self._sql, self._limits = connection, limits

    def close(self) -> None:
        """Close the connection."""
        self._sql.close()

    @contextmanager
    def _transaction(self, *, told: bool = False) -> Iterator[None]:
        """Do all of it or nothing; `told`: somebody relies on it, so that it must outlive a power cut.

        What was not flushed is lost from the end of the log, and only then.
        """
        self._sql.execute(f"pragma synchronous = {'full' if told else 'normal'}")
        self._sql.execute("begin immediate")
        try:
            yield
            self._sql.execute("commit")
        except BaseException:
            if self._sql.in_transaction:
                self._sql.execute("rollback")
            raise

    def _one(self, query: str, *values: object) -> tuple[Any, ...]:
        row: tuple[Any, ...] | None = self._sql.execute(query, values).fetchone()
        assert row is not None, query
        return row

    def _has_room(self, size: int) -> bool:
        """Return whether so many bytes may be put; the rest is for answers to what is there."""
        pages, free, page = (
            int(self._one(f"pragma {name}")[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * page + size <= self._limits.store_bytes * self._limits.put_share
