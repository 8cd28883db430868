"""What does one replica carry at its SLO, of which mix, and how far is that to be believed?

An envelope is a measurement: the work rate that one replica held, with an interval, and the fingerprint of
all that it was measured with. One that fits what runs now counts as it stands. Where none fits, the lowest
of its kind counts, less a margin, until it is measured again.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

_Word = Annotated[str, Meta(max_length=256)]
_Rate = Annotated[float, Meta(gt=0, le=1_000_000)]
_Millis = Annotated[float, Meta(gt=0, le=86_400_000)]
_Degree = Annotated[int, Meta(ge=1, le=1_024)]

_AT_MAX_S = 4_102_444_800  # the year 2100

MISMATCH_MARGIN = 0.1
"""Taken off an envelope that was measured with something else than runs now. An assumption: more than
seeds differ by, less than hardware does."""
DECLARED_RATE = 0.7
"""Work-seconds per second of a replica of which nothing is known. Chunked prefill spends about a third of a
step on fixed cost that the work unit does not count."""


class Promise(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bounds that a class's requests were served and judged by, in ms; None: not bounded."""

    ttft_ms: _Millis | None = None
    gap_ms: _Millis | None = None
    """Of one gap: our plane fills no replica beyond it."""
    tpot_ms: _Millis | None = None
    stall_ms: _Millis | None = None
    completion_ms: _Millis | None = None


class Fingerprint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an envelope was measured with (DEM-7). An empty word is not known, and compared with nothing."""

    model: _Word
    revision: _Word = ""
    """Of the weights."""
    quantization: _Word = ""
    hardware: _Word
    """Kind of GPU."""
    tp: _Degree = 1
    pp: _Degree = 1
    profile: _Word = ""
    """Name and digest of the step times."""
    engine: _Word = ""
    """Software and version."""
    scheduler: _Word = ""
    """How its steps are filled."""
    step_tokens: Annotated[int, Meta(ge=1)]
    """Token budget of a step."""
    policy: _Word = ""
    """Under which policy of ours, by the digest of what of it was in force."""
    mix: _Word = ""
    """Which lengths, by name."""
    mix_digest: _Word = ""
    """And by what they are, whatever they are called."""
    promises: Annotated[dict[str, Promise], Meta(max_length=100)] = {}
    """By class of the mix, what was to be held."""

    @property
    def kind(self) -> tuple[str, str, int, int]:
        """What must be alike for the one to say anything of the other."""
        return (self.model, self.hardware, self.tp, self.pp)


_COMPARED = (
    "model", "revision", "quantization", "hardware", "tp", "pp", "profile", "engine", "scheduler",
    "step_tokens", "policy",
)  # fmt: skip
"""All but the mix, which chooses among envelopes, and promises, which are compared class by class."""


class Envelope(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one replica carries of one mix."""

    fingerprint: Fingerprint
    work_rate: _Rate
    """Work-seconds offered per second that it still held."""
    low: _Rate
    high: _Rate
    """95 % interval of the above over the seeds."""
    request_rate: _Rate
    """Requests per second of this mix: the same, in other words."""
    attainment: dict[str, Annotated[float, Meta(gt=0, le=1)]]
    """By class, the share of the offered that was to hold its promise."""
    seeds: Annotated[tuple[int, ...], Meta(max_length=1_000)]
    """Whose mean it is, and whose interval."""
    measured_at_s: Annotated[int, Meta(ge=0, le=_AT_MAX_S)]
    """When, in seconds since 1970."""

    def age_s(self, now_s: int) -> int:
        """Return how old it is, in seconds; none where clocks disagree."""
        return max(0, now_s - self.measured_at_s)


def differing(measured: Fingerprint, now: Fingerprint) -> tuple[str, ...]:
    """Return what an envelope was measured with that is otherwise now, by name.

    What either does not know is not among it, nor are classes that the mix has nothing of.
    """
    found = [
        name
        for name in _COMPARED
        if (was := getattr(measured, name)) and (runs := getattr(now, name)) and was != runs
    ]
    found += [
        f"promises.{name}"
        for name, promise in measured.promises.items()
        if now.promises.get(name) != promise
    ]
    return tuple(found)


class Origin(StrEnum):
    """Where a pool's work rate comes from."""

    DECLARED = "declared"
    MEASURED = "measured"
    """From an envelope of just what runs."""
    LOWEST = "lowest"
    """From the lowest of its kind, since none fits."""
    DEFAULT = "default"


class Reading(Struct, frozen=True, kw_only=True):
    """The work rate that one replica of a pool counts as, and why."""

    work_rate: float
    """Work-seconds per second, margin taken off."""
    origin: Origin
    margin: float = 0.0
    """The share that was taken off."""
    envelope: Envelope | None = None
    """The one that was read."""
    differs: tuple[str, ...] = ()
    """What of it is otherwise now."""


def read(envelopes: Sequence[Envelope], now: Fingerprint) -> Reading:
    """Return what a replica of a fingerprint counts as, by what was measured.

    Of several that fit, the lowest: whoever does not say what mix it serves may be serving any. Of those
    that do not, the least end of any interval, less `MISMATCH_MARGIN` (SCALE-10).
    """
    kind = [one for one in envelopes if one.fingerprint.kind == now.kind]
    fitting = [one for one in kind if not differing(one.fingerprint, now)]
    of_mix = [one for one in fitting if now.mix in ("", one.fingerprint.mix)]
    if of_mix:
        lowest = min(of_mix, key=lambda one: one.work_rate)
        return Reading(work_rate=lowest.work_rate, origin=Origin.MEASURED, envelope=lowest)
    if not kind:
        return Reading(work_rate=DECLARED_RATE, origin=Origin.DEFAULT)
    lowest = min(fitting or kind, key=lambda one: one.low)
    named = () if now.mix in ("", lowest.fingerprint.mix) else ("mix",)
    return Reading(
        work_rate=lowest.low * (1 - MISMATCH_MARGIN),
        origin=Origin.LOWEST,
        margin=MISMATCH_MARGIN,
        envelope=lowest,
        differs=(*differing(lowest.fingerprint, now), *named),
    )


def told(found: Reading) -> str:
    """Return in words where a rate that was read off an envelope comes from."""
    assert found.envelope is not None, f"{found.origin=} has no envelope"
    one = found.envelope
    words = f"envelope of mix {one.fingerprint.mix or '?'}, {len(one.seeds)} seeds, {one.fingerprint.engine}"
    if found.origin is Origin.MEASURED:
        return f"{words}, fits"
    changed = ", ".join(found.differs) or "none of this mix"
    return f"{words}, lowest of its kind less {100 * found.margin:g} %: other {changed}"


def mixes(envelopes: Iterable[Envelope]) -> tuple[str, ...]:
    """Return the names of the mixes that were measured, each once."""
    return tuple(dict.fromkeys(one.fingerprint.mix for one in envelopes))
