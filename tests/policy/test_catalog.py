"""One configuration, one string of bytes, one set of policies."""

import msgspec
import pytest

from headrace.policy.catalog import PlaneConfig, Reports, canonical, decode
from headrace.policy.ordering.orders import Fifo, TenantFirst
from tests.plane.scenes import config


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
