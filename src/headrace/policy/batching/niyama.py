"""The largest budget of a grid whose step the decodes can bear, after Niyama: for comparison.

From the published code of Niyama (ASPLOS 2026): the grid, the reserve of a fifth, the smaller grid when
KV is short, and the order by deadline and length. Not taken over: it counts slack from the deadline of
each token since the request came, here it is the tightest ITL bound, by which gaps are judged; and
requests are relegated by the gateway.
"""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.policy.batching.knobs import ONE_STEP, BatchView, Entry, Key, Knobs, arrival
from headrace.policy.batching.steps import Steps, idle
from headrace.units import BLOCK_TOKENS, NS_PER_MS, PS_PER_NS

_GRID: tuple[int, ...] = (128, *range(256, 2_049, 256), 2_552)
_SHORT_OF_KV: tuple[int, ...] = (128, 256, 384, 512)
_SHORT_BELOW = 32_000  # tokens free


class DynamicChunk(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind",
    tag="dynamic_chunk",
):  # fmt: skip
    """Tokens of a step from a grid: the most for which 1.2 times the predicted step fits the gap."""

    length_ms: Annotated[float, Meta(ge=0, le=1_000)] = 8.0
    """How much later a prompt counts for each of its tokens, in ms: 0 is earliest deadline first,
    a lot is shortest first. 8: Niyama's."""
    running_limit: Annotated[int, Meta(ge=1)] | None = None
    """Requests with a slot. None: the profile's `max_running`."""

    def knobs(self, view: BatchView) -> Knobs:
        """Return the budget of one step, or of all while there is no prompt to compute."""
        slots = self.running_limit or view.profile.max_running
        if holds := idle(view, slots):
            return Knobs(token_budget=_GRID[-1], running_limit=slots, holds=holds)
        return Knobs(token_budget=_budget(view), running_limit=slots, holds=ONE_STEP)

    def waiting_key(self, entry: Entry) -> Key:
        """Order by deadline and length; what the gateway relegated goes behind all the rest."""
        length = round(self.length_ms * NS_PER_MS) * (entry.prompt_tokens + entry.made)
        return (entry.relegated, entry.deadline + length)

    def victim_key(self, entry: Entry) -> Key:
        """Preempt the relegated first, then whoever came last."""
        return arrival(entry)


def _budget(view: BatchView) -> int:
    """Return the largest total of the grid whose predicted step fits, or the least."""
    grid = _SHORT_OF_KV if view.free_blocks * BLOCK_TOKENS < _SHORT_BELOW else _GRID
    if view.tightest_gap_ns is None:
        return grid[-1]
    limit = view.tightest_gap_ns * PS_PER_NS * 5 // 6
    steps = Steps(view)
    tokens = steps.most_within(limit, grid[-1] - view.decodes)
    if tokens == steps.tokens:
        return grid[-1]  # there is no more to compute than fits
    return max((total for total in grid if total <= view.decodes + tokens), default=grid[0])
