"""What the page of settings and the example tell is what there is."""

import re
from pathlib import Path

from headrace.config.check import problems
from headrace.config.resolve import resolved
from headrace.config.schema import Settings
from headrace.policy.catalog import PlaneConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
EXAMPLE = (ROOT / "examples" / "deployment.yaml").read_text(encoding="utf-8")


def test_every_setting_is_in_the_table_and_no_other() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", PAGE.partition("## Settings")[2], re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]
    inside = {name.rpartition(".")[2] for name in named if "." in name}
    assert inside == set(PlaneConfig.__struct_fields__)
    assert {name for name in named if "." not in name} == set(Settings.__struct_fields__) - {
        "deployment"
    }


def test_the_tree_of_the_example_can_be_uncommented() -> None:
    before, _, rest = EXAMPLE.partition("  #\n")
    tree, _, after = rest.partition("\n\n")
    text = before + re.sub(r"^  # ?", "  ", tree, flags=re.MULTILINE) + "\n\n" + after
    settings = resolved(text, "d", Path(), {}, {}).settings
    found = {one.name: one for one in settings.deployment.tenants}
    assert found["search"].by_user
    assert found["indexing"].maximum == 0.5
    assert {found[name].organisation for name in ("search", "indexing")} == {"acme"}
    assert not problems(settings)
