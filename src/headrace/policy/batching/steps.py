"""How long would a step take that computes so many prompt tokens, and how many fit a time?

A step spends its tokens on the prompts in front one after the other. What one costs depends on its
position, so the price of n tokens is that of the prompts they would really go to.
"""

from bisect import bisect_left, bisect_right

from headrace.policy.batching.knobs import BatchView, Break, Holds
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
    if not view.prefills and (view.decodes >= running_limit or not view.free_blocks):
        return UNTIL_ROOM
    return None


class Steps:
    """The steps possible at a boundary, by the number of their prompt tokens."""

    __slots__ = ("_ends", "_starts", "_view", "tokens")

    def __init__(self, view: BatchView, chunk_limit: int | None = None) -> None:
        """Lay out the prompts in front, of each no more than `chunk_limit` tokens."""
        self._view = view
        # Of each prompt: tokens and span of those before it, its position; and where it ends.
        self._starts: list[tuple[int, int, int]] = []
        self._ends: list[int] = []
        tokens = span = 0
        for front in view.fronts:
            chunk: int = front.left if chunk_limit is None else min(front.left, chunk_limit)
            self._starts.append((tokens, span, front.position))
            tokens += chunk
            span += chunk * (2 * front.position + chunk)
            self._ends.append(tokens)
        self.tokens = tokens
        """The most prompt tokens of one step, as far as the prompts are known."""

    def step_ps(self, tokens: int) -> Ps:
        """Return how long the step with so many prompt tokens takes, in ps; at most `tokens`."""
        nth = bisect_left(self._ends, tokens)
        before, span, position = self._starts[nth]
        part = tokens - before
        view = self._view
        return view.profile.step_ps(
            view.decodes, view.context, tokens, span + part * (2 * position + part)
        )

    def most_within(self, limit_ps: int, most: int) -> int:
        """Return the most prompt tokens, up to `most`, whose step takes no longer; 0 if none."""
        sizes = range(1, min(most, self.tokens) + 1)
        return bisect_right(sizes, limit_ps, key=self.step_ps)
