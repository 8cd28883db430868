"""Whose counter stands where? Virtual token counters.

service = w_p * input + w_d * output, divided by weight; the backlogged tenant with the smallest
counter goes first, and a tenant back from idle is lifted so that idle time earns no credit (Sheng
et al., Fairness in Serving Large Language Models, OSDI 2024; FAIR-1). Pure arithmetic: the plane's
ledger keeps the counters, ordering decides what else counts in a turn.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.profile import Profile
from headrace.units import MICRO, PS_PER_NS, Service, WorkNs


class Cost(StrEnum):
    """What a tenant's counter counts; part of the policy's revision (FAIR-2)."""

    TOKENS = "tokens"
    """Weighted tokens: cheap and what the bounds of the method are stated in. Linear, so that a long
    prompt's attention is not paid for."""
    WORK = "work"
    """GPU time of the hardware profile: attention and context are paid for."""


class Vtc(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Virtual token counters over one cost function."""

    cost: Cost = Cost.TOKENS
    """tokens or work. tokens: the published method; work where prompt lengths differ widely."""
    input_weight: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    """Service of one uncached input token. None: 1."""
    output_weight: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    """Service of one output token. None: the profile's cost ratio of output to input."""
    cached_weight: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of an input token's service that a cached one costs. 0.1: it holds memory, but needs
    hardly any compute."""

    aging_tokens_per_s: Annotated[float, Meta(ge=0, le=1_000_000)] = 0.0
    """Input tokens that a turn is ahead of its counter for each second that the first request has waited.
    0: turns go by counters; the bound on unfairness grows by what it adds."""
    boost_tokens: Annotated[float, Meta(ge=0, le=10_000_000)] = 0.0
    """Input tokens that a queue's turn is ahead once its first request's slack is below `boost_ms`. 0: a
    deadline changes nothing between tenants."""
    boost_ms: Annotated[float, Meta(ge=0, le=3_600_000)] = 200.0
    """Slack below which `boost_tokens` count. 200: the last moment at which a turn still helps."""
    memory_tokens: Annotated[float, Meta(gt=0, le=1_000_000_000)] = 100_000.0
    """Input tokens beyond a minimum or maximum that are held against a node, at that share. 100,000:
    some seconds of a replica; what was used while nobody else wanted it is forgiven as fast."""

    revision: str = "vtc-1"

    def exceptions(self, price: "Price") -> tuple[int, int, int]:
        """Return (aging a second, boost, memory) in service."""
        return (
            price.service(round(self.aging_tokens_per_s), 0, 0) if self.aging_tokens_per_s else 0,
            price.service(round(self.boost_tokens), 0, 0) if self.boost_tokens else 0,
            price.service(round(self.memory_tokens), 0, 0),
        )

    def price(self, profile: Profile) -> "Price":
        """Return what served tokens cost on one profile."""
        return Worked(profile) if self.cost is Cost.WORK else self.rates(profile)

    def rates(self, profile: Profile) -> "Rates":
        """Return the integer service of each kind of token for one profile; none to compute is free."""
        w_p, w_d = profile.service_weights()
        uncached = w_p if self.input_weight is None else max(1, round(self.input_weight * MICRO))
        output = w_d if self.output_weight is None else max(1, round(self.output_weight * MICRO))
        return Rates(
            uncached=uncached,
            cached=round(uncached * self.cached_weight),
            output=output,
            token_ps=profile.costs.mixed_b,
        )


class Rates(Struct, frozen=True, kw_only=True, gc=False):
    """Service per token, in millionths."""

    uncached: int
    cached: int
    output: int
    token_ps: int = 0
    """GPU time of one uncached input token."""

    def service(self, uncached: int, cached: int, output: int) -> Service:
        """Return the service of so many tokens."""
        return Service(self.uncached * uncached + self.cached * cached + self.output * output)

    def work_ns(self, service: int) -> WorkNs:
        """Return about how much GPU time a service stands for."""
        return WorkNs(service * self.token_ps // (self.uncached * PS_PER_NS))


class Worked(Struct, frozen=True, gc=False):
    """Service as GPU time, in ns of the profile."""

    profile: Profile

    def service(self, uncached: int, cached: int, output: int) -> Service:
        """Return the service of so many tokens; what is computed at all is never free."""
        return Service(max(1, self.profile.work_ns(uncached, cached, output)))

    def work_ns(self, service: int) -> WorkNs:
        """Return the GPU time a service stands for: itself."""
        return WorkNs(service)


Price = Rates | Worked
"""What served tokens cost a tenant."""


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
