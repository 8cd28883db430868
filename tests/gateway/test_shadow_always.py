"""Whatever happens: the same configuration decides the same, and another's books balance all the same."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from headrace.gateway.differences import Pair
from headrace.gateway.shadow import Shadow
from headrace.model.event import ConfigChanged, Event
from headrace.plane.core import Plane
from headrace.policy.catalog import PlaneConfig, advising, decode, passing
from headrace.units import InstantNs
from tests.plane import invariants, trees
from tests.plane.test_whole_plane import BASE, CONFIGS, WholePlane


def state(plane: Plane) -> bytes:
    """Return all a plane knows, but of events it had no use for: a shadow is not told those."""
    twin = Plane.thaw(plane.freeze())
    twin.state.ignored.clear()
    twin.state.now = InstantNs(0)
    return twin.freeze()


class _Beside(WholePlane):
    """The whole plane, with a shadow that sees the same events."""

    def shadow_of(self, config: PlaneConfig) -> Shadow:
        raise NotImplementedError

    def tell(self, event: Event) -> None:
        if isinstance(event, ConfigChanged) and not hasattr(self, "shadow"):
            self.shadow = self.shadow_of(decode(event.config))
        effects = self.recorder.handle(event, now=self.now)
        for effect in effects:
            self.note(effect)
        self.shadow.saw(event, effects, self.now)
        assert self.shadow.broken is None, self.shadow.broken

    def configure(self, **_: Any) -> None:
        """Leave the configuration as it is: the shadow would keep its own."""

    def regrow(self, **_: Any) -> None:
        """Likewise."""

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "shadow"):
            invariants.over(self.shadow.plane)
            assert self.shadow.known == 0
            assert self.shadow.found.requests == self.requests


class Same(_Beside):
    """A shadow by the same configuration; it only ever advises how to scale, so both do."""

    def change(self, config: PlaneConfig) -> None:
        super().change(advising(config))

    def shadow_of(self, config: PlaneConfig) -> Shadow:
        self.differing: list[Pair] = []
        return Shadow(config, differing=self.differing.append)

    @invariant()
    def knows_the_same(self) -> None:
        if hasattr(self, "shadow"):
            assert state(self.shadow.plane) == state(self.plane)
            assert self.shadow.next_timer() == self.plane.next_timer()
            assert not self.differing
            assert self.shadow.found.agreed == self.requests
            assert self.shadow.found.real_wait_ns == self.shadow.found.shadow_wait_ns


class Other(_Beside):
    """A shadow by another configuration, or one that refuses nothing."""

    @initialize(other=st.one_of(st.sampled_from(CONFIGS), trees.grown(BASE)), passes=st.booleans())
    def choose(self, other: PlaneConfig, *, passes: bool) -> None:
        self.other = passing(other) if passes else other

    def shadow_of(self, config: PlaneConfig) -> Shadow:  # noqa: ARG002 - another one
        return Shadow(getattr(self, "other", CONFIGS[0]))

    @invariant()
    def books_of_the_shadow_balance(self) -> None:
        if hasattr(self, "shadow"):
            self.shadow.wake(self.now)
            assert self.shadow.broken is None, self.shadow.broken
            invariants.hold(self.shadow.plane, self.shadow.plane.state.now)
            assert self.shadow.plane.state.live.keys() <= self.plane.state.live.keys()
            assert self.shadow.known <= len(self.plane.state.live)


TestSame = Same.TestCase
TestSame.settings = settings(
    max_examples=100, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
TestOther = Other.TestCase
TestOther.settings = settings(
    max_examples=100, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
