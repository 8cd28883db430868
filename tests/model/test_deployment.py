"""What an operator may declare, and what one request is promised by it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.deployment import (
    DEFAULT_CLASSES,
    ClassSpec,
    ModelSpec,
    PoolSpec,
    TenantSpec,
)
from headrace.units import DurationNs, ms

CHAT = ClassSpec(name="chat", ttft_ms=2_000.0, itl_ms=80.0)


def test_four_classes_ship() -> None:
    assert [spec.name for spec in DEFAULT_CLASSES] == [
        "interactive", "long_reasoning", "batch", "best_effort",
    ]  # fmt: skip
    interactive = DEFAULT_CLASSES[0].bounds(None, None)
    assert (interactive.ttft_ns, interactive.gap_ns) == (ms(2_000), ms(80))
    assert interactive.e2e_ns is None
    batch, best = (spec.bounds(None, None) for spec in DEFAULT_CLASSES[2:])
    assert (batch.ttft_ns, batch.e2e_ns) == (None, ms(3_600_000))
    assert (best.ttft_ns, best.e2e_ns) == (None, None)
    assert [spec.expire for spec in DEFAULT_CLASSES] == [True, True, False, False]


@pytest.mark.parametrize(
    ("ttft", "gap", "expected"),
    [
        (None, None, (2_000, 80)),
        (500, None, (500, 80)),
        (9_000, None, (2_000, 80)),
        (None, 40, (2_000, 40)),
        (None, 400, (2_000, 80)),
        (1, 1, (1, 1)),
    ],
)
def test_a_caller_may_tighten_and_never_widen(
    ttft: int | None, gap: int | None, expected: tuple[int, int]
) -> None:
    found = CHAT.bounds(None if ttft is None else ms(ttft), None if gap is None else ms(gap))
    assert (found.ttft_ns, found.gap_ns) == (ms(expected[0]), ms(expected[1]))


def test_a_class_without_a_first_token_bound_takes_none_from_the_caller() -> None:
    free = ClassSpec(name="free", ttft_ms=None)
    assert free.bounds(None, None).ttft_ns is None
    assert free.bounds(ms(700), None).ttft_ns is None
    assert free.bounds(ms(700), ms(30)).gap_ns == ms(30), "a gap may be tightened"


def test_the_mean_per_token_is_bound_by_the_gap_unless_told() -> None:
    assert CHAT.bounds(None, None).tpot_ns == ms(80)
    assert CHAT.bounds(None, ms(30)).tpot_ns == ms(30)
    own = msgspec.structs.replace(CHAT, tpot_ms=50.0, stall_ms=900.0, completion_ms=5_000.0)
    found = own.bounds(None, ms(60))
    assert (found.gap_ns, found.tpot_ns) == (ms(60), ms(50))
    assert own.bounds(None, ms(30)).tpot_ns == ms(30)
    assert own.bounds(None, None).tpot_ns == ms(50)
    assert (found.stall_ns, found.e2e_ns) == (ms(900), ms(5_000))


@given(
    st.none() | st.integers(1, 10**13),
    st.none() | st.integers(1, 10**13),
    st.none() | st.floats(1, 10_000),
    st.none() | st.floats(1, 10_000),
)
def test_no_bound_is_ever_wider_than_the_classs(
    ttft: int | None, gap: int | None, own: float | None, tpot: float | None
) -> None:
    spec = ClassSpec(name="any", ttft_ms=own, tpot_ms=tpot)
    found = spec.bounds(
        None if ttft is None else DurationNs(ttft), None if gap is None else DurationNs(gap)
    )
    plain = spec.bounds(None, None)
    assert found.gap_ns <= plain.gap_ns
    assert found.tpot_ns <= plain.tpot_ns
    if plain.ttft_ns is not None:
        assert found.ttft_ns is not None
        assert found.ttft_ns <= plain.ttft_ns


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ModelSpec, {"name": ""}),
        (ModelSpec, {"name": "-dash"}),
        (ModelSpec, {"name": "a b"}),
        (ModelSpec, {"name": "a|b"}),
        (ModelSpec, {"name": "m", "context_limit": 15}),
        (ModelSpec, {"name": "m", "fan_out_limit": 0}),
        (ModelSpec, {"name": "m", "colour": "red"}),
        (ClassSpec, {"name": "c", "ttft_ms": 0}),
        (ClassSpec, {"name": "c", "weight": 0}),
        (ClassSpec, {"name": "c", "queue": 0}),
        (ClassSpec, {"name": "c", "target": 1.5}),
        (TenantSpec, {"name": "t", "weight": 1_001}),
        (TenantSpec, {"name": "t", "tpm_limit": 0}),
        (TenantSpec, {"name": "t", "max_parallel_requests": -1}),
        (TenantSpec, {"name": "x" * 65}),
        (PoolSpec, {"name": "p", "model": "m", "role": "cook"}),
    ],
)
def test_what_makes_no_sense_is_refused(kind: type, fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, kind)


@pytest.mark.parametrize("name", ["a", "meta-llama/Llama-3.1-8B", "team.a:b_c", "9"])
def test_names_may_look_like_model_names(name: str) -> None:
    assert msgspec.convert({"name": name}, ModelSpec).name == name
