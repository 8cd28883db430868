"""A plane's life as bytes: what happened when, and a digest of everything that followed from it.

A journal is a list of segments. A segment starts with a checkpoint, so that any kept one replays
alone; each record holds (now, event) and a chained digest over all events and effects so far, so
that a replay names the first index at which anything differs. Pure: bytes in and out; where they
are kept is an adapter's.
"""

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

import msgspec
from msgspec import Struct

from headrace.model.effect import Effect
from headrace.model.event import Event
from headrace.plane.core import Plane
from headrace.units import MIB, InstantNs

VERSION = 5
SEGMENT_BYTES = 64 * MIB
"""Size at which a new segment starts: a checkpoint of a large plane is a few MiB."""
_LENGTH = 4
_DIGEST = 16


class Checkpoint(Struct, frozen=True, kw_only=True, tag="checkpoint"):
    """The head of a segment: everything needed to go on from here."""

    version: int
    index: int
    """Index of the first record that follows, counted over the whole journal."""
    digest: bytes
    """The chain so far."""
    state: bytes
    """A frozen plane."""
    resumed: bool = False
    """A driver came back from an older state: a new life, not a continuation of what stands before."""


class Record(Struct, frozen=True, kw_only=True, tag="record"):
    """One event, and the chain after its effects."""

    now: InstantNs
    event: Event
    digest: bytes
    """Empty: the plane broke on this event, and nothing follows."""


class Gap(Struct, frozen=True, kw_only=True, tag="gap", gc=False):
    """Records that could not be kept (a full disk): recorded, never waited for."""

    records: int


Frame = Checkpoint | Record | Gap

_ENCODER = msgspec.msgpack.Encoder()
_FRAME = msgspec.msgpack.Decoder(Frame)


class JournalError(ValueError):
    """The bytes are no journal, or cut off."""


def frame_bytes(frame: Frame) -> bytes:
    """Return a frame as stored: four bytes of length, big-endian, and msgpack."""
    body = _ENCODER.encode(frame)
    return len(body).to_bytes(_LENGTH, "big") + body


def frames(content: bytes) -> Iterator[Frame]:
    """Yield the frames of one segment; raises `JournalError` where it is cut or no journal."""
    at, size = 0, len(content)
    while at < size:
        end = at + _LENGTH + int.from_bytes(content[at : at + _LENGTH], "big")
        if end > size or at + _LENGTH > size:
            raise JournalError(f"cut off at byte {at}")
        try:
            yield _FRAME.decode(memoryview(content)[at + _LENGTH : end])
        except msgspec.DecodeError as broken:
            raise JournalError(f"no frame at byte {at}: {broken}") from broken
        at = end


def chain(before: bytes, now: InstantNs, event: Event, effects: list[Effect]) -> bytes:
    """Return the digest after one step: over the one before, the instant, event and effects."""
    digest = blake2b(before, digest_size=_DIGEST)
    digest.update(_ENCODER.encode((now, event, effects)))
    return digest.digest()


class Recorder:
    """A plane that writes its journal: the same calls, with a sink for frames.

    `sink(frame, opens_segment)` gets each frame's bytes and whether a new segment starts with it.
    """

    def __init__(
        self,
        plane: Plane,
        sink: Callable[[bytes, bool], None],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        resumed: bool = False,
    ) -> None:
        """Start a journal at the plane's present state; `resumed`: it was thawed."""
        self.plane = plane
        self._sink, self._limit = sink, segment_bytes
        self._written, self._index, self._digest = 0, 0, bytes(_DIGEST)
        self._bare = True  # nothing stands behind the last checkpoint
        self._open(resumed=resumed)

    def handle(self, event: Event, *, now: InstantNs) -> list[Effect]:
        """Take one event, record it, return its effects; what breaks the plane is recorded too."""
        try:
            effects = self.plane.handle(event, now=now)
        except Exception:
            self._put(frame_bytes(Record(now=now, event=event, digest=b"")), opens=False)
            raise
        self._digest = chain(self._digest, now, event, effects)
        self._put(frame_bytes(Record(now=now, event=event, digest=self._digest)), opens=False)
        self._index += 1
        self._bare = False
        if self._written >= self._limit:
            self._open()
        return effects

    def checkpoint(self) -> None:
        """Keep the present state, so that whoever goes on from here has nothing to replay."""
        if not self._bare:
            self._open()

    def _open(self, *, resumed: bool = False) -> None:
        """Start a segment with a checkpoint."""
        self._written = 0
        head = Checkpoint(
            version=VERSION,
            index=self._index,
            digest=self._digest,
            state=self.plane.freeze(),
            resumed=resumed,
        )
        self._put(frame_bytes(head), opens=True)
        self._bare = True

    def _put(self, content: bytes, *, opens: bool) -> None:
        self._written += len(content)
        self._sink(content, opens)


class Verified(Struct, frozen=True, kw_only=True):
    """Every record replayed to the same effects."""

    records: int
    first: int
    """Index of the first record verified: above 0 when older segments are gone."""


class Differs(Struct, frozen=True, kw_only=True):
    """The first record whose replay gives something else."""

    index: int
    now: InstantNs
    event: str
    """Kind of the event."""
    why: str


Told = Callable[[Plane, Record, list[Effect]], None]


def verify(segments: Iterable[bytes], told: Told | None = None) -> Verified | Differs:
    """Replay segments in order and compare the digest after each record.

    The first one may be any kept segment: it brings its own checkpoint. A following checkpoint must
    equal the plane's own state. After a recorded gap the next checkpoint is believed anew. `told` is
    shown each record that follows, with what came of it.
    """
    return _Replay(told).run(segments)


class _Replay:
    """The walk of `verify`."""

    def __init__(self, told: Told | None) -> None:
        self.told = told
        self.plane: Plane | None = None
        self.index, self.first = 0, 0
        self.digest = b""
        self.verified = 0

    def run(self, segments: Iterable[bytes]) -> Verified | Differs:
        for content in segments:
            for frame in frames(content):
                wrong = self._step(frame)
                if wrong is not None:
                    return wrong
        return Verified(records=self.verified, first=self.first)

    def _step(self, frame: Frame) -> Differs | None:
        match frame:
            case Checkpoint():
                return self._checkpoint(frame)
            case Gap():
                self.plane = None
                return None
            case Record():
                return self._record(frame)

    def _checkpoint(self, head: Checkpoint) -> Differs | None:
        if head.version != VERSION:
            raise JournalError(f"journal version {head.version}, this reads {VERSION}")
        if self.plane is None or head.resumed:
            if not self.verified:
                self.first = head.index
            try:
                self.plane = Plane.thaw(head.state)
            except msgspec.DecodeError as broken:
                raise JournalError(f"the checkpoint of record {head.index}: {broken}") from broken
            self.index, self.digest = head.index, head.digest
            return None
        same = self.plane.freeze() == head.state and head.digest == self.digest
        if same and head.index == self.index:
            return None
        return Differs(
            index=self.index,
            now=self.plane.state.now,
            event="checkpoint",
            why=f"the checkpoint of record {head.index} is not the state that the replay reached",
        )

    def _record(self, record: Record) -> Differs | None:
        if self.plane is None:
            raise JournalError("a segment must start with a checkpoint")
        kind = type(record.event).__name__
        try:
            effects = self.plane.handle(record.event, now=record.now)
        except Exception as impossible:  # noqa: BLE001 - whatever an altered event may break
            why = f"replay refused it: {type(impossible).__name__} {impossible}"
            return Differs(index=self.index, now=record.now, event=kind, why=why)
        self.digest = chain(self.digest, record.now, record.event, effects)
        if self.digest != record.digest:
            why = "event or effects are not those that were recorded"
            if not record.digest:
                why = "the plane broke on this event; this code does not"
            return Differs(index=self.index, now=record.now, event=kind, why=why)
        self.index += 1
        self.verified += 1
        if self.told is not None:
            self.told(self.plane, record, effects)
        return None
