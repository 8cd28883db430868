"""Whose request is it?"""

import pytest

from headrace.config.schema import KeySpec
from headrace.gateway.auth import KeyRing
from headrace.model.ids import TenantId
from tests.gateway.scenes import KEYS, keys, sha256


@pytest.mark.parametrize("tenant", list(KEYS))
def test_a_key_names_its_tenant(tenant: str) -> None:
    ring = KeyRing(keys())
    assert ring.tenant(f"Bearer {KEYS[tenant]}".encode()) == tenant
    assert ring.tenant(f"bearer  {KEYS[tenant]} ".encode()) == tenant


@pytest.mark.parametrize(
    "told",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"sk-free",
        b"Basic sk-free",
        b"Bearer sk-fre",
        b"Bearer \xff",
    ],
)
def test_anything_else_is_nobody(told: bytes | None) -> None:
    assert KeyRing(keys()).tenant(told) is None


def test_hashes_that_begin_alike_are_told_apart() -> None:
    right = sha256("sk-free")
    near = right[:16] + ("0" if right[16] != "0" else "1") + right[17:]
    ring = KeyRing(
        [
            KeySpec(name="a", tenant="near", hash=f"sha256:{near}"),
            KeySpec(name="b", tenant="right", hash=f"sha256:{right}"),
        ]
    )
    assert ring.tenant(b"Bearer sk-free") == "right"


def test_without_any_key_all_requests_are_one_tenants() -> None:
    ring = KeyRing([], anonymous=TenantId("first"))
    assert ring.tenant(None) == "first"
    assert ring.tenant(b"Bearer whatever") == "first"
    assert KeyRing(keys(), anonymous=TenantId("first")).tenant(None) is None
