"""Envelopes: what fits counts as it stands, what does not counts as the lowest of its kind, less a margin."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.model.envelope import (
    DECLARED_RATE,
    MISMATCH_MARGIN,
    Envelope,
    Fingerprint,
    Origin,
    Promise,
    differing,
    mixes,
    read,
)
from headrace.model.hardware import Hardware, hardware_of
from headrace.model.price import GpuPrices

CHAT = Promise(ttft_ms=2_000.0, gap_ms=80.0, tpot_ms=80.0)
MARK = Fingerprint(
    model="m", revision="1", hardware="H100", tp=2, profile="p 1", engine="emulated 1",
    scheduler="chunked", step_tokens=512, policy="fifo 1", mix="conv", mix_digest="d",
    promises={"chat": CHAT},
)  # fmt: skip
NOW = replace(MARK, engine="", scheduler="", mix="", mix_digest="")


def envelope(work_rate: float = 0.7, low: float = 0.6, **changed: Any) -> Envelope:
    return Envelope(
        fingerprint=replace(MARK, **changed),
        work_rate=work_rate,
        low=low,
        high=0.9,
        request_rate=7.0,
        attainment={"chat": 0.9},
        seeds=(0, 1, 2),
        measured_at_s=1_000,
    )


def test_one_that_fits_counts_as_it_stands() -> None:
    found = read((envelope(),), NOW)
    assert (found.origin, found.work_rate, found.margin) == (Origin.MEASURED, 0.7, 0.0)
    assert found.differs == ()


def test_of_several_mixes_the_lowest_counts_unless_one_is_named() -> None:
    both = (envelope(0.7), envelope(0.5, mix="reasoning"))
    assert read(both, NOW).work_rate == 0.5
    assert read(both, replace(NOW, mix="conv")).work_rate == 0.7
    assert mixes(both) == ("conv", "reasoning")


CHANGES: dict[str, Any] = {
    "revision": "2", "quantization": "fp8", "profile": "p 2", "step_tokens": 1_024, "policy": "fifo 2",
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_else_differs_counts_as_the_lowest_of_its_kind_less_a_margin(name: str) -> None:
    now = replace(NOW, **{"quantization": "bf16", name: CHANGES[name]})
    old = (
        envelope(quantization="bf16"),
        envelope(0.8, 0.5, quantization="bf16", mix="chat"),
        envelope(0.4, 0.3, hardware="A100"),
    )
    found = read(old, now)
    assert found.origin is Origin.LOWEST
    assert found.work_rate == pytest.approx(0.5 * (1 - MISMATCH_MARGIN))
    assert name in found.differs
    assert found.envelope is old[1]


@pytest.mark.parametrize("changed", [{"model": "n"}, {"hardware": "A100"}, {"tp": 4}, {"pp": 2}])
def test_another_kind_says_nothing(changed: dict[str, Any]) -> None:
    found = read((envelope(**changed),), NOW)
    assert (found.origin, found.work_rate, found.envelope) == (Origin.DEFAULT, DECLARED_RATE, None)


def test_what_is_unknown_is_compared_with_nothing() -> None:
    assert differing(MARK, NOW) == ()
    assert differing(MARK, replace(NOW, engine="vllm 1")) == ("engine",)


def test_a_promise_that_changed_differs_and_one_of_a_class_without_requests_does_not() -> None:
    other = replace(NOW, promises={"chat": replace(CHAT, ttft_ms=500.0), "batch": Promise()})
    assert differing(MARK, other) == ("promises.chat",)
    assert differing(MARK, replace(NOW, promises={"chat": CHAT, "batch": Promise()})) == ()
    assert differing(MARK, replace(NOW, promises={})) == ("promises.chat",)


def test_a_mix_that_was_never_measured_takes_the_lowest_and_says_so() -> None:
    found = read((envelope(),), replace(NOW, mix="code"))
    assert found.origin is Origin.LOWEST
    assert found.differs == ("mix",)
    assert found.work_rate == pytest.approx(0.6 * (1 - MISMATCH_MARGIN))


@given(st.lists(st.tuples(st.floats(0.1, 1.0), st.sampled_from(("1", "2"))), max_size=5))
def test_no_reading_is_above_the_lowest_of_those_it_was_chosen_from(
    given_: list[tuple[float, str]],
) -> None:
    some = tuple(envelope(rate, rate * 0.9, revision=word) for rate, word in given_)
    found = read(some, NOW)
    fit = [one for one in some if one.fingerprint.revision == "1"]
    assert (found.origin is Origin.MEASURED) == bool(fit)
    assert all(found.work_rate <= one.work_rate for one in fit or some)


def test_age_is_told_from_outside_and_never_negative() -> None:
    assert envelope().age_s(1_060) == 60
    assert envelope().age_s(10) == 0


def test_a_record_survives_json_and_refuses_what_it_does_not_know() -> None:
    text = msgspec.json.encode(envelope())
    assert msgspec.json.decode(text, type=Envelope) == envelope()
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(text.replace(b'"low"', b'"least"'), type=Envelope)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("H100 SXM 80 GB x4", Hardware(gpu="H100 SXM 80 GB", gpus=4, tp=4, pp=1)),
        ("H100 SXM 80 GB x16 tp8 pp2", Hardware(gpu="H100 SXM 80 GB", gpus=16, tp=8, pp=2)),
        ("1 vCPU", Hardware(gpu="1 vCPU", gpus=0, tp=1, pp=1)),
        ("box x0", Hardware(gpu="box x0", gpus=0, tp=1, pp=1)),
    ],
)
def test_hardware_is_read_off_its_words(words: str, found: Hardware) -> None:
    assert hardware_of(words) == found


def test_a_plan_that_is_not_its_gpus_is_refused() -> None:
    with pytest.raises(ValueError, match="tp 4 times pp 2 is not 16"):
        hardware_of("H100 x16 tp4 pp2")


def test_prices_are_found_by_whole_words_and_the_longest_name() -> None:
    prices = GpuPrices(usd_gpu_hour={"h100": 2.5, "H100 SXM": 3.0, "h1": 9.0})
    assert prices.of("H100 SXM 80 GB") == 3.0
    assert prices.of("H100 PCIe") == 2.5
    assert prices.of("H200 SXM 141 GB") is None
