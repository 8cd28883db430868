"""The page on simulation names every key, format and fault that there is, and its faults are read."""

import re
from pathlib import Path
from typing import get_args

import msgspec

from headrace.config.load import parse
from headrace.sim.faults import Fault
from headrace.sim.scenario import Scenario
from headrace.trace.read import Format
from tests.sim.scenes import scenario

PAGE = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text(encoding="utf-8")


class Faults(msgspec.Struct):
    """The part of a scenario that the page shows."""

    faults: tuple[Fault, ...]


def first_column(heading: str) -> list[str]:
    """Return the words in code of the first column of the first table under a heading."""
    _, _, part = PAGE.partition(f"\n## {heading}\n")
    rows = part.partition("\n## ")[0].splitlines()
    return [word for row in rows for word in re.findall(r"^\| `(\w+)`", row)]


def test_every_key_of_a_scenario_is_told() -> None:
    told = first_column("A scenario")
    assert sorted(told) == sorted(field.name for field in msgspec.structs.fields(Scenario))


def test_every_trace_format_is_told() -> None:
    kinds = [kind.__struct_config__.tag for kind in get_args(Format)]
    assert sorted(first_column("Traces")) == sorted(map(str, kinds))


def test_the_faults_shown_are_read_and_are_all_there_are() -> None:
    _, _, part = PAGE.partition("    faults:\n")
    lines = [line for line in part.splitlines() if line.startswith("      - ")]
    shown = parse("faults:\n" + "\n".join(lines) + "\n", Faults, "docs/simulation.md").faults
    assert {type(fault) for fault in shown} == set(get_args(Fault))
    assert scenario(faults=shown).faults == shown
