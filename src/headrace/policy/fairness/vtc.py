"""Whose counter stands where? Virtual token counters.

Service by some cost (`costs`), divided by weight; the backlogged tenant with the smallest counter
goes first, and a tenant back from idle is lifted so that idle time earns no credit (Sheng et al.,
Fairness in Serving Large Language Models, OSDI 2024; FAIR-1). Pure arithmetic: the plane's ledger
keeps the counters, ordering decides what else counts in a turn.
"""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.profile import Profile
from headrace.policy.fairness.costs import Cost, Price, TokenCost, price

MEMORY_TOKENS = 20_000.0
"""Input tokens for which what a node had too much or too little of is remembered."""


class Vtc(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Virtual token counters over one cost function."""

    cost: Cost = TokenCost()
    """What counters count: request, tokens, work, kv, money or mix. tokens: the published method;
    work or mix where lengths differ widely. docs/fairness.md compares them."""

    aging_tokens_per_s: Annotated[float, Meta(ge=0, le=1_000_000)] = 0.0
    """Input tokens that a turn is ahead of its counter for each second that the first request has waited.
    0: turns go by counters; the bound on unfairness grows by what it adds."""
    boost_tokens: Annotated[float, Meta(ge=0, le=10_000_000)] = 0.0
    """Input tokens that a queue's turn is ahead once its first request's slack is below `boost_ms`. 0: a
    deadline changes nothing between tenants."""
    boost_ms: Annotated[float, Meta(ge=0, le=3_600_000)] = 200.0
    """Slack below which `boost_tokens` count. 200: the last moment at which a turn still helps."""
    memory_tokens: Annotated[float, Meta(gt=0, le=1_000_000_000)] = MEMORY_TOKENS
    """Input tokens beyond a minimum or maximum that are held against a node, at that share, and most of what
    it lent that it has back. 20,000: about two seconds of an 8B replica, so that nobody is shut out for
    longer, and at most 4 % of a share over a minute (100,000: 13 %)."""

    revision: str = "vtc-1"

    def exceptions(self, price: Price) -> tuple[int, int, int]:
        """Return (aging a second, boost, memory) in service."""
        return (
            price.service(round(self.aging_tokens_per_s), 0, 0) if self.aging_tokens_per_s else 0,
            price.service(round(self.boost_tokens), 0, 0) if self.boost_tokens else 0,
            price.service(round(self.memory_tokens), 0, 0),
        )

    def price(self, model: str, profile: Profile) -> Price:
        """Return what served tokens of a model cost on one profile."""
        return price(self.cost, model, profile)


def share(service: int, weight: int) -> int:
    """Return what a service adds to a counter: integer micro-units / weight, rounded down."""
    return service // weight


def lifted(own: int, least_backlogged: int | None, last_out: int | None) -> int:
    """Return the counter of a tenant that becomes backlogged.

    At least the least counter among the backlogged; if none is, that of the tenant which left the
    queue last. Never lowered.
    """
    floor = last_out if least_backlogged is None else least_backlogged
    return own if floor is None or floor < own else floor
