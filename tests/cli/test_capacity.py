"""`headrace capacity` from the outside: what a replica carries, and how many a rate takes."""

import json
from pathlib import Path

import msgspec
import pytest

from headrace.cli import main
from headrace.report.capacity import CapacityReport
from headrace.report.sizing import SizingReport

Output = pytest.CaptureFixture[str]
SCENARIO = """\
name: one
deployment:
  models: [{name: m}]
  pools:
    - {name: fast, model: m, profile: h100-70b-tp4, replicas: 3}
    - {name: slow, model: m, profile: h200-70b-tp2, classes: [batch]}
  tenants: [{name: a, tpm_limit: 1000}, {name: b}]
mix:
  duration_s: 100
  sources:
    - tenant: a
      slo_class: interactive
      arrivals: {kind: on_off, rate: 40, on_s: 1, off_s: 3}
      lengths: {kind: fixed, input: 4000, output: 20}
    - tenant: b
      slo_class: batch
      arrivals: {kind: even, rate: 10}
      lengths: {kind: fixed, input: 6000, output: 20}
faults:
  - {kind: crash, replica: 0, at_s: 1, back_after_s: 1}
"""
SHORT = ("--quick", "--warm-s", "2", "--span-s", "8", "--measured-at", "1700000000")
FLEET = ("--ttft-ms", "2000", "--tpot-ms", "40", "--quick", "--warm-s", "2", "--span-s", "8")


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "one.yaml"
    path.write_text(SCENARIO)
    return str(path)


def test_each_pool_is_told_with_its_picture_and_progress(scenario: str, capsys: Output) -> None:
    assert main(["capacity", scenario, *SHORT, "--price", "h100=2"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("one at ")
    for text in (
        "one on pool fast", "one on pool slow", "CAPACITY", "90.0 % of `interactive`",
        "H100 SXM 80 GB x4 (tp 4, pp 1)", "USD a million requests that hold",
        "- (give --price NAME=USD, of an hour of one GPU)", "o met of offered",
    ):  # fmt: skip
        assert text in out
    assert [line for line in out.splitlines() if line.startswith("    90 % ")]


def test_json_is_the_same_for_the_same_seeds_and_a_configuration_reads_it(
    scenario: str, tmp_path: Path, capsys: Output
) -> None:
    file = tmp_path / "c.json"
    assert main(["capacity", scenario, *SHORT, "--pool", "fast", "--json", str(file)]) == 0
    capsys.readouterr()
    assert main(["capacity", scenario, *SHORT, "--pool", "fast", "--json", "-"]) == 0
    assert capsys.readouterr().out == file.read_text()
    told = msgspec.json.decode(file.read_bytes(), type=CapacityReport, strict=True)
    (one,) = told.envelopes
    assert told.measured[0].envelope == one
    mark = one.fingerprint
    assert (mark.model, mark.tp, mark.pp, mark.mix) == ("m", 4, 1, "one")
    assert (one.seeds, one.measured_at_s) == ((0, 1, 2), 1_700_000_000)
    assert one.low <= one.work_rate <= one.high
    assert set(one.attainment) == set(mark.promises) == {"interactive", "batch"}
    assert all(
        a.rate < b.rate
        for a, b in zip(told.measured[0].points, told.measured[0].points[1:], strict=False)
    )

    config = tmp_path / "d.yaml"
    config.write_text(
        "deployment:\n  models: [{name: m}]\n  tenants: [{name: a}]\n  pools:\n"
        "  - {name: p, model: m, profile: h100-70b-tp4, envelopes: c.json}\n"
    )
    assert main(["config", "check", str(config)]) == 0
    assert capsys.readouterr().err == ""
    assert main(["config", "explain", str(config), "--json"]) == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)}
    found = rows["deployment.pools[0].work_rate"]
    assert found["value"] == one.work_rate
    assert found["source"].startswith("default: envelope of mix one, 3 seeds, emulated ")


def test_two_mixes_are_two_envelopes(scenario: str, capsys: Output) -> None:
    mixes = ("--mix", "conv", "--mix", "chat", "--pool", "fast")
    assert main(["capacity", scenario, *SHORT, *mixes, "--json", "-"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out, type=CapacityReport)
    conv, chat = told.envelopes
    assert [one.fingerprint.mix for one in (conv, chat)] == ["conv", "chat"]
    assert conv.fingerprint.mix_digest != chat.fingerprint.mix_digest
    assert conv.request_rate < chat.request_rate


def test_what_no_replica_could_hold_alone_says_why(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "one.yaml"
    hard = "  classes: [{name: interactive, ttft_ms: 50}, {name: batch}]\nmix:"
    path.write_text(SCENARIO.replace("mix:", hard, 1))
    assert main(["capacity", str(path), *SHORT]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "headrace: one on pool fast: 100 % take 306 ms on average to the first token, of 50, even alone\n"
    )


def test_a_fleet_is_sized_by_hardware_the_cheapest_first(capsys: Output) -> None:
    asked: tuple[str, ...] = (
        "--rate",
        "20",
        "--input",
        "1000",
        "--output",
        "50",
        "--model",
        "llama-3.1-70b",
    )
    names = ("h100-70b-tp8", "h200-70b-tp4", "h100-70b-tp4")
    asked += tuple(word for name in names for word in ("--hardware", name))
    prices = ("--price", "h100=2", "--price", "h200=3")
    assert main(["capacity", *asked, *FLEET, *prices, "--json", "-"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out, type=SizingReport)
    costs = [one.usd_hour for one in told.answers]
    assert costs == sorted(costs, key=lambda cost: cost or 0.0)
    assert None not in costs
    for one in told.answers:
        assert one.replicas is not None
        assert one.carries_rps is not None
        assert one.gpus == one.replicas * one.gpus_each
        assert one.attained is not None
        assert one.attained >= 0.9
        assert (one.replicas - 1) * one.carries_rps < 20
        assert one.usd_hour == {"h100": 2, "h200": 3}[one.profile[:4]] * one.gpus
        million = one.usd_hour / (20 * 3_600 * one.attained) * 1e6
        assert one.usd_million == pytest.approx(million)


def test_a_table_says_what_it_was_asked_and_whose_price_is_missing(capsys: Output) -> None:
    asked = ("--rate", "5", "--mix", "chat", "--hardware", "h200-70b-tp4", "--hardware", "a100")
    assert main(["capacity", *asked, *FLEET, "--model", "llama-3.1-70b", "--price", "a100=1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "llama-3.1-70b: 5 requests/s of chat, 2000 ms to the first token and 40 ms for each after it,"
        " 90.0 % of the offered\n"
    )
    assert "a100-70b-tp4" in out.splitlines()[2]
    assert "no price for H200 SXM 141 GB: give --price NAME=USD" in out


def test_hardware_whose_lone_stream_is_too_slow_says_so(capsys: Output) -> None:
    asked = ("--rate", "1", "--input", "500", "--output", "50", "--hardware", "a100-70b-tp4")
    bounds = ("--ttft-ms", "2000", "--tpot-ms", "20")
    assert main(["capacity", *asked, *bounds, "--quick"]) == 1
    out = capsys.readouterr().out
    assert "100 % take 27.1 ms a token, of 20, even alone" in out


def test_a_trace_may_say_what_comes(tmp_path: Path, capsys: Output) -> None:
    trace = tmp_path / "t.jsonl"
    row = {"input_tokens": 800, "output_tokens": 30}
    head = '{"format": "headrace.trace", "version": 1}\n'
    trace.write_text(head + "".join(json.dumps({"at_ns": n, **row}) + "\n" for n in range(400)))
    asked = ("--rate", "4", "--trace", str(trace), "--hardware", "h100-70b-tp4")
    assert main(["capacity", *asked, *FLEET]) == 0
    assert "4 requests/s of t.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give a scenario, or --rate, --ttft-ms and --tpot-ms"),
        (("--rate", "1"), "--ttft-ms is missing"),
        (("--rate", "1", "--ttft-ms", "1", "--tpot-ms", "1"), "give lengths one way"),
        (("--rate", "1", "--ttft-ms", "1", "--tpot-ms", "1", "--input", "1"), "belong together"),
        (
            (
                "--rate",
                "0",
            ),
            "Must be > 0",
        ),
        (("--mix", "nil"), "no mix 'nil'; there are: arxiv, bimodal, chat, conv, reasoning"),
        (("--seeds", "2"), "Must be >= 3"),
        (("--price", "h100"), "expected NAME=USD"),
        (("one.yaml", "--rate", "1"), "--rate asks for a fleet"),
        (("one.yaml", "--pool", "nil"), "no pool 'nil'; there are: fast, slow"),
        (
            ("--rate", "1", "--ttft-ms", "1", "--tpot-ms", "1", "--mix", "conv", "--pool", "p"),
            "--pool is of a scenario",
        ),
        (
            ("--rate", "1", "--ttft-ms", "1", "--tpot-ms", "1", "--mix", "conv", "--hardware", "b"),
            "no profile or GPU 'b'",
        ),
        (
            ("--rate", "1", "--ttft-ms", "1", "--tpot-ms", "1", "--mix", "conv", "--model", "b"),
            "no profile of 'b'",
        ),
    ],
)
def test_what_cannot_be_answered_is_one_line(
    arguments: tuple[str, ...],
    told: str,
    scenario: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Output,
) -> None:
    monkeypatch.chdir(Path(scenario).parent)
    assert main(["capacity", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err


def test_prices_may_be_a_file(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("usd_gpu_hour: {h100: 4, h200: 1}\n")
    asked = ("--rate", "1", "--mix", "chat", "--hardware", "h100-70b-tp8", "--json", "-")
    paid = ("--prices", str(file), "--price", "h100=2")
    assert main(["capacity", *asked, *FLEET, *paid]) == 0
    told = msgspec.json.decode(capsys.readouterr().out, type=SizingReport)
    assert told.answers[0].usd_hour == 16.0
