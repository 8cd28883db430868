"""Worked examples of scaling that take a run."""

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.decision import Reject
from headrace.model.evidence import EntryRecord
from headrace.model.ids import PoolName
from headrace.model.ladder import LadderSpec
from headrace.model.scaling_spec import Scaling
from headrace.units import NS_PER_S
from tests.sim.scaled import run, scaled, starts, steady
from tests.sim.scenes import Ran

BEGIN, END = 60, 70
"""Seconds between which the spike is offered."""
SPIKE = steady(((0.0, BEGIN, 1.0), (BEGIN, END, 12.0), (END, 260.0, 1.0)))
T_READY = 120.0
PLAIN = Scaling(min=1, max=8, times=starts(T_READY), forecast=None)


class Seen(Struct):
    """What came of the spike's requests."""

    ran: Ran
    met: int
    refused: int
    deferred: int
    """Of the refused, those that the durable queue would have taken."""
    places: set[str]


def spike(settings: Scaling, ladder: LadderSpec | None = None) -> Seen:
    """Offer the spike to a pool that begins at its floor."""
    scenario = scaled(settings, replicas=settings.min)
    if ladder is not None:
        plain = scenario.deployment
        first, *others = plain.classes
        config = replace(
            plain,
            classes=(replace(first, degrade=ladder), *others),
            tenants=tuple(replace(one, degrade=ladder.level) for one in plain.tenants),
        )
        scenario = replace(scenario, deployment=config)
    ran = run(scenario, rows=SPIKE)
    rows = [r for r in ran.rows() if BEGIN * NS_PER_S <= r.entry.arrived_at < END * NS_PER_S]
    mine = {row.request for row in rows}
    refused = [
        one.decision
        for one in ran.decisions
        if isinstance(one, EntryRecord)
        and isinstance(one.decision, Reject)
        and one.request_id in mine
    ]
    return Seen(
        ran=ran,
        met=sum(row.met for row in rows),
        refused=len(refused),
        deferred=sum(one.defer for one in refused),
        places={str(row.replica) for row in rows if row.replica is not None},
    )


def test_ex_7_a_spike_shorter_than_a_start_is_served_by_what_was_there_when_it_began() -> None:
    plain = spike(PLAIN)
    assert plain.met + plain.refused == 120
    assert plain.places == {"pool-0"}, "of no use to it is what was started after it began"
    provider = plain.ran.world.provider
    assert provider.asked[PoolName("pool")] >= 1, "though a group was asked for"
    assert not provider.rose, "and given up on its way, once nothing more came"

    warm = spike(replace(PLAIN, min=4))
    assert warm.places == {f"pool-{nth}" for nth in range(4)}
    assert (warm.met, warm.refused) == (120, 0)
    assert warm.ran.world.provider.asked == {}
    held = [one.ran.world.provider.gpu_ns[PoolName("pool")] for one in (plain, warm)]
    assert held[0] < held[1], "which is paid for all day"

    ladder = LadderSpec(level=1, output_part=0.25)
    degraded = spike(PLAIN, ladder)
    assert degraded.places == {"pool-0"}
    assert degraded.met > plain.met, "shorter answers leave room for more"

    batch = spike(PLAIN, replace(ladder, defer=True))
    assert batch.deferred == batch.refused > 0, "what is left of it is answered later"
