"""No prompt is computed while anything decodes: for comparison (TOK-2).

Batching of whole requests: gaps are never longer than a step of decodes alone, and a prompt waits
for the longest output of those that run.
"""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.policy.batching.knobs import BatchView, Break, Entry, Holds, Key, Knobs, arrival

_DECODING = Holds(max_steps=None, breaks_on=Break.END | Break.PREEMPTION)
_PROMPTS = Holds(max_steps=None, breaks_on=Break.FIRST_TOKEN)


class DecodeFirst(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind",
    tag="decode_first",
):  # fmt: skip
    """Decodes to their end, then the next prompts together; first come first served."""

    token_budget: Annotated[int, Meta(ge=1)] = 8_192
    """Prompt tokens of a step without decodes, and so about those of a batch."""
    running_limit: Annotated[int, Meta(ge=1)] | None = None
    """Requests with a slot. None: the profile's `max_running`."""

    def knobs(self, view: BatchView) -> Knobs:
        """Return no budget for prompts while there are decodes, else the whole."""
        return Knobs(
            token_budget=1 if view.decodes else self.token_budget,
            running_limit=self.running_limit or view.profile.max_running,
            holds=_DECODING if view.decodes else _PROMPTS,
        )

    def waiting_key(self, entry: Entry) -> Key:
        """Order by arrival; what the gateway relegated goes behind all the rest."""
        return arrival(entry)

    def victim_key(self, entry: Entry) -> Key:
        """Preempt the relegated first, then whoever came last."""
        return arrival(entry)
