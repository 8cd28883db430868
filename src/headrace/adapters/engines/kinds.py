"""What is each kind of engine able to do, and by which names does it tell of its load?

One table. Nothing else asks which kind an engine is: whoever needs an ability looks it up here, and
the conformance suite (`tests/conformance`) holds the table against real servers, what is said to be
lacking included. `docs/engines.md` repeats it.
"""

from enum import StrEnum

from msgspec import Struct

from headrace.model.engine import EngineKind, Preemption, Scheduler


class Signal(StrEnum):
    """What an engine may tell of its load. Also a metric label: a closed list."""

    RUNNING = "running"
    WAITING = "waiting"
    KV_SHARE = "kv_share"
    """Of its KV cache in use; 1 is full."""
    KV_TOKENS = "kv_tokens"
    """That its KV cache holds when full."""
    KV_BLOCKS = "kv_blocks"
    """The same in blocks of its own size."""
    KV_BLOCK_TOKENS = "kv_block_tokens"
    PREEMPTIONS = "preemptions"
    PREFIX_QUERIED = "prefix_queried"
    """Prompt tokens looked up in its prefix cache."""
    PREFIX_HIT = "prefix_hit"
    """Prompt tokens found there."""
    PREFIX_MISSED = "prefix_missed"
    """Prompt tokens not found there."""
    PREFIX_HIT_BLOCKS = "prefix_hit_blocks"
    """Blocks of its own size found there."""


class Feature(StrEnum):
    """What an engine may be able to do beyond answering; the value says it in words."""

    LOAD = "tells requests running and waiting"
    KV_USE = "tells how full its KV cache is"
    KV_EVENTS = "publishes what enters and leaves its KV cache"
    CACHED_TOKENS = "tells the cached tokens of a prompt"
    USAGE_APART = "tells the usage of a stream in a chunk of its own"
    CONTINUOUS_USAGE = "tells usage in every chunk if asked"
    ABORT_BY_ID = "ends a request by its id"
    PRIORITY = "runs waiting requests by their `priority`"
    METADATA = "takes metadata with a request (`vllm_xargs`)"
    CHOICES = "gives several answers at once (`n`)"
    CHOICES_USAGE = "counts the tokens of all of them"
    MODEL_CHECK = "refuses a model that it does not serve"
    CONTEXT_CHECK = "refuses a prompt beyond its context"
    OUTPUT_CHECK = "refuses `max_tokens` beyond its context"
    QUEUE_BOUND = "refuses when full: 503, as a status or as a stream's event"
    EXACT_LENGTH = "makes exactly `max_tokens` with `ignore_eos`"
    TOKENIZE = "counts the tokens of a text"
    KEEP_ALIVE = "keeps an idle connection open for as long as we do"


class Priority(Struct, frozen=True, kw_only=True):
    """How an engine reads `priority`."""

    lower_first: bool


class Abort(Struct, frozen=True, kw_only=True):
    """How an engine is told to end a request by its id. Closing the connection does as well."""

    path: str
    field: str
    listed: bool
    """Whether the field takes a list of ids."""


class Tokenize(Struct, frozen=True, kw_only=True):
    """How an engine is asked for the tokens of a text."""

    path: str = "/tokenize"
    text: str
    """The field that the text goes into."""
    count: str | None
    """The field of the answer that is the count; None: `tokens` is a list to be counted."""
    chats: bool
    """Whether it takes `messages` too, and applies the chat template."""
    more: dict[str, bool] = {}
    """What it is told beside a text, so that it counts the text as it would complete it."""


class CacheInfo(Struct, frozen=True):
    """A metric whose labels tell the size of the KV cache."""

    name: str
    block_tokens: str
    """Label with the tokens of a block."""
    blocks: str
    """Label with the number of blocks."""


Names = dict[Signal, tuple[str, ...]]


class Traits(Struct, frozen=True, kw_only=True):
    """One kind of engine."""

    lacks: frozenset[Feature]
    ready_by_token: bool = True
    """Whether it is asked for a token before it counts as up. Hosted ones are paid by the token and
    were up before us."""
    health_path: str = "/health"
    metrics_path: str | None = "/metrics"
    """None: it is never asked for its load."""
    slots_path: str | None = None
    """Where a list of its slots is, for when the metrics are switched off."""
    prefixes: tuple[str, ...] = ()
    """How the names of its metrics begin: any of these, by version."""
    names: Names = {}
    """By signal its names without prefix, the newest first; each with or without `_total`."""
    cache_info: CacheInfo | None = None
    expected: frozenset[Signal] = frozenset()
    """Signals that all its versions tell: if one is missing it was renamed, and somebody must know."""
    priority: Priority | None = None
    """None: it has none, or there are none of ours that it could read."""
    abort: Abort | None = None
    always_told: bool = False
    """Whether it gets metadata whatever orders it: it refuses none, and what it is told can be looked at."""
    preemption: tuple[Preemption, ...] = ()
    """How requests may give way in it; of emulated ones, whichever of these it is started with."""
    tokenize: Tokenize | None = None

    def has(self, feature: Feature) -> bool:
        """Return whether it is able to do something."""
        return feature not in self.lacks

    def may_have(self, scheduler: Scheduler) -> bool:
        """Return whether what waits in it can be ordered so, if it was started for that."""
        needed = _NEEDED.get(scheduler)
        return needed is None or self.has(needed)

    def is_told(self, scheduler: Scheduler) -> bool:
        """Return whether it gets metadata, ordered so."""
        wanted = self.always_told or scheduler is Scheduler.HEADRACE
        return wanted and self.has(Feature.METADATA)


_NEEDED = {Scheduler.PRIORITY: Feature.PRIORITY, Scheduler.HEADRACE: Feature.METADATA}


_VLLM_NAMES: Names = {
    Signal.RUNNING: ("num_requests_running",),
    Signal.WAITING: ("num_requests_waiting",),
    Signal.KV_SHARE: ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    Signal.PREEMPTIONS: ("num_preemptions",),
    Signal.PREFIX_QUERIED: ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    Signal.PREFIX_HIT: ("prefix_cache_hits", "gpu_prefix_cache_hits"),
}
_LOAD = frozenset({Signal.RUNNING, Signal.WAITING})
_LOAD_AND_KV = _LOAD | {Signal.KV_SHARE}
_VLLM = Traits(
    lacks=frozenset(),
    prefixes=("vllm:",),
    names=_VLLM_NAMES,
    cache_info=CacheInfo("cache_config_info", "block_size", "num_gpu_blocks"),
    expected=_LOAD_AND_KV,
    priority=Priority(lower_first=True),
    abort=Abort(path="/inference/v1/abort_requests", field="request_ids", listed=True),
    preemption=(Preemption.RECOMPUTE,),
    tokenize=Tokenize(text="prompt", count="count", chats=True),
)

KINDS: dict[EngineKind, Traits] = {
    EngineKind.VLLM: _VLLM,
    EngineKind.SGLANG: Traits(
        lacks=frozenset({Feature.METADATA, Feature.MODEL_CHECK}),
        prefixes=("sglang:", "sglang_"),
        names={
            Signal.RUNNING: ("num_running_reqs",),
            Signal.WAITING: ("num_queue_reqs",),
            Signal.KV_SHARE: ("token_usage",),
            Signal.KV_TOKENS: ("max_total_num_tokens",),
            # The gauge num_retracted_reqs is of the last batch only, and not taken for it.
            Signal.PREEMPTIONS: ("num_retracted_requests",),
            Signal.PREFIX_QUERIED: ("prompt_tokens",),
            Signal.PREFIX_HIT: ("cached_tokens",),
        },
        cache_info=CacheInfo("cache_config_info", "page_size", "num_pages"),
        expected=_LOAD_AND_KV,
        priority=Priority(lower_first=False),
        abort=Abort(path="/abort_request", field="rid", listed=False),
        preemption=(Preemption.RECOMPUTE,),
        tokenize=Tokenize(text="prompt", count="count", chats=False),
    ),
    EngineKind.LLAMACPP: Traits(
        lacks=frozenset(
            {
                Feature.KV_USE,
                Feature.KV_EVENTS,
                Feature.USAGE_APART,
                Feature.CONTINUOUS_USAGE,
                Feature.ABORT_BY_ID,
                Feature.PRIORITY,
                Feature.METADATA,
                Feature.CHOICES_USAGE,
                Feature.MODEL_CHECK,
                Feature.OUTPUT_CHECK,
                Feature.QUEUE_BOUND,
            }
        ),
        slots_path="/slots",
        prefixes=("llamacpp:",),
        names={
            Signal.RUNNING: ("requests_processing",),
            Signal.WAITING: ("requests_deferred",),
            Signal.PREFIX_MISSED: ("prompt_tokens",),
            Signal.PREFIX_HIT: ("prompt_tokens_cached",),
        },
        expected=_LOAD,
        # It begins completions with its first token, and adds none when it is asked.
        tokenize=Tokenize(
            text="content",
            count=None,
            chats=False,
            more={"add_special": True, "parse_special": True},
        ),
    ),
    # Known by its metrics alone: what else it is able to do nobody has looked at.
    EngineKind.TRTLLM: Traits(
        lacks=frozenset(Feature) - {Feature.LOAD, Feature.KV_USE, Feature.KEEP_ALIVE},
        metrics_path="/prometheus/metrics",
        prefixes=("trtllm_", "trtllm:"),
        names={
            Signal.RUNNING: ("num_requests_running",),
            Signal.WAITING: ("num_requests_waiting",),
            Signal.KV_SHARE: ("kv_cache_utilization",),
            Signal.KV_BLOCKS: ("kv_cache_max_blocks",),
            Signal.KV_BLOCK_TOKENS: ("kv_cache_tokens_per_block",),
            Signal.PREEMPTIONS: ("num_paused_requests",),
            Signal.PREFIX_HIT_BLOCKS: ("kv_cache_reused_blocks",),
        },
        expected=_LOAD_AND_KV,
    ),
    EngineKind.EMULATED: Traits(
        lacks=frozenset(
            {
                Feature.KV_EVENTS,
                Feature.PRIORITY,
                Feature.CHOICES,
                Feature.CHOICES_USAGE,
            }
        ),
        prefixes=("vllm:",),
        names=_VLLM_NAMES,
        cache_info=_VLLM.cache_info,
        expected=_LOAD_AND_KV,
        abort=_VLLM.abort,
        always_told=True,
        preemption=tuple(Preemption),
        tokenize=_VLLM.tokenize,
    ),
    EngineKind.OPENAI: Traits(
        lacks=frozenset(Feature) - {Feature.CHOICES, Feature.CHOICES_USAGE, Feature.CACHED_TOKENS},
        ready_by_token=False,
        metrics_path=None,
    ),
}
"""Every kind. Of TensorRT-LLM and unknown engines nothing is asked that is not known to be there."""
