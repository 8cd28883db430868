"""What does a journal, or a decision log, tell of one request? Everything decided and done about it.

A journal is replayed from the segment in which the request arrived, each record held against its
digest; what does not follow is not told. A log has decisions alone.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from msgspec import Struct

from headrace.model.effect import Concluded, Decided, Dispatch, Effect
from headrace.model.event import RequestArrived
from headrace.model.evidence import EntryRecord, RequestRecord, RouteRecord
from headrace.model.ids import DecisionId, RequestId
from headrace.model.scaling import ScaleRecord
from headrace.plane.core import Plane
from headrace.plane.journal import Checkpoint, Differs, Gap, JournalError, Record, frames, verify
from headrace.policy.catalog import PlaneConfig, decode
from headrace.report.decisions import ConfigLine, EntryLine, RouteLine, read, to_record

Segments = Callable[[], Iterator[bytes]]
"""Reads a journal from its beginning."""


class Entered(Struct, frozen=True, kw_only=True):
    """The decision at the door."""

    record: EntryRecord
    config: PlaneConfig | None
    """What it was made under; None: not told."""


class Sent(Struct, frozen=True, kw_only=True):
    """A turn that was used, and where the request went."""

    record: RouteRecord
    config: PlaneConfig | None
    dispatch: Dispatch | None
    """None: a log does not tell."""


class Story(Struct, kw_only=True):
    """One request from its arrival to its end, as far as that is told."""

    request: RequestId
    entered: Entered | None = None
    sent: list[Sent] = []
    ended: Concluded | None = None
    notes: list[str] = []
    """What is missing, and why."""

    @property
    def over(self) -> bool:
        """Whether nothing more is to be expected."""
        return self.ended is not None


class Untold(Exception):  # noqa: N818 - no error: there is nothing to tell
    """No such request or decision, or none that is kept any more."""


class _Over(Exception):  # noqa: N818 - it is found
    """Nothing more need be replayed."""


def of_journal(segments: Segments, request: RequestId) -> Story:
    """Return what a journal tells of a request.

    Raises `Untold` if that is nothing, and `JournalError` for bytes that cannot be read.
    """
    story = Story(request=request)
    begin = _arrival(segments, request)
    if begin is None:
        begin = _alive(segments, request)
        story.notes.append(
            "it arrived before what the journal keeps: how it was let in is not told"
        )

    def told(plane: Plane, _record: Record, effects: list[Effect]) -> None:
        for effect in effects:
            _take(story, effect, plane)
        if story.over:
            raise _Over

    _replay(segments, begin, told, story)
    return story


def request_of(segments: Segments, decision: DecisionId) -> RequestId:
    """Return the request that a decision was about; the last of that number, if there are several.

    Raises `Untold` if there is none, and `JournalError` for bytes that cannot be read.
    """
    firsts = [None if head is None else _plane(head).state.decisions for head in _heads(segments)]
    places = [nth for nth, first in enumerate(firsts) if first is not None and first < decision]
    known = [first for first in firsts if first is not None]
    if not places:
        first = min(known, default=0) + 1
        raise Untold(f"decision {decision} is not kept: the journal begins with decision {first}")
    found: list[RequestId] = []
    last: int = max(known)

    def told(plane: Plane, _record: Record, effects: list[Effect]) -> None:
        nonlocal last
        last = plane.state.decisions
        for effect in effects:
            if isinstance(effect, Decided) and effect.record.decision_id == decision:
                if isinstance(effect.record, ScaleRecord):
                    raise Untold(f"decision {decision} is about no request: see `scale explain`")
                found.append(effect.record.request_id)
                raise _Over

    differs = _walk(islice(segments(), places[-1], places[-1] + 1), told)
    if found:
        return found[0]
    if differs is not None:
        raise JournalError(_unlike(differs))
    raise Untold(f"no decision {decision} in the journal: its last is {last}")


def of_log(path: Path, request: RequestId) -> Story:
    """Return what a decision log tells of a request; raises `Untold` if nothing, and `BadLog`."""
    story = Story(request=request)
    story.notes.append("a decision log does not tell how a request ended")
    configs: dict[int, PlaneConfig] = {}
    in_force: PlaneConfig | None = None
    for line in read(path):
        if isinstance(line, ConfigLine):
            in_force = configs[line.revision] = decode(line.config.encode())
        elif isinstance(line, EntryLine | RouteLine) and line.request_id == request:
            record = to_record(line)
            if isinstance(record, EntryRecord):
                config = configs.get(record.policy_revision)
                story.entered, story.sent = Entered(record=record, config=config), []
                if line.observed is True:
                    story.notes.append("it was observed: what was decided had no effect")
            else:
                story.sent.append(Sent(record=record, config=in_force, dispatch=None))
    if story.entered is None and not story.sent:
        raise Untold(f"no request {request} in the decision log")
    return story


def request_of_log(path: Path, decision: DecisionId) -> RequestId:
    """Return the request that a decision in a log was about; raises `Untold` and `BadLog`."""
    found = [
        line.request_id
        for line in read(path)
        if isinstance(line, EntryLine | RouteLine) and line.decision_id == decision
    ]
    if not found:
        raise Untold(f"no decision {decision} in the decision log")
    return found[-1]


def _take(story: Story, effect: Effect, plane: Plane) -> None:
    """Add an effect to the story of the request it is about."""
    match effect:
        case Decided(record=EntryRecord() | RouteRecord() as record) if (
            record.request_id == story.request
        ):
            _decided(story, record, plane.settings.config)
        case Dispatch(request=request) if request == story.request:
            last = story.sent[-1]
            story.sent[-1] = Sent(record=last.record, config=last.config, dispatch=effect)
        case Concluded(request=request) if request == story.request:
            story.ended = effect
        case _:
            pass


def _decided(story: Story, record: RequestRecord, config: PlaneConfig) -> None:
    if isinstance(record, EntryRecord):
        story.entered = Entered(record=record, config=config)
    else:
        story.sent.append(Sent(record=record, config=config, dispatch=None))


def _arrival(segments: Segments, request: RequestId) -> int | None:
    """Return the segment in which a request arrived; None if it may have come before the first.

    Raises `Untold` if that cannot be either.
    """
    seen: list[RequestId] = []
    for nth, content in enumerate(segments()):
        here = list(_arrivals(content))
        if request in here:
            return nth
        seen += here[:1] + here[-1:]
    if seen and seen[0] < request and not _has_gap(segments()):
        raise Untold(f"no request {request} in the journal, which has {seen[0]} to {seen[-1]}")
    return None


def _arrivals(content: bytes) -> Iterator[RequestId]:
    """Yield who arrived in a segment; ids rise, in later lives as well."""
    for frame in frames(content):
        if isinstance(frame, Record) and isinstance(frame.event, RequestArrived):
            yield frame.event.request.id


def _has_gap(segments: Iterable[bytes]) -> bool:
    return any(isinstance(frame, Gap) for content in segments for frame in frames(content))


def _alive(segments: Segments, request: RequestId) -> int:
    """Return the first segment at whose head a request was live; raises `Untold`."""
    for nth, head in enumerate(_heads(segments)):
        if head is not None and request in _plane(head).state.live:
            return nth
    raise Untold(f"request {request} lies before what the journal keeps, or never was")


def _heads(segments: Segments) -> Iterator[Checkpoint | None]:
    """Yield each segment's first checkpoint; None for one without."""
    for content in segments():
        yield next((frame for frame in frames(content) if isinstance(frame, Checkpoint)), None)


def _plane(head: Checkpoint) -> Plane:
    try:
        return Plane.thaw(head.state)
    except Exception as foreign:
        raise JournalError(f"the checkpoint of record {head.index}: {foreign}") from foreign


def _replay(
    segments: Segments,
    begin: int,
    told: Callable[[Plane, Record, list[Effect]], None],
    story: Story,
) -> None:
    """Replay from a segment on until the story is over; note why it is not."""
    differs = _walk(islice(segments(), begin, None), told)
    if story.over:
        return
    if differs is not None:
        story.notes.append(_unlike(differs))
    elif _has_gap(islice(segments(), begin, None)):
        story.notes.append("records are missing in the journal: what happened then is not told")
    else:
        story.notes.append(
            "its end is not told: the journal, or the process that wrote it, ended first"
        )


def _walk(
    segments: Iterable[bytes], told: Callable[[Plane, Record, list[Effect]], None]
) -> Differs | None:
    """Replay until `told` has had enough; return the first record that does not follow, if any."""
    try:
        found = verify(segments, told)
    except _Over:
        return None
    return found if isinstance(found, Differs) else None


def _unlike(differs: Differs) -> str:
    return (
        f"record {differs.index} of the journal does not follow ({differs.why}): "
        "what came after it is not told"
    )
