"""The picture of a capacity shows its points where they are, and files say what they hold."""

import re
from pathlib import Path

import msgspec

from headrace.model.envelope import Envelope, Fingerprint, Promise
from headrace.report.capacity import (
    FORMAT,
    HEIGHT,
    WIDTH,
    CapacityReport,
    Measured,
    Point,
    picture,
    render_measured,
    report,
)
from headrace.report.sizing import Sized, SizingReport, ordered, render_sizing

PAGE = (Path(__file__).parents[2] / "docs" / "capacity.md").read_text(encoding="utf-8")
SHARES = {5.0: (1.0, 1.0, 1.0), 8.0: (0.9, 1.0, 0.95), 9.0: (0.4, 0.7, 0.55), 12.0: (0.0, 0.0, 0.0)}


def point(rate: float, by_seed: tuple[float, ...]) -> Point:
    share = sum(by_seed) / len(by_seed)
    return Point(
        rate=rate, work_rate=rate / 10, met_work_rate=share * rate / 10, attained={"chat": share},
        binding="chat", by_seed=by_seed, holds=share >= 0.9,
    )  # fmt: skip


def measured() -> Measured:
    envelope = Envelope(
        fingerprint=Fingerprint(
            model="m", hardware="H100", tp=2, profile="p 1", engine="emulated 1",
            scheduler="chunked_prefill", step_tokens=512, policy="fifo 1", mix="conv",
            mix_digest="d", promises={"chat": Promise(ttft_ms=2_000.0, gap_ms=80.0, tpot_ms=60.0)},
        ),
        work_rate=0.8, low=0.7, high=0.9, request_rate=8.0, attainment={"chat": 0.9},
        seeds=(0, 1, 2), measured_at_s=7,
    )  # fmt: skip
    points = tuple(point(rate, shares) for rate, shares in SHARES.items())
    return Measured(
        pool="p", replicas=1, gpus=2, warm_s=20.0, span_s=100.0, patience_s=5.0, precision=0.01,
        envelope=envelope, points=points,
    )  # fmt: skip


GOLDEN = """\
   100 %                           o              :
    90 % -----------------------------------------o----------------------
                                                  |
                                                  |
                                                  |    :
                                                  |    o
                                                  |    :
                                                  |    :
                                                  |
                                                  |
                                                  |
                                                  |
     0 %                                          |                    o
         0                   requests/s offered                      12.2
         o met of offered  : its seeds  | capacity, 8.00
"""


def test_the_picture_is_this() -> None:
    assert picture(measured()) == GOLDEN
    assert GOLDEN.count("\n") == HEIGHT + 2
    assert max(map(len, GOLDEN.splitlines())) <= WIDTH + 9


def test_all_that_an_envelope_is_known_by_is_told() -> None:
    text = render_measured(measured(), 5.0)
    for words in (
        "conv on pool p", "0.800 work-seconds per second and replica", "0.700 to 0.900 with 95 %",
        "90.0 % of `chat`, of all that was offered", "2,000 ms to the first token, 60 ms on average",
        "H100 x2 (tp 2, pp 1)", "5.00 USD an hour: 193 USD a million",
    ):  # fmt: skip
        assert words in text


def test_a_file_is_read_back_as_it_was_written() -> None:
    told = report("s", [measured()])
    assert told.format == FORMAT
    assert told.envelopes == (measured().envelope,)
    assert msgspec.json.decode(msgspec.json.encode(told), type=CapacityReport) == told
    schema = msgspec.json.schema(CapacityReport)["$defs"]
    assert set(schema["CapacityReport"]["required"]) == {
        "format",
        "scenario",
        "envelopes",
        "measured",
    }
    assert schema["Envelope"]["additionalProperties"] is False


def sized(profile: str, **told: object) -> Sized:
    base = {"profile": profile, "model": "m", "gpu": "G", "gpus_each": 4}
    return msgspec.convert({**base, **told}, Sized)


def test_the_cheapest_come_first_then_those_without_a_price_then_those_that_cannot() -> None:
    answers = [
        sized("none", why="too slow"), sized("many", gpus=8), sized("few", gpus=4),
        sized("dear", gpus=4, usd_hour=9.0), sized("cheap", gpus=8, usd_hour=3.0),
    ]  # fmt: skip
    names = [one.profile for one in ordered(answers)]
    assert names == ["cheap", "dear", "few", "many", "none"]
    asked = SizingReport(
        format="f", rate=1.0, ttft_ms=1.0, tpot_ms=1.0, attainment=0.9, mix="x", mix_digest="",
        seeds=(0,), answers=ordered(answers),
    )  # fmt: skip
    text = render_sizing(asked)
    assert "too slow" in text
    assert "no price for G" in text


def test_the_page_names_options_that_there_are() -> None:
    command = (Path(__file__).parents[2] / "src/headrace/cli/capacity.py").read_text()
    setup = (Path(__file__).parents[2] / "src/headrace/cli/capacity_setup.py").read_text()
    for option in set(re.findall(r"`(--[a-z-]+)", PAGE)):
        name = option.removeprefix("--").replace("-", "_")
        assert f'"{option}"' in command + setup or f"    {name}: " in command, option
