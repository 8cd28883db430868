"""Which parts of a prompt may be left out where there is not enough capacity (DEG-1)?

Callers mark them: `"headrace": {"optional": 1}` on a message or on a part of one, 1 being the most useful.
What must stay stays though it is marked (DEG-2): what is of another kind than `context`, the system's words,
calls of tools and their results, what answers cite by its number, and the question itself.
"""

from collections.abc import Sequence
from typing import Annotated, Protocol

from msgspec import Meta, Raw, Struct

from headrace.gateway.asked.prompt import At, Prompt
from headrace.model.ladder import OPTIONAL_MAX
from headrace.ports.engine import Place
from headrace.units import Tokens

RANK_MAX = 1_000_000
_CONTEXT = "context"
"""The one kind that may be left out. Of one that nobody here knows the caller knows why it is told."""
_KINDS = frozenset(
    (
        *("text", "input_text", "output_text", "image", "image_url", "input_image", "input_audio"),
        *("audio_url", "video_url", "file", "input_file", "document", "search_result"),
    )
)
"""Parts that a message can do without: of any other, none here knows what refers to it."""
_NOTHING = (b"", b"null", b"[]")
_SAYING = ("user", "assistant")
"""Roles that say what can be left out; others set rules, or answer a call."""


class Mark(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """What a caller says of a part of its prompt."""

    optional: Annotated[int, Meta(ge=1, le=RANK_MAX)] | None = None
    """Its rank among what may be left out; None: it may not."""
    kind: Annotated[str, Meta(max_length=64)] | None = None
    """None: context."""

    @property
    def rank(self) -> int | None:
        """Its rank, if it is of the kind that may be left out."""
        return self.optional if self.kind in (None, _CONTEXT) else None


class Marked(Protocol):
    """A part of a message, in whichever API."""

    type: str | None
    headrace: Mark | None

    @property
    def stays(self) -> bool:
        """Whether it stays though it is marked: it is cited by number or cites others, or there is evidence in it."""
        ...


class Turn(Struct, frozen=True):
    """One message, as far as marks go."""

    mark: Mark | None
    parts: Sequence[str | Marked] | None
    """None: it is said in one piece."""
    is_free: bool
    """It is no rule, and neither a call of a tool nor its result."""
    is_question: bool
    """A user says it."""


class Span(Struct, frozen=True):
    """A part that may be left out."""

    rank: int
    place: Place
    begin: At
    tokens: int


class Options(Struct, frozen=True, gc=False):
    """What of a prompt may be left out, by rank."""

    places: tuple[Place, ...] = ()
    """All of it."""
    tokens: tuple[Tokens, ...] = ()
    """Of each part, those beyond `OPTIONAL_MAX` counting as one more."""
    begin: int = 0
    """Byte of the canonical prompt at which the first in it begins."""


NO_OPTIONS = Options()


def ranks(turns: Sequence[Turn]) -> dict[Place, int]:
    """Return what may be left out, with its rank.

    The mark of a message is for all of it, and counts where none of its parts has one. The last message, and
    the last that a user says, never go as a whole.
    """
    last = len(turns) - 1
    question = max((nth for nth, turn in enumerate(turns) if turn.is_question), default=last)
    found: dict[Place, int] = {}
    for nth, turn in enumerate(turns):
        if turn.is_free:
            found |= _of(nth, turn, may_go=nth not in (last, question))
    return found


def _of(nth: int, turn: Turn, *, may_go: bool) -> dict[Place, int]:
    """Return what of one message may be left out; `may_go`: all of it may."""
    parts = turn.parts or ()
    if any(_mark(part) is not None for part in parts):
        each = ((index, _mark(part)) for index, part in enumerate(parts) if _can_go(part))
        found: dict[Place, int] = {
            (nth, index): mark.rank for index, mark in each if mark is not None and mark.rank
        }
        return found if may_go or len(found) < len(parts) else {}
    rank = None if turn.mark is None else turn.mark.rank
    if rank is None or not may_go or not all(map(_can_go, parts)):
        return {}
    return {(nth, None): rank}


def turn(
    role: str | None,
    mark: Mark | None,
    content: str | Sequence[str | Marked] | None,
    *,
    is_free: bool = True,
) -> Turn:
    """Return a message in a role; `is_free`: nothing that is not looked at here holds it."""
    parts = None if isinstance(content, str) else content
    results = parts is not None and all(
        not isinstance(part, str) and part.type == "tool_result" for part in parts
    )
    return Turn(
        mark=mark,
        parts=parts,
        is_free=is_free and role in _SAYING,
        is_question=role == "user" and not (parts and results),
    )


def is_empty(value: Raw) -> bool:
    """Return whether a field is not there, or has nothing in it."""
    return bytes(value) in _NOTHING


def _mark(part: str | Marked) -> Mark | None:
    return None if isinstance(part, str) else part.headrace


def _can_go(part: str | Marked) -> bool:
    return isinstance(part, str) or (part.type in _KINDS and not part.stays)


class Spans:
    """Notes where in a prompt stands what may be left out, while it is made."""

    __slots__ = ("_found", "_message", "_open", "_part", "_prompt", "_ranks")

    def __init__(self, prompt: Prompt, ranks: dict[Place, int]) -> None:
        """Note what has a rank."""
        self._prompt, self._ranks = prompt, ranks
        self._found: list[Span] = []
        self._message = 0
        self._part: int | None = None
        self._open: dict[int | None, At] = {}

    def message(self, nth: int) -> None:
        """A message begins here, and what came before ends."""
        self._end()
        self._message, self._open = nth, {None: self._prompt.at()}

    def part(self, index: int) -> None:
        """A part of the message begins here, and the one before it ends."""
        if self._part is not None:
            self._close(self._part)
        self._part = index
        self._open[index] = self._prompt.at()

    def options(self) -> Options:
        """Return what may be left out, the most useful first; of equal ranks, what comes first."""
        self._end()
        if not self._found:
            return NO_OPTIONS
        found = sorted(self._found, key=lambda span: span.rank)
        tokens = [span.tokens for span in found[:OPTIONAL_MAX]]
        if rest := found[OPTIONAL_MAX:]:
            tokens.append(sum(span.tokens for span in rest))
        first = min((span.begin for span in found), key=lambda at: at.pieces)
        return Options(
            places=tuple(span.place for span in found),
            tokens=tuple(map(Tokens, tokens)),
            begin=self._prompt.bytes_before(first),
        )

    def _end(self) -> None:
        if self._part is not None:
            self._close(self._part)
        self._part = None
        self._close(None)

    def _close(self, part: int | None) -> None:
        """End all of a message, or a part of it."""
        place = self._message, part
        begin, rank = self._open.pop(part, None), self._ranks.get(place)
        if begin is not None and rank is not None:
            self._found.append(Span(rank, place, begin, self._prompt.tokens_since(begin)))
