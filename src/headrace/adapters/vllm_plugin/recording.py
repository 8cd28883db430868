"""What each step did, for the step log: put together as it is planned, told once its outputs are in.

Reads vLLM's requests and what it planned, and changes nothing: it does the same where vLLM schedules.
"""

from collections import deque
from typing import Any, Protocol

from msgspec.structs import replace

from headrace.adapters.vllm_plugin.guests import Guest, Guests
from headrace.model.steplog import Arrived, Ended, Note, Step
from headrace.policy.batching.knobs import Knobs
from headrace.units import NS_PER_MS, DurationNs, InstantNs, Tokens

_OVER = "finished_"


class Writer(Protocol):
    """What takes the lines."""

    def put(self, line: Step | Note) -> None:
        """Take one."""
        ...

    def close(self) -> None:
        """End."""
        ...


class Recorder:
    """The steps of one engine."""

    def __init__(self, writer: Writer, guests: Guests) -> None:
        """Start with nothing told."""
        self._writer, self._guests = writer, guests
        self._planned: deque[Step] = deque()
        self._count = self._told = 0  # steps, and the last request whose arrival was told
        self._arrived: list[Arrived] = []
        self._ended: list[Ended] = []
        self._preempted: list[int] = []

    def arrive(self, guest: Guest) -> None:
        """Note who came."""
        told = guest.told
        self._arrived.append(
            Arrived(
                n=guest.n,
                request=guest.request.request_id,
                at_ns=guest.arrived_at,
                tenant=guest.tenant,
                slo_class=guest.slo_class,
                prompt_tokens=Tokens(guest.request.num_prompt_tokens),
                left_ms=None if told is None else told.left_ns // NS_PER_MS,
                relegated=guest.relegated,
                marked=told is not None,
            )
        )

    def end(self, guest: Guest) -> None:
        """Note who is over."""
        request = guest.request
        self._ended.append(
            Ended(
                n=guest.n,
                reason=request.status.name.lower().removeprefix(_OVER),
                output_tokens=Tokens(request.num_output_tokens),
                cached_tokens=Tokens(guest.cached),
            )
        )

    def preempt(self, guest: Guest) -> None:
        """Note who lost its slot."""
        self._preempted.append(guest.n)

    def plan(
        self,
        scheduler: Any,
        tokens: dict[str, int],
        at: InstantNs,
        took_ns: int,
        knobs: Knobs | None,
    ) -> None:
        """Note a planned step; `tokens` by request in the order of scheduling, `knobs` if only proposed."""
        started: list[int] = []
        resumed: list[int] = []
        decodes: list[int] = []
        prefills: list[tuple[int, int, int]] = []
        for request_id, count in tokens.items():
            guest = self._guests.get(request_id)
            if guest is None:
                continue  # it came while nobody kept records
            position = guest.request.num_computed_tokens - count
            if guest.seated:
                (resumed if guest.logged else started).append(guest.n)
                guest.seated, guest.logged = False, True
            if position < guest.target:
                prefills.append((guest.n, position, count))
            else:
                decodes.append(guest.n)
        self._count += 1
        chunk = scheduler.scheduler_config.long_prefill_token_threshold
        proposed = (
            None if knobs is None else (knobs.token_budget, knobs.chunk_limit, knobs.running_limit)
        )
        preempted, self._preempted = tuple(self._preempted), []
        arrived, self._arrived = tuple(self._arrived), []
        step = Step(
            step=self._count,
            at_ns=at,
            schedule_ns=DurationNs(took_ns),
            running=len(scheduler.running),
            waiting=scheduler.get_request_counts()[1],
            budget=Tokens(scheduler.max_num_scheduled_tokens),
            chunk=Tokens(chunk) if chunk else None,
            limit=scheduler.max_num_active_reqs,
            free_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            arrived=arrived,
            started=tuple(started),
            resumed=tuple(resumed),
            preempted=preempted,
            decodes=tuple(decodes),
            prefills=tuple(prefills),
            proposed=proposed,
        )
        self._planned.append(step)

    def done(self, now: InstantNs) -> None:
        """Tell the step whose outputs are in, unless nothing was in it."""
        if not self._planned:
            return
        step = self._planned.popleft()
        if step.arrived:
            self._told = step.arrived[-1].n
        # Who came after that step was planned is told of by the next, its end as well.
        ended = tuple(one for one in self._ended if one.n <= self._told)
        self._ended = [one for one in self._ended if one.n > self._told]
        if not (step.decodes or step.prefills or step.arrived or step.preempted or ended):
            return
        took = DurationNs(now - step.at_ns)
        self._writer.put(replace(step, took_ns=took, ended=ended))

    def close(self, note: Note | None = None) -> None:
        """Tell what is left, and what befell the scheduler, if anything did."""
        while self._planned:
            self._writer.put(self._planned.popleft())
        if note is not None:
            self._writer.put(note)
        self._writer.close()
