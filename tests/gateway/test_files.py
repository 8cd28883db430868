"""Files as their callers see them, in virtual time."""

from typing import Any

import pytest

from headrace.config.schema import ServerSpec
from headrace.gateway.jobs.files import FORM_BYTES
from headrace.ports.batch import FileId
from headrace.ports.batches import PIECE_BYTES, Kept
from headrace.ports.jobs import Limits
from headrace.units import MIB, Bytes
from tests.conformance.jobs.naive_batches import NaiveBatches
from tests.gateway.deferring import BORN, Deferring
from tests.gateway.filing import BOUNDARY, filed, form, get, line, lines, send
from tests.gateway.scenes import KEYS, Gateway

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

BORN_S = BORN // 10**9
DAY_S = 86_400


async def test_a_file_comes_back_as_it_came() -> None:
    gateway = Deferring()
    content = lines(3_000)
    assert len(content) > PIECE_BYTES
    caller = await send(gateway, form(content, "mine.jsonl"))
    assert caller.status == 200
    told = caller.json
    assert told == {
        "id": told["id"],
        "object": "file",
        "bytes": len(content),
        "created_at": BORN_S,
        "expires_at": BORN_S + DAY_S,
        "filename": "mine.jsonl",
        "purpose": "batch",
        "status": "processed",
    }
    place = f"/v1/files/{told['id']}"
    assert (await get(gateway, place)).json == told
    found = await get(gateway, f"{place}/content")
    assert (found.status, found.content) == (200, content)
    gone = await get(gateway, place, method="DELETE")
    assert gone.json == {"id": told["id"], "object": "file", "deleted": True}
    for path in (place, f"{place}/content"):
        assert (await get(gateway, path)).error["code"] == "file_not_found"
    assert (await get(gateway, place, method="DELETE")).status == 404
    await gateway.end()


async def test_a_form_may_come_in_any_parts() -> None:
    gateway = Deferring()
    whole = form(lines(10))
    parts = [whole[at : at + 7] for at in range(0, len(whole), 7)]
    caller = await send(gateway, parts)
    assert (caller.status, caller.json["bytes"]) == (200, len(lines(10)))
    await gateway.end()


async def test_files_are_listed_by_their_tenant_alone() -> None:
    gateway = Deferring()
    mine = [await filed(gateway, line(f"{n}")) for n in range(3)]
    await filed(gateway, line("x"), KEYS["narrow"])

    async def listed(asked: str = "") -> Any:
        return (await get(gateway, f"/v1/files{asked}")).json

    whole = await listed()
    assert [one["id"] for one in whole["data"]] == mine[::-1]
    assert (whole["first_id"], whole["last_id"], whole["has_more"]) == (mine[2], mine[0], False)
    first = await listed("?limit=2&order=asc")
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (mine[:2], True)
    rest = await listed(f"?limit=2&order=asc&after={mine[1]}&purpose=batch")
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (mine[2:], False)
    for none in ("?purpose=batch_output", "?purpose=vision", "?after=file-none"):
        assert (await listed(none))["data"] == []
    for wrong, param in (
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("limit=x", "limit"),
        ("limit=%C2%B2", "limit"),
        ("order=up", "order"),
        (f"after={'x' * 99}", "after"),
        ("&".join(f"a{n}=1" for n in range(99)), None),
    ):
        caller = await get(gateway, f"/v1/files?{wrong}")
        assert (caller.status, caller.error["param"]) == (400, param)
    other = await get(gateway, f"/v1/files/{mine[0]}/content", KEYS["narrow"])
    assert other.error["code"] == "file_not_found"
    assert (await get(gateway, f"/v1/files/{mine[0]}", KEYS["narrow"], "DELETE")).status == 404
    assert (await get(gateway, f"/v1/files/{mine[0]}")).status == 200
    await gateway.end()


async def test_a_file_goes_when_its_time_is_over() -> None:
    gateway = Deferring(keep_s=60.0)
    soon = await filed(gateway, line("a"))
    later = await filed(
        gateway,
        line("b"),
        **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"},
    )
    told = (await get(gateway, f"/v1/files/{later}")).json
    assert told["expires_at"] - told["created_at"] == 3_600
    await gateway.until(60_000)
    assert (await get(gateway, f"/v1/files/{soon}")).status == 404
    assert (await get(gateway, f"/v1/files/{later}")).status == 200
    await gateway.until(3_600_000)
    assert (await get(gateway, f"/v1/files/{later}")).status == 404
    await gateway.until(3_700_000)
    assert await gateway.store.kept() == Kept()
    await gateway.end()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "vision"}, "purpose"),
        ({"expires_after[anchor]": "created_at"}, "expires_after.seconds"),
        ({"expires_after[seconds]": "3600"}, "expires_after.anchor"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"},
            "expires_after.seconds",
        ),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "9" * 4_000},
            "expires_after.seconds",
        ),
    ],
)
async def test_what_is_wrong_with_a_form_is_told_and_nothing_is_kept(
    fields: dict[str, str], param: str
) -> None:
    gateway = Deferring()
    caller = await send(gateway, form(b"x", **fields))
    assert (caller.status, caller.error["param"]) == (400, param)
    assert caller.error["headrace"]["reason"] == "malformed"
    await _nothing_left(gateway)


async def test_a_file_is_bounded_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Deferring(file_mib=1, server=ServerSpec(body_limit_bytes=10_000))
    caller = await send(gateway, [form(bytes(MIB + FORM_BYTES)), b""])
    assert (caller.status, caller.error["code"]) == (413, "request_too_large")
    parts = [form(lines(10_000)), b"", b""]
    assert len(parts[0]) > MIB + FORM_BYTES
    caller = await send(gateway, parts, headers={"content-length": "unknown"})
    assert (caller.status, caller.error["code"]) == (413, "request_too_large")
    monkeypatch.setattr("headrace.gateway.jobs.files.LINES_MAX", 5)
    for content in (lines(6), b"x" * 15_000, lines(2) + b"x" * 15_000):
        caller = await send(gateway, form(content))
        assert (caller.status, caller.error["param"]) == (400, "file")
    caller = await send(gateway, form(lines(5)))
    assert caller.status == 200
    await get(gateway, f"/v1/files/{caller.json['id']}", method="DELETE")
    await _nothing_left(gateway)


async def test_a_caller_that_leaves_or_stalls_leaves_nothing_behind() -> None:
    gateway = Deferring()
    caller = gateway.ask(
        path="/v1/files",
        body=[form(lines(9_000))[:-99], b""],
        headers={"content-type": f"multipart/form-data; boundary={BOUNDARY}"},
    )
    await gateway.until(100)
    assert (await gateway.store.kept()).files == 1
    assert (await get(gateway, "/v1/files")).json["data"] == []
    caller.leave()
    await caller.done()
    stalled = await send(gateway, [form(lines(9_000))[:-99], b""])
    assert stalled.status == 408
    await _nothing_left(gateway)


async def test_files_of_a_tenant_and_bytes_of_the_store_are_limited() -> None:
    limits = Limits(tenant_files=1, store_bytes=Bytes(MIB))
    gateway = Deferring(store=NaiveBatches(limits))
    full = await send(gateway, form(bytes(PIECE_BYTES * 3 + 1)))
    assert (full.status, full.error["headrace"]["reason"]) == (503, "jobs_full")
    await gateway.until(2_000)
    await filed(gateway, b"x")
    more = await send(gateway, form(b"x"))
    assert (more.status, more.error["code"]) == (429, "too_many_files")
    assert more.headers["x-should-retry"] == "false"
    assert (await send(gateway, form(b"x"), key=KEYS["narrow"])).status == 200
    await gateway.end()


async def test_a_file_deleted_while_it_is_fetched_is_seen_to_be_cut() -> None:
    class Short(NaiveBatches):
        async def piece(self, file: FileId, nth: int) -> bytes | None:
            return None if nth else await super().piece(file, nth)

    gateway = Deferring(store=Short())
    file = await filed(gateway, bytes(PIECE_BYTES * 2))
    caller = await get(gateway, f"/v1/files/{file}/content")
    assert caller.is_cut
    assert len(caller.content) < PIECE_BYTES * 2
    await gateway.end()


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/files/x", "/v1/batches", "/v1/batches/x/cancel"]
)
async def test_without_a_store_callers_are_told_so(path: str) -> None:
    gateway = Gateway()
    caller = await gateway.ask(path=path, method="GET").done()
    assert (caller.status, caller.error["code"]) == (404, "not_found")
    assert "`jobs`" in caller.error["message"]
    gateway.finish()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("DELETE", "/v1/files", 405),
        ("POST", "/v1/files/x", 405),
        ("POST", "/v1/files/x/content", 405),
        ("GET", "/v1/files/x/other", 404),
        ("GET", "/v1/files/", 404),
        ("GET", "/v1/filesystem", 404),
        ("GET", "/", 404),
        ("GET", "/elsewhere", 404),
        ("POST", "/elsewhere", 404),
        ("GET", "/elsewhere/content", 404),
        ("POST", "/elsewhere/cancel", 404),
        ("GET", "/v1", 404),
        ("DELETE", "/v1/batches/x", 405),
        ("GET", "/v1/batches/x/cancel", 405),
        ("GET", "/v1/batches/x/y/z", 404),
    ],
)
async def test_paths_and_methods_are_those_of_the_api(method: str, path: str, status: int) -> None:
    gateway = Deferring()
    caller = await gateway.ask(path=path, method=method).done()
    assert caller.status == status
    assert (await gateway.ask(path="/v1/files", method="GET", key="wrong").done()).status == 401
    await gateway.end()


async def _nothing_left(gateway: Deferring) -> None:
    await gateway.until(gateway.clock.now() / 1e6 + 70_000)
    assert await gateway.store.kept() == Kept()
    await gateway.end()
