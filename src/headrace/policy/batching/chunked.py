"""Decodes first, prompts in chunks under a fixed token budget: vLLM's default (TOK-1, TOK-2).

A fixed budget bounds every step, so a long prompt stalls nobody, and costs a long prompt more
steps. It does not look at deadlines of single tokens.
"""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.policy.batching.knobs import ALWAYS, BatchView, Entry, Key, Knobs, arrival


class ChunkedPrefill(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind",
    tag="chunked_prefill",
):  # fmt: skip
    """Fixed budget, first come first served, the last to come preempted first."""

    token_budget: Annotated[int, Meta(ge=1)] | None = None
    """Tokens of a step. None: the profile's. 512 is strict on ITL, 1024-2048 relaxed."""
    chunk_limit: Annotated[int, Meta(ge=1)] | None = None
    """Prompt tokens of one request in a step. None: the budget, so prompts go one by one."""
    running_limit: Annotated[int, Meta(ge=1)] | None = None
    """Requests with a slot. None: the profile's `max_running`."""

    def knobs(self, view: BatchView) -> Knobs:
        """Return the same knobs at any time: they hold for good."""
        return Knobs(
            token_budget=self.token_budget or view.profile.token_budget,
            chunk_limit=self.chunk_limit,
            running_limit=self.running_limit or view.profile.max_running,
            holds=ALWAYS,
        )

    def waiting_key(self, entry: Entry) -> Key:
        """Order by arrival; what the gateway relegated goes behind all the rest."""
        return arrival(entry)

    def victim_key(self, entry: Entry) -> Key:
        """Preempt the relegated first, then whoever came last."""
        return arrival(entry)
