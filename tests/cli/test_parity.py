"""`headrace parity` from the outside: one short scenario both ways, over real loopback HTTP."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.cli import main
from headrace.cli.live import named, recorded
from headrace.model.ids import RequestId, TenantId
from headrace.sim.experiment import simulate
from headrace.sim.reading import load_scenario
from headrace.sim.scenario import rows_of
from tests.cli.scenarios import SMALL, small

pytestmark = pytest.mark.service
ROOT = Path(__file__).parents[2]
CALM = (SMALL[SMALL.index("faults:") :], "")
FEW = ("rows: 120", "rows: 15")


def test_both_run_the_same_requests_and_the_journal_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "parity.json"

    code = main(["parity", small(tmp_path, CALM, FEW), "--json", str(out), "--seed", "3"])

    shown = capsys.readouterr().out
    report = json.loads(out.read_bytes())
    [seed] = report["seeds"]
    assert code in (0, 1, 3)  # how busy this machine is decides the figures
    assert (code == 3) is not seed["valid"]
    assert seed["journal"]["whole"] is True
    assert report["parity"]["requests"] == 15
    assert seed["simulated"]["trace_hash"] == seed["live"]["trace_hash"]
    assert seed["live"]["total"]["offered"] == 15
    assert "journal records replay to the same effects" in shown


def test_what_happens_in_simulations_only_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parity", small(tmp_path)]) == 2
    assert "faults happen in simulations only" in capsys.readouterr().err

    assert main(["parity", small(tmp_path, CALM), "--load", "0"]) == 2


def test_requests_are_numbered_as_in_the_trace_though_they_came_swapped() -> None:
    scenario = load_scenario(ROOT / "examples" / "parity.yaml")
    rows = named(scenario, rows_of(scenario, 1)[:40])
    simulated = simulate(scenario, 1, rows)
    # The gateway numbers requests as they come: here each pair the wrong way round.
    came = [replace(row, request=RequestId((row.request - 1 ^ 1) + 1)) for row in simulated.rows]

    live = recorded(scenario, 1, rows, came)

    by_number = {row.request: row for row in live.rows}
    for nth, row in enumerate(rows, start=1):
        mine = by_number[RequestId(nth)]
        assert (mine.tenant, mine.entry.input_tokens) == (row.tenant, row.input_tokens)
    assert live.offered == simulated.offered


def test_rows_without_an_owner_get_the_simulators() -> None:
    scenario = load_scenario(ROOT / "examples" / "parity.yaml")
    bare = [replace(row, tenant=None) for row in rows_of(scenario, 1)[:3]]

    assert {row.tenant for row in named(scenario, bare)} == {TenantId("chat")}
