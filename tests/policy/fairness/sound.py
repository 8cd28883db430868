"""What must hold of a share tree and what waits in it, whatever has happened to both."""

from collections import Counter, defaultdict

from headrace.model.paths import ROOT, Level, Step
from headrace.policy.fairness.backlog import NEVER, Backlog, Queue
from headrace.policy.fairness.shares import USERS, Shares, Side
from headrace.policy.fairness.siblings import Mark, Siblings
from headrace.policy.fairness.vtc import share
from headrace.units import NS_PER_S


def shares_are_sound(shares: Shares, backlog: Backlog) -> None:
    """Check a tree against the queues that stand in it; all of them must have been refreshed."""
    sums_are_those_of_the_queues(shares, backlog)
    for queue in backlog.queues.values():
        queue_is_sound(queue, backlog)
    if any(line.size for side in backlog.lines for line in side.values()):
        assert not any(shares.sides), "an order has one line for everybody, or a tree"
        lines_are_the_queues(backlog)
    else:
        for side in Side:
            nodes_are_listed(shares, backlog, side)
    changes = {
        key: one.change_at for key, one in backlog.queues.items() if one.change_at is not None
    }
    assert {key: at for at, key in backlog.changes} == changes
    users_are_remembered(shares)


def sums_are_those_of_the_queues(shares: Shares, backlog: Backlog) -> None:
    waiting: Counter[str] = Counter()
    work: Counter[str] = Counter()
    tenants: Counter[str] = Counter()
    for queue in backlog.queues.values():
        assert queue.size > 0
        for step in queue.way:
            waiting[step.key] += 1
            work[step.key] += queue.work
        users = queue.way[-1].level is Level.USER and len(queue.way) > 1
        tenants[queue.way[-2 if users else -1].key] += queue.size
    assert shares.waiting == waiting
    assert shares.work == +work, "a node without work is not in here"
    assert backlog.tenants == tenants
    queues = backlog.queues.values()
    assert backlog.size == sum(one.size for one in queues) == len(backlog.slots)
    assert backlog.work_ns == sum(one.work for one in queues)
    for slo_class in {one.slo_class for one in queues} | backlog.queued.keys():
        mine = [one for one in queues if one.slo_class == slo_class]
        assert backlog.queued[slo_class] == sum(one.size for one in mine)
        assert backlog.work[slo_class] == sum(one.work for one in mine)


def queue_is_sound(queue: Queue, backlog: Backlog) -> None:
    key = queue.way[-1].key
    assert queue.side is not None, "each queue is listed"
    for ranked, late in ((queue.ready, False), (queue.late, True)):
        for rank, request in ranked:
            waiting = backlog.slots[request]
            assert backlog.inside[request] == key
            assert waiting.late is late
            assert rank == (waiting.starve_at if late else waiting.key)
            assert queue.bounded is (waiting.starve_at < NEVER)
    starts = {(backlog.slots[one].start, one) for _, one in queue.ready}
    assert set(queue.starts) in (set(), starts)


def lines_are_the_queues(backlog: Backlog) -> None:
    listed = [
        (side, slo_class, turn, key)
        for side in Side
        for slo_class, line in backlog.lines[side].items()
        for turn, key in line
    ]
    expected = [(q.side, q.slo_class, q.head()[0], key) for key, q in backlog.queues.items()]
    assert sorted(listed) == sorted(expected)


def nodes_are_listed(shares: Shares, backlog: Backlog, side: Side) -> None:
    """Check that nodes are listed exactly where a queue of that side stands below them."""
    below: defaultdict[str, dict[str, list[Step]]] = defaultdict(dict)
    for queue in backlog.queues.values():
        parent = ROOT
        for step in queue.way if queue.side is side else ():
            below[parent].setdefault(step.key, []).append(step)
            parent = step.key
    assert shares.sides[side].keys() == below.keys()
    for parent, children in below.items():
        siblings = shares.sides[side][parent]
        assert siblings.marks.keys() == children.keys()
        rankings_are_the_marks(siblings)
        for key, steps in children.items():
            mark = siblings.marks[key]
            assert mark.weight in {step.weight for step in steps}
            mark_is_right(shares, parent, key, mark)
            leaf = backlog.queues.get(key)
            if leaf is not None:
                boost = share(shares.rules.boost, mark.weight) if leaf.boosted else 0
                assert mark.bias == mark.since * shares.rules.aging // NS_PER_S - boost
            elif shares.rules.aging:
                first = shares.sides[side][key].first(shares.served.get(key, 0))
                assert first is not None
                assert mark.since == shares.sides[side][key].marks[first[0]].since
                assert mark.bias == mark.since * shares.rules.aging // NS_PER_S
            else:
                assert not mark.bias


def mark_is_right(shares: Shares, parent: str, key: str, mark: Mark) -> None:
    assert mark.turn == shares.counters[key] + mark.bias
    clock = shares.served.get(parent, 0)
    if mark.high is not None:
        assert mark.high == shares.highs[key]
    if mark.capped:
        # The other way round it need not be: a refund may take the clock back.
        assert mark.high is not None
        assert mark.high > clock
    if mark.low is not None:
        assert mark.low == shares.lows[key]


def rankings_are_the_marks(siblings: Siblings) -> None:
    marks = siblings.marks
    assert siblings.weight == sum(mark.weight for mark in marks.values())
    assert list(siblings.fair) == sorted((m.turn, k) for k, m in marks.items() if not m.capped)
    assert list(siblings.capped) == sorted((m.high, k) for k, m in marks.items() if m.capped)
    floors = sorted((m.low, k) for k, m in marks.items() if m.low is not None)
    assert list(siblings.floors) == floors


def users_are_remembered(shares: Shares) -> None:
    assert len(shares.idle_users) <= USERS
    assert not shares.idle_users.keys() & shares.waiting.keys()
    for key in shares.idle_users:
        assert key[key.rindex("\x1f") + 1] == str(int(Level.USER))
