"""How long would a step take that computes so many prompt tokens, and how many fit a time?

A step spends its tokens on the prompts in front one after the other. What one costs depends on its
position, so the price of n tokens is that of the prompts they would really go to.
"""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from headrace.policy.batching.knobs import BatchView, Break, Front, Holds
from headrace.units import Ps

UNTIL_PROMPT = Holds(max_steps=None, breaks_on=Break.ARRIVAL | Break.PREEMPTION)
UNTIL_ROOM = Holds(max_steps=None, breaks_on=Break.END | Break.PREEMPTION)


def idle(view: BatchView, running_limit: int) -> Holds | None:
    """Return how long the decodes stay alone, or None if the next step may compute a prompt.

    No prompt is there, or none that could start before a decode gives up its slot or blocks. A
    policy that answers the same in that time may promise it.
    """
    if not view.prefill_tokens:
        return UNTIL_PROMPT
    no_room = view.decodes >= running_limit or not view.free_blocks
    if no_room and not view.prefills and not view.contests:
        return UNTIL_ROOM
    return None


class _Place(NamedTuple):
    """A prompt's place in a step, and what is spent before it."""

    tokens: int
    """Of the budget."""
    prompt: int
    """Tokens of prompts, those that resume not counted."""
    span: int
    decodes: int
    """With those that resume, itself included if it does."""
    context: int
    transfers_ps: int
    """Its own included."""
    front: Front


class Steps:
    """The steps possible at a boundary, by the number of their prompt tokens."""

    __slots__ = ("_ends", "_places", "_view", "tokens")

    def __init__(self, view: BatchView, chunk_limit: int | None = None) -> None:
        """Lay out the prompts in front, of each no more than `chunk_limit` tokens, but for one alone."""
        if not view.decodes and view.prefills + view.waiting == 1:
            chunk_limit = None
        self._view = view
        self._places: list[_Place] = []
        self._ends: list[int] = []
        tokens = prompt = span = transfers = 0
        decodes, context = view.decodes, int(view.context)
        for front in view.fronts:
            chunk: int = front.left if chunk_limit is None else min(front.left, chunk_limit)
            transfers += front.transfer_ps
            if front.resumes:
                decodes, context = decodes + 1, context + front.position + 1
            self._places.append(_Place(tokens, prompt, span, decodes, context, transfers, front))
            tokens += chunk
            if not front.resumes:
                prompt += chunk
                span += chunk * (2 * front.position + chunk)
            self._ends.append(tokens)
        self.tokens = tokens
        """The most prompt tokens of one step, as far as the prompts are known."""

    def step_ps(self, tokens: int) -> Ps:
        """Return how long the step with so many prompt tokens takes, in ps; at most `tokens`."""
        place = self._places[bisect_left(self._ends, tokens)]
        prompt, span = place.prompt, place.span
        if not place.front.resumes:
            part = tokens - place.tokens
            prompt += part
            span += part * (2 * place.front.position + part)
        profile = self._view.profile
        return Ps(profile.step_ps(place.decodes, place.context, prompt, span) + place.transfers_ps)

    def most_within(self, limit_ps: int, most: int) -> int:
        """Return the most prompt tokens, up to `most`, whose step takes no longer; 0 if none."""
        sizes = range(1, min(most, self.tokens) + 1)
        return bisect_right(sizes, limit_ps, key=self.step_ps)
