"""What callers prefer, and the keys they know their requests by."""

import pytest

from headrace.gateway.asked import InvalidError
from headrace.gateway.prefer import Preference, idempotency_key, preference


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        ([], Preference()),
        ([b"respond-async"], Preference(later=True)),
        ([b"Respond-Async, wait=10"], Preference(later=True, wait_s=10)),
        ([b"wait=5", b"respond-async"], Preference(later=True, wait_s=5)),
        ([b'wait = "7"; x=y'], Preference(wait_s=7)),
        ([b"wait=5, wait=9"], Preference(wait_s=5)),
        ([b"wait=soon, return=minimal"], Preference()),
        ([b"wait=-1"], Preference()),
        ([b"respond-async=no"], Preference()),
    ],
)
def test_preferences_are_read_from_every_header(values: list[bytes], meant: Preference) -> None:
    assert preference([(b"prefer", value) for value in values]) == meant


def test_a_key_is_plain_and_short_or_refused() -> None:
    assert idempotency_key([]) is None
    assert idempotency_key([(b"idempotency-key", b"")]) is None
    assert idempotency_key([(b"idempotency-key", b"a 1"), (b"idempotency-key", b"b")]) == "a 1"
    for wrong in (b"x" * 256, b"\xff", b"a\x01"):
        with pytest.raises(InvalidError, match="ASCII"):
            idempotency_key([(b"idempotency-key", wrong)])
