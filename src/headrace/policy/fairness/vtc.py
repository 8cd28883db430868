"""Whose counter stands where? Virtual token counters.

Service by some cost (`costs`), divided by weight; the backlogged tenant with the smallest counter
goes first, and a tenant back from idle is lifted so that idle time earns no credit (Sheng et al.,
Fairness in Serving Large Language Models, OSDI 2024; FAIR-1). Pure arithmetic: the plane's ledger
keeps the counters, ordering decides what else counts in a turn.
"""

from msgspec import Struct

from headrace.model.profile import Profile
from headrace.policy.fairness.costs import Cost, Price, TokenCost, price


class Vtc(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Virtual token counters over one cost function."""

    cost: Cost = TokenCost()
    """What counters count: request, tokens, work, kv, money or mix. tokens: the published method;
    work or mix where lengths differ widely. docs/fairness.md compares them."""

    revision: str = "vtc-1"

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
