"""How many groups is a pool to have, and what is to be done for it now?

The largest number that any signal asks for wins. Growing needs no permission but the limits; shrinking
needs all of them: nothing stale, not needed for a whole window, old enough. The number is clamped last, on
every path, between floor and ceiling. Nothing is remembered here: `remembered` returns what the next
decision is to know of this one.
"""

from msgspec.structs import replace

from headrace.model.ids import ReplicaName
from headrace.model.scaling import (
    Brake,
    Reading,
    ScaleDecision,
    ScaleEvidence,
    ScaleMemory,
    Signal,
    Standing,
    Steps,
)
from headrace.model.scaling_spec import By, Mode, Scaling, ppm
from headrace.policy.scaling.reserve import with_reserve
from headrace.policy.scaling.rules import ruled
from headrace.policy.scaling.signals import readings
from headrace.policy.scaling.supply import Supply
from headrace.policy.scaling.victims import to_cancel, to_drain, to_recall, to_wake
from headrace.units import MICRO, DurationNs, InstantNs, seconds

SEARCH = 2_048
"""Groups up to which a number is sought that survives the loss of a domain: twice the most there may be."""


def decide(settings: Scaling, evidence: ScaleEvidence) -> ScaleDecision:
    """Return the decision of one pool at one tick."""
    return _Choice(settings, evidence).made()


def remembered(settings: Scaling, evidence: ScaleEvidence, decision: ScaleDecision) -> ScaleMemory:
    """Return what the next decision is to know: what was needed, and what was done."""
    memory, now = evidence.memory, evidence.now
    window = max(seconds(settings.in_window_s), seconds(settings.cancel_window_s))
    keeps = [(at, keep) for at, keep in memory.keeps if keep > decision.keep and now - at <= window]
    return ScaleMemory(
        since=now if memory.since is None else memory.since,
        keeps=(*keeps, (now, decision.keep)),
        out_at=now if decision.steps.grows else memory.out_at,
    )


class _Choice:
    """One decision in the making; thrown away once made."""

    def __init__(self, settings: Scaling, evidence: ScaleEvidence) -> None:
        self.settings, self.evidence = settings, evidence
        self.supply = Supply(settings, evidence)
        says = readings if settings.by is By.SLO else ruled
        self.readings = says(settings, evidence, self.supply)
        self.brakes: list[Brake] = []
        self.ceiling = settings.ceiling(evidence.gpus)
        floor = settings.floor_at(evidence.minute, evidence.ready_p90_ns)
        self.floor = min(floor, self.ceiling)
        self.need = max(reading.desired or 0 for reading in self.readings)
        self.want = self._reserved(self.need)
        kept = max(reading.keep or 0 for reading in self.readings)
        self.keep = max(self.want, self._reserved(max(kept, self.need)))

    def made(self) -> ScaleDecision:
        """Return what to do: more, less, or what keeps things as they are."""
        out = self._out()
        cancel, drain = self._less(out)
        grown = self._grown(out)
        steps = replace(
            grown, cancel=(*cancel, *grown.cancel), release=self._overdue(), drain=drain
        )
        asked = self.supply.ordered + out - len(cancel) - len(drain)
        desired = min(self.ceiling, max(self.floor, asked))
        return ScaleDecision(
            pool=self.evidence.pool,
            readings=self.readings,
            winner=self._winner(),
            need=self.need,
            keep=self.keep,
            reserve=self.want - self.need,
            floor=self.floor,
            ceiling=self.ceiling,
            desired=desired,
            ordered=self.supply.ordered,
            supply=self.supply.facts(),
            steps=Steps() if self._held() else steps,
            brakes=tuple(dict.fromkeys(self.brakes)),
        )

    def _winner(self) -> Signal | None:
        """Return the first of the signals that ask for most; None if a floor does."""
        if self.need == 0 or self.want < self.floor:
            return None
        best: Reading = max(self.readings, key=lambda reading: reading.desired or 0)
        return best.signal

    def _held(self) -> bool:
        """Return whether nothing is to be done whatever was found."""
        held = {
            Brake.OFF: self.settings.mode is Mode.OFF,
            Brake.ADVICE: self.settings.mode is Mode.ADVISE,
            Brake.FROZEN: self.evidence.frozen,
        }
        self.brakes += [brake for brake, holds in held.items() if holds]
        return any(held.values())

    def _reserved(self, need: int) -> int:
        """Return a number of groups that leaves `need` after the loss that the reserve is for."""
        lost = self.settings.reserve
        there = [one.domain for one in (*self.supply.ready, *self.supply.coming)]
        most = min(SEARCH, need * (lost + 1) + len(there) + lost)
        found = with_reserve(need, lost, there, self.evidence.domains, most)
        if found is None:
            self.brakes.append(Brake.RESERVE)
            return need + lost
        return found

    def _out(self) -> int:
        """Return how many groups to add, all limits kept."""
        supply, settings = self.supply, self.settings
        wanted = max(self.want, self.floor) - supply.expected
        if wanted <= 0:
            return 0
        most = max(settings.out_groups, ppm(settings.out_part) * supply.ordered // MICRO)
        most = max(most, self.floor - supply.ordered)  # a floor is no matter of pace
        room = max(0, self.ceiling - supply.ordered)
        if most < min(wanted, room):
            self.brakes.append(Brake.RATE)
        if room < wanted:
            self.brakes.append(Brake.MAXIMUM)
        return min(wanted, most, room)

    def _grown(self, out: int) -> Steps:
        """Return where so many groups come from: drains called off, sleepers woken, then new ones.

        Sleepers that are woken are asked for anew, and those too many given up.
        """
        supply, settings = self.supply, self.settings
        recall = to_recall(supply.draining)[:out]
        wake = to_wake(supply.standby)[: out - len(recall)]
        asleep = [one for one in supply.standby if one.group not in wake]
        new, more = out - len(recall) - len(wake), settings.standby - len(asleep)
        if settings.max_gpus is not None:
            free = (settings.max_gpus - supply.gpus_committed) // self.evidence.gpus
            if free < 0:  # more is held than may be, even after what goes: sleepers go too
                kept = supply.gpus_committed - supply.gpus_going
                free = min(0, (settings.max_gpus - kept) // self.evidence.gpus)
            if free < new:
                self.brakes.append(Brake.GPUS)
            new = max(0, min(new, free))
            more = min(more, free - new)
        if self.evidence.refused and new + max(0, more):
            self.brakes.append(Brake.RATE)
            new, more = 0, min(more, 0)
        drop = [] if supply.stale else to_cancel(asleep)[: max(0, -more)]
        return Steps(
            recall=tuple(recall),
            wake=tuple(wake),
            ask=new,
            standby=max(0, more),
            cancel=tuple(drop),
        )

    def _overdue(self) -> tuple[ReplicaName, ...]:
        """Return the partial groups whose time is over; what they hold serves nobody."""
        rising = (Standing.COMING, Standing.STANDBY)
        found = [one for one in self.evidence.groups if one.overdue and one.standing in rising]
        return tuple(one.group for one in found)

    def _less(self, out: int) -> tuple[tuple[ReplicaName, ...], tuple[ReplicaName, ...]]:
        """Return which groups on their way to give up, and which ready ones to drain."""
        supply, settings = self.supply, self.settings
        if out:
            return (), ()
        over = max(0, supply.ordered - self.ceiling)
        spare = max(0, supply.ordered - max(self.floor, self.keep))
        if over == 0 and spare == 0:
            return (), ()
        if supply.stale:
            self.brakes.append(Brake.STALE)
            spare = 0
        soon = 0
        if supply.coming and spare:
            soon = min(spare, self._unneeded(seconds(settings.cancel_window_s)))
        cancel = to_cancel(supply.coming)[: max(over, soon)]
        over = max(0, over - len(cancel))
        # What is on its way may not come: ready groups alone must be enough.
        idle = min(spare - len(cancel), len(supply.ready) - max(self.floor, self.keep))
        if idle > 0:
            idle = min(idle, self._unneeded(seconds(settings.in_window_s)) - len(cancel))
        return tuple(cancel), self._drained(max(over, idle))

    def _drained(self, count: int) -> tuple[ReplicaName, ...]:
        settings, supply = self.settings, self.supply
        if count <= 0:
            return ()
        most = max(settings.in_groups, ppm(settings.in_part) * supply.ordered // MICRO)
        if most < count:
            self.brakes.append(Brake.RATE)
        count = min(most, count)
        victims = to_drain(settings, supply, count)
        if len(victims) < count:
            self.brakes.append(Brake.YOUNG)
        return tuple(victims)

    def _unneeded(self, window_ns: DurationNs) -> int:
        """Return how many groups nobody needed for a whole window, in which none was added either."""
        memory, now = self.evidence.memory, self.evidence.now
        if not _past(memory.since, now, window_ns):
            self.brakes.append(Brake.WINDOW)
            return 0
        if memory.out_at is not None and not _past(memory.out_at, now, window_ns):
            self.brakes.append(Brake.WINDOW)
            return 0
        needed = [keep for at, keep in memory.keeps if now - at < window_ns]
        most = max([self.floor, self.keep, *needed])
        found = max(0, self.supply.ordered - most)
        if most > max(self.floor, self.keep):
            self.brakes.append(Brake.WINDOW)
        return found


def _past(since: InstantNs | None, now: InstantNs, window_ns: DurationNs) -> bool:
    return window_ns == 0 or (since is not None and now - since >= window_ns)
