"""Steps vLLM's scheduler without server, model or real time.

    PYTHON -m tests.services.vllm_stepper MODEL_FOLDER

PYTHON is that of vLLM's environment. One scene a line on standard input, one answer a line on standard
output (`vllm_scene`). The calls come in the order of vLLM's engine core: inputs that arrived, then the
next step's plan, then, once as many steps are in flight as the engine takes, the outputs of the oldest.
"""

import gc
import importlib
import inspect
import logging
import os
import random
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from headrace.model.profile import Profile
from headrace.units import NS_PER_MS, NS_PER_S, PS_PER_NS
from tests.services.vllm_scene import SYNC, Answer, Asked, Engine, Fate, Plant, Run, Scene, Step

VOCABULARY = range(3, 4_096)
"""Token ids of the test's model but the special ones."""
_IDLE_NS = NS_PER_MS
_LINES = 200


class PlantedError(RuntimeError):
    """Raised where a scene says so."""


class Flight:
    """A step whose outputs are not in yet."""

    def __init__(self, plan: Any, output: Any, step: dict[str, Any]) -> None:
        """Keep vLLM's plan, what the model will say, and what is to be told of the step."""
        self.plan, self.output, self.step = plan, output, step


class Model:
    """Says one token for each prompt that is complete, and how long a step takes."""

    def __init__(self, profile: Profile) -> None:
        """Price steps by a profile."""
        self._profile = profile
        self._targets: dict[str, int] = {}
        self._made = 0

    def start(self, request: Any) -> None:
        """Note what has to be computed of one that starts, or starts again, before it decodes."""
        self._targets[request.request_id] = request.num_tokens

    def step(
        self, tokens: dict[str, int], requests: dict[str, Any]
    ) -> tuple[Any, int, dict[str, int]]:
        """Return a step's output, its time in ps and its prompt tokens by request."""
        if not tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT, 0, {}
        prompts: dict[str, int] = {}
        sampled: list[list[int]] = []
        decodes = context = span = 0
        for name, count in tokens.items():
            end = requests[name].num_computed_tokens
            start = end - count
            if start < self._targets[name]:
                prompts[name] = count
                span += end * end - start * start
            else:
                decodes += 1
                context += end
            sampled.append([self._token()] if end >= self._targets[name] else [])
        output = ModelRunnerOutput(
            req_ids=list(tokens),
            req_id_to_index={name: nth for nth, name in enumerate(tokens)},
            sampled_token_ids=sampled,
        )
        took = self._profile.step_ps(decodes, context, sum(prompts.values()), span)
        return output, took, prompts

    def _token(self) -> int:
        self._made += 1
        return VOCABULARY[self._made * 7_919 % len(VOCABULARY)]


class Drive:
    """One scheduler and its virtual time."""

    def __init__(self, model: str, engine: Engine, scene: Scene) -> None:
        """Build the scheduler as vLLM's engine core does."""
        self._scene, self._engine = scene, engine
        self.scheduler, self._hasher, self._depth = built(model, engine)
        self._model = Model(scene.profile)
        self._coming = deque(sorted(scene.requests, key=lambda each: each.at_ns))
        aborts = [each for each in scene.requests if each.abort_at_ns is not None]
        self._aborts = deque(sorted(aborts, key=lambda each: each.abort_at_ns or 0))
        self._now = self._free_at = 0
        self._flying: deque[Flight] = deque()
        self._steps: list[Step] = []
        self._number = self._idle = 0
        self._fates: dict[str, dict[str, Any]] = {each.id: {} for each in scene.requests}
        self._requests: dict[str, Any] = {}
        self._error: str | None = None
        self._stuck = False
        if hasattr(self.scheduler, "clock"):
            self.scheduler.clock = lambda: self._now // PS_PER_NS

    def turn(self) -> bool:
        """Do what the engine's loop does in one turn; return whether there may be another."""
        if self._error or self._stuck:
            return False
        try:
            return self._turn()
        except Exception:  # noqa: BLE001  whatever it is, it would end the engine
            self._error = traceback.format_exc()[-4_000:]
            return False

    def _turn(self) -> bool:
        self._hear()
        if not (self.scheduler.has_requests() or self._flying):
            if not self._coming:
                return False
            self._now = max(self._now, self._coming[0].at_ns * PS_PER_NS)
            self._hear()
        self._step()
        return True

    def _hear(self) -> None:
        """Take what arrived by now, and abort what was given up by now."""
        now = self._now // PS_PER_NS
        while self._coming and self._coming[0].at_ns <= now:
            asked = self._coming.popleft()
            request = requested(asked, len(self._coming), self._hasher)
            self._requests[asked.id] = request
            self.scheduler.add_request(request)
        self._abort()

    def _abort(self) -> None:
        """Abort what was given up by now and is known; the rest is told again after it arrived."""
        now = self._now // PS_PER_NS
        known: list[Asked] = []
        unknown: list[Asked] = []
        while self._aborts and (self._aborts[0].abort_at_ns or 0) <= now:
            asked = self._aborts.popleft()
            (known if asked.id in self._requests else unknown).append(asked)
        self._aborts.extendleft(unknown[::-1])
        if known:
            ids = [each.id for each in known]
            self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    def _step(self) -> None:
        """Plan a step if there is anything to plan for; land the oldest if no more can fly."""
        executed = False
        if self.scheduler.has_requests():
            flight = self._planned()
            executed = bool(flight.step["tokens"])
            self._flying.append(flight)
            more = executed or self.scheduler.has_requests()
            if len(self._flying) < self._depth and more:
                self._rest(executed)
                return
        if self._flying:
            self._land(self._flying.popleft())
        self._rest(executed)

    def _rest(self, executed: bool) -> None:
        """Pass time where the engine would sleep, and give up where it would do so for ever."""
        self._stuck = self._number >= self._scene.max_steps
        if executed or not self.scheduler.has_requests():
            self._idle = 0
            return
        self._now += self._scene.idle_ns * PS_PER_NS
        if self._flying or not self.scheduler.get_num_unfinished_requests():
            return
        if not self._scene.idle_ns:
            self._now += _IDLE_NS * PS_PER_NS
        self._idle += 1
        self._stuck = self._stuck or (self._idle > self._scene.max_steps // 10 and not self._coming)

    def _planned(self) -> Flight:
        scheduler = self.scheduler
        begun = time.perf_counter_ns()
        plan = scheduler.schedule(False)
        took = time.perf_counter_ns() - begun
        tokens = dict(plan.num_scheduled_tokens)
        starts = [each.req_id for each in plan.scheduled_new_reqs]
        starts += [each for each in tokens if each in plan.scheduled_cached_reqs.resumed_req_ids]
        for each in starts:
            self._model.start(scheduler.requests[each])
        fates = self._fates
        new = tuple(each for each in starts if "scheduled_ps" not in fates[each])
        for each in new:
            fates[each]["scheduled_ps"] = self._now
        output, cost, prompts = self._model.step(tokens, scheduler.requests)
        if tokens:
            scheduler.get_grammar_bitmask(plan)
        start = max(self._now, self._free_at)
        self._free_at = start + cost
        self._number += 1
        running, waiting = scheduler.get_request_counts()
        step = {
            "number": self._number,
            "planned_ps": self._now,
            "start_ps": start,
            "end_ps": self._free_at,
            "tokens": tokens,
            "prompts": prompts,
            "new": new,
            "resumed": tuple(each for each in starts if each not in new),
            "preempted": tuple(sorted(plan.preempted_req_ids or ())),
            "running": running,
            "waiting": waiting,
            "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "schedule_ns": took,
        }
        return Flight(plan, output, step)

    def _land(self, flight: Flight) -> None:
        self._now = max(self._now, flight.step["end_ps"])
        self._abort()
        begun = time.perf_counter_ns()
        outputs = self.scheduler.update_from_output(flight.plan, flight.output)
        flight.step["update_ns"] = time.perf_counter_ns() - begun
        self._steps.append(Step(**flight.step))
        for each in (one for batch in outputs.values() for one in batch.outputs):
            fate = self._fates[each.request_id]
            fate.setdefault("token_ps", []).extend([self._now] * len(each.new_token_ids))
            if each.prefill_stats is not None:
                fate["cached_tokens"] = each.prefill_stats.num_cached_tokens
            if each.finish_reason is not None:
                fate["finished_ps"] = self._now
                fate["reason"] = str(each.finish_reason)

    def run(self, said: Sequence[str]) -> Run:
        """Return what came of it."""
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        cls = type(scheduler)
        fates = {
            name: Fate(
                **{**fate, "token_ps": tuple(fate.get("token_ps", ()))},
                preemptions=getattr(self._requests.get(name), "num_preemptions", 0),
            )
            for name, fate in self._fates.items()
        }
        kept = ("requests", "running", "waiting", "kv_holding_waiting", "deferred_waiting")
        return Run(
            scheduler=f"{cls.__module__}.{cls.__qualname__}",
            steps=tuple(self._steps),
            fates=fates,
            error=self._error,
            stuck=self._stuck,
            free_blocks=pool.get_num_free_blocks(),
            total_blocks=pool.num_gpu_blocks - 1,
            left={name: len(getattr(scheduler, name)) for name in kept},
            said=tuple(said),
            read={path: plain(scheduler, path) for path in self._scene.read},
        )


def built(model: str, engine: Engine) -> tuple[Any, Callable[[Any], Any] | None, int]:
    """Return a scheduler, the hasher of its prefix cache and how many steps may be in flight."""
    config = EngineArgs(
        model=model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=engine.block_size,
        enable_prefix_caching=engine.prefix_caching,
        long_prefill_token_threshold=engine.long_prefill_token_threshold,
        scheduler_reserve_full_isl=engine.reserve_full_isl,
        scheduling_policy=engine.policy,
        scheduler_cls=engine.scheduler,
        additional_config=engine.additional_config,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = engine.async_scheduling  # off on a CPU until here
    config.cache_config.num_gpu_blocks = engine.num_gpu_blocks
    spec = FullAttentionSpec(
        block_size=engine.block_size,
        num_kv_heads=config.model_config.get_num_kv_heads(config.parallel_config),
        head_size=config.model_config.get_head_size(),
        dtype=config.model_config.dtype,
    )
    pool = KVCacheConfig(engine.num_gpu_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    block_size, hash_size = resolve_kv_cache_block_sizes(pool, config)
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=pool,
        structured_output_manager=StructuredOutputManager(config),
        include_finished_set=False,
        log_stats=True,
        block_size=block_size,
        hash_block_size=hash_size,
    )
    hasher = None
    if engine.prefix_caching:
        hash_of = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_of)
        hasher = get_request_block_hasher(hash_size, hash_of)
    return scheduler, hasher, config.max_concurrent_batches


def requested(asked: Asked, nth: int, hasher: Callable[[Any], Any] | None) -> Any:
    """Return a request as vLLM's front end hands it in; `nth` seeds a prompt of its own."""
    prompt = list(asked.prompt)
    if asked.length:
        draw = random.Random(f"{nth} {asked.id}" if asked.seed is None else asked.seed)
        prompt = draw.choices(VOCABULARY, k=asked.length)
    return Request(
        request_id=asked.id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(
            max_tokens=asked.max_tokens, ignore_eos=True, extra_args=asked.extra_args
        ),
        pooling_params=None,
        arrival_time=asked.at_ns / NS_PER_S,
        cache_salt=asked.cache_salt,
        priority=asked.priority,
        block_hasher=hasher,
    )


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Let a function fail at some of its calls."""
    *above, name = plant.path.split(".")
    owner = owner_of(above)
    original = inspect.getattr_static(owner, name)
    call = getattr(original, "__func__", original)
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if not plant.calls or calls in plant.calls:
            raise PlantedError(f"call {calls} of {plant.path}")
        return call(*args, **kwargs)

    own = name in vars(owner)
    wrap = type(original) if isinstance(original, staticmethod | classmethod) else None
    setattr(owner, name, wrap(failing) if wrap else failing)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def owner_of(path: Sequence[str]) -> Any:
    """Return the module or class that a dotted path names."""
    for cut in range(len(path), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(path[:cut]))
        except ModuleNotFoundError:
            continue
        for name in path[cut:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(".".join(path))


def plain(owner: Any, path: str) -> Any:
    """Return what is under a dotted path, as JSON can say it."""
    found = owner
    for name in path.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    if callable(found):
        found = found()
    return msgspec.to_builtins(found, enc_hook=repr, str_keys=True)


class Lines(logging.Handler):
    """Keeps the first lines at warning or above."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one, if there is room."""
        if len(self.lines) < _LINES:
            line = f"{record.name} {record.levelname} {record.getMessage()}"
            if record.exc_info:
                line += f"\n{self.format(record)}"
            self.lines.append(line)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what is logged."""
    handler = Lines()
    loggers = [logging.getLogger(), logging.getLogger("vllm")]  # vLLM's does not pass on
    for each in loggers:
        each.addHandler(handler)
    try:
        yield handler.lines
    finally:
        for each in loggers:
            each.removeHandler(handler)


def played(model: str, scene: Scene) -> tuple[Run, ...]:
    """Run a scene; two schedulers take their turns one after the other, each first every other time."""
    with ExitStack() as stack:
        said = stack.enter_context(heard())
        for plant in scene.plants:
            stack.enter_context(planted(plant))
        engines = [scene.engine, *([scene.beside] if scene.beside else [])]
        drives = [Drive(model, each, scene) for each in engines]
        going = list(drives)
        while going:
            going = [each for each in going if each.turn()][::-1]
        return tuple(each.run(said) for each in drives)


def main(model: str) -> None:
    """Answer scenes until there are no more."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed is no answer
    built(
        model, Engine(scheduler=SYNC)
    )  # the first one sets up logging anew, and nothing would be heard
    gc.freeze()  # as vLLM does once it has started
    for line in sys.stdin.buffer:
        try:
            answer = Answer(runs=played(model, msgspec.json.decode(line, type=Scene)))
        except Exception:  # noqa: BLE001  told to the test
            answer = Answer(failed=traceback.format_exc()[-4_000:])
        out.write(msgspec.json.encode(answer) + b"\n")
        out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
