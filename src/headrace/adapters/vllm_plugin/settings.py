"""How is the scheduler set up? `--additional-config '{"headrace": {...}}'` of vLLM.

A scheduler class gets no arguments of its own; this is where vLLM lets others have settings.
"""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from headrace.model.profile import DecodeFit, MixedFit, Profile
from headrace.policy.batching import Batching, ChunkedPrefill, DecodeFirst, PrefillFirst
from headrace.policy.batching.preemption import Victims
from headrace.policy.fairness.costs import Linear, TokenCost, token_rates
from headrace.policy.fairness.line import LATE_NS
from headrace.policy.ordering.orders import Ordering, TenantFirst
from headrace.units import NS_PER_MS, Tokens

KEY = "headrace"
_OUTPUT_WEIGHT = 2.0
"""What an output token weighs beside an input one where no profile tells: as in the VTC paper."""


class Mode(StrEnum):
    """What the scheduler does."""

    ENFORCE = "enforce"
    """It decides."""
    PASSIVE = "passive"
    """vLLM's own scheduling, with the step log; nothing is changed."""


class Untested(StrEnum):
    """What to do in a release of vLLM that the scheduler was not tested with."""

    REFUSE = "refuse"
    PASSIVE = "passive"
    TRY = "try"
    """Decide, unless a field or method that it uses is missing."""


class OnFault(StrEnum):
    """What to do when the scheduler itself fails."""

    STOCK = "stock"
    """Say so and go on with vLLM's own scheduling."""
    STOP = "stop"
    """Say so and stop the engine: every request ends with an error."""


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it; every field has a default that is right for a first try."""

    mode: Mode = Mode.ENFORCE
    untested: Untested = Untested.REFUSE
    on_fault: OnFault = OnFault.STOCK
    profile: str | None = None
    """Hardware profile: a packaged name, or a .json or .yaml file. None: step times are not known, so that
    batching must not hang on them."""
    batching: Batching = ChunkedPrefill()
    """How steps are filled. Chunked prefill without a budget of its own: as vLLM is set up."""
    ordering: Ordering = TenantFirst()
    """Whose turn it is, and which of their requests."""
    victims: Victims = Victims.FAIR
    """Who gives way when KV blocks run out."""
    cost: TokenCost = TokenCost()
    """What tokens weigh in the counters. An output token without a weight or a profile: 2."""
    late_ms: Annotated[float, Meta(gt=0, le=86_400_000)] = LATE_NS / NS_PER_MS
    """Longest that a request past its latest start lets others pass here."""
    step_log: Annotated[str, Meta(min_length=1)] | None = None
    """File that gets a line for each step; `headrace steps` reads it."""
    step_log_mib: Annotated[int, Meta(ge=1, le=65_536)] = 32
    """Size at which it is set aside once and begun anew."""

    def __post_init__(self) -> None:
        """Refuse what vLLM cannot do, or not without a profile."""
        for fault in self._faults():
            raise ValueError(fault)

    def _faults(self) -> Iterator[str]:
        if isinstance(self.batching, PrefillFirst):
            yield "batching prefill_first: vLLM cannot leave decodes out of a step"
        if self.step_log is not None and ("\0" in self.step_log or not Path(self.step_log).name):
            yield "step_log: expected the name of a file"
        if self.profile is None and not isinstance(self.batching, ChunkedPrefill | DecodeFirst):
            yield "this batching sizes steps by their times: give a profile"


def kind_of(policy: Batching | Ordering) -> str:
    """Return by which name a policy is chosen."""
    return str(type(policy).__struct_config__.tag)


def read(additional: object) -> Settings:
    """Return the settings in vLLM's additional configuration. ValueError says where it is wrong."""
    found = additional.get(KEY, {}) if isinstance(additional, dict) else {}
    try:
        return msgspec.convert(found, Settings)
    except msgspec.ValidationError as error:
        raise ValueError(f"additional_config.{KEY}: {error}") from error


def profile_of(settings: Settings, *, capacity: int, budget: int, slots: int) -> Profile:
    """Return the profile that is named, or one of vLLM's own sizes in which times mean nothing."""
    if settings.profile is not None:
        try:
            profile = _load(settings.profile)
        except ValueError as error:
            raise ValueError(f"additional_config.{KEY}.profile: {error}") from error
        return _within(profile, budget, slots)
    batch = min(slots, capacity)
    return Profile(
        name="unmeasured",
        source="sizes of this vLLM; times are placeholders that nothing goes by",
        hardware="",
        model="",
        kv_bytes_per_token=1,
        kv_capacity_tokens=Tokens(capacity),
        max_running=slots,
        token_budget=budget,
        reference_batch=batch,
        reference_context=Tokens(capacity // batch),
        decode=DecodeFit(a_ms=1.0, c_ms=0.0, d_ms=0.0),
        mixed=MixedFit(a_ms=1.0, knee=0, b_ms=0.001, c_ms=0.0, d_ms=0.0, e_ms=0.0),
    )


def _within(profile: Profile, budget: int, slots: int) -> Profile:
    """Return a profile whose limits are no larger than vLLM was started with."""
    return msgspec.structs.replace(
        profile,
        token_budget=min(profile.token_budget, budget),
        max_running=min(profile.max_running, slots),
        reference_batch=min(profile.reference_batch, slots),
    )


def _load(name: str) -> Profile:
    if not name.endswith(".json"):
        from headrace.config.profiles import load_profile  # noqa: PLC0415  PyYAML, only if needed

        return load_profile(name)
    return _from_json(name)


def _from_json(path: str) -> Profile:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except OSError as error:
        raise ValueError(f"profile {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ValueError(f"profile {path}: {error}") from error


def rates_of(settings: Settings, profile: Profile) -> Linear:
    """Return what tokens weigh in the counters."""
    cost = settings.cost
    if settings.profile is None and cost.output_weight is None:
        cost = msgspec.structs.replace(cost, output_weight=_OUTPUT_WEIGHT)
    return token_rates(cost, profile)


def token_ns_of(settings: Settings, profile: Profile) -> int:
    """Return what a prompt token takes, for latest starts; 0 where nobody knows."""
    return profile.prompt_token_ns() if settings.profile is not None else 0
