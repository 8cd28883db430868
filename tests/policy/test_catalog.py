"""One configuration, one string of bytes, one set of policies."""

import msgspec
import pytest
from msgspec.structs import replace

from headrace.model.deployment import ClassSpec, PoolSpec
from headrace.policy.admission.gates import GateMode, Gates, Mode, Modes
from headrace.policy.catalog import PlaneConfig, Reports, Window, canonical, decode, passing
from headrace.policy.ordering.orders import Fifo, TenantFirst
from tests.plane.scenes import Driver, config, small


def test_canonical_bytes_rebuild_the_configuration() -> None:
    for settings in (config(), config(ordering=Fifo()), config(ordering=TenantFirst())):
        assert decode(canonical(settings)) == settings
        assert canonical(decode(canonical(settings))) == canonical(settings)


def test_equal_configurations_have_equal_bytes() -> None:
    assert canonical(config()) == canonical(config())
    assert canonical(config()) != canonical(config(ordering=Fifo()))


@pytest.mark.parametrize(
    "change",
    [
        {"ordering": {"kind": "lottery"}},
        {"surprise": 1},
        {"models": []},
        {"window": {"prefill_ms": 0}},
        {"tenants": [{"name": ""}]},
        {"tenants": [{"name": "a|b"}]},
        {"tenants": [{"name": "a", "tpm_limit": 10**16}]},
        {"reports": {"poll_ms": 1_000, "stale_ms": 999}},
    ],
)
def test_what_nobody_knows_or_means_is_refused(change: dict[str, object]) -> None:
    plain = msgspec.json.decode(canonical(config()))
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.json.encode(plain | change))


def test_reports_are_stale_after_their_limit() -> None:
    settings: PlaneConfig = config(reports=Reports(poll_ms=100, stale_ms=250))
    assert settings.stale_after_ns() == 250_000_000


def test_what_passes_everything_keeps_whom_it_is_about() -> None:
    modes = Modes(deadline=Mode.ENFORCE, contract=Mode.AUDIT)
    given = config(admission=Gates(margin_ms=7.0, modes=modes), window=Window(prefill_ms=90.0))
    passed = passing(given)
    assert passed.admission == Gates(mode=GateMode.OBSERVE, margin_ms=7.0)
    assert passed.ordering == Fifo()
    assert passed.window == Window(prefill_ms=90.0, unbounded=True)
    same = replace(passed, admission=given.admission, ordering=given.ordering, window=given.window)
    assert same == given
    assert decode(canonical(passed)) == passed
    assert passing(passed) == passed


def test_everything_is_sent_at_once_where_the_window_has_no_bound() -> None:
    settings = config(
        pools=(PoolSpec(name="p", model="m", profile=small(4_096, running=1)),),
        classes=(ClassSpec(name="chat", ttft_ms=1.0, queue=1, tenant_queue=1),),
    )
    made = Driver(passing(settings), replicas=2)
    for _ in range(6):
        made.arrive(tokens=30_000)
    assert len(made.sent()) == 6
    assert sorted(set(made.places())) == ["r0", "r1"]
    assert not any(one.relegated for one in made.sent())
    assert not made.failed()
