"""The durable store does what the plain one does, whatever is asked of it and in whatever order."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from msgspec import msgpack

from headrace.adapters.jobs.schema import opened
from headrace.adapters.jobs.tables import Tables
from headrace.model.ids import TenantId
from headrace.policy.fairness.claims import Line, Memory
from headrace.ports.job import OVER, JobId, Lease, State
from headrace.ports.jobs import Ending, Limits, Result
from headrace.units import Service
from tests.conformance.jobs.naive import Naive
from tests.conformance.jobs.scenes import ask, at, order, spec

LIMITS = Limits(tenant_jobs=6, lost_max=2)
ORDER = order(a=1, b=2, c=3)
TENANTS = st.sampled_from("abc")
IDS = st.integers(0, 25).map(str)


class Compared(RuleBasedStateMachine):
    """Both stores, asked the same."""

    leases: Bundle[Lease] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name) / "jobs.db"
        self.real = Tables(opened(self.path, LIMITS, 0), LIMITS)
        self.naive = Naive(limits=LIMITS)
        self.now = 0
        self.ends: dict[str, tuple[State, Any]] = {}

    def both(self, operation: str, *arguments: Any) -> Any:
        told = getattr(self.real, operation)(*arguments)
        assert told == getattr(self.naive, operation)(*arguments)
        return told

    @rule(
        ident=IDS,
        tenant=TENANTS,
        key=st.none() | st.sampled_from("kl"),
        body=st.sampled_from([b"x", b"y"]),
        priority=st.integers(0, 2),
        service=st.integers(1, 50),
        life=st.integers(1, 40),
        model=st.sampled_from("mn"),
        slo_class=st.sampled_from(["batch", "slow"]),
    )
    def put(self, ident: str, tenant: str, body: bytes, life: int, **changed: Any) -> None:
        one = spec(ident, tenant, deadline=self.now + life, keep=15, **changed)
        self.both("put", [(one, body)])

    @rule(
        target=leases,
        owner=st.sampled_from("pq"),
        limit=st.integers(0, 4),
        lease=st.integers(1, 20),
        model=st.sampled_from("mn"),
    )
    def claim(self, owner: str, limit: int, lease: int, model: str) -> Any:
        wish = ask(limit, owner=owner, until=self.now + lease, model=model)
        told = self.both("claim", wish, ORDER, at(self.now))
        for claim in told:
            assert claim.job.spec.id not in self.ends
            assert claim.job.spec.deadline_ns > at(self.now)
        return multiple(*(claim.lease for claim in told))

    @rule(lease=leases, longer=st.integers(0, 20))
    def renew(self, lease: Lease, longer: int) -> None:
        self.both("renew", [lease], at(self.now + longer))

    @rule(lease=leases, state=st.sampled_from(sorted(OVER)), spent=st.none() | st.integers(0, 90))
    def finish(self, lease: Lease, state: State, spent: int | None) -> None:
        told = Result(status=200, body=lease.owner.encode())
        service = None if spent is None else Service(spent)
        ending = Ending(state=state, result=told, spent=service)
        self.both("finish", [(lease, ending)], at(self.now))

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        self.both("release", [lease], at(self.now))

    @rule(tenant=TENANTS, ident=IDS)
    def cancel(self, tenant: str, ident: str) -> None:
        self.both("cancel", tenant, [JobId(ident)], at(self.now))

    @rule(alive=st.sets(st.sampled_from("pq")))
    def recover(self, alive: set[str]) -> None:
        self.both("recover", at(self.now), frozenset(alive))

    @rule(operation=st.sampled_from(["sweep", "purge"]))
    def pass_by(self, operation: str) -> None:
        before = set(self.naive.entries)
        self.both(operation, at(self.now))
        for ident in before - set(self.naive.entries):
            self.ends.pop(ident, None)  # the id is free for another job

    @rule(seconds=st.integers(1, 12))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def reopen(self) -> None:
        self.real.close()
        self.real = Tables(opened(self.path, LIMITS, 0), LIMITS)

    @invariant()
    def they_hold_the_same(self) -> None:
        self.both("counts")
        self.both("oldest")
        for tenant in "abc":
            for job in self.both("page", TenantId(tenant), 0, 100, None):
                result = self.both("result", job.spec.tenant, job.spec.id)
                if job.is_over:
                    end = (job.state, result)
                    assert self.ends.setdefault(job.spec.id, end) == end

    @invariant()
    def they_remember_the_same(self) -> None:
        sql = self.real._sql
        rows = sql.execute("select model, packed from memory")
        assert {m: msgpack.decode(packed, type=Memory) for m, packed in rows} == self.naive.memory
        owed = {(m, Line(t, c)): s for m, t, c, s in sql.execute("select * from owed")}
        assert owed == self.naive.owed

    def teardown(self) -> None:
        self.real.close()
        self.folder.cleanup()


Compared.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestCompared = Compared.TestCase
