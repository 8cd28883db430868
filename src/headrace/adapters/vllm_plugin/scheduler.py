"""vLLM's scheduler, with our order, our knobs and our victims (TOK-5).

A subclass of the asynchronous one, since any other turns asynchronous scheduling off. It leaves
`schedule()` to vLLM and changes what that goes by: the waiting queue, the limits of a step, the order of
`running`, and the priorities of those who may have to give way. What is decided is decided by
`policy/fairness` and `policy/batching`, as at a gateway and in an emulated engine.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import vllm
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy, create_request_queue
from vllm.v1.request import Request, RequestStatus

from headrace.adapters.vllm_plugin import contract
from headrace.adapters.vllm_plugin.guests import EngineRequest, Guest, Guests
from headrace.adapters.vllm_plugin.metrics import Metrics, NoMetrics, metrics
from headrace.adapters.vllm_plugin.queue import Looked, Ordered, Queue, TurnQueue
from headrace.adapters.vllm_plugin.recording import Recorder
from headrace.adapters.vllm_plugin.settings import (
    Mode,
    OnFault,
    Settings,
    Untested,
    kind_of,
    profile_of,
    rates_of,
    read,
    token_ns_of,
)
from headrace.adapters.vllm_plugin.steplog import StepWriter
from headrace.adapters.vllm_plugin.turning import Sizes, Turner
from headrace.model.steplog import Head, Note
from headrace.policy.batching.knobs import Break
from headrace.policy.fairness.line import Line
from headrace.units import NS_PER_MS, NS_PER_S, InstantNs, Tokens, ms

_log = logging.getLogger("vllm.headrace")
RequestQueue.register(TurnQueue)


class SLOScheduler(AsyncScheduler):  # type: ignore[misc]  # vLLM is untyped here
    """`--scheduler-cls headrace.adapters.vllm_plugin.SLOScheduler`."""

    # vLLM's, which are set here.
    waiting: Any
    policy: Any
    max_num_scheduled_tokens: int
    max_num_active_reqs: int
    adaptive_long_prefill_threshold: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take over vLLM's scheduler, or refuse to: `contract.UnsupportedError`, ValueError of the settings."""
        super().__init__(*args, **kwargs)
        self.clock: Callable[[], int] = time.monotonic_ns
        self._settings = settings = read(self.vllm_config.additional_config)
        self._decides, self._watches = self._supported(settings)
        self._now = InstantNs(0)
        self._open = False  # whether a step is being planned
        self._raised: list[Guest] = []
        self._starts = 0
        self._metrics: Metrics = NoMetrics()
        self._recorder: Recorder | None = None
        if self._decides or self._watches:
            self._set_up(settings)

    def _supported(self, settings: Settings) -> tuple[bool, bool]:
        """Return whether to decide here, in this release, and whether to look on; say so if not."""
        lacks = contract.missing(self, _probe(), RequestQueue)
        fault = contract.fault(vllm.__version__, lacks)
        passive = settings.mode is Mode.PASSIVE or settings.untested is Untested.PASSIVE
        if fault is None:
            return settings.mode is Mode.ENFORCE, True
        if passive:
            _log.error("headrace: %s; passive, as it is set up: vLLM schedules", fault)
            return False, not lacks
        if settings.untested is Untested.TRY and not lacks:
            _log.warning("headrace: %s; going on, as it is set up", fault)
            return True, True
        choice = '"untested": "passive" runs vLLM\'s own scheduling'
        raise contract.UnsupportedError(f"headrace: {fault}. Use a tested release, or {choice}")

    def _set_up(self, settings: Settings) -> None:
        """Make what is ours, and let vLLM go by it if we decide."""
        self._sizes = sizes = self._measure()
        profile = profile_of(
            settings, capacity=sizes.capacity, budget=sizes.budget, slots=sizes.slots
        )
        late_ns = ms(settings.late_ms)
        rates, token_ns = rates_of(settings, profile), token_ns_of(settings, profile)
        self._guests = Guests(Line(settings.ordering, rates, token_ns, late_ns), late_ns)
        self._own_policy = self.policy
        self._turner = Turner(
            settings.batching,
            profile,
            sizes,
            settings.victims,
            by_priority=self.policy is SchedulingPolicy.PRIORITY,
        )
        self._queue: Queue = Looked(self._guests, self)
        if self._decides:
            self._queue = ordered = Ordered(self._guests, self._own_queue(), self._instant, _runs)
            self.waiting = TurnQueue(ordered, self._own_queue, self._fail)
        self._metrics = metrics()
        self._metrics.mode("enforce" if self._decides else "passive")
        if settings.step_log is not None:
            self._recorder = self._recording(settings, Path(settings.step_log))
        ordering, batching = kind_of(settings.ordering), kind_of(settings.batching)
        how = "scheduling" if self._decides else "looking on, and would schedule"
        _log.info("headrace: %s by %s, %s, profile %s", how, ordering, batching, profile.name)

    def _measure(self) -> Sizes:
        config, groups = self.scheduler_config, self.kv_cache_config.kv_cache_groups
        count = max(1, len(groups))
        blocks = self.kv_cache_manager.block_pool.num_gpu_blocks
        whole = not config.enable_chunked_prefill or config.disable_chunked_mm_input
        if whole or self.need_mamba_block_aligned_split:
            _log.warning("headrace: parts of prompts cannot be cut here: the budget stays vLLM's")
        return Sizes(
            budget=self.max_num_scheduled_tokens,
            slots=self.max_num_active_reqs,
            chunk=config.long_prefill_token_threshold,
            adaptive=self.adaptive_long_prefill_threshold,
            cuts=not whole and not self.need_mamba_block_aligned_split,
            block_tokens=self.block_size,
            least_block=min(
                (one.kv_cache_spec.block_size for one in groups), default=self.block_size
            ),
            groups=count,
            capacity=max(1, blocks // count * self.block_size),
            decode_tokens=1 + self.num_spec_tokens,
        )

    def _recording(self, settings: Settings, path: Path) -> Recorder:
        parallel = self.vllm_config.parallel_config
        if parallel.data_parallel_size > 1:  # an engine each
            path = path.with_name(f"{path.name}.rank{parallel.data_parallel_index}")
        head = Head(
            engine=f"vllm {vllm.__version__}",
            mode="enforce" if self._decides else "passive",
            started_unix_ms=time.time_ns() // NS_PER_MS,
            block_tokens=self._sizes.block_tokens,
            blocks=self.kv_cache_manager.block_pool.num_gpu_blocks,
            ordering=kind_of(settings.ordering),
            batching=kind_of(settings.batching),
            running_limit=self._sizes.slots,
            token_budget=Tokens(self._sizes.budget),
        )
        writer = StepWriter(path, head, told=_disk_fault, mib=settings.step_log_mib)
        return Recorder(writer, self._guests)

    def _own_queue(self) -> Any:
        return create_request_queue(self._own_policy)

    def _instant(self) -> InstantNs:
        """Return the instant of the step that is planned, or else the present one."""
        return self._now if self._open else InstantNs(self.clock())

    # What vLLM calls -----------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Take a request in."""
        if self._watches:
            self._ours(lambda: self._arrive(request))
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step, as vLLM does; under our knobs, if we decide."""
        if not self._watches:
            return super().schedule(*args, **kwargs)
        self._now, self._open = InstantNs(self.clock()), True
        began = time.perf_counter_ns()
        try:
            if self._decides:
                self._ours(self._prepare)
            output = super().schedule(*args, **kwargs)
        finally:
            self._open = False
            self._lower()
        if self._watches:
            self._ours(lambda: self._follow(output.num_scheduled_tokens, began))
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step's outputs in, as vLLM does."""
        outputs = super().update_from_output(*args, **kwargs)
        recorder = self._recorder
        if recorder is not None:
            self._ours(lambda: recorder.done(InstantNs(self.clock())))
        return outputs

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self._watches:
            self._ours(lambda: self._give_way(request))
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._watches:
            self._ours(lambda: self._leave(request))
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        """End, the step log told to its end."""
        if self._recorder is not None:
            self._recorder.close()
        super().shutdown()

    # What is ours --------------------------------------------------------------------------------

    def _ours(self, work: Callable[[], None]) -> None:
        """Do what must not harm vLLM if it fails."""
        try:
            work()
        except Exception as fault:  # noqa: BLE001  whatever it is, vLLM goes on
            self._fail(fault)

    def _fail(self, fault: Exception) -> None:
        """Leave the scheduling to vLLM for good, or stop it, and say why."""
        if not self._watches:
            return
        decided, self._decides, self._watches = self._decides, False, False
        recorder, self._recorder = self._recorder, None
        stops = decided and self._settings.on_fault is OnFault.STOP
        then = "the engine stops, as it is set up" if stops else "vLLM's own scheduling goes on"
        _log.error("headrace: the scheduler failed; %s", then, exc_info=fault)
        if decided:
            self._hand_back()
        self._metrics.mode("stock")
        if recorder is not None:
            text = f"{type(fault).__name__}: {fault}; {then}"
            recorder.close(Note(at_ns=InstantNs(self.clock()), text=text))
        if stops:
            raise RuntimeError(f"headrace: the scheduler failed; {then}") from fault

    def _hand_back(self) -> None:
        """Let vLLM go by what it went by before."""
        self._lower()
        self.waiting.give_up()
        self.policy = self._own_policy
        self.max_num_scheduled_tokens = self._sizes.budget
        self.max_num_active_reqs = self._sizes.slots
        self.scheduler_config.long_prefill_token_threshold = self._sizes.chunk
        self.adaptive_long_prefill_threshold = self._sizes.adaptive

    def _arrive(self, request: Request) -> None:
        if request.request_id in self._guests:
            return  # more of a session's input
        parameters = request.sampling_params
        scalars: Mapping[str, object] | None = parameters and parameters.extra_args
        guest = self._guests.arrive(request, scalars, self._instant())
        self._turner.changed |= Break.ARRIVAL
        if self._recorder is not None:
            self._recorder.arrive(guest)

    def _prepare(self) -> None:
        """Set what the step goes by."""
        knobs = self._turner.knobs(self, self._guests, self._queue, self._now)
        self._turner.turn(self, self._guests, knobs)
        self._raised = self._turner.rank_victims(self, self._guests)
        self.policy = SchedulingPolicy.PRIORITY if self._raised else self._own_policy

    def _follow(self, tokens: dict[str, int], began: int) -> None:
        """Note what the step does."""
        self._queue.account(tokens)
        guests = self._guests
        others = guests.starts != self._starts or len(guests.running) != len(self.running)
        if others or not tokens.keys() <= guests.running.keys():
            guests.follow(self.running, tokens)
            self._starts = guests.starts
            self._turner.changed |= Break.COMPOSITION
        took = time.perf_counter_ns() - began
        self._metrics.planned(took / NS_PER_S)
        if self._recorder is not None:
            proposed = None
            if not self._decides:
                knobs = self._turner.knobs(self, self._guests, self._queue, self._now)
                proposed = self._turner.within(knobs)
            self._recorder.plan(self, tokens, self._now, took, proposed)

    def _give_way(self, request: Request) -> None:
        self._turner.changed |= Break.PREEMPTION
        guest = self._guests.get(request.request_id)
        if guest is not None:
            self._metrics.preempted(guest)
            if self._recorder is not None:
                self._recorder.preempt(guest)

    def _lower(self) -> None:
        """Give back the priorities that were raised for a step."""
        raised, self._raised = self._raised, []
        for guest in raised:
            guest.request.priority = guest.own_priority

    def _leave(self, request: Request) -> None:
        guest = self._guests.get(request.request_id)
        if guest is None:
            return
        self._turner.changed |= Break.END
        if self._recorder is not None:
            self._recorder.end(guest)
        self._metrics.ended(guest)
        self._guests.leave(guest)


def _runs(request: EngineRequest) -> bool:
    return request.status is RequestStatus.RUNNING


def _disk_fault(text: str) -> None:
    _log.error("headrace: %s", text)


def _probe() -> Request:
    """Return a request of the least that one has, to look at."""
    return Request("headrace", [0], SamplingParams(max_tokens=1), None)
