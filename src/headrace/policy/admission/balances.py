"""Do a tenant's own balances allow a request, and when will they?

Tokens, requests, budgets, answers and sessions at once: what the books hold of the tenant alone, whatever
queue and replicas are like. Part of the budget gate.
"""

from headrace.model.budget import Per, Unit
from headrace.model.decision import Gate, Reason, Verdict
from headrace.model.evidence import BudgetFacts, WindowFacts
from headrace.units import NS_PER_S, DurationNs


def over_limits(facts: BudgetFacts) -> Verdict | None:
    """Return a refusal by the tenant's balances alone, which nothing of queue or replicas can change."""
    need, limit = facts.tokens_needed, facts.tokens_limit
    if limit is not None and need > limit:
        return over(Reason.TOKEN_LIMIT, need, limit)
    spent = _spent_longest(facts.windows) if facts.windows else None
    if spent is not None and (spent.per is not Per.MINUTE or _never_fits(spent)):
        return _spent(spent)
    if (refusal := _at_once(facts) or _too_soon(facts)) is not None:
        return refusal
    return None if spent is None else _spent(spent)


def _at_once(facts: BudgetFacts) -> Verdict | None:
    """Return a refusal if too much of the tenant's runs already."""
    if facts.parallel_left is not None and facts.parallel_left < facts.branches:
        return over(Reason.CONCURRENCY, facts.branches, facts.parallel_left)
    if facts.sessions_left is not None and facts.sessions_left < 1:
        return over(Reason.SESSIONS, 1, facts.sessions_left)
    return None


def _too_soon(facts: BudgetFacts) -> Verdict | None:
    """Return a refusal if a bucket does not hold what is needed."""
    if facts.requests_left is not None and facts.requests_left < 1:
        return over(Reason.REQUEST_RATE, 1, facts.requests_left)
    if facts.tokens_left is not None and facts.tokens_needed > facts.tokens_left:
        return over(Reason.TOKEN_RATE, facts.tokens_needed, facts.tokens_left)
    return None


def over(reason: Reason, measured: int, threshold: int) -> Verdict:
    """Return a refusal by the budget gate."""
    return Verdict(gate=Gate.BUDGET, reason=reason, measured=measured, threshold=threshold)


def _spent_longest(windows: tuple[WindowFacts, ...]) -> WindowFacts | None:
    """Return the spent budget that lets this request in last: one it never fits, else by its end."""
    spent = [one for one in windows if one.spent]
    return max(spent, key=lambda one: (_never_fits(one), one.wait_ns), default=None)


def _never_fits(window: WindowFacts) -> bool:
    return window.hard is not None and window.need > window.hard


def _spent(window: WindowFacts) -> Verdict:
    if window.per is Per.MINUTE and not _never_fits(window):
        reason = Reason.BUDGET_RATE
    elif window.unit in (Unit.REQUESTS, Unit.TOKENS):
        reason = Reason.QUOTA_SPENT
    else:
        reason = Reason.BUDGET_SPENT
    assert window.hard is not None, "what has no hard limit is never spent"
    return Verdict(
        gate=Gate.BUDGET,
        reason=reason,
        measured=window.need,
        threshold=window.hard - window.taken,
        limit=window.name,
    )


def balanced_after(reason: Reason, facts: BudgetFacts) -> DurationNs | None:
    """Return when the balances allow what they refused; None: never, or it was not for them to refuse.

    A bucket refills, a budget begins anew, a tenant's own requests end. Where several of them refuse, all
    must have: who came back after the first would be refused by the next.
    """
    if reason not in _BALANCES or _too_many(facts):
        return None
    waits = [facts.tokens_wait_ns, facts.requests_wait_ns]
    if _at_once(facts) is not None:
        waits.append(at_least_a_second(facts.ends_wait_ns))
    spent = _spent_longest(facts.windows)
    if spent is not None:
        if _never_fits(spent):
            return None
        waits.append(spent.wait_ns)
    return max(waits)


_BALANCES = frozenset(
    {
        Reason.TOKEN_RATE,
        Reason.REQUEST_RATE,
        Reason.BUDGET_RATE,
        Reason.QUOTA_SPENT,
        Reason.BUDGET_SPENT,
        Reason.CONCURRENCY,
        Reason.SESSIONS,
    }
)
"""Refusals by a balance that comes back."""


def at_least_a_second(wait: int) -> DurationNs:
    """Return a wait that no caller takes for none."""
    return DurationNs(max(NS_PER_S, wait))


def _too_many(facts: BudgetFacts) -> bool:
    """Return whether more answers are asked for at once than the tenant may ever have."""
    return facts.parallel_limit is not None and facts.branches > facts.parallel_limit
