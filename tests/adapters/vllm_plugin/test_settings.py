"""How the scheduler in vLLM is set up: what may be said, what is refused, what it comes to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.vllm_plugin.settings import (
    Mode,
    OnFault,
    Settings,
    Untested,
    kind_of,
    profile_of,
    rates_of,
    read,
    token_ns_of,
)
from headrace.config.profiles import load_profile
from headrace.policy.batching import ChunkedPrefill, PacedPrefill
from headrace.policy.batching.preemption import Victims
from headrace.policy.ordering.orders import EarliestDeadline, TenantFirst
from headrace.units import MICRO

PROFILE = "h100-8b-tp1"


def given_as(**settings: Any) -> Settings:
    return read({"headrace": settings})


def sizes(settings: Settings, **more: int) -> Any:
    return profile_of(settings, **({"capacity": 1_600, "budget": 512, "slots": 8} | more))


@pytest.mark.parametrize("additional", [None, {}, {"other": {"mode": "x"}}, {"headrace": {}}])
def test_nothing_said_is_a_first_try(additional: object) -> None:
    settings = read(additional)
    assert settings == Settings()
    assert (settings.mode, settings.untested) == (Mode.ENFORCE, Untested.REFUSE)
    assert (settings.on_fault, settings.victims) == (OnFault.STOCK, Victims.FAIR)
    assert (settings.batching, settings.ordering) == (ChunkedPrefill(), TenantFirst())
    assert settings.late_ms == 10_000


def test_everything_may_be_said() -> None:
    settings = given_as(
        mode="passive",
        untested="try",
        on_fault="stop",
        profile=PROFILE,
        batching={"kind": "paced_prefill"},
        ordering={"kind": "edf"},
        victims="policy",
        cost={"output_weight": 3},
        late_ms=50,
        step_log="logs/steps.jsonl",
        step_log_mib=1,
    )
    assert isinstance(settings.batching, PacedPrefill)
    assert settings.ordering == EarliestDeadline()
    assert settings.step_log == "logs/steps.jsonl"
    assert (kind_of(settings.batching), kind_of(settings.ordering)) == ("paced_prefill", "edf")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"mod": "passive"}, "mod"),
        ({"mode": "off"}, "mode"),
        ({"batching": {"kind": "prefill_first"}}, "cannot leave decodes out"),
        ({"batching": {"kind": "paced_prefill"}}, "give a profile"),
        ({"batching": {"kind": "chunked_prefill", "token_budget": 0}}, "token_budget"),
        ({"ordering": {"kind": "nice"}}, "ordering"),
        ({"late_ms": 0}, "late_ms"),
        ({"step_log": 5}, "step_log"),
        ({"step_log": "/"}, "step_log: expected the name of a file"),
        ({"step_log": "."}, "step_log: expected the name of a file"),
        ({"step_log": "a\0b"}, "step_log: expected the name of a file"),
        ({"step_log_mib": 0}, "step_log_mib"),
    ],
)
def test_what_is_wrong_is_refused_and_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        given_as(**settings)
    assert str(refused.value).startswith("additional_config.headrace: ")


@pytest.mark.parametrize(
    "additional", [{"headrace": None}, {"headrace": [1]}, {"headrace": "paced"}]
)
def test_settings_are_an_object(additional: object) -> None:
    with pytest.raises(ValueError, match=r"^additional_config\.headrace: Expected `object`"):
        read(additional)


def test_step_times_are_not_needed_where_batching_does_not_go_by_them() -> None:
    for batching in ("chunked_prefill", "decode_first"):
        assert kind_of(given_as(batching={"kind": batching}).batching) == batching


@given(st.integers(1, 10**8), st.integers(1, 10**5), st.integers(1, 2_000))
def test_without_a_profile_its_sizes_are_those_of_vllm(
    capacity: int, budget: int, slots: int
) -> None:
    found = sizes(Settings(), capacity=capacity, budget=budget, slots=slots)
    assert msgspec.convert(msgspec.to_builtins(found), type(found)) == found, "it is one"
    assert (found.kv_capacity_tokens, found.token_budget) == (capacity, budget)
    assert found.max_running == slots


def test_profile_is_packaged_or_a_file(tmp_path: Path) -> None:
    packaged = load_profile(PROFILE)
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(packaged))
    for named in (PROFILE, str(path)):
        assert sizes(given_as(profile=named), budget=10_000, slots=10_000) == packaged


def test_limits_of_a_profile_are_no_larger_than_vllms() -> None:
    found = sizes(given_as(profile=PROFILE), budget=128, slots=3)
    assert (found.token_budget, found.max_running, found.reference_batch) == (128, 3, 3)


@pytest.mark.parametrize(
    ("write", "complaint"),
    [
        (lambda _: None, "No such file"),
        (lambda path: path.write_text("{"), "truncated"),
        (lambda path: path.write_text("{}"), "name"),
    ],
)
def test_profile_that_cannot_be_read_is_refused(
    tmp_path: Path, write: Callable[[Path], object], complaint: str
) -> None:
    path = tmp_path / "mine.json"
    write(path)
    where = r"^additional_config\.headrace\.profile: .*"
    with pytest.raises(ValueError, match=rf"{where}mine\.json: .*{complaint}"):
        sizes(given_as(profile=str(path)))


def test_without_a_profile_an_output_token_weighs_two_and_time_nothing() -> None:
    settings = Settings()
    rates = rates_of(settings, sizes(settings))
    assert rates.output == 2 * MICRO
    assert rates.output == 2 * rates.uncached
    assert token_ns_of(settings, sizes(settings)) == 0


def test_with_a_profile_tokens_weigh_what_it_measured() -> None:
    settings, profile = given_as(profile=PROFILE), load_profile(PROFILE)
    rates = rates_of(settings, profile)
    assert (rates.uncached, rates.output) == profile.service_weights()
    assert token_ns_of(settings, profile) == profile.prompt_token_ns()


def test_weights_that_are_said_stand() -> None:
    settings = given_as(cost={"output_weight": 5, "input_weight": 2})
    rates = rates_of(settings, sizes(settings))
    assert (rates.uncached, rates.output) == (2 * MICRO, 5 * MICRO)
