"""Files and batches for tests: short to write, all alike but for what a test is about."""

import json
from typing import Any

from headrace.model.ids import TenantId
from headrace.ports.batch import Batch, File, FileId, Purpose, Stage
from headrace.ports.batches import BatchStore, Entry, Hold
from headrace.ports.engine import Route
from headrace.ports.job import BatchId, UnixNs
from headrace.units import DurationNs
from tests.conformance.jobs.scenes import BATCH, at, spec

ACME = TenantId("acme")


def paper(ident: str, tenant: TenantId = ACME, *, until: float = 1_000, **changed: Any) -> File:
    """Return a file that is there from 0 on."""
    told = {"purpose": Purpose.BATCH, "name": f"{ident}.jsonl", "created_ns": at(0), **changed}
    return File(id=FileId(ident), tenant=tenant, until_ns=at(until), **told)


async def filed(store: BatchStore, file: File, content: bytes = b"x") -> None:
    """Put a file."""
    assert await store.open_file(file) is None
    assert await store.append(file.id, content) is None
    assert await store.keep_file(file) is None


def batch(ident: str, file: str = "in", *, deadline: float = 100, **changed: Any) -> Batch:
    """Return a batch that was handed in at 0, to be kept for 50 s."""
    told = {"tenant": ACME, "slo_class": BATCH, "endpoint": Route.CHAT, "window": "24h", **changed}
    return Batch(
        id=BatchId(ident),
        input_file=FileId(file),
        created_ns=at(0),
        deadline_ns=at(deadline),
        keep_ns=DurationNs(at(50)),
        **told,
    )


def entries(ident: str, numbers: range, *, deadline: float = 100, key: str = "") -> list[Entry]:
    """Return lines of a batch, each of ten bytes."""
    return [
        Entry(
            spec=spec(
                f"job_{ident}_{n}{key}", deadline=deadline, batch=BatchId(ident), custom_id=f"{n}"
            ),
            body=b"%d" % n,
            end=(n + 1) * 10,
        )
        for n in numbers
    ]


async def lines(store: BatchStore, file: FileId | None) -> list[Any]:
    """Return what is in a file of answers."""
    assert file is not None
    content, nth = b"", 0
    while (piece := await store.piece(file, nth)) is not None:
        content, nth = content + piece, nth + 1
    return [json.loads(line) for line in content.splitlines()]


SLICE = 100
"""Lines that one step of `go_on` makes jobs."""


async def go_on(store: BatchStore, hold: Hold, lines: int, now: UnixNs) -> Stage:
    """Take one step with a batch of so many lines; return where it was."""
    one = hold.batch
    if one.stage is Stage.VALIDATING:
        await store.check_batch(hold, lines, (), now)
    elif one.left:
        numbers = range(one.put, min(one.put + SLICE, one.lines))
        await store.enqueue(hold, entries(one.id, numbers, deadline=1), now, now)
    else:
        await store.write_out(hold, (FileId(f"{one.id}_out"), FileId(f"{one.id}_err")), now)
    return one.stage
