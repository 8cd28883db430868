"""How many tokens will the answer have?

Learns the output length of (tenant, class, model, prompt bucket) online as quantiles of a sliding
window and falls back to coarser groups until a group has seen enough (DEM-4). Knows nothing of the
request's true length before it ends.
"""

from functools import lru_cache
from typing import Annotated

from msgspec import Meta, Struct

from headrace.policy.predict.windows import Windows

REVISION = "window-1"


class OutputPrediction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sliding-window quantiles with fallback to coarser groups."""

    window: Annotated[int, Meta(ge=8, le=4_096)] = 128
    """Ended requests a group remembers. 128: a p90 with a dozen samples above it."""
    enough: Annotated[int, Meta(ge=1, le=4_096)] = 16
    """Samples before a group is believed; below it the next coarser one answers."""
    groups: Annotated[int, Meta(ge=16, le=1_000_000)] = 20_000
    """Groups kept; beyond, the one longest without a sample is forgotten."""
    prior_p50: Annotated[int, Meta(ge=1, le=1_000_000)] = 200
    """Output tokens assumed before anything is known. 200: a chat answer."""
    prior_p90: Annotated[int, Meta(ge=1, le=1_000_000)] = 480

    def __post_init__(self) -> None:
        """Refuse a prior upside down, and a belief that no window could earn."""
        if self.prior_p90 < self.prior_p50:
            raise ValueError(f"prior_p90 {self.prior_p90} is below prior_p50 {self.prior_p50}")
        if self.enough > self.window:
            raise ValueError(f"enough {self.enough} is more than the window of {self.window}")

    def groups_of(self, tenant: str, slo_class: str, model: str, prompt: int) -> tuple[str, ...]:
        """Return a request's groups, finest first; prompts are bucketed by powers of two."""
        return _groups(tenant, slo_class, model, prompt.bit_length())

    def predict(self, state: Windows, groups: tuple[str, ...]) -> tuple[int, int]:
        """Return (p50, p90) of the finest group that has seen enough, else the prior."""
        return state.quantiles(groups, self.enough) or (self.prior_p50, self.prior_p90)

    def learn(self, state: Windows, groups: tuple[str, ...], tokens: int) -> None:
        """Add one ended answer's length to each of its groups."""
        state.teach(groups, tokens, size=self.window, most=self.groups)


@lru_cache(maxsize=4_096)  # each request asks twice, and most are like one before
def _groups(tenant: str, slo_class: str, model: str, bucket: int) -> tuple[str, ...]:
    by_class = f"{model}|{slo_class}"
    by_tenant = f"{by_class}|{tenant}"
    return f"{by_tenant}|{bucket}", by_tenant, by_class, model
