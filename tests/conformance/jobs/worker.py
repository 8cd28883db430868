"""A process that works off a store, one command a line on its input, and says on its output what it did.

`claim N`: claim so many, name them. `race`: claim and finish one by one until nothing is left, and name each
at its finish. `batches N`: take batches of so many lines from step to step. `churn`: put, claim, renew, release and finish for ever, naming each end only after it was stored.
"""

import asyncio
import sys
from pathlib import Path

from headrace.adapters.jobs.sqlite import SqliteJobs
from headrace.ports.job import State
from headrace.ports.jobs import Ending, Finished, Result
from tests.conformance.jobs.batching import go_on
from tests.conformance.jobs.scenes import ask, at, finish, ids, order

UNTIL = 10**6
"""Until when its leases hold, in seconds."""


def say(*words: str) -> None:
    """Tell whoever started this."""
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


def told_by(owner: str) -> Ending:
    """Return an end that shows whose it is."""
    return Ending(state=State.DONE, result=Result(status=200, body=owner.encode()))


async def race(store: SqliteJobs, owner: str) -> None:
    """Work until nothing is left."""
    while claims := await store.claim(ask(2, owner=owner, until=UNTIL), order(), at(5)):
        for claim in claims:
            assert await finish(store, claim.lease, told_by(owner), 5) is Finished.STORED
            say(claim.job.spec.id)
    say("over")


async def churn(store: SqliteJobs, owner: str) -> None:
    """Claim, renew, give back and finish until killed."""
    while claims := await store.claim(ask(3, owner=owner, until=UNTIL), order(), at(5)):
        leases = [claim.lease for claim in claims]
        await store.renew(leases, at(UNTIL))
        if len(leases) > 1:
            await store.release(leases[1:2], at(5))
        assert await finish(store, leases[0], told_by(owner), 5) is Finished.STORED
        say(leases[0].job)
    say("over")


async def batches(store: SqliteJobs, owner: str, lines: int) -> None:
    """Take batches from step to step until none has one, and name each."""
    while hold := await store.take_batch(owner, at(UNTIL), at(5)):
        stage = await go_on(store, hold, lines, at(5))
        say(hold.batch.id, stage)
    say("over")


async def main(path: str, owner: str) -> None:
    """Do what is asked."""
    store = SqliteJobs(Path(path))
    say("ready")
    for line in sys.stdin:
        match line.split():
            case ["claim", limit]:
                wish = ask(int(limit), owner=owner, until=UNTIL)
                say(*ids(await store.claim(wish, order(), at(5))))
            case ["race"]:
                await race(store, owner)
            case ["churn"]:
                await churn(store, owner)
            case ["batches", lines]:
                await batches(store, owner, int(lines))
            case unknown:
                raise ValueError(unknown)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
