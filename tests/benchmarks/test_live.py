"""What the live benchmarks claim, and how they measure inside the server."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from msgspec.structs import replace

from benchmarks import parity
from benchmarks.live_overload import AMPLE, KEYS, Refusals, gated, timed
from headrace.cli.parity import ParityReport, Replayed, SeedRun
from headrace.model.decision import Gate, Reject
from headrace.model.effect import Decided, Effect
from headrace.model.evidence import EntryRecord
from headrace.report.parity import parity as judged
from headrace.report.summary import summarise
from headrace.sim.experiment import simulate
from headrace.sim.reading import load_scenario
from headrace.sim.scenario import rows_of
from headrace.sim.world import World

EXAMPLES = Path(__file__).parents[2] / "examples"


class Transport:
    """As much of a transport as is written to."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        return 7


class Connection:
    """As much of a server's connection as is timed."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b'{"error":{"headrace":{"gate":"deadline","outcome":"reject"}}}', 1),
        (b'{"error":{"headrace":{"outcome":"fail"}}}', 0),
        (b"data: {}\n\n", 0),
    ],
)
def test_only_refusals_at_the_door_are_timed(body: bytes, count: int) -> None:
    took: list[int] = []
    transport, connection = Transport(), timed(Connection, took.append)()
    connection.connection_made(transport)
    connection.transport.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n" + body)
    assert len(took) == count
    assert transport.written
    assert connection.transport.get_write_buffer_size() == 7


def report(lag_ms: float) -> ParityReport:
    scenario = parity.scene(2.0, 20.0)
    run = simulate(scenario, 1)
    both = judged([(run, run)])
    seed = SeedRun(
        seed=1,
        loop_lag_p99_ms=lag_ms,
        valid=lag_ms <= 20,
        journal=Replayed(records=1, whole=True),
        parity=both,
        simulated=summarise(run),
        live=summarise(run),
    )
    return ParityReport(scenario="s", load=1.0, parity=both, seeds=(seed,))


def test_parity_claims_each_bound_with_the_lag_first() -> None:
    claims = parity._claims(report(1.0), 0.8, quick=False)

    assert all(claim.holds for claim in claims)
    assert [claim.claim for claim in claims[:3]] == [
        "0.8x: loop lag p99, ms",
        "0.8x: journals that replay, of 1",
        "0.8x: requests that end alike",
    ]
    assert {claim.bound for claim in claims} >= {">= 0.98", "<= 0.03", "<= 0.05"}


def test_a_run_on_a_busy_machine_claims_nothing_but_that() -> None:
    [claim] = parity._claims(report(25.0), 2.0, quick=False)

    assert not claim.holds
    assert "invalid" in claim.claim


def test_the_example_is_what_is_measured() -> None:
    shown = load_scenario(EXAMPLES / "parity.yaml")
    measured = parity.scene(4.9, 300.0)

    assert shown.deployment == measured.deployment
    assert shown.mix == measured.mix


def test_a_gateway_whose_server_is_set_up_already_is_watched_all_the_same() -> None:
    """What a server was told before counts no more once it has loaded."""
    config = uvicorn.Config(
        lambda *_: None, http=cast("Any", Connection), ws="none", log_config=None
    )
    config.load()
    gateway = SimpleNamespace(server=SimpleNamespace(config=config))
    Refusals(took=[]).watch(cast("Any", gateway))
    made: type[Any] = config.http_protocol_class
    assert made is not Connection
    assert issubclass(made, Connection)


def test_with_every_gate_on_only_capacity_refuses_and_every_gate_has_looked() -> None:
    plain = replace(parity.scene(12.0, 10.0), drain_s=5.0)
    seen: list[EntryRecord] = []

    def watch(_: World, effects: Sequence[Effect]) -> None:
        found = (one.record for one in effects if isinstance(one, Decided))
        seen.extend(one for one in found if isinstance(one, EntryRecord))

    scenario = gated(plain)
    World(scenario, rows_of(scenario, 1), 1, after=watch).run()

    refused = [one for one in seen if isinstance(one.decision, Reject)]
    assert refused
    assert {one.decision.gate for one in seen if isinstance(one.decision, Reject)} == {
        Gate.DEADLINE
    }
    for one in seen:
        budget = one.evidence.budget
        assert len({facts.name for facts in budget.windows}) == 4
        assert None not in (
            budget.tokens_left,
            budget.requests_left,
            budget.parallel_left,
        )
        assert {verdict.gate for verdict in one.decision.verdicts} == set(Gate)
    assert any(one.evidence.budget.sessions_left is not None for one in seen)
    assert len(scenario.deployment.tenants) == len(plain.deployment.tenants) + KEYS
    assert all(one.rpm_limit in {None, AMPLE} for one in scenario.deployment.tenants)
