"""A tenant's users have equal parts of its own, and the tenant is read as one."""

from headrace.gateway.fairness import Shares, competing, counters
from headrace.model.deployment import ClassSpec, PoolSpec, TenantSpec
from headrace.model.ids import TenantId
from headrace.model.paths import tenant_key
from headrace.policy.admission.gates import GateMode, Gates
from headrace.units import InstantNs
from tests.plane import invariants
from tests.plane.scenes import MODEL, Driver, S, config, small

CHAT = ClassSpec(name="chat", ttft_ms=8_000.0)
AUDIT = Gates(mode=GateMode.AUDIT)
TENANTS = (TenantSpec(name="a", by_user=True, weight=3), TenantSpec(name="b"))


def driver() -> Driver:
    """Return an engine that runs one request at a time, before two tenants, one of them by user."""
    pool = PoolSpec(name="p", model="m", profile=small(65_536, running=1))
    return Driver(config(pools=(pool,), classes=(CHAT,), tenants=TENANTS, admission=AUDIT))


def turns(made: Driver, most: int) -> list[tuple[str, str]]:
    """Serve so many requests and return whose they were, in the order in which they were sent."""
    for _ in range(most):
        made.serve(made.sent()[-1].request, output=200)
        invariants.hold(made.plane, made.now)
    return [(effect.tenant, effect.way[-1].name) for effect in made.sent()]


def test_who_tells_no_user_stands_beside_the_users_as_one_of_them() -> None:
    made = driver()
    for user in ("u", "v", None):
        for _ in range(20):
            made.arrive("a", 500, user=user)
    seen = turns(made, 30)[1:]
    assert [seen.count(("a", user)) for user in ("u", "v", "")] == [10, 10, 10]


def test_a_tenants_users_share_what_is_its_own() -> None:
    """However many they are, the other tenant has its quarter."""
    made = driver()
    for nth in range(60):
        made.arrive("a", 500, user=f"u{nth % 6}")
        made.arrive("b", 500)
    seen = turns(made, 40)[1:]
    assert sum(tenant == "b" for tenant, _ in seen) == 10
    assert {seen.count(("a", f"u{nth}")) for nth in range(6)} == {5}


def test_a_tenant_is_read_as_one_whatever_its_users() -> None:
    made, shares = driver(), Shares()
    named = [TenantId("a"), TenantId("b")]
    for nth in range(200):
        made.arrive("a", 500, user=f"u{nth}")  # each has one: its queue is empty once that is sent
        made.arrive("b", 500)
    assert shares.deviations(competing(made.plane, {}, named), InstantNs(0)) == {}
    turns(made, 80)
    found = shares.deviations(competing(made.plane, {}, named), InstantNs(60 * S))
    assert found.keys() == {(MODEL, name) for name in named}
    assert all(abs(strayed) < 0.02 for strayed in found.values()), found
    tree = made.plane.state.ledger.shares[MODEL]
    assert counters(made.plane, named) == {
        (MODEL, name): tree.counters[tenant_key(made.way(name))] for name in named
    }
