"""Whose counter stands where? Virtual token counters.

service = w_p * input + w_d * output, divided by weight; the backlogged tenant with the smallest
counter goes first, and a tenant back from idle is lifted so that idle time earns no credit (Sheng
et al., Fairness in Serving Large Language Models, OSDI 2024; FAIR-1). Pure arithmetic: the plane's
ledger keeps the counters, ordering decides what else counts in a turn.
"""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.profile import Profile
from headrace.units import MICRO, Service


class Vtc(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weighted tokens as service."""

    input_weight: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    """Service of one uncached input token. None: 1."""
    output_weight: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    """Service of one output token. None: the profile's cost ratio of output to input."""
    cached_weight: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of an input token's service that a cached one costs. 0.1: it holds memory, but needs
    hardly any compute."""

    revision: str = "vtc-1"

    def rates(self, profile: Profile) -> "Rates":
        """Return the integer service of each kind of token for one profile; none to compute is free."""
        w_p, w_d = profile.service_weights()
        uncached = w_p if self.input_weight is None else max(1, round(self.input_weight * MICRO))
        output = w_d if self.output_weight is None else max(1, round(self.output_weight * MICRO))
        return Rates(uncached=uncached, cached=round(uncached * self.cached_weight), output=output)


class Rates(Struct, frozen=True, kw_only=True, gc=False):
    """Service per token, in millionths."""

    uncached: int
    cached: int
    output: int

    def service(self, uncached: int, cached: int, output: int) -> Service:
        """Return the service of so many tokens."""
        return Service(self.uncached * uncached + self.cached * cached + self.output * output)


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
