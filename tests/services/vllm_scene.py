"""What is said between a test and the process that steps vLLM's scheduler.

Both sides import this: a test in our environment, `vllm_stepper` in vLLM's, which has msgspec and no
pytest. Instants are virtual; a step's are in ps, so that nothing is lost where steps follow each other.
"""

from typing import Any

from msgspec import Struct

from headrace.model.profile import Profile

ASYNC = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
"""vLLM's own where it plans the next step while the last one runs, as it does by default on GPUs."""
SYNC = "vllm.v1.core.sched.scheduler.Scheduler"
"""vLLM's own where it plans a step after the last one's outputs are in, as on a CPU."""
OURS = "headrace.adapters.vllm_plugin.SLOScheduler"


class Engine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scheduler and the settings of vLLM that it sees."""

    scheduler: str = ASYNC
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_gpu_blocks: int = 1_024
    """With the null block, which no request gets."""
    policy: str = "fcfs"
    additional_config: dict[str, Any] = {}
    async_scheduling: bool = True
    """Whether two steps are in flight at once. vLLM has it off on a CPU, whatever it is told."""
    prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    reserve_full_isl: bool = True
    """Whether one starts only where its whole prompt fits. False: where its first chunk does."""
    max_model_len: int = 32_768


class Asked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request; it ends at `max_tokens` unless aborted."""

    id: str
    at_ns: int = 0
    length: int = 0
    """Prompt tokens, drawn from `seed`; 0: `prompt` has them."""
    seed: int | None = None
    """None: a prompt that no other request begins alike."""
    prompt: tuple[int, ...] = ()
    max_tokens: int = 1
    priority: int = 0
    extra_args: dict[str, Any] | None = None
    """What `vllm_xargs` of a body becomes."""
    cache_salt: str | None = None
    abort_at_ns: int | None = None


class Plant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An error that a function raises instead of running."""

    path: str
    """Dotted, from the package: `headrace.adapters.vllm_plugin.SLOScheduler.schedule`."""
    calls: tuple[int, ...] = ()
    """Which calls fail, from 1; (): all."""


class Scene(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run."""

    engine: Engine
    beside: Engine | None = None
    """Another scheduler on the same requests, stepped in turns with the first, for what steps cost."""
    profile: Profile
    """Prices the steps; its sizes are not looked at."""
    requests: tuple[Asked, ...]
    plants: tuple[Plant, ...] = ()
    read: tuple[str, ...] = ()
    """Dotted attributes of the scheduler to tell at the end."""
    idle_ns: int = 0
    """Pause after a step of nothing while there are requests: vLLM sleeps 1 ms. Where nothing is in
    flight either, 1 ms passes even if this is 0, so that a scheduler may wait for an instant."""
    max_steps: int = 100_000
    """Steps after which a run counts as stuck."""


class Step(Struct, frozen=True, kw_only=True):
    """One call of `schedule` and what came of it."""

    number: int
    planned_ps: int
    start_ps: int
    end_ps: int
    tokens: dict[str, int]
    """By request, in the order of scheduling; {}: a step of nothing, which takes no time."""
    prompts: dict[str, int]
    """Those of them that are prompt tokens, or are computed again after a preemption."""
    new: tuple[str, ...]
    resumed: tuple[str, ...]
    preempted: tuple[str, ...]
    """By this call, in alphabetical order."""
    running: int
    waiting: int
    free_blocks: int
    """As these three stand after the call."""
    schedule_ns: int
    update_ns: int
    """Real time that `schedule` took, and `update_from_output`."""

    @property
    def decodes(self) -> tuple[str, ...]:
        """Those that make a token without a prompt token computed."""
        return tuple(each for each in self.tokens if each not in self.prompts)


class Fate(Struct, frozen=True, kw_only=True):
    """What became of a request, as its client sees it."""

    scheduled_ps: int | None = None
    """When it was first planned: with two steps in flight, one before it starts."""
    token_ps: tuple[int, ...] = ()
    """When each of its tokens was out."""
    finished_ps: int | None = None
    reason: str | None = None
    """vLLM's finish reason; None of one that was aborted, or not over."""
    preemptions: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first start."""

    @property
    def first_token_ps(self) -> int | None:
        """When its first token was out."""
        return self.token_ps[0] if self.token_ps else None


class Run(Struct, frozen=True, kw_only=True):
    """What one scheduler did."""

    scheduler: str
    """The class that ran, dotted."""
    steps: tuple[Step, ...]
    fates: dict[str, Fate]
    error: str | None
    """The traceback of what escaped the scheduler and would have ended the engine."""
    stuck: bool
    """Whether it was ended with requests that it did not get done."""
    free_blocks: int
    total_blocks: int
    """Without the null block."""
    left: dict[str, int]
    """Sizes of the scheduler's own collections of requests."""
    said: tuple[str, ...]
    """Lines logged at warning or above, the first 200."""
    read: dict[str, Any]

    @property
    def is_clean(self) -> bool:
        """Whether it came to its end with empty books: all blocks free, no request left anywhere."""
        whole = self.error is None and not self.stuck
        return whole and self.free_blocks == self.total_blocks and not any(self.left.values())


class Answer(Struct, frozen=True, kw_only=True):
    """What the process answers to a scene."""

    runs: tuple[Run, ...] = ()
    """Of the engine, and of the one beside it."""
    failed: str | None = None
    """The traceback if there was no run: a mistake in the scene or in the stepper."""
