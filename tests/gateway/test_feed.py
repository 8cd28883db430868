"""Distributions, rates and labels by themselves, and the page that lists the families."""

import re
from pathlib import Path

from msgspec.structs import replace

from headrace.gateway.families import FAMILIES, Kind, exposed
from headrace.gateway.feed import Distribution, Feed
from headrace.gateway.labels import Labels, kept, opened
from headrace.model.decision import Reason
from headrace.model.deployment import TenantSpec
from headrace.model.ids import ClassName, TenantId
from headrace.model.slo import Outcome
from headrace.plane.accounts import Accounts
from headrace.units import NS_PER_MS, NS_PER_S, InstantNs
from tests.gateway.scenes import deployment

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def test_an_edge_belongs_to_the_bucket_below_it() -> None:
    found = Distribution.over((10, 20))
    for one in (9, 10, 11, 20, 21):
        found.note(one)
    assert (found.counts, found.sum) == ([2, 2, 1], 71)
    found.pour([1, 0, 2], 60)
    assert (found.counts, found.sum) == ([3, 2, 3], 131)


def test_a_bound_of_a_class_is_an_edge() -> None:
    feed = Feed(deployment(ttft_ms=1_234.0))
    assert 1_234 * NS_PER_MS in feed.classes["interactive"].ttft.edges
    assert feed.classes["batch"].ttft.edges == feed.classes["interactive"].ttft.edges


def test_a_change_of_classes_keeps_what_goes_on_and_drops_what_is_gone() -> None:
    config = deployment()
    feed = Feed(config)
    feed.classes["interactive"].ttft.note(1)
    feed.configure(replace(config, classes=config.classes[:1]))
    assert sum(feed.classes["interactive"].ttft.counts) == 1
    assert "batch" not in feed.classes


def test_rates_are_means_of_whole_seconds() -> None:
    window = Feed(deployment()).classes["interactive"].window
    for second in range(3):
        window.at(InstantNs(second * NS_PER_S + 5)).offered += 10
    assert window.rates(InstantNs(3 * NS_PER_S)).offered == 3.0
    assert window.rates(InstantNs(2 * NS_PER_S + 5)).offered == 2.0, "the present one is not over"
    assert window.rates(InstantNs(12 * NS_PER_S)).offered == 1.0
    assert window.rates(InstantNs(99 * NS_PER_S)).offered == 0.0


def test_counts_without_a_label_of_their_own_are_added_up() -> None:
    accounts = Accounts()
    for tenant, met in (("a", 1), ("b", 2), ("c", 4)):
        tally = accounts.tally(TenantId(tenant), ClassName("interactive"))
        tally.met, tally.outcomes = met, {Outcome.SUCCESS: met}
        tally.rejected = {Reason.TOKEN_RATE: met} if met > 1 else {}
    config = deployment(tenants=(TenantSpec(name="a"), TenantSpec(name="b")))
    found = Labels(config, 1).tallies(opened(kept(accounts)))
    other = found["other", "interactive"]
    assert (found["a", "interactive"].met, other.met) == (1, 6)
    assert (other.outcomes, other.rejected) == ({Outcome.SUCCESS: 6}, {Reason.TOKEN_RATE: 6})
    mine = accounts.tallies[TenantId("b")][ClassName("interactive")]
    assert mine.met == 2, "the plane's own counts are not touched"


def test_the_page_tells_of_every_family() -> None:
    rows = re.findall(
        r"^\| `headrace_(\w+)` \| (\w+) \|([^|]*)\| (.*) \|$",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    told = {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels)), about)
        for name, kind, labels, about in rows
    }
    assert told == {
        exposed(name).removeprefix("headrace_"): (one.kind.value, one.labels, one.about)
        for name, one in FAMILIES.items()
    }
    assert all(one.kind in Kind for one in FAMILIES.values())
