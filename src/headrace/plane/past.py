"""What does a segment of a journal still know? A plane as it stood after the last whole record.

A driver that comes back starts from there. Records are held against their digests on the way: where
one is cut off, lost or does not follow any more (other code, a rotten byte), the past ends before it.
"""

from msgspec import Struct

from headrace.plane.core import Plane
from headrace.plane.journal import (
    VERSION,
    Checkpoint,
    Frame,
    Gap,
    JournalError,
    Record,
    chain,
    frames,
)


class Thawed(Struct, frozen=True, kw_only=True):
    """A plane from a journal."""

    plane: Plane
    records: int
    """How many were replayed after the checkpoint."""
    lost: str = ""
    """Why not all that is there; empty: all of it, but for a record that the end cut off."""


class _Unlike(Exception):  # noqa: N818 - no error: the past ends there
    """A record does not follow."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def thaw(content: bytes) -> Thawed:
    """Return the plane of a segment; raises `JournalError` if its checkpoint cannot be read."""
    head, records = _read(content)
    lost = ""
    while True:
        plane = _plane(head)
        digest = head.digest
        for nth, record in enumerate(records):
            try:
                digest = _again(plane, record, digest)
            except _Unlike as unlike:
                # The plane has taken part of it: once more, up to there.
                records, lost = records[:nth], f"record {head.index + nth} {unlike.why}"
                break
        else:
            return Thawed(plane=plane, records=len(records), lost=lost)


def _read(content: bytes) -> tuple[Checkpoint, list[Record]]:
    """Return the checkpoint and the records after it, up to a gap or wherever the bytes end."""
    head: Checkpoint | None = None
    records: list[Record] = []
    try:
        for frame in frames(content):
            if head is None:
                head = _head(frame)
            elif isinstance(frame, Record) and frame.digest:
                records.append(frame)
            else:
                break  # a gap, or the event that broke the plane: nothing that counts follows
    except JournalError:
        if head is None:
            raise
    if head is None:
        raise JournalError("no checkpoint")
    return head, records


def _head(frame: Frame) -> Checkpoint | None:
    match frame:
        case Gap():
            return None  # told at the head of the segment that comes after it
        case Record():
            raise JournalError("a segment must start with a checkpoint")
        case Checkpoint():
            if frame.version != VERSION:
                raise JournalError(f"journal version {frame.version}, this reads {VERSION}")
            return frame


def _plane(head: Checkpoint) -> Plane:
    try:
        return Plane.thaw(head.state)
    except Exception as foreign:
        raise JournalError(f"the checkpoint of record {head.index}: {foreign}") from foreign


def _again(plane: Plane, record: Record, digest: bytes) -> bytes:
    """Have the plane take a record again; return the digest after it, which is the recorded one."""
    try:
        effects = plane.handle(record.event, now=record.now)
    except Exception as impossible:  # noqa: BLE001 - whatever an altered event may break
        raise _Unlike(f"cannot be replayed: {type(impossible).__name__} {impossible}") from None
    after = chain(digest, record.now, record.event, effects)
    if after != record.digest:
        raise _Unlike("replays to other effects")
    return after
