"""vLLM's scheduler, with our order, our knobs and our victims (TOK-5).

A subclass of the asynchronous one, since any other turns asynchronous scheduling off. It leaves
`schedule()` to vLLM and changes what that goes by: the waiting queue, the limits of a step, the order of
`running`, and the priorities of those who may have to give way. What is decided is decided by
`policy/fairness` and `policy/batching`, as at a gateway and in an emulated engine.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import vllm
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy, create_request_queue
from vllm.v1.request import Request, RequestStatus

from headrace.adapters.vllm_plugin import contract
from headrace.adapters.vllm_plugin.guests import EngineRequest, Guest, Guests
from headrace.adapters.vllm_plugin.queue import Ordered, TurnQueue
from headrace.adapters.vllm_plugin.settings import (
    Mode,
    OnFault,
    Settings,
    Untested,
    profile_of,
    rates_of,
    read,
    token_ns_of,
)
from headrace.adapters.vllm_plugin.turning import Sizes, Turner
from headrace.policy.batching.knobs import Break
from headrace.policy.fairness.line import Line
from headrace.units import DurationNs, InstantNs, ms

_log = logging.getLogger("vllm.headrace")
RequestQueue.register(TurnQueue)


class SLOScheduler(AsyncScheduler):  # type: ignore[misc]  # vLLM is untyped here
    """`--scheduler-cls headrace.adapters.vllm_plugin.SLOScheduler`."""

    # vLLM's, which are set here.
    waiting: Any
    policy: Any
    max_num_scheduled_tokens: int
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take over vLLM's scheduler, or refuse to: `contract.UnsupportedError`, ValueError of the settings."""
        super().__init__(*args, **kwargs)
        self.clock: Callable[[], int] = time.monotonic_ns
        self._settings = settings = read(self.vllm_config.additional_config)
        self._decides = self._supported(settings)
        self._now = InstantNs(0)
        self._open = False  # whether a step is being planned
        self._raised: list[Guest] = []
        self._starts = 0
        if self._decides:
            self._take_over(settings)

    def _supported(self, settings: Settings) -> bool:
        """Return whether to decide here, in this release; say so if not."""
        lacks = contract.missing(self, _probe(), RequestQueue)
        fault = contract.fault(vllm.__version__, lacks)
        if settings.mode is Mode.PASSIVE:
            return False
        if fault is None:
            return True
        if settings.untested is Untested.TRY and not lacks:
            _log.warning("headrace: %s; going on, as it is set up", fault)
            return True
        if settings.untested is Untested.PASSIVE:
            _log.error("headrace: %s; passive, as it is set up: vLLM schedules", fault)
            return False
        choice = '"untested": "passive" runs vLLM\'s own scheduling'
        raise contract.UnsupportedError(f"headrace: {fault}. Use a tested release, or {choice}")

    def _take_over(self, settings: Settings) -> None:
        pool = self.kv_cache_manager.block_pool
        self._sizes = sizes = Sizes(
            budget=self.max_num_scheduled_tokens,
            slots=self.max_num_active_reqs,
            chunk=self.scheduler_config.long_prefill_token_threshold,
            block_tokens=self.block_size,
            groups=max(1, len(self.kv_cache_config.kv_cache_groups)),
            decode_tokens=1 + self.num_spec_tokens,
        )
        profile = profile_of(
            settings,
            blocks=pool.num_gpu_blocks,
            block=sizes.block_tokens,
            budget=sizes.budget,
            slots=sizes.slots,
        )
        self._own_policy = self.policy
        late_ns = ms(settings.late_ms)
        line = Line(
            settings.ordering,
            rates_of(settings, profile),
            token_ns_of(settings, profile),
            DurationNs(late_ns),
        )
        self._guests = Guests(line, late_ns)
        self._turner = Turner(settings.batching, profile, sizes, settings.victims)
        self._ordered = Ordered(self._guests, self._own_queue(), self._instant, _runs)
        self.waiting = TurnQueue(self._ordered, self._own_queue, self._fail)
        _log.info(
            "headrace: scheduling by %s with %s, profile %s",
            type(settings.ordering).__name__,
            type(settings.batching).__name__,
            profile.name,
        )

    def _own_queue(self) -> Any:
        return create_request_queue(self._own_policy)

    def _instant(self) -> InstantNs:
        """Return the instant of the step that is planned, or else the present one."""
        return self._now if self._open else InstantNs(self.clock())

    # What vLLM calls -----------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Take a request in."""
        if self._decides:
            self._ours(lambda: self._arrive(request))
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step, as vLLM does, under our knobs."""
        if not self._decides:
            return super().schedule(*args, **kwargs)
        self._now, self._open = InstantNs(self.clock()), True
        try:
            self._ours(self._prepare)
            output = super().schedule(*args, **kwargs)
            if self._decides:
                self._ours(self._follow)
        finally:
            self._open = False
            self._lower()
        return output

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self._decides:
            self._turner.changed |= Break.PREEMPTION
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._decides:
            self._ours(lambda: self._leave(request))
        return super()._free_request(request, *args, **kwargs)

    # What is ours --------------------------------------------------------------------------------

    def _ours(self, work: Callable[[], None]) -> None:
        """Do what must not harm vLLM if it fails."""
        try:
            work()
        except Exception as fault:  # noqa: BLE001  whatever it is, vLLM goes on
            self._fail(fault)

    def _fail(self, fault: Exception) -> None:
        """Leave the scheduling to vLLM for good, or stop it, and say why."""
        if not self._decides:
            return
        self._decides = False
        self._lower()
        self.waiting.give_up()
        self.policy = self._own_policy
        self.max_num_scheduled_tokens = self._sizes.budget
        self.max_num_active_reqs = self._sizes.slots
        self.scheduler_config.long_prefill_token_threshold = self._sizes.chunk
        stops = self._settings.on_fault is OnFault.STOP
        then = "the engine stops, as it is set up" if stops else "vLLM's own scheduling goes on"
        _log.error("headrace: the scheduler failed; %s", then, exc_info=fault)
        if stops:
            raise RuntimeError(f"headrace: the scheduler failed; {then}") from fault

    def _arrive(self, request: Request) -> None:
        parameters = request.sampling_params
        scalars: Mapping[str, object] | None = parameters and parameters.extra_args
        self._guests.arrive(request, scalars, self._instant())
        self._turner.changed |= Break.ARRIVAL

    def _prepare(self) -> None:
        """Set what the step goes by."""
        knobs = self._turner.knobs(self, self._guests, self._ordered, self._now)
        self._turner.turn(self, knobs)
        self._raised = self._turner.rank_victims(self, self._guests)
        self.policy = SchedulingPolicy.PRIORITY if self._raised else self._own_policy

    def _follow(self) -> None:
        """Note what the step does."""
        self._ordered.account()
        guests = self._guests
        if self._starts != guests.starts or len(guests.running) != len(self.running):
            # Some have slots that did not wait here: those whose KV came from elsewhere.
            guests.seated(self.running)
            self._starts = guests.starts
            self._turner.changed |= Break.COMPOSITION

    def _lower(self) -> None:
        """Give back the priorities that were raised for a step."""
        raised, self._raised = self._raised, []
        for guest in raised:
            guest.request.priority = guest.own_priority

    def _leave(self, request: Request) -> None:
        guest = self._guests.get(request.request_id)
        if guest is not None:
            self._guests.leave(guest)
            self._turner.changed |= Break.END


def _runs(request: EngineRequest) -> bool:
    return request.status is RequestStatus.RUNNING


def _probe() -> Request:
    """Return a request of the least that one has, to look at."""
    return Request("headrace", [0], SamplingParams(max_tokens=1), None)
