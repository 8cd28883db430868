"""Same seed, same bytes: in one process, in another, whatever the hash seed."""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.cli import main
from headrace.model.event import Ended
from headrace.sim.faults import Crash, Leavers, Reports, Restart
from headrace.sim.reading import load_scenario
from headrace.sim.scenario import Scenario, rows_of
from headrace.sim.swarm import draw
from headrace.sim.world import World
from tests.sim.scenes import profile, run, scenario

EXAMPLES = Path(__file__).parents[2] / "examples"
FAULTS = (
    Crash(replica=0, at_s=5.0, back_after_s=2.0),
    Reports(lost=0.3, twice=0.3, delay_s=1.0),
    Leavers(share=0.2, within_s=2.0),
    Restart(at_s=10.0),
)
ELSEWHERE = """
import sys
from hashlib import sha256
from tests.sim.scenes import run, scenario
from tests.sim.test_determinism import FAULTS
sys.stdout.write(sha256(run(scenario(faults=FAULTS), 3).journal).hexdigest())
"""
SCENARIO = """
name: tiny
deployment:
  models: [{name: m}]
  pools: [{name: pool, model: m, profile: h100-8b-tp1, replicas: 2}]
  tenants: [{name: a}, {name: b}, {name: c}]
assign: {tenants: {a: 1, b: 2, c: 3}, classes: {interactive: 3, batch: 1}}
faults: [{kind: leavers, share: 0.2}]
mix:
  rows: 150
  sources:
    - tenant: a
      arrivals: {kind: poisson, rate: 12}
      lengths: {kind: lognormal, input_median: 400, output_median: 60, output_max: 300}
"""


def replaced_trace(name: str, first: int) -> Scenario:
    """Return an example with the beginning of its trace only."""
    whole = load_scenario(EXAMPLES / f"{name}.yaml")
    assert whole.trace is not None
    return replace(whole, trace=replace(whole.trace, first=first))


def digest(one: Scenario, seed: int, folders: tuple[Path, ...] = ()) -> str:
    """Return a digest of a run's journal."""
    seen = sha256()
    rows = rows_of(one, seed, folders)
    World(one, rows, seed, sink=lambda frame, _: seen.update(frame)).run()
    return seen.hexdigest()


def subprocess_output(code: list[str], hash_seed: str) -> str:
    """Return what a fresh Python process prints under a hash seed."""
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, *code],
        env=env,
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_one_seed_gives_one_journal_and_another_seed_another() -> None:
    faulty = scenario(faults=FAULTS)
    first, again, other = run(faulty, 3), run(faulty, 3), run(faulty, 4)
    assert first.journal == again.journal
    assert first.decisions == again.decisions
    assert first.journal != other.journal


def test_the_seed_alone_moves_a_trace_that_stays_the_same() -> None:
    quiet = scenario()
    rows = rows_of(quiet, 0)
    one, two = (run(quiet, seed, rows) for seed in (0, 1))
    assert one.events(Ended) != two.events(Ended)  # the noise of step times
    still = replace(quiet, noise_percent=0.0)
    assert run(still, 0, rows).journal == run(still, 1, rows).journal


def test_observers_change_nothing() -> None:
    watched = run(scenario(faults=FAULTS), 3, check=True)
    assert run(scenario(faults=FAULTS), 3, check=False).journal == watched.journal


def test_the_hash_seed_does_not_show_in_a_journal() -> None:
    here = sha256(run(scenario(faults=FAULTS), 3).journal).hexdigest()
    assert [subprocess_output(["-c", ELSEWHERE], seed) for seed in ("1", "77")] == [here, here]


def test_the_hash_seed_does_not_show_in_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(SCENARIO)
    assert main(["simulate", str(file), "--json", "-"]) == 0
    here = capsys.readouterr().out
    code = "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))"
    command = ["-c", code, "simulate", str(file), "--json", "-"]
    assert [subprocess_output(command, seed) for seed in ("1", "77")] == [here, here]
    assert main(["simulate", str(file), "--json", "-", "--seed", "9"]) == 0
    assert capsys.readouterr().out != here


@pytest.mark.parametrize("seed", [2, 11])
def test_a_drawn_world_is_its_seed(seed: int) -> None:
    (one, rows), (two, again) = draw(seed, profile()), draw(seed, profile())
    assert one == two
    assert rows == again
    assert one != draw(seed + 1, profile())[0]


@pytest.mark.data
@pytest.mark.parametrize(("name", "first"), [("azure_conv", 2_000), ("mooncake_conv", 1_000)])
def test_a_public_trace_gives_the_same_bytes_elsewhere(
    name: str, first: int, data_dir: Path
) -> None:
    one = replaced_trace(name, first)
    rows = rows_of(one, 0, (data_dir,))
    assert len(rows) == first
    ran = run(one, 0, rows)
    code = (
        "import sys; from pathlib import Path; from tests.sim.test_determinism import *;"
        f"one = replaced_trace({name!r}, {first});"
        f"sys.stdout.write(digest(one, 0, (Path({str(data_dir)!r}),)))"
    )
    assert subprocess_output(["-c", code], "1") == sha256(ran.journal).hexdigest()
    hits = sum(life.hit for node in ran.world.nodes for life in node.past)
    assert (hits > 0) is (name == "mooncake_conv")
    assert ran.world.concluded.keys() == set(range(1, first + 1))
