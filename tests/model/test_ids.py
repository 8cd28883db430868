"""Ids say who is who, and the driver's never come twice."""

import pytest

from headrace.model import ids
from tests.plane.scenes import Driver


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("RequestId", int), ("AttemptId", int), ("DecisionId", int), ("Incarnation", int),
        ("TenantId", str), ("ClassName", str), ("ModelName", str), ("ReplicaName", str),
        ("PoolName", str),
    ],
)  # fmt: skip
def test_an_id_is_its_plain_value_at_run_time(name: str, base: type) -> None:
    kind = getattr(ids, name)
    assert kind.__supertype__ is base
    assert type(kind(base(7))) is base


def test_requests_attempts_and_decisions_are_counted_apart() -> None:
    made = Driver(replicas=2)
    for _ in range(3):
        made.arrive(tokens=100)
    assert [sent.request for sent in made.sent()] == [1, 2, 3]
    assert [sent.attempt for sent in made.sent()] == [1, 2, 3]
    assert [sent.decision for sent in made.sent()] == [1, 3, 5]
