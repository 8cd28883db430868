"""Drains under drawn loads: no stream and no token is lost, but what the end of a drain cuts and counts."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.model.decision import Reason
from headrace.model.deployment import ClassSpec
from headrace.model.effect import DrainGroup, Effect, RecallGroup, StopGroup
from headrace.model.ids import ReplicaName
from headrace.model.scaling_spec import Scaling
from headrace.model.slo import Outcome
from headrace.sim.checks import Checker
from headrace.sim.faults import Crash, Fault
from headrace.sim.world import World
from headrace.trace.row import TraceRow
from headrace.units import seconds
from tests.sim.scaled import scaled, starts, steady

CLASSES = (
    ClassSpec(name="chat", weight=4),
    ClassSpec(name="batch", ttft_ms=None, itl_ms=2_000.0, expire=False),
)
EAGER = Scaling(
    max=4, times=starts(6.0), tick_s=3.0, in_window_s=3.0, cancel_window_s=3.0, min_life_s=0.0,
    in_groups=3, forecast=None,
)  # fmt: skip


class Watched:
    """What became of the drains of a run."""

    def __init__(self) -> None:
        """Watch from the beginning, with every invariant checked."""
        self.checker, self.begun = Checker(), dict[ReplicaName, int]()
        self.times: list[int] = []
        """How long each took that was carried to its end."""
        self.steps: Counter[str] = Counter()

    def __call__(self, world: World, effects: list[Effect]) -> None:
        """Look at one step."""
        self.checker(world, effects)
        for effect in effects:
            if isinstance(effect, DrainGroup):
                self.begun[effect.group] = world.now
            elif isinstance(effect, RecallGroup):
                del self.begun[effect.group]
            elif isinstance(effect, StopGroup) and effect.group in self.begun:
                self.times.append(world.now - self.begun.pop(effect.group))
            self.steps[type(effect).__name__] += 1


def drained(
    rows: list[TraceRow], drain_s: float, *, standby: int = 0, faults: tuple[Fault, ...] = ()
) -> tuple[World, Watched]:
    one = scaled(
        replace(EAGER, drain_s=drain_s, standby=standby),
        replicas=3,
        classes=CLASSES,
        faults=faults,
    )
    (pool,) = one.deployment.pools
    slow = replace(one.deployment, pools=(replace(pool, work_rate=0.03),))
    watched = Watched()
    world = World(replace(one, deployment=slow), rows, 0, after=watched).run()
    watched.checker.finish(world)
    return world, watched


def load(waves: list[float], long: float, factor: int) -> list[TraceRow]:
    """Return short requests in waves of ten seconds, and long answers all the while."""
    spans = [(10.0 * nth, 10.0 * nth + 10, rate) for nth, rate in enumerate(waves) if rate]
    whole = 10.0 * len(waves)
    rows = [
        replace(row, output_tokens=row.output_tokens * factor)
        for row in steady(((0.0, whole, long),), "batch", given=100)
    ]
    return sorted([*steady(spans, given=1_000), *rows], key=lambda row: row.at)


def no_token_is_lost(world: World) -> None:
    """What callers were shown is what engines made, whole answers and cut ones together."""
    made = sum(past.output_tokens for node in world.nodes for past in node.past)
    shown = [row.timing.tokens for row in world.concluded.values() if row.timing is not None]
    assert made == sum(shown)
    for request, row in world.concluded.items():
        if row.outcome is Outcome.SUCCESS:
            assert row.timing is not None
            assert row.timing.tokens == world.rows[request - 1].output_tokens


@settings(max_examples=12, deadline=None)
@given(
    waves=st.lists(st.sampled_from((0.0, 0.5, 3.0, 6.0)), min_size=4, max_size=9),
    long=st.sampled_from((0.2, 0.6)),
    factor=st.sampled_from((5, 20, 80)),
    drain_s=st.sampled_from((0.0, 2.0, 10.0, 120.0)),
    standby=st.sampled_from((0, 1)),
)
def test_a_stream_on_a_draining_group_is_whole_or_ends_with_the_drain(
    waves: list[float], long: float, factor: int, drain_s: float, standby: int
) -> None:
    world, watched = drained(load(waves, long, factor), drain_s, standby=standby)
    no_token_is_lost(world)
    bad = [row for row in world.concluded.values() if row.outcome is not Outcome.SUCCESS]
    ended = [row for row in bad if row.admitted and row.request not in world.cut_off]
    assert {row.reason for row in ended} <= {Reason.DRAINED, Reason.EXPIRED}
    assert all(took <= seconds(drain_s) for took in watched.times)
    if any(row.reason is Reason.DRAINED for row in ended):
        assert max(watched.times) == seconds(drain_s), "its time was over"


def test_drains_are_called_off_begun_again_and_carried_to_their_end() -> None:
    """The waves that it takes, so that the property above is not one of runs without drains."""
    waves = [0.0, 6.0, 6.0, 0.0, 0.0, 6.0, 6.0, 0.0, 0.0]
    world, watched = drained(load(waves, 0.6, 80), 120.0, standby=1)
    no_token_is_lost(world)
    assert watched.steps["RecallGroup"] > 0
    assert watched.steps["WakeGroup"] > 0
    assert watched.steps["DrainGroup"] > watched.steps["RecallGroup"]
    bad = [row for row in world.concluded.values() if row.reason is Reason.DRAINED]
    assert bad == []


def test_a_crash_during_a_drain_loses_what_ran_there_and_leaks_nothing() -> None:
    waves = [0.5] * 6
    for replica in range(3):
        for at_s in (5.0, 12.0, 20.0):
            fault = Crash(replica=replica, at_s=at_s, back_after_s=1.0)
            world, _ = drained(load(waves, 0.6, 20), 60.0, faults=(fault,))
            bad = [row.reason for row in world.concluded.values() if row.admitted and row.reason]
            assert set(bad) <= {Reason.REPLICA_LOST, Reason.UPSTREAM_ERROR}
            (books,) = world.plane.state.pools.values()
            assert sorted(books.groups) == sorted(world.provider.groups)
