"""Each step computes as much prompt as the running streams can bear (TOK-1, TOK-2).

Decodes first, prompts in chunks, as `chunked`; but the budget is sized anew for every step from the
profile's step times: the most prompt tokens whose step, with the decodes, their context and the
position of the very prompts, stays within a time. As with Sarathi's budget, a long prompt stalls
nobody; unlike it, a step is neither longer when context grows nor shorter when few decode.
"""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.policy.batching.knobs import BatchView, Entry, Key, Knobs, arrival
from headrace.policy.batching.steps import Steps, idle
from headrace.units import MICRO, NS_PER_MS, PS_PER_NS, ps_from_ms


class PacedPrefill(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind",
    tag="paced_prefill",
):  # fmt: skip
    """Budget by predicted step time; arrival order, the relegated last and preempted first.

    No step with a prompt is predicted to exceed the tightest bound of a running stream less the
    margin, but for the least progress of a prompt and for a step in which blocks run out, whose
    tokens go to other prompts than foreseen.
    """

    step_ms: Annotated[float, Meta(gt=0, le=60_000)] | None = None
    """Longest step in ms while nobody is in a hurry. None: what the profile's token budget takes
    beside its reference batch, so that gaps are those of a fixed budget at its worst."""
    margin_percent: Annotated[float, Meta(ge=0, lt=100)] = 5.0
    """How far below the tightest ITL bound a step must stay. 5: step times are foreseen to 4 %."""
    hurry_ms: Annotated[float, Meta(ge=0, le=3_600_000)] = 400.0
    """A prompt expected to end less than this before its deadline is in a hurry: steps may take
    what the tightest ITL bound allows. 400: some five such steps, for what arrives meanwhile."""
    least_tokens: Annotated[int, Meta(ge=1)] = 32
    """Prompt tokens of a step even where none fit: prompts never starve. 32: they ride free on the
    reading of the weights."""
    token_budget_max: Annotated[int, Meta(ge=1)] = 2_048
    """Most tokens of a step however loose the bounds. 2,048: a newcomer waits for the step's end."""
    lend_gap_ms: Annotated[float, Meta(gt=0, le=86_400_000)] = 500.0
    """Decodes that all bear gaps this long, batch's say, lend their pace: only their bound and
    `token_budget_max` count, as without decodes."""
    running_limit: Annotated[int, Meta(ge=1)] | None = None
    """Requests with a slot. None: the profile's `max_running`."""

    def knobs(self, view: BatchView) -> Knobs:
        """Return a budget for one step, or one for as long as there is no prompt to compute."""
        slots = self.running_limit or view.profile.max_running
        if holds := idle(view, slots):
            return Knobs(token_budget=self.token_budget_max, running_limit=slots, holds=holds)
        longest = self._longest_ps(view)
        pace = longest if self._lent(view) else min(longest, self._pace_ps(view))
        steps = Steps(view)
        tokens = self._fill(steps, view, pace)
        hurried = self._hurried(view, steps, tokens)
        if hurried is not None and pace < longest:
            pace = longest
            tokens = self._fill(steps, view, pace)
        limit = _shared(view, tokens, hurried)
        if limit is not None:
            tokens = self._fill(Steps(view, limit), view, pace)
        return Knobs(token_budget=view.decodes + tokens, chunk_limit=limit, running_limit=slots)

    def waiting_key(self, entry: Entry) -> Key:
        """Order by arrival; what the gateway relegated goes behind all the rest."""
        return arrival(entry)

    def victim_key(self, entry: Entry) -> Key:
        """Preempt the relegated first, then whoever came last."""
        return arrival(entry)

    def _fill(self, steps: Steps, view: BatchView, pace_ps: int) -> int:
        """Return the prompt tokens of a step of at most `pace_ps`, and never none."""
        most = self.token_budget_max - view.decodes
        return max(steps.most_within(pace_ps, most), self.least_tokens)

    def _longest_ps(self, view: BatchView) -> int:
        """Return what the tightest running bound allows a step, in ps."""
        if view.tightest_gap_ns is None:
            return _UNBOUNDED
        margin = round(self.margin_percent * _PPM_PER_PERCENT)
        return view.tightest_gap_ns * PS_PER_NS * (MICRO - margin) // MICRO

    def _pace_ps(self, view: BatchView) -> int:
        """Return the longest step while nobody is in a hurry, in ps."""
        if self.step_ms is not None:
            return ps_from_ms(self.step_ms)
        profile = view.profile
        batch = profile.reference_batch
        return profile.full_step_ns(batch, batch * profile.reference_context) * PS_PER_NS

    def _lent(self, view: BatchView) -> bool:
        gap = view.tightest_gap_ns
        return gap is None or gap >= self.lend_gap_ms * NS_PER_MS

    def _hurried(self, view: BatchView, steps: Steps, tokens: int) -> int | None:
        """Return which prompt in front is the first in a hurry, at so many tokens a step."""
        if not view.fronts:
            return None
        latest = view.now + round(self.hurry_ms * NS_PER_MS)
        step = steps.step_ps(min(tokens, steps.tokens)) // PS_PER_NS
        ahead = 0
        for nth, front in enumerate(view.fronts):
            ahead += front.left
            if not front.relegated and latest + -(-ahead // tokens) * step > front.deadline:
                return nth
        return None


_PPM_PER_PERCENT = MICRO // 100
_UNBOUNDED = 1 << 70  # ps: longer than any step


def _shared(view: BatchView, tokens: int, hurried: int | None) -> int | None:
    """Return a limit for each prompt, if those served first would keep the step from urgent ones.

    The relegated lend to all others; else those due later lend to the first in a hurry. The engine
    serves prompts in their order, so what it can do is to limit each alike: the least limit that
    still spends the step on the lenders in front and on whom they lend to.
    """
    fronts = view.fronts
    first = next((nth for nth, front in enumerate(fronts) if not front.relegated), 0)
    lends = [front.relegated for front in fronts]
    if not first and hurried:
        first, due = hurried, fronts[hurried].deadline
        lends = [front.relegated or front.deadline > due for front in fronts]
    if not first or not all(lends[:first]):
        return None
    last = max(nth for nth, lent in enumerate(lends) if not lent)
    return _level(sorted(front.left for front in fronts[: last + 1]), tokens)


def _level(sizes: list[int], tokens: int) -> int | None:
    """Return the least limit for each of the rising sizes that lets them take so many in all."""
    for nth, size in enumerate(sizes):
        share = -(-tokens // (len(sizes) - nth))
        if size >= share:
            return share
        tokens -= size
    return None
