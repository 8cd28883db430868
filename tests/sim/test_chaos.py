"""Scenarios of what goes wrong: those that ship hold, and an expectation is a figure with bounds."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from headrace.config.errors import ConfigError
from headrace.model.decision import Reason
from headrace.model.effect import Concluded
from headrace.model.ids import ClassName, PoolName
from headrace.model.scaling import ScaleRecord
from headrace.sim.chaos import Chaos, load_chaos, shipped_names
from headrace.sim.chaos_run import Ran, run_chaos
from headrace.sim.expect import (
    Account,
    AttainmentOf,
    Desired,
    DesiredLowered,
    Ended,
    Expected,
    Fleet,
    Gpus,
    GroupsAtEnd,
    GroupsReady,
    Leaked,
    Step,
    StepsTaken,
    StreamsLost,
    TokensLost,
    Verdict,
    judge,
)
from headrace.units import InstantNs, seconds

FOLDER = Path(__file__).parents[2] / "src" / "headrace" / "sim" / "scenarios"
CHAT = ClassName("interactive")


@pytest.mark.parametrize("name", shipped_names())
def test_a_scenario_that_ships_holds(name: str) -> None:
    loaded = load_chaos(name)
    ran = run_chaos(loaded, loaded.seed)
    assert ran.broken is None
    assert [one for one in ran.verdicts if not one.holds] == []
    assert loaded.name == name


def test_every_promised_scenario_ships() -> None:
    promised = {
        "drain", "rank-loss", "node-loss", "zone-loss", "region-loss", "nic-fault", "gpu-fault",
        "slow-group", "kernel-fallback", "cold-cache", "canary-slow", "canary-wrong",
        "driver-update", "stale-metrics", "short-burst", "retry-storm", "retry-storm-scale-out",
        "restart-in-drain", "restart-in-scale-out",
    }  # fmt: skip
    assert set(shipped_names()) == promised
    page = (Path(__file__).parents[2] / "docs" / "chaos.md").read_text(encoding="utf-8")
    assert [name for name in shipped_names() if f"| `{name}` |" not in page] == []


def test_every_kind_of_expectation_is_told() -> None:
    page = (Path(__file__).parents[2] / "docs" / "chaos.md").read_text(encoding="utf-8")
    kinds = [str(one.__struct_config__.tag) for one in Expected.__args__]
    assert [kind for kind in kinds if f"| `{kind}` |" not in page] == []


def test_a_run_is_its_seed() -> None:
    drain = load_chaos("drain")
    one, again, other = (run_chaos(drain, seed) for seed in (4, 4, 5))
    assert msgspec.json.encode(one) == msgspec.json.encode(again)
    assert one.happened != other.happened


def test_what_happened_is_told_in_order() -> None:
    loaded = load_chaos("zone-loss")
    ran = run_chaos(short(loaded), 0)
    told = [(one.at, one.what) for one in ran.happened]
    assert told == sorted(told, key=lambda one: one[0])
    (fault,) = [(at, what) for at, what in told if what.startswith("fault: domain_loss")]
    assert fault[0] == InstantNs(seconds(30))
    lost = [at for at, what in told if "not ready any more" in what]
    asked = [at for at, what in told if "asked for" in what]
    assert min(asked) >= min(lost) >= fault[0]


def short(loaded: Chaos) -> Chaos:
    """Return the scenario with its fault at 30 s, over after a minute."""
    assert loaded.mix is not None
    faults = tuple(replace(one, at_s=30.0) for one in loaded.faults)
    return replace(loaded, faults=faults, mix=replace(loaded.mix, duration_s=60.0))


# Expectations ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def account() -> Account:
    """Return what the short loss of a zone leaves behind."""
    kept: list[Account] = []

    def keep(_: object, seen: Account) -> tuple[Verdict, ...]:
        kept.append(seen)
        return ()

    loaded = short(load_chaos("zone-loss"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.sim.chaos_run.judge", keep)
        run_chaos(loaded, 0)
    return kept[0]


def figure(one: Expected, account: Account) -> float | None:
    (verdict,) = judge([one], account)
    return verdict.measured


def rows(account: Account, **wanted: Any) -> list[Concluded]:
    return [one for one in account.rows if all(getattr(one, k) == v for k, v in wanted.items())]


def test_attainment_is_of_a_class_and_of_those_that_came_in_the_time(account: Account) -> None:
    mine = [one for one in account.rows if one.entry.arrived_at < seconds(20)]
    offered = AttainmentOf(slo_class=CHAT, at_least=0.5, to_s=20)
    assert figure(offered, account) == sum(one.met for one in mine) / len(mine)
    none = replace(mine[0], admitted=False, outcome=None)
    some = replace(account, rows=[none, *mine[1:]])
    assert figure(offered, some) == sum(one.met for one in mine[1:]) / len(mine)
    admitted = replace(offered, admitted=True)
    assert figure(admitted, some) == sum(one.met for one in mine[1:]) / (len(mine) - 1)
    assert figure(replace(offered, slo_class=ClassName("other")), account) is None


def test_streams_and_tokens_that_broke_off_are_counted(account: Account) -> None:
    broken = rows(account, reason=Reason.UPSTREAM_ERROR)
    assert broken
    assert figure(StreamsLost(at_most=0), account) == len(broken)
    assert figure(Ended(reason=Reason.UPSTREAM_ERROR, at_most=0), account) == len(broken)
    owed = {one.request: one.output_tokens for one in account.offered}
    shown = {one.request: one.timing.tokens for one in broken if one.timing is not None}
    missing = sum(owed[name] - tokens for name, tokens in shown.items())
    assert figure(TokensLost(at_most=0), account) == missing > 0


def test_groups_and_gpus_are_looked_at_for_the_whole_time() -> None:
    fleet = [
        Fleet(at=InstantNs(seconds(at)), ready=ready, gpus=gpus, idle=idle)
        for at, ready, gpus, idle in ((0, 3, 12, 0), (10, 1, 12, 8), (12, 2, 16, 8), (20, 4, 16, 0))
    ]
    seen = Account(offered=[], rows=[], decisions=[], fleet=fleet, end=InstantNs(seconds(30)))
    assert figure(GroupsReady(at_least=1), seen) == 1
    assert figure(GroupsReady(at_least=1, from_s=12), seen) == 2
    assert figure(GroupsReady(at_least=1, from_s=13, to_s=20), seen) == 2
    assert figure(GroupsReady(at_least=1, from_s=25), seen) == 4
    assert figure(Gpus(at_most=1, to_s=12), seen) == 12
    assert figure(Gpus(at_most=1), seen) == 16
    assert figure(GroupsAtEnd(at_least=1), seen) == 4
    assert figure(Leaked(at_most=0), seen) == 0
    late = replace(seen, fleet=fleet[:3], end=InstantNs(seconds(180)))
    assert figure(Leaked(at_most=0), late) == 0  # for all that is known it is a start
    assert figure(Leaked(at_most=0), replace(late, end=InstantNs(seconds(192)))) == 8
    assert figure(GroupsReady(at_least=1), replace(seen, fleet=[])) is None


def test_what_the_scaler_decided_is_counted(account: Account) -> None:
    first = account.decisions[0]

    def wants(at: float, desired: int, ask: int = 0) -> ScaleRecord:
        steps = replace(first.decision.steps, ask=ask, drain=(), cancel=())
        decision = replace(first.decision, desired=desired, steps=steps)
        return replace(first, at=InstantNs(seconds(at)), decision=decision)

    other = wants(25, 1)
    other = replace(other, evidence=replace(other.evidence, pool=PoolName("other")))
    made = [wants(10, 4), wants(20, 3), other, wants(30, 5, ask=2), wants(40, 2)]
    seen = replace(account, decisions=made)
    assert figure(Desired(at_most=1), seen) == 5
    assert figure(Desired(at_most=1, to_s=30), seen) == 4
    assert figure(DesiredLowered(at_most=0), seen) == 2
    assert figure(DesiredLowered(at_most=0, from_s=20, to_s=40), seen) == 1
    assert figure(DesiredLowered(at_most=0, from_s=30, to_s=40), seen) == 0
    assert figure(StepsTaken(step=Step.ASK, at_least=1), seen) == 2
    assert figure(StepsTaken(step=Step.DRAIN, at_most=0), seen) == 0
    assert figure(DesiredLowered(at_most=0, from_s=50), seen) is None


@pytest.mark.parametrize(
    ("bounds", "measured", "holds"),
    [
        ({"at_least": 2}, 2, True),
        ({"at_least": 2}, 1, False),
        ({"at_most": 2}, 2, True),
        ({"at_most": 2}, 3, False),
        ({"at_least": 1, "at_most": 2}, 3, False),
        ({"at_most": 2}, None, False),
    ],
)
def test_a_figure_holds_within_its_bounds(
    bounds: dict[str, float], measured: float | None, *, holds: bool
) -> None:
    assert Gpus(**bounds).holds(measured) is holds


# The format -----------------------------------------------------------------------------------


def refused(tmp_path: Path, *changes: tuple[str, str]) -> str:
    """Return what is said of a scenario in which something was replaced."""
    text = (FOLDER / "drain.yaml").read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_chaos(str(path))
    return str(caught.value)


STREAMS = "{kind: streams_lost, at_most: 0}"


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ("{kind: streams_lost}", "expected at_least, at_most or both"),
        ("{kind: attainment, slo_class: other, at_least: 1}", "unknown slo_class `other`"),
        ("{kind: stream_lost, at_most: 0}", "unknown kind 'stream_lost'"),
        ("{kind: streams_lost, at_most: 0, to_s: 0}", "to_s 0 is not after from_s 0"),
        ("{kind: ended, reason: bored, at_most: 0}", "invalid enum value 'bored'"),
        ("{kind: steps, step: jump, at_most: 0}", "invalid enum value 'jump'"),
    ],
)
def test_what_is_wrong_with_an_expectation_is_told(tmp_path: Path, new: str, said: str) -> None:
    told = refused(tmp_path, (STREAMS, new))
    assert "mine.yaml:" in told
    assert said in told


def test_a_scenario_says_what_it_is_about_and_what_is_expected(tmp_path: Path) -> None:
    assert "missing field `about`" in refused(tmp_path, ("about:", "# about:"))
    assert "unknown field `expects`" in refused(tmp_path, ("expect:", "expects:"))


def test_groups_are_expected_of_pools_that_scale_alone(tmp_path: Path) -> None:
    text = (FOLDER / "drain.yaml").read_text(encoding="utf-8")
    head, _, rest = text.partition("      scaling:\n")
    path = tmp_path / "fixed.yaml"
    path.write_text(head + rest.partition("\n")[2] + "faults: [{kind: canary, at_s: 1}]\n")
    with pytest.raises(ConfigError) as caught:
        load_chaos(str(path))
    lines = str(caught.value).splitlines()
    assert all("expected a pool with `scaling`" in line for line in lines)
    assert {line.partition("`$.")[2][:6] for line in lines} == {"expect", "faults"}


def test_an_unknown_name_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        load_chaos("zone")
    assert "zone-loss" in str(caught.value)


def test_a_broken_invariant_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.plane.ledger.Ledger.settle", lambda *_: None)
    ran: Ran = run_chaos(load_chaos("drain"), 0)
    assert ran.broken is not None
    assert "INV-" in ran.broken
    assert not ran.holds
    assert ran.verdicts == ()
