"""What can be configured? The deployment the plane decides by, and the process around it.

Every setting gives unit, default and why. What the plane decides by is `deployment` alone: it is
the first event of a journal, so nothing that only concerns this process belongs in it.
"""

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from headrace.model.deployment import END, Name
from headrace.model.engine import EngineKind, Scheduler
from headrace.model.price import PriceSpec
from headrace.policy.batching import Batching, ChunkedPrefill
from headrace.policy.batching.preemption import RECOMPUTE_ONLY, Offers
from headrace.policy.catalog import PlaneConfig
from headrace.policy.fairness.leftover import Leftover
from headrace.policy.ordering.orders import Fifo, Ordering
from headrace.units import MIB

Path = Annotated[str, Meta(min_length=1, max_length=4_096)]
KeyHash = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}" + END, max_length=71)]
_Host = Annotated[str, Meta(min_length=1, max_length=255)]
_Word = Annotated[str, Meta(max_length=4_096)]


class KeySpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An API key, by its hash: the key itself is told once and kept nowhere."""

    name: Name
    """Names the key in logs, so that one can be withdrawn."""
    tenant: Name
    """Whose requests it marks."""
    hash: KeyHash
    """SHA-256 of a key that `headrace key new` made: 256 random bits need no slow hash."""


class TlsSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """With which certificate callers are spoken to."""

    cert_file: Path
    """The certificate and those that vouch for it, as PEM."""
    key_file: Path
    """Its private key, as PEM, without a password."""


class ServerSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and how much the gateway listens."""

    host: _Host = "127.0.0.1"
    """Address. 127.0.0.1: nothing is open to the network unless asked for."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8_000
    """TCP port; 0 takes a free one. 8000: what vLLM listens on, so callers change nothing."""
    tls: TlsSpec | None = None
    """Certificate of the traffic listener; none: plain HTTP, as behind a proxy that has one."""
    body_limit_bytes: Annotated[int, Meta(ge=1_024, le=256 * MIB)] = 8 * MIB
    """Longest request body, in bytes. 8 MiB: a million tokens of four letters, with room for JSON."""
    concurrency: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """Requests open at once, streams included, and as many whose body is still on its way;
    beyond, 503 at once. 10,000: more than one process can stream to; it bounds memory, and
    admission does the deciding."""
    header_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 10.0
    """Seconds a caller may take to send a request's head, and again its body and each MiB of
    it; beyond, 408. As long for the handshake of TLS. 10: slow links pass, idlers do not."""
    write_stall_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0
    """Seconds in which a slow caller must take most of the 64 KiB that wait for it; beyond, it
    counts as gone. 60: a phone in a tunnel comes back, a stuck process does not."""
    drain_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    """Seconds that running streams get to finish at shutdown. 30: Kubernetes' grace period."""
    trusted_replay: bool = False
    """Whether `x-headrace-replay-output` is believed. False: only a test bench may tell the
    emulated engine how long an answer is to be."""


class AdminKeySpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key to the admin listener; no tenant's key opens it, and it opens nothing else."""

    name: Name
    """Who holds it, as the audit names them."""
    hash: KeyHash
    """SHA-256 of a key that `headrace key new --admin` made."""


class AdminSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where operators and Prometheus look in."""

    host: _Host = "127.0.0.1"
    """Address. 127.0.0.1: the network sees traffic, not the controls."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 9_090
    """TCP port; 0 takes a free one. 9,090: where metrics are looked for by habit."""
    keys: Annotated[tuple[AdminKeySpec, ...], Meta(max_length=1_000)] = ()
    """Who may look in and change things. At least one, unless `open`."""
    open: bool = False
    """Whether everybody on this machine may do everything, without a key. False: on a shared
    machine that is anybody. Allowed on a loopback address only."""
    tenant_series: Annotated[int, Meta(ge=0, le=10_000)] = 200
    """Tenants with metrics of their own, in the order of `deployment.tenants`; the others are
    added up as `other`. 200: some ten thousand series, a tenth of a second to read."""
    audit_log: Path | None = None
    """File that gets one JSON line for each change; none: the log `headrace.audit` alone."""


_Endpoint = Annotated[
    str, Meta(max_length=1_024, pattern=r"^(tcp://[^\s/]+:[0-9]{1,5}|ipc://\S+)" + END)
]


class KvEventsSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an engine publishes what enters and leaves its KV cache, over ZeroMQ (extra `kv-events`)."""

    endpoint: _Endpoint
    """`tcp://host:port` or `ipc://path`, as it is reached from here. The engine must bind there: vLLM
    does where its own says `*`, as in `tcp://*:5557`."""
    replay_endpoint: _Endpoint | None = None
    """Where it is asked for what was missed. None: after a gap nothing that was known counts."""
    topic: Annotated[str, Meta(max_length=256)] = ""
    """What its messages begin with. Empty: whatever comes, and what vLLM publishes unless told."""

    def __post_init__(self) -> None:
        """Refuse where an engine binds, and no one can connect to."""
        for told in (self.endpoint, self.replay_endpoint or ""):
            if "*" in told or told.endswith(":0"):
                raise ValueError(
                    f"{told} is where an engine binds: say how it is reached from here"
                )


class UpstreamSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine behind HTTP, one replica of a pool. A pool that has any starts no emulated ones."""

    formerly: ClassVar[dict[str, str]] = {
        "priority": "it is `scheduler` now: `priority` where this was true, else `own`"
    }
    url: Annotated[str, Meta(min_length=8, max_length=2_048, pattern=r"^https?://[^\s@?#]+" + END)]
    """Where it listens: `http://host:port`, with or without `/v1`. No key in it."""
    pool: Name
    """The pool it belongs to."""
    name: Name | None = None
    """The replica's name. None: the pool's with a number."""
    kind: EngineKind | None = None
    """Which software it is: `vllm`, `sglang`, `llamacpp`, `trtllm`, `emulated`, or `openai` for any
    other. None: found out once, by its metrics and paths, and `openai` if nothing tells."""
    scheduler: Scheduler = Scheduler.OWN
    """How it was started to order what waits in it: `own`, by the `priority` of requests, or by `headrace`,
    our scheduler class. Own: one that was not started for priorities may refuse any request that has one."""
    model: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """What the engine calls the model. None: as the deployment does."""
    key_env: (
        Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*" + END, max_length=128)] | None
    ) = None
    """Environment variable that holds the key it wants; none: no credentials. Callers' keys end here
    and are never passed on."""
    continuous_usage: bool | None = None
    """Whether it takes `stream_options.continuous_usage_stats`: streams that are left early are billed
    by their tokens then, else by their frames. None: as its kind does, vLLM and SGLang do; others may
    refuse what they do not know."""
    kv_events: KvEventsSpec | None = None
    """Where it publishes its KV cache's changes. None: of those only usage and load tell. Of kinds that
    publish: vLLM, SGLang."""
    price: PriceSpec | None = None
    """What it charges, if somebody else runs it; shown as `headrace_spend_usd_total`."""
    ca_file: Path | None = None
    """Certificates to trust, as PEM, instead of the system's."""
    connections: Annotated[int, Meta(ge=1, le=65_536)] = 1_024
    """Most connections at once. 1,024: more than any one replica runs."""
    first_byte_s: Annotated[float, Meta(gt=0, le=86_400)] = 120.0
    """Seconds until the first token, or a whole answer. 120: the longest prompts take a minute."""
    gap_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0
    """Seconds between two tokens. 60: an engine that is silent for longer is stuck."""


class GroupsSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the replica groups of a pool are started: as processes on this machine. Then it has no emulated
    ones; `replicas` of them are started at first, and more or fewer as the pool scales."""

    pool: Name
    """Whose groups they are."""
    command: Annotated[tuple[_Word, ...], Meta(min_length=1, max_length=256)]
    """The program and its arguments; in each, `{port}` is the group's port, `{rank}` a number from 0."""
    model: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """What the engine calls the model. None: as the deployment does."""
    kind: EngineKind | None = None
    """Which software it is. None: found out once, as of upstreams."""
    env: Annotated[dict[_Word, _Word], Meta(max_length=256)] = {}
    """Added to the variables that a child gets of our own: paths, locale, devices. Shown to nobody."""
    ranks: Annotated[int, Meta(ge=1, le=1_024)] = 1
    """Processes of a group. The first of them listens."""
    start_s: Annotated[float, Meta(gt=0, le=86_400)] = 120.0
    """Seconds until one must be ready; else it gives back what it holds. 120: weights from a cold disk, and
    a first token."""
    stop_s: Annotated[float, Meta(gt=0, le=86_400)] = 10.0
    """Seconds from being asked to end until it is made to."""


class EmulatorSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the emulated replicas behave where profiles leave it open."""

    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Seed of their noise. 0: same input, same run."""
    noise_percent: Annotated[float, Meta(ge=0, le=50)] = 2.0
    """Spread of step times around the profile, in percent. 2: replicas do not move in
    step, and no objective is decided by it."""
    batching: Batching = ChunkedPrefill()
    """How their steps are filled. Chunked prefill: vLLM's own, so that they behave as it does."""
    ordering: Ordering = Fifo()
    """Who starts first in them; by share, on counters of weighted tokens. In order of arrival: what
    engines do."""
    preemption: Offers = RECOMPUTE_ONLY
    """How requests give way when memory or slots run out. Computing again, started whole: what vLLM does."""

    def noise_ppm(self) -> int:
        """Return the spread in millionths, rounded once."""
        return round(self.noise_percent * 10_000)


class EngineTokenizerSpec(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="engine"
):
    """Count by the tokenizer of the model's own engines, as their kind has it."""

    model: Name
    """Whose prompts are counted."""


class FileTokenizerSpec(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="file"
):
    """Count with a tokenizer of our own, which knows no chat template."""

    model: Name
    """Whose prompts are counted."""
    file: Path
    """The model's `tokenizer.json`."""


class TokenCountsSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose prompts are counted exactly before they are decided on, and what that may cost."""

    models: Annotated[
        tuple[EngineTokenizerSpec | FileTokenizerSpec, ...], Meta(min_length=1, max_length=1_000)
    ]
    """The models, each with where its tokenizer is. All others' prompts are estimated."""
    wait_ms: Annotated[float, Meta(gt=0, le=10_000)] = 50.0
    """How long a request waits for its count, in ms; beyond, the estimate stands. 50: a fortieth of the
    default first-token bound, and ten times what a common prompt takes."""
    at_once: Annotated[int, Meta(ge=1, le=256)] = 4
    """Prompts being counted at once, and threads for each file. 4: counting must leave the machine
    to the traffic; who finds all of them busy is estimated."""
    prompt_bytes: Annotated[int, Meta(ge=1, le=256 * MIB)] = 128 * 1_024
    """Longest prompt that is counted, in bytes. 128 KiB: about 33,000 tokens, 25 to 70 ms of a
    tokenizer; more would come too late anyway, and the longer a prompt, the nearer its estimate."""
    cache: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """Counts remembered, by a keyed hash of what was counted. 10,000: about 3 MB."""


class JournalSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ring of events from which a run is replayed."""

    path: Path | None = None
    """Folder of the segments; none: no journal."""
    segment_mib: Annotated[int, Meta(ge=1, le=1_024)] = 64
    """Size of a segment in MiB; each starts with a checkpoint and so replays alone. 64: sixteen
    in the default ring, so that dropping the oldest loses little."""
    keep_gib: Annotated[float, Meta(gt=0, le=10_000)] = 1.0
    """Size of all segments together in GiB; the oldest go first. 1: small beside the
    disk of any machine that serves models."""

    def __post_init__(self) -> None:
        """Refuse a ring that could not hold a closed segment beside the open one."""
        if self.keep_gib * 1_024 < 2 * self.segment_mib:
            raise ValueError(f"keep_gib {self.keep_gib} holds fewer than two segments")


class JobsSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The durable queue of deferred requests, and how much of the fleet it may have."""

    file: Path
    """Where it is kept. Several processes of one machine may share it."""
    tenant_jobs: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    """Jobs of one tenant that are not over; beyond, 429. 100,000: two of the largest batches of
    OpenAI's API."""
    result_mib: Annotated[int, Meta(ge=1, le=256)] = 16
    """Longest answer that is kept, in MiB; a job with a longer one has failed. 16: twice the longest
    request."""
    store_gib: Annotated[float, Meta(gt=0, le=10_000)] = 8.0
    """Size of the file in GiB; from three quarters on no request is deferred (503). 8: small beside the
    disk of any machine that serves models."""
    keep_s: Annotated[float, Meta(gt=0, le=31_536_000)] = 86_400.0
    """Seconds for which a job and its answer are kept after its end. 86,400: callers that look once a
    day find it."""
    window_s: Annotated[float, Meta(gt=0, le=31_536_000)] = 86_400.0
    """Seconds in which a job must be begun where its class has no `completion_ms`; else that. 86,400:
    the completion window of OpenAI's batches."""
    wait_s: Annotated[float, Meta(ge=0, le=3_600)] = 60.0
    """Longest that `Prefer: wait` is heeded, in seconds. 60: proxies give up after that."""
    tries: Annotated[int, Meta(ge=1, le=100)] = 3
    """How often an engine may fail at a job before it has failed. 3: two different replicas, and one
    of them again."""
    lease_s: Annotated[float, Meta(ge=1, le=3_600)] = 30.0
    """Seconds after which the jobs of a process that is gone are another's. 30: three missed renewals."""
    file_mib: Annotated[int, Meta(ge=1, le=2_048)] = 200
    """Longest file of a batch, in MiB; beyond, 413. 200: as in OpenAI's API."""
    tenant_files: Annotated[int, Meta(ge=1, le=1_000_000)] = 1_000
    """Files of one tenant, but for those of answers; beyond, 429. 1,000: a batch each minute and a half
    of a day."""
    tenant_batches: Annotated[int, Meta(ge=1, le=100_000)] = 100
    """Batches of one tenant that are not over; beyond, 429. 100: more than are of use, since all share
    its turns."""
    leftover: Leftover = Leftover()
    """How many run beside live traffic."""


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole configuration file."""

    deployment: PlaneConfig
    """What the plane decides by."""
    keys: Annotated[tuple[KeySpec, ...], Meta(max_length=1_000_000)] = ()
    """API keys. None: requests are not authenticated and belong to the first tenant."""
    server: ServerSpec = ServerSpec()
    upstreams: Annotated[tuple[UpstreamSpec, ...], Meta(max_length=10_000)] = ()
    """Real engines. None: every pool is emulated in process."""
    groups: Annotated[tuple[GroupsSpec, ...], Meta(max_length=1_024)] = ()
    """Pools whose engines are started here as processes. None: all others have addresses, or are emulated."""
    token_counts: TokenCountsSpec | None = None
    """Which prompts are counted by a tokenizer. None: all are estimated from their bytes."""
    admin: AdminSpec | None = None
    """The admin listener. None: nothing listens, and nothing is measured for it."""
    emulator: EmulatorSpec = EmulatorSpec()
    journal: JournalSpec = JournalSpec()
    decision_log: Path | None = None
    """File that gets one JSON line for each decision; none: no log."""
    jobs: JobsSpec | None = None
    """The queue of deferred requests. None: every request is answered at once."""

    @property
    def real(self) -> frozenset[str]:
        """Pools whose engines are not emulated in process: they have addresses, or are started here."""
        started = {spec.pool for spec in self.groups}
        return frozenset(started | {spec.pool for spec in self.upstreams})
