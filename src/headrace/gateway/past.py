"""Where does a process start that is not the first on its journal? Where the one before it ended.

Budgets, counters and what predictors learned come from the newest checkpoint that can be read, and
the records after it; time goes on by as much as passed on the wall. What cannot be read is told and
counted, and never keeps a process from serving.
"""

import logging
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from headrace.adapters.journal.held import HeldJournal
from headrace.adapters.journal.ring import segment_paths
from headrace.gateway.clock import LoopClock
from headrace.model.event import ConfigChanged, Restarted
from headrace.plane.core import Plane
from headrace.plane.journal import JournalError
from headrace.plane.past import Thawed, thaw
from headrace.plane.state import EPOCH_BITS
from headrace.policy.catalog import POLICY, PlaneConfig, canonical, decode
from headrace.units import NS_PER_S, InstantNs

AWAY_NS_MAX = 400 * 24 * 3_600 * NS_PER_S
"""The longest absence that is believed: a clock that was never set does not age us by decades."""
_log = logging.getLogger(__name__)


class Past(Struct, frozen=True, kw_only=True):
    """What a process knows of those before it; by default there was none."""

    plane: Plane = field(default_factory=Plane)
    epoch: int = 0
    """How many lives of the journal came before."""
    unread: int = 0
    """Segments that were passed over because they cannot be read."""

    @property
    def first_id(self) -> int:
        """Ids of requests and incarnations of replicas are above this one, and in no earlier life."""
        return self.epoch << EPOCH_BITS

    def in_force(self, config: PlaneConfig, source: bytes) -> PlaneConfig:
        """Return what is decided by where a file of this digest says `config`.

        The policy that the last process ended with goes on, unless the file has changed since.
        """
        state = self.plane.state
        if not state.config or state.source != source:
            return config
        kept = decode(state.config)
        return replace(config, **{name: getattr(kept, name) for name in POLICY})

    def revision(self, config: PlaneConfig) -> int:
        """Return the revision of `config`: the one in force if that is it, else the next."""
        state = self.plane.state
        return state.revision + (state.config != canonical(config))


def recall(
    journal: HeldJournal | None, clock: LoopClock, config: PlaneConfig, source: bytes
) -> Past:
    """Return the past that a journal holds, and set the clock to go on from it.

    It is one from which a process with this configuration, of a file of this digest, can go on.
    """
    if journal is None:
        return Past()
    unread = 0
    for path in reversed(segment_paths(journal.folder)):
        try:
            written_ns, found = path.stat().st_mtime_ns, thaw(path.read_bytes())
            state = found.plane.state
            epoch = max(journal.life - 1, (state.attempts >> EPOCH_BITS) + 1)
            past = Past(plane=found.plane, epoch=epoch, unread=unread)
            _try(past, config, source)
        except (JournalError, OSError) as error:
            _log.warning("%s: cannot be read, and is passed over: %s", path, error)
            unread += 1
            continue
        _tell(path, found)
        away_ns = min(max(0, clock.wall_ns() - written_ns), AWAY_NS_MAX)
        clock.go_on_from(InstantNs(state.now + away_ns))
        return past
    if unread:
        _log.warning("%s: nothing of it can be read: budgets start afresh", journal.folder)
    return Past(epoch=journal.life - 1, unread=unread)


def _try(past: Past, config: PlaneConfig, source: bytes) -> None:
    """Take the first steps on a copy: a state that breaks the plane must not do so at every start."""
    copy = Plane.thaw(past.plane.freeze())
    now = copy.state.now
    try:
        copy.handle(Restarted(past.epoch), now=now)
        config = past.in_force(config, source)
        revision = past.revision(config)
        copy.handle(ConfigChanged(revision=revision, config=canonical(config)), now=now)
    except Exception as broken:
        raise JournalError(f"its state breaks the plane: {broken!r}") from broken


def _tell(path: Path, found: Thawed) -> None:
    _log.info("%s: goes on after %d records", path, found.records)
    if found.lost:
        _log.warning("%s: goes on after %d records: %s", path, found.records, found.lost)
