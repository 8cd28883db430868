"""Batches as their callers see them, in virtual time."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.config.schema import ServerSpec
from headrace.model.deployment import TenantSpec
from headrace.model.ids import ClassName, ModelName
from headrace.model.ladder import LadderSpec
from headrace.plane.levels import Standing
from headrace.policy.fairness.leftover import Leftover
from headrace.ports.batch import ERRORS_MAX, Batch, FileId
from headrace.ports.batches import Declined, Hold, Progress
from headrace.ports.job import UnixNs
from headrace.ports.jobs import Limits, StoreBusyError, StoreFullError
from tests.conformance.jobs.naive_batches import NaiveBatches
from tests.gateway.deferring import BORN, Deferring, config
from tests.gateway.filing import answers, batched, filed, get, hand_in, line, lines, over
from tests.gateway.scenes import KEYS, MODEL, ObedientEngine

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

BORN_S = BORN // 10**9
DAY_S = 86_400


def obedient(**fields: Any) -> tuple[Deferring, ObedientEngine]:
    gateway = Deferring(lambda clock: [ObedientEngine(clock)], **fields)
    (engine,) = gateway.engines
    assert isinstance(engine, ObedientEngine)
    return gateway, engine


async def test_a_batch_goes_from_its_file_to_its_answers() -> None:
    gateway = Deferring()
    content = line("a") + line("b", max_tokens=7) + line("wrong", max_tokens=10**7)
    caller = await hand_in(gateway, await filed(gateway, content), metadata={"for": "tests"})
    told = caller.json
    assert told == {
        "id": told["id"],
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "errors": None,
        "input_file_id": told["input_file_id"],
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": BORN_S,
        "expires_at": BORN_S + DAY_S,
        **dict.fromkeys(["in_progress_at", "finalizing_at", "completed_at", "failed_at"]),
        **dict.fromkeys(["expired_at", "cancelling_at", "cancelled_at"]),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": {"for": "tests"},
    }
    found = await over(gateway, told["id"])
    assert found["status"] == "completed"
    assert found["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    times = ("created_at", "in_progress_at", "finalizing_at", "completed_at")
    assert sorted(found[name] for name in times) == [found[name] for name in times]
    output = await answers(gateway, found["output_file_id"])
    assert [(one["custom_id"], one["error"]) for one in output] == [("a", None), ("b", None)]
    assert [one["response"]["status_code"] for one in output] == [200, 200]
    used = [one["response"]["body"]["usage"]["completion_tokens"] for one in output]
    assert used == [4, 7]
    assert (
        len({one["id"] for one in output} | {one["response"]["request_id"] for one in output}) == 4
    )
    (error,) = await answers(gateway, found["error_file_id"])
    assert (error["custom_id"], error["response"]["status_code"]) == ("wrong", 400)
    assert error["response"]["body"]["error"]["param"] == "max_tokens"
    file = (await get(gateway, f"/v1/files/{found['output_file_id']}")).json
    assert (file["purpose"], file["filename"]) == ("batch_output", f"{told['id']}_output.jsonl")
    rows = [(row.slo_class, row.tenant) for row in gateway.driver.recent]
    assert rows == [("batch", "free")] * 3, "decided, counted and billed as any other"
    await gateway.end()


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 3}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 16}),
        ("/v1/embeddings", {"input": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "é\n\u2028"}]}),
    ],
)
async def test_batches_are_made_of_each_of_these(endpoint: str, body: dict[str, Any]) -> None:
    gateway = Deferring(running=True)
    told = {"custom_id": "é", "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}}
    content = json.dumps(told, ensure_ascii=False).encode()
    found = await over(gateway, await batched(gateway, content, endpoint=endpoint))
    assert (found["status"], found["endpoint"]) == ("completed", endpoint)
    (answer,) = await answers(gateway, found["output_file_id"])
    assert answer["custom_id"] == "é"
    assert answer["response"]["body"]["model"] == MODEL
    await gateway.end()


async def test_batches_are_listed_by_their_tenant_alone() -> None:
    gateway = Deferring(running=False)
    file = await filed(gateway, lines(2))
    mine = [(await hand_in(gateway, file)).json["id"] for _ in range(3)]

    async def listed(asked: str = "") -> Any:
        return (await get(gateway, f"/v1/batches{asked}")).json

    assert [one["id"] for one in (await listed())["data"]] == mine[::-1]
    first = await listed("?limit=2")
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (mine[:0:-1], True)
    rest = await listed(f"?limit=2&after={first['last_id']}")
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (mine[:1], False)
    assert (await get(gateway, "/v1/batches?limit=101")).error["param"] == "limit"
    assert (await get(gateway, "/v1/batches", KEYS["narrow"])).json["data"] == []
    for path, method in (
        (f"/v1/batches/{mine[0]}", "GET"),
        (f"/v1/batches/{mine[0]}/cancel", "POST"),
    ):
        caller = await get(gateway, path, KEYS["narrow"], method)
        assert (caller.status, caller.error["code"]) == (404, "batch_not_found")
    taken = await hand_in(gateway, file, key=KEYS["narrow"])
    assert (taken.status, taken.error["code"]) == (404, "file_not_found")
    await gateway.end()


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "25h"}, "completion_window"),
        ({"completion_window": "0s"}, "completion_window"),
        ({"completion_window": "1d"}, "completion_window"),
        ({"completion_window": None}, "completion_window"),
        ({"metadata": {f"{n}": "" for n in range(17)}}, "metadata"),
        ({"metadata": {"x" * 65: ""}}, "metadata"),
        ({"metadata": {"x": "y" * 513}}, "metadata"),
        ({"metadata": {"x": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3_600}}, "expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
    ],
)
async def test_what_is_wrong_with_a_batch_is_told(changed: dict[str, Any], param: str) -> None:
    gateway = Deferring(running=False)
    caller = await hand_in(gateway, await filed(gateway, lines(1)), **changed)
    assert caller.status == 400
    assert caller.error["param"].startswith(param)
    assert (await get(gateway, "/v1/batches")).json["data"] == []
    await gateway.end()


@pytest.mark.parametrize(
    ("content", "errors"),
    [
        (b"", [("empty_file", None, None)]),
        (b"{\n", [("invalid_json_line", 1, None)]),
        (line("a") + b"\n" + line("b"), [("invalid_json_line", 2, None)]),
        (b'{"custom_id": "\xff"}', [("invalid_json_line", 1, None)]),
        (b'{"custom_id": "a", "method": "POST"}', [("missing_required_parameter", 1, "url")]),
        (line("a") + line("a"), [("duplicate_custom_id", 2, "custom_id")]),
        (line(""), [("invalid_value", 1, "custom_id")]),
        (line("x" * 513), [("invalid_value", 1, "custom_id")]),
        (line("a").replace(b"POST", b"GET"), [("invalid_value", 1, "method")]),
        (line("a").replace(b"POST", b"G" * 9_000), [("invalid_value", 1, "method")]),
        (line("a", "/v1/completions"), [("mismatched_url", 1, "url")]),
        (line("a", stream=True), [("invalid_value", 1, "body.stream")]),
        (line("a", model=None), [("invalid_value", 1, "body.model")]),
        (
            line("a").replace(b'"model": "', b'"other": "'),
            [("missing_required_parameter", 1, "body.model")],
        ),
        (
            line("a", model="none") + line("b") + line("c", model="none"),
            [("model_not_found", 1, "body.model"), ("model_not_found", 3, "body.model")],
        ),
        (line("a", more="x" * 10_000), [("request_too_large", 1, "body")]),
        (b'{"body":' + b"[" * 9_000, [("invalid_json_line", 1, None)]),
        (b"[1]", [("invalid_value", 1, None)]),
    ],
)
async def test_a_file_at_fault_fails_the_batch_and_nothing_of_it_runs(
    content: bytes, errors: list[Any]
) -> None:
    gateway = Deferring(server=ServerSpec(body_limit_bytes=10_000))
    found = await over(gateway, await batched(gateway, content))
    assert found["status"] == "failed"
    assert found["failed_at"] == BORN_S
    assert found["errors"]["object"] == "list"
    told = [(one["code"], one["line"], one["param"]) for one in found["errors"]["data"]]
    assert told == errors
    assert all(0 < len(one["message"]) < 200 for one in found["errors"]["data"])
    assert not gateway.driver.recent
    assert await gateway.store.counts() == []
    await gateway.end()


async def test_so_many_faults_are_told_and_no_more() -> None:
    gateway = Deferring()
    found = await over(gateway, await batched(gateway, b"x\n" * 500))
    assert [one["line"] for one in found["errors"]["data"]] == [*range(1, ERRORS_MAX + 1)]
    await gateway.end()


async def test_a_model_that_the_key_may_not_use_is_told_before_anything_runs() -> None:
    gateway = Deferring()
    file = await filed(gateway, lines(1), KEYS["narrow"])
    batch = (await hand_in(gateway, file, key=KEYS["narrow"])).json["id"]
    await gateway.until(1_000)
    found = (await get(gateway, f"/v1/batches/{batch}", KEYS["narrow"])).json
    (error,) = found["errors"]["data"]
    assert (error["code"], error["line"]) == ("model_not_allowed", 1)
    await gateway.end()


async def test_a_line_that_cannot_be_read_further_in_is_answered_so() -> None:
    gateway = Deferring()
    content = line("a", messages="none") + line("b") + line("c", max_tokens=-1)
    found = await over(gateway, await batched(gateway, content))
    assert found["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    told = await answers(gateway, found["error_file_id"])
    assert [(one["custom_id"], one["response"]["status_code"]) for one in told] == [
        ("a", 400),
        ("c", 400),
    ]
    await gateway.end()


# Whose turn it is -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "asked", "expected"),
    [
        ((), None, "batch"),
        ((), "nightly", "nightly"),
        ((), "unknown", "batch"),
        (("interactive", "nightly"), None, "nightly"),
        (("interactive", "nightly"), "batch", "nightly"),
        ((), "interactive", None),
        (("interactive",), None, None),
    ],
)
async def test_a_batch_is_of_a_class_that_is_deferred(
    classes: tuple[str, ...], asked: str | None, expected: str | None
) -> None:
    plain = config()
    tenants = (TenantSpec(name="free", classes=classes), *plain.tenants[1:])
    gateway = Deferring(plane=replace(plain, tenants=tenants))
    headers = {} if asked is None else {"x-llm-d-inference-objective": asked}
    caller = await hand_in(gateway, await filed(gateway, lines(1)), headers)
    if expected is None:
        assert (caller.status, caller.error["param"]) == (400, "x-llm-d-inference-objective")
    else:
        await over(gateway, caller.json["id"])
        assert [row.slo_class for row in gateway.driver.recent] == [expected]
    await gateway.end()


# Ends -------------------------------------------------------------------------------------------


async def test_a_cancelled_batch_runs_no_further_and_tells_of_each_line() -> None:
    gateway, engine = obedient()
    batch = await batched(gateway, lines(30))
    await gateway.until(600)
    began = len(engine.calls)
    assert 0 < began < 30
    engine.say("one", engine.calls[0].dispatch.attempt)
    engine.end(engine.calls[0].dispatch.attempt)
    caller = await get(gateway, f"/v1/batches/{batch}/cancel", method="POST")
    assert caller.json["status"] == "cancelling"
    began = len(engine.calls)
    again = await get(gateway, f"/v1/batches/{batch}/cancel", method="POST")
    assert again.status == 200
    found = await over(gateway, batch)
    assert found["status"] == "cancelled"
    assert found["request_counts"] == {"total": 30, "completed": 1, "failed": 29}
    assert len(engine.calls) == began, "nothing more was sent"
    assert len(engine.aborted) == began - 1, "and what ran was stopped"
    told = await answers(gateway, found["error_file_id"])
    assert {one["error"]["code"] for one in told} == {"batch_cancelled"}
    named = {one["custom_id"] for one in told + await answers(gateway, found["output_file_id"])}
    assert named == {f"{n}" for n in range(30)}
    late = await get(gateway, f"/v1/batches/{batch}/cancel", method="POST")
    assert late.status == 200, "it is cancelled"
    await gateway.end()


async def test_what_is_all_over_cannot_be_cancelled() -> None:
    gateway = Deferring()
    batch = await batched(gateway, lines(1))
    await over(gateway, batch)
    caller = await get(gateway, f"/v1/batches/{batch}/cancel", method="POST")
    assert (caller.status, caller.error["code"]) == (400, "batch_over")
    await gateway.end()


async def test_a_batch_is_cancelled_before_its_file_was_read() -> None:
    gateway = Deferring(running=False)
    batch = await batched(gateway, lines(3))
    caller = await get(gateway, f"/v1/batches/{batch}/cancel", method="POST")
    assert (caller.json["status"], caller.json["output_file_id"]) == ("cancelled", None)
    gateway.clerk.start()
    await gateway.until(2_000)
    assert await gateway.store.counts() == []
    await gateway.end()


async def test_what_is_not_begun_within_the_window_never_runs() -> None:
    gateway, engine = obedient(leftover=Leftover(at_once=1))
    batch = await batched(gateway, lines(3), completion_window="2s")
    await gateway.until(1_900)
    assert len(engine.calls) == 1
    await gateway.until(3_500)
    engine.say("late")
    engine.end()
    found = await over(gateway, batch)
    assert (found["status"], found["expired_at"]) == ("expired", found["finalizing_at"])
    assert found["expires_at"] - found["created_at"] == 2
    assert found["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    told = await answers(gateway, found["error_file_id"])
    assert [(one["custom_id"], one["error"]["code"], one["response"]) for one in told] == [
        ("1", "batch_expired", None),
        ("2", "batch_expired", None),
    ]
    (kept,) = await answers(gateway, found["output_file_id"])
    assert kept["response"]["body"] == "late", "what was begun in time counts"
    assert len(engine.calls) == 1
    await gateway.end()


async def test_batch_and_answers_go_when_their_time_is_over() -> None:
    gateway = Deferring(keep_s=60.0)
    short = await over(gateway, await batched(gateway, lines(1)))
    kept = await over(
        gateway,
        await batched(
            gateway, lines(1), output_expires_after={"anchor": "created_at", "seconds": 3_600}
        ),
    )
    await gateway.until(70_000)
    for path in (f"/v1/batches/{short['id']}", f"/v1/files/{short['output_file_id']}"):
        assert (await get(gateway, path)).status == 404
    assert len(await answers(gateway, kept["output_file_id"])) == 1
    await gateway.until(3_700_000)
    assert (await get(gateway, f"/v1/files/{kept['output_file_id']}")).status == 404
    await gateway.end()


async def test_the_file_may_be_deleted_while_its_batch_is_worked_on() -> None:
    gateway = Deferring(running=False)
    file = await filed(gateway, lines(40))
    batch = (await hand_in(gateway, file)).json["id"]
    assert (await get(gateway, f"/v1/files/{file}", method="DELETE")).status == 200
    assert (await hand_in(gateway, file)).status == 404
    gateway.dispatcher.start()
    gateway.clerk.start()
    found = await over(gateway, batch)
    assert found["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert (await gateway.store.kept()).files == 1, "that of the answers"
    await gateway.end()


# Processes --------------------------------------------------------------------------------------


async def test_two_processes_make_each_line_one_job_and_one_answer() -> None:
    store = NaiveBatches()
    first = Deferring(store=store)
    second = Deferring(store=store, owner="two")
    batches = [await batched(first, lines(60, max_tokens=2)) for _ in range(4)]
    for batch in batches:
        found = await over(first, batch)
        assert found["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
        told = await answers(second, found["output_file_id"])
        assert [one["custom_id"] for one in told] == [f"{n}" for n in range(60)]
    ran = [len(one.driver.recent) for one in (first, second)]
    assert sum(ran) == 240
    assert first.clerk.lines + second.clerk.lines == {"put": 240, "output": 240}
    await first.end()
    await second.end()


@pytest.mark.parametrize("stage", ["check_batch", "enqueue", "write_out"])
async def test_a_process_that_dies_within_a_step_has_it_taken_anew(stage: str) -> None:
    class Dying(NaiveBatches):
        def __getattribute__(self, name: str) -> Any:
            if name == stage and not reached:
                reached.append(name)
                raise StoreBusyError("the process is killed here")
            return super().__getattribute__(name)

    reached: list[str] = []
    store = Dying()
    first = Deferring(store=store, lease_s=5.0)
    batch = await batched(first, lines(20, max_tokens=2))
    while not reached:
        await first.until(first.clock.now() / 1e6 + 50)
    await first.clerk.close()
    second = Deferring(store=store, owner="two", lease_s=5.0)
    found = await over(second, batch)
    assert found["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    told = await answers(second, found["output_file_id"])
    assert [one["custom_id"] for one in told] == [f"{n}" for n in range(20)]
    await first.end()
    await second.end()


async def test_while_a_process_stands_aside_another_takes_the_steps() -> None:
    store = NaiveBatches()
    first = Deferring(store=store)
    first.aside = True
    batch = await batched(first, lines(5))
    await first.until(3_000)
    assert (await get(first, f"/v1/batches/{batch}")).json["status"] == "validating"
    second = Deferring(store=store, owner="two")
    assert (await over(second, batch))["status"] == "completed"
    await first.end()
    await second.end()


async def test_a_store_in_trouble_refuses_and_goes_on_after() -> None:
    class Troubled(NaiveBatches):
        broken = False

        async def put_batch(self, batch: Batch) -> Progress | Declined:
            if self.broken:
                raise StoreBusyError("busy")
            return await super().put_batch(batch)

        async def take_batch(self, owner: str, until: UnixNs, now: UnixNs) -> Hold | None:
            if self.broken:
                raise StoreBusyError("busy")
            return await super().take_batch(owner, until, now)

    store = Troubled()
    gateway = Deferring(store=store)
    file = await filed(gateway, lines(2))
    batch = (await hand_in(gateway, file)).json["id"]
    store.broken = True
    caller = await hand_in(gateway, file)
    assert (caller.status, caller.error["headrace"]["reason"]) == (503, "jobs_trouble")
    await gateway.until(5_000)
    store.broken = False
    assert (await over(gateway, batch))["status"] == "completed"
    await gateway.end()


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (
            {"x-headrace-degrade": "1", "x-slo-tpot-ms": "070"},
            {"x-headrace-degrade": "1", "x-slo-tpot-ms": "70"},
        ),
        ({"x-headrace-replay-input": "9" * 9_000, "x-other": "1"}, {}),
        ({"x-headrace-degrade": "9"}, "x-headrace-degrade"),
        ({"x-slo-tpot-ms": "9" * 9_000}, "x-slo-tpot-ms"),
        ({"x-llm-d-slo-tpot-ms": "7", "x-slo-tpot-ms": "soon"}, "x-slo-tpot-ms"),
    ],
)
async def test_headers_hold_for_each_line_or_are_refused_at_once(
    told: dict[str, str], kept: dict[str, str] | str
) -> None:
    gateway = Deferring()
    caller = await hand_in(gateway, await filed(gateway, lines(3)), headers=told)
    if isinstance(kept, str):
        assert (caller.status, caller.error["param"]) == (400, kept)
    else:
        assert (await over(gateway, caller.json["id"]))["status"] == "completed"
        store = gateway.store
        assert isinstance(store, NaiveBatches)
        (row,) = store.rows.values()
        assert dict(row.batch.headers) == kept
    await gateway.end()


async def test_in_a_full_store_what_nobody_needs_goes_so_that_there_is_room() -> None:
    class Full(NaiveBatches):
        async def write_out(
            self, hold: Hold, names: tuple[FileId, FileId], now: UnixNs
        ) -> Batch | None:
            if len(self.papers) > 1:
                raise StoreFullError("full")
            return await super().write_out(hold, names, now)

    gateway = Deferring(store=Full())
    batch = await batched(gateway, lines(2))
    gone = await filed(gateway, bytes(9))
    await gateway.until(gateway.clock.now() / 1e6 + 60_000)
    assert (await get(gateway, f"/v1/batches/{batch}")).json["status"] == "in_progress"
    await get(gateway, f"/v1/files/{gone}", method="DELETE")
    assert (await over(gateway, batch))["status"] == "completed"
    await gateway.end()


async def test_a_line_that_is_given_less_is_told() -> None:
    ladder = LadderSpec(level=1, output_part=0.5)
    plain = config()
    classes = tuple(
        replace(one, degrade=ladder if one.name == "batch" else None) for one in plain.classes
    )
    tenants = tuple(replace(one, degrade=3) for one in plain.tenants)
    gateway = Deferring(plane=replace(plain, classes=classes, tenants=tenants))
    plane = gateway.driver.plane
    known, now = plane.state.models[ModelName(MODEL)], plane.state.now
    known.standings[ClassName("batch")] = Standing(level=1, since=now, quiet_from=now, left_at=now)
    one = await over(gateway, await batched(gateway, line("less", max_tokens=8)))
    (less,) = await answers(gateway, one["output_file_id"])
    assert less["response"]["headers"] == {
        "x-headrace-degrade-level": "1",
        "x-headrace-degrade-reason": "overload",
        "x-headrace-output-limit": "4",
    }
    known.standings.clear()
    one = await over(gateway, await batched(gateway, line("asked", max_tokens=8)))
    (asked,) = await answers(gateway, one["output_file_id"])
    assert "headers" not in asked["response"]
    await gateway.clerk.close()
    await gateway.dispatcher.close()
    gateway.driver.stop()  # its journal does not know who set the level


async def test_batches_of_a_tenant_are_limited() -> None:
    gateway = Deferring(store=NaiveBatches(Limits(tenant_batches=1)), running=False)
    await batched(gateway, lines(1))
    caller = await hand_in(gateway, await filed(gateway, lines(1)))
    assert (caller.status, caller.error["code"]) == (429, "slow_down")
    assert "retry-after" in caller.headers
    await gateway.end()


async def test_a_key_finds_the_batch_that_came_first() -> None:
    gateway = Deferring()
    file, key = await filed(gateway, lines(2)), {"idempotency-key": "mine"}
    first = await hand_in(gateway, file, key)
    found = await over(gateway, first.json["id"])
    again = await hand_in(gateway, file, key)
    assert (again.status, again.json) == (200, found)
    other = await hand_in(gateway, file, key, completion_window="1h")
    assert (other.status, other.error["code"]) == (422, "idempotency_mismatch")
    wrong = await hand_in(gateway, file, {"idempotency-key": "k" * 256})
    assert wrong.error["param"] == "idempotency-key"
    assert (await hand_in(gateway, file)).json["id"] != first.json["id"]
    await gateway.end()


async def test_a_batch_larger_than_its_tenants_room_goes_in_as_it_empties() -> None:
    gateway = Deferring(store=NaiveBatches(Limits(tenant_jobs=7)))
    found = await over(gateway, await batched(gateway, lines(50, max_tokens=2)))
    assert found["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
    told = await answers(gateway, found["output_file_id"])
    assert [one["custom_id"] for one in told] == [f"{n}" for n in range(50)]
    await gateway.end()
