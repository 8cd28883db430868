"""What is there to serve with, and what will be when a group asked for now is ready?

Supply is whole groups that are ready, at what their envelope was measured to hold (SCALE-10). Groups on
their way count once, from when they are expected, and as far as starts are known to succeed.
"""

from functools import cached_property

from headrace.model.scaling import (
    GroupFacts,
    GroupSample,
    ScaleEvidence,
    Standing,
    SupplyFacts,
)
from headrace.model.scaling_spec import Scaling
from headrace.policy.scaling.reserve import left_of
from headrace.units import MICRO, elapsed, seconds, time_for


class Supply:
    """The groups of one evidence, sorted; made for one decision and thrown away."""

    def __init__(self, settings: Scaling, evidence: ScaleEvidence) -> None:
        """Sort groups by what they are to the scaler."""
        self.settings, self.evidence = settings, evidence
        self.ready = self._of(Standing.READY)
        self.coming = [one for one in self._of(Standing.COMING) if not one.overdue]
        self.standby = [one for one in self._of(Standing.STANDBY) if not one.overdue]
        self.draining = self._of(Standing.DRAINING)
        self.each_micro = self._known(evidence.envelope_micro)
        """What a group asked for now makes up."""

    def _of(self, standing: Standing) -> list[GroupFacts]:
        return [one for one in self.evidence.groups if one.standing is standing]

    def _known(self, envelope: int | None) -> int:
        """Return an envelope, else the lowest of its kind, else what was declared."""
        lowest = self.evidence.lowest_micro
        known = envelope if envelope is not None else lowest
        return max(1, self.evidence.declared_micro if known is None else known)

    def nominal(self, group: GroupFacts) -> int:
        """Return what a group makes up by its envelope."""
        return self._known(group.envelope_micro)

    def effective(self, group: GroupFacts) -> int:
        """Return what a group makes up as it runs now; one that is new is believed its envelope."""
        nominal = self.nominal(group)
        if group.effective_ppm is None or self._is_warming(group):
            return nominal
        return nominal * min(MICRO, group.effective_ppm) // MICRO

    def _is_warming(self, group: GroupFacts) -> bool:
        return elapsed(group.since, self.evidence.now) < seconds(self.settings.warmup_s)

    @cached_property
    def counted(self) -> list[GroupFacts]:
        """Groups on their way that are there in time; whole ones that are expected to fail are left out."""
        ahead = self.evidence.ready_p90_ns
        timely = [one for one in self.coming if one.arrival_p50_ns <= ahead]
        failing = sum(MICRO - one.success_ppm for one in timely) // MICRO
        timely.sort(key=lambda one: (one.arrival_p50_ns, one.group))
        return timely[: len(timely) - failing]

    @cached_property
    def now_micro(self) -> int:
        """Work rate of all that is ready, as it runs now."""
        return sum(self.effective(one) for one in self.ready)

    @cached_property
    def landing_micro(self) -> int:
        """The same when a group asked for now is ready."""
        return self.now_micro + sum(self.nominal(one) for one in self.counted)

    @cached_property
    def ordered(self) -> int:
        """Groups that serve or are on their way."""
        return len(self.ready) + len(self.coming)

    @cached_property
    def expected(self) -> int:
        """Groups that serve or can be counted on to."""
        return len(self.ready) + len(self.counted)

    @cached_property
    def fresh(self) -> dict[str, GroupSample]:
        """What ready groups said lately, by name: not other groups', not of earlier lives, not stale."""
        stale = seconds(self.settings.stale_s)
        lives = {one.group: one.incarnation for one in self.ready}
        return {
            one.group: one
            for one in self.evidence.samples
            if lives.get(one.group) == one.incarnation and one.age_ns <= stale
        }

    @cached_property
    def stale(self) -> bool:
        """Whether some ready group has not told of itself lately."""
        return len(self.fresh) < len(self.ready)

    @cached_property
    def gpus_held(self) -> int:
        """GPUs that the pool holds, whatever for."""
        return sum(one.gpus for one in self.evidence.groups)

    @cached_property
    def gpus_going(self) -> int:
        """GPUs of groups that are being given back."""
        going = (Standing.DRAINING, Standing.STOPPING)
        return sum(one.gpus for one in self.evidence.groups if one.standing in going)

    @cached_property
    def gpus_committed(self) -> int:
        """The same once all that is on its way has its ranks."""
        whole, rising = self.evidence.gpus, (Standing.COMING, Standing.STANDBY)
        return sum(
            max(one.gpus, whole) if one.standing in rising else one.gpus
            for one in self.evidence.groups
        )

    def facts(self) -> SupplyFacts:
        """Return what a decision keeps of it."""
        by_domain: dict[str, int] = {}
        for one in self.ready:
            key = one.domain or one.group
            by_domain[key] = by_domain.get(key, 0) + self.effective(one)
        told = [one.utilization_ppm for one in self.fresh.values()]
        busy = [part for part in told if part is not None]
        demand, serving = self.evidence.demand, self.now_micro
        work = demand.urgent_ns + demand.active_ns + demand.patient_ns
        return SupplyFacts(
            ready=len(self.ready),
            coming=len(self.coming),
            counted=len(self.counted),
            standby=len(self.standby),
            draining=len(self.draining),
            now_micro=self.now_micro,
            landing_micro=self.landing_micro,
            gpus_held=self.gpus_held,
            utilization_ppm=sum(busy) // len(busy) if busy else None,
            drain_ns=time_for(work, serving) if serving > 0 else None,
            left_micro=left_of(by_domain.values(), self.settings.reserve),
        )
