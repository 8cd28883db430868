"""What the step log tells of a step: who came, started, computed what, gave way and ended; once each."""

from enum import Enum
from typing import Any

import pytest

from headrace.adapters.vllm_plugin.guests import Guest
from headrace.adapters.vllm_plugin.recording import Recorder
from headrace.model.ids import ClassName, TenantId
from headrace.model.steplog import Arrived, Ended, Note, Step
from headrace.policy.batching.knobs import Knobs
from headrace.units import NS_PER_MS, InstantNs, Tokens
from tests.adapters.vllm_plugin.fakes import BEGIN, Request, guests, scheduler, told


class Status(Enum):
    """vLLM's words."""

    FINISHED_LENGTH_CAPPED = 1
    FINISHED_ABORTED = 2


class Scene:
    """A recorder, and a scheduler that plans steps of 1 ms and computes them at once, or later."""

    def __init__(self) -> None:
        self.guests = guests()
        self.lines: list[Step | Note] = []
        self.closed = False
        self.recorder = Recorder(self, self.guests)
        self.scheduler = scheduler()
        self.now = BEGIN

    def put(self, line: Step | Note) -> None:
        assert not self.closed
        self.lines.append(line)

    def close(self) -> None:
        self.closed = True

    def arrive(self, name: str, prompt: int = 10, extra: dict[str, object] | None = None) -> Guest:
        guest = self.guests.arrive(Request(name, prompt), extra, self.now)
        self.recorder.arrive(guest)
        return guest

    def plan(self, tokens: dict[str, int], proposed: Knobs | None = None) -> None:
        """Plan a step: counts are brought forward, as vLLM does at once."""
        for name, count in tokens.items():
            guest = self.guests.get(name)
            if guest is None:
                continue
            if name not in self.guests.running:
                self.guests.start(guest, guest.request.num_computed_tokens)
            guest.request.num_computed_tokens += count
        self.recorder.plan(self.scheduler, tokens, self.now, 7_000, proposed)
        self.now = InstantNs(self.now + NS_PER_MS)

    def preempt(self, guest: Guest) -> None:
        self.guests.stop(guest)
        guest.request.num_computed_tokens = 0
        self.recorder.preempt(guest)

    def end(self, guest: Guest, status: Status) -> None:
        guest.request.status = status
        self.recorder.end(guest)
        self.guests.leave(guest)

    def done(self) -> None:
        self.recorder.done(self.now)

    def step(self, tokens: dict[str, int]) -> Step:
        """Plan a step and have its outputs."""
        self.plan(tokens)
        self.done()
        line = self.lines[-1]
        assert isinstance(line, Step)
        return line


def made(guest: Guest, tokens: int = 1) -> None:
    request: Any = guest.request
    request.num_output_tokens += tokens


def test_arrivals_are_told_with_what_was_known_of_them() -> None:
    scene = Scene()
    scene.arrive("one", 10, told("a", left_ms=250, relegated=True))
    scene.arrive("two", 20)
    one, two = scene.step({"one": 10}).arrived
    assert one == Arrived(
        n=1, request="one", at_ns=BEGIN, tenant=TenantId("a"), slo_class=ClassName("chat"),
        prompt_tokens=Tokens(10),
        left_ms=250, relegated=True, marked=True,
    )  # fmt: skip
    assert (two.n, two.tenant, two.left_ms, two.marked) == (2, "", None, False)
    assert scene.step({"two": 20}).arrived == ()


def test_prompts_go_in_chunks_and_then_decode() -> None:
    scene = Scene()
    guest = scene.arrive("r", 25)
    steps = [scene.step({"r": 10}), scene.step({"r": 15})]
    made(guest)
    steps.append(scene.step({"r": 1}))
    assert [step.prefills for step in steps] == [((1, 0, 10),), ((1, 10, 15),), ()]
    assert [step.decodes for step in steps] == [(), (), (1,)]
    assert [step.started for step in steps] == [(1,), (), ()]
    assert [step.step for step in steps] == [1, 2, 3]


def test_decode_with_guessed_tokens_is_one_decode() -> None:
    scene = Scene()
    guest = scene.arrive("r", 10)
    scene.step({"r": 10})
    made(guest)
    assert scene.step({"r": 4}).decodes == (1,)


def test_what_gave_way_is_resumed_and_computes_all_it_had() -> None:
    scene = Scene()
    guest = scene.arrive("r", 10)
    scene.step({"r": 10})
    made(guest, 3)
    scene.preempt(guest)
    lost = scene.step({})
    back = scene.step({"r": 13})
    assert (lost.preempted, lost.decodes) == ((1,), ())
    assert (back.started, back.resumed, back.prefills) == ((), (1,), ((1, 0, 13),))


def test_what_was_found_in_the_cache_is_told_at_the_end() -> None:
    scene = Scene()
    guest = scene.arrive("r", 40)
    guest.request.num_computed_tokens = 32
    assert scene.step({"r": 8}).prefills == ((1, 32, 8),)
    scene.plan({"r": 1})
    made(guest)
    scene.end(guest, Status.FINISHED_LENGTH_CAPPED)
    scene.done()
    ended = Ended(n=1, reason="length_capped", output_tokens=Tokens(1), cached_tokens=Tokens(32))
    assert scene.lines[-1].ended == (ended,)  # type: ignore[union-attr]


def test_steps_planned_ahead_are_told_in_order_each_with_its_time() -> None:
    scene = Scene()
    scene.arrive("r", 30)
    scene.plan({"r": 10})
    scene.plan({"r": 20})
    assert scene.lines == []
    scene.done()
    scene.done()
    scene.done()  # of a step before the records
    first, second = scene.lines
    assert isinstance(first, Step)
    assert isinstance(second, Step)
    assert (first.step, second.step) == (1, 2)
    assert (first.schedule_ns, first.took_ns) == (7_000, 2 * NS_PER_MS)
    assert second.took_ns == NS_PER_MS


def test_step_in_which_nothing_was_is_not_told_but_counted() -> None:
    scene = Scene()
    scene.plan({})
    scene.done()
    scene.arrive("r")
    assert scene.step({"r": 10}).step == 2
    assert len(scene.lines) == 1


@pytest.mark.parametrize("while_planned", [False, True])
def test_end_between_steps_is_told_by_the_next(while_planned: bool) -> None:
    scene = Scene()
    gone, stays = scene.arrive("gone"), scene.arrive("stays")
    scene.step({"gone": 10})
    if while_planned:
        scene.plan({"stays": 10})
    scene.end(gone, Status.FINISHED_ABORTED)
    if not while_planned:
        scene.plan({"stays": 10})
    scene.done()
    (ended,) = scene.lines[-1].ended  # type: ignore[union-attr]
    assert (ended.n, ended.reason, stays.n) == (1, "aborted", 2)


def test_limits_are_those_the_step_was_planned_under() -> None:
    scene = Scene()
    scene.scheduler.max_num_scheduled_tokens, scene.scheduler.max_num_active_reqs = 100, 3
    scene.scheduler.scheduler_config.long_prefill_token_threshold = 40
    scene.scheduler.kv_cache_manager.block_pool.free = 17
    scene.arrive("r")
    step = scene.step({"r": 10})
    assert (step.budget, step.limit, step.chunk, step.free_blocks) == (100, 3, 40, 17)
    scene.scheduler.scheduler_config.long_prefill_token_threshold = 0
    step = scene.step({"r": 1})
    assert (step.chunk, step.proposed) == (None, None)


def test_limits_that_are_only_proposed_are_told_as_such() -> None:
    scene = Scene()
    scene.arrive("r")
    scene.plan({"r": 10}, Knobs(token_budget=64, running_limit=5, chunk_limit=8))
    scene.done()
    assert scene.lines[0].proposed == (64, 8, 5)  # type: ignore[union-attr]


def test_who_came_before_the_records_is_left_out() -> None:
    scene = Scene()
    scene.arrive("r")
    assert scene.step({"nobody knows": 5, "r": 10}).prefills == ((1, 0, 10),)


def test_at_the_end_planned_steps_are_told_without_their_time() -> None:
    scene = Scene()
    scene.arrive("r")
    scene.plan({"r": 10})
    scene.recorder.close(Note(at_ns=scene.now, text="RuntimeError: it failed"))
    step, note = scene.lines
    assert note == Note(at_ns=scene.now, text="RuntimeError: it failed")
    assert isinstance(step, Step)
    assert (step.step, step.took_ns, scene.closed) == (1, None, True)


def test_nobody_ends_before_arriving() -> None:
    scene = Scene()
    scene.arrive("r")
    scene.plan({"r": 10})
    gone = scene.arrive("gone")
    scene.end(gone, Status.FINISHED_ABORTED)
    scene.done()
    scene.step({"r": 1})
    known: set[int] = set()
    for line in scene.lines:
        assert isinstance(line, Step)
        known |= {one.n for one in line.arrived}
        assert {one.n for one in line.ended} <= known
