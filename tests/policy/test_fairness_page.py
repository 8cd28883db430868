"""The page on fairness names every cost with all its settings, and what it shows is read."""

import re
from pathlib import Path
from textwrap import dedent
from typing import get_args

import msgspec

from headrace.config.load import parse
from headrace.policy.fairness.costs import Cost, MoneyCost, revision
from headrace.policy.fairness.vtc import Vtc

PAGE = (Path(__file__).parents[2] / "docs" / "fairness.md").read_text(encoding="utf-8")
KINDS = {str(one.__struct_config__.tag): one for one in get_args(Cost)}


def test_every_cost_is_told_with_its_settings() -> None:
    table = PAGE.partition("\n### Revisions\n")[0]
    rows = re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\|[^|]*\|([^|]*)\|$", table, flags=re.MULTILINE)
    told = {kind: re.findall(r"`(\w+)`", listed) for kind, listed in rows if kind in KINDS}
    assert told == {
        kind: [field.name for field in msgspec.structs.fields(one)] for kind, one in KINDS.items()
    }


def test_the_costs_shown_are_read() -> None:
    blocks = re.findall(r"(?:^    .*\n)+", PAGE, flags=re.MULTILINE)
    shown = [dedent(block) for block in blocks if "cost:" in block]
    first, money = shown
    inner = dedent(first.partition("fairness:\n")[2])
    assert parse(inner, Vtc, "docs/fairness.md") == Vtc()
    listed = parse(money, Vtc, "docs/fairness.md").cost
    assert isinstance(listed, MoneyCost)
    assert f"`{revision(listed)}`" in PAGE, "the revision shown is that of the list shown"
