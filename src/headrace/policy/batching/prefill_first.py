"""Whole prompts before any decode: what vLLM did before chunks (TOK-2).

Prompts wait least and every decode waits for them: a stream stalls for as long as prompts arrive, a
second and more under load. For outputs that nobody reads as they come, and to measure chunks against.
"""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.policy.batching.knobs import ALWAYS, BatchView, Entry, Key, Knobs, arrival


class PrefillFirst(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind",
    tag="prefill_first",
):  # fmt: skip
    """Prompts first, unsplit and unmixed; first come first served, the last to come preempted first."""

    token_budget: Annotated[int, Meta(ge=1)] = 8_192
    """Prompt tokens of a step; a longer prompt has one to itself. 8192: about one second of an 8B model
    on an A100, the longest stall that arrivals at once make."""
    running_limit: Annotated[int, Meta(ge=1)] | None = None
    """Requests with a slot. None: the profile's `max_running`."""

    def knobs(self, view: BatchView) -> Knobs:
        """Return the same knobs at any time: they hold for good."""
        return Knobs(
            token_budget=self.token_budget,
            running_limit=self.running_limit or view.profile.max_running,
            mixed=False,
            holds=ALWAYS,
        )

    def waiting_key(self, entry: Entry) -> Key:
        """Order by arrival; what the gateway relegated goes behind all the rest."""
        return arrival(entry)

    def victim_key(self, entry: Entry) -> Key:
        """Preempt the relegated first, then whoever came last."""
        return arrival(entry)
