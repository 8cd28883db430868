"""What does served work cost a tenant? The unit of its virtual counter (FAIR-2).

A `Cost` is configuration. On one model and its hardware profile it becomes a `Price`, which turns
tokens into service: whole numbers that fall with none of their arguments, ask no more for a token
found in a cache than for one computed, and are never zero for what is served. `docs/fairness.md`
tells what each cost leaves out. The counters themselves are `vtc`'s.
"""

from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from headrace.model.deployment import Name
from headrace.model.price import PriceSpec
from headrace.model.profile import Profile
from headrace.units import MICRO, NS_PER_S, Service, WorkNs

SERVICE_MAX = 10**15
"""Most service of one request: the longest at the highest weight. Thousands whose engine lies then
stay in 64 bits."""
KIB = 1 << 10
_Weight = Annotated[float, Meta(gt=0, le=100)]
_Part = Annotated[float, Meta(ge=0, le=100)]


class RequestCost(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="request"
):
    """Every request alike, whatever its length: for callers who pay by the call."""


class TokenCost(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="tokens"
):
    """Weighted tokens: the published method, and what its bounds are stated in."""

    input_weight: _Weight | None = None
    """Service of one uncached input token. None: 1."""
    output_weight: _Weight | None = None
    """Service of one output token. None: the profile's cost ratio of output to input."""
    cached_weight: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of an input token's service that a cached one costs. 0.1: it holds memory, but needs
    hardly any compute."""


class WorkCost(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="work"
):
    """GPU time of the hardware profile: attention and context are paid for."""


class KvCost(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="kv"
):
    """KV byte-seconds: the memory that a context holds, for as long as it is predicted to."""


class MoneyCost(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="money"
):
    """What a price list asks, whatever the tokens cost to make."""

    as_of: Annotated[str, Meta(min_length=1, max_length=64)]
    """Date or name of the price list. Another is another revision, even at the same prices."""
    price: PriceSpec
    """Prices of every model that has none of its own, in US dollars for a million tokens."""
    models: dict[Name, PriceSpec] = {}
    """Prices by model."""

    def __post_init__(self) -> None:
        """Refuse a list by which whoever finds a prefix pays more than whoever computed it."""
        for one in (self.price, *self.models.values()):
            if one.found > one.input:
                raise ValueError(f"cached {one.found:g} is dearer than input {one.input:g}")


class MixCost(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="mix"
):
    """Prefill work, decode work and KV byte-seconds, each as seconds of one whole replica.

    A second of GPU time and a full KV pool held for a second weigh the same: a replica has one of
    each to give in a second.
    """

    prefill_weight: _Part = 1.0
    """Weight of the prompt's GPU time. 1: all three are seconds of a replica."""
    decode_weight: _Part = 1.0
    """Weight of the answer's GPU time. 1: as above."""
    kv_weight: _Part = 1.0
    """Weight of the KV pool's time. 1: as above."""

    def __post_init__(self) -> None:
        """Refuse a mix of nothing."""
        if not self.prefill_weight + self.decode_weight + self.kv_weight:
            raise ValueError("expected at least one weight above 0")


Cost = RequestCost | TokenCost | WorkCost | KvCost | MoneyCost | MixCost

FORMULA = 1
"""Revision of what the kinds count; raised with any of their formulas."""
_ENCODER = msgspec.json.Encoder(order="sorted")
_DECODER = msgspec.json.Decoder(Cost)


def revision(cost: Cost) -> str:
    """Return what tells a cost from any other, short enough for a label: `tokens-1`.

    Kind, revision of its formula, and a digest of its settings unless they are the default ones.
    """
    named = f"{cost.__struct_config__.tag}-{FORMULA}"
    if not isinstance(cost, MoneyCost) and cost == type(cost)():
        return named
    read = _DECODER.decode(_ENCODER.encode(cost))  # 1 and 1.0 are one price
    return f"{named}-{blake2b(_ENCODER.encode(read), digest_size=4).hexdigest()}"


class Linear(Struct, frozen=True, kw_only=True, gc=False):
    """So much for a request, and for each token of a kind."""

    request: int = 0
    uncached: int = 0
    cached: int = 0
    output: int = 0

    def amount(self, uncached: int, cached: int, output: int) -> int:
        """Return the sum of its parts."""
        return self.request + self.uncached * uncached + self.cached * cached + self.output * output


class GpuTime(Struct, frozen=True, gc=False):
    """Nanoseconds of work on a profile."""

    profile: Profile

    def amount(self, uncached: int, cached: int, output: int) -> int:
        """Return the work of so many tokens; what was found needs none of its own."""
        return self.profile.work_ns(uncached, cached, output)


class Held(Struct, frozen=True, gc=False):
    """KiB-seconds of KV cache on a profile."""

    profile: Profile

    def amount(self, uncached: int, cached: int, output: int) -> int:
        """Return what a context holds over its predicted residency.

        Computed or found, a holder pays for the whole of it, as its own residency would need it.
        """
        held = self.profile.held_token_ns(uncached, cached, output)
        return held * self.profile.kv_bytes_per_token // (KIB * NS_PER_S)


class Mixed(Struct, frozen=True, kw_only=True, gc=False):
    """Nanoseconds of one replica: of its GPU in prefill and in decode, and of its KV pool."""

    profile: Profile
    prefill: int
    """Weights, in millionths."""
    decode: int
    kv: int

    def amount(self, uncached: int, cached: int, output: int) -> int:
        """Return the weighted sum; the pool's part is tokens held over tokens that it holds."""
        profile = self.profile
        work = self.prefill * profile.work_ns(uncached, cached, 0)
        work += self.decode * profile.work_ns(0, uncached + cached, output)
        held = profile.held_token_ns(uncached, cached, output) // profile.kv_capacity_tokens
        return (work + self.kv * held) // MICRO


class Price(Struct, frozen=True, gc=False):
    """What served tokens cost a tenant of one model."""

    revision: str
    """Of the cost: `revision`."""
    formula: Linear | GpuTime | Held | Mixed
    mean_work: int = 1
    """GPU time of the reference request, ns."""
    mean_service: int = 1
    """Its service."""

    def service(self, uncached: int, cached: int, output: int) -> Service:
        """Return the service of one request; what is served at all is never free."""
        found = self.formula.amount(uncached, cached, output)
        return Service(1 if found < 1 else min(found, SERVICE_MAX))

    def work_ns(self, service: int) -> WorkNs:
        """Return about how much GPU time a service stands for.

        Exact where service is GPU time; elsewhere at the rate of the reference request, which a
        tenant of other lengths may be far from.
        """
        return WorkNs(service * self.mean_work // self.mean_service)


def price(cost: Cost, model: str, profile: Profile) -> Price:
    """Return what served tokens of a model cost on a profile.

    The reference request has a prompt of the profile's reference context, nothing cached, and an
    answer a quarter as long: about the mean of public conversation traces.
    """
    formula = _formula(cost, model, profile)
    given = profile.reference_context
    reference = given, 0, max(1, given // 4)
    return Price(
        revision(cost),
        formula,
        mean_work=max(1, profile.work_ns(*reference)),
        mean_service=max(1, formula.amount(*reference)),
    )


def _formula(cost: Cost, model: str, profile: Profile) -> Linear | GpuTime | Held | Mixed:
    match cost:
        case RequestCost():
            return Linear(request=MICRO)
        case TokenCost():
            return token_rates(cost, profile)
        case WorkCost():
            return GpuTime(profile)
        case KvCost():
            return Held(profile)
        case MoneyCost():
            return _money(cost.models.get(model, cost.price))
        case MixCost():
            return Mixed(
                profile=profile,
                prefill=round(cost.prefill_weight * MICRO),
                decode=round(cost.decode_weight * MICRO),
                kv=round(cost.kv_weight * MICRO),
            )


def token_rates(cost: TokenCost, profile: Profile) -> Linear:
    """Return the service of each kind of token, in millionths; none to compute is free."""
    uncached, output = profile.service_weights()
    if cost.input_weight is not None:
        uncached = Service(max(1, round(cost.input_weight * MICRO)))
    if cost.output_weight is not None:
        output = Service(max(1, round(cost.output_weight * MICRO)))
    return Linear(uncached=uncached, cached=round(uncached * cost.cached_weight), output=output)


def _money(listed: PriceSpec) -> Linear:
    """Return nano-dollars a token: dollars a million are micro-dollars each."""
    return Linear(
        uncached=round(listed.input * 1_000),
        cached=round(listed.found * 1_000),
        output=round(listed.output * 1_000),
    )
