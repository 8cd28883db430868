"""One logical request, as far as deciders may know it."""

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.features import Feature
from headrace.model.ids import ClassName, ModelName, RequestId, TenantId
from headrace.model.ladder import LEVEL_MAX
from headrace.units import DurationNs, Tokens

GIVEN = "given"
"""Revision of a count that nobody estimated."""
BY_BYTES = "bytes-4"
"""Revision of the estimate that knows nothing yet: four bytes a token, and a quarter of that more."""


class TextBytes(Struct, frozen=True, kw_only=True, gc=False):
    """Bytes of a prompt's text in UTF-8, by script: tokenizers treat them differently."""

    ascii: int = 0
    two: int = 0
    """Of letters with two bytes: accented Latin, Greek, Cyrillic, Hebrew, Arabic."""
    cjk: int = 0
    """Of Chinese, Japanese and Korean, their punctuation included."""
    other: int = 0
    """Of everything else: Indic and Thai scripts, typographic marks, emoji."""

    @property
    def total(self) -> int:
        """All bytes."""
        return self.ascii + self.two + self.cjk + self.other


class Request(Struct, frozen=True, kw_only=True, gc=False):
    """What the driver knows on arrival. No prompt, no socket and no true output length."""

    id: RequestId
    tenant: TenantId
    """From the key. An unknown tenant is the contract gate's to refuse."""
    model: ModelName
    """As the caller spelled it: alias or canonical."""
    input_tokens: Tokens
    """Prompt tokens, counted or estimated by the driver."""
    input_margin: Tokens = Tokens(0)
    """How far the count may be short (p90 minus p50); 0 for an exact count."""
    input_revision: str = GIVEN
    """Who counted: `GIVEN`, `BY_BYTES`, a tokenizer or, within the plane, a learned estimate."""
    text: TextBytes | None = None
    """What a learned estimate goes by, and is taught by once the engine tells its count. None where
    the prompt is not, or not only, text that was counted here."""
    max_output: Tokens | None = None
    """The caller's own cap; None if not told."""
    user: str | None = None
    """Whom of its tenant's users it is for: a keyed hash, nobody's name. None: not told, or not asked."""
    session: str | None = None
    """Which session it belongs to: a keyed hash. None: not told, or its tenant's are not limited."""
    slo_class: ClassName | None = None
    """Asked for; None takes the tenant's default. Granted only by the tenant's contract."""
    prefix: tuple[int, ...] = ()
    """Keyed hashes of the prompt's leading chunks, each covering all before it (at most 512)."""
    prefix_tokens: Tokens = Tokens(0)
    """Tokens in one such chunk, at four bytes a token where text was counted in bytes."""
    prefix_kept: int = 0
    """Of `prefix`, the leading chunks in which there is nothing optional: they stay what they are whatever
    is left out."""
    optional: tuple[Tokens, ...] = ()
    """Prompt tokens of each part that may be left out, by rank, the most useful first (DEG-1); they are
    among `input_tokens`. What must stay, as citations and evidence, is never one of these."""
    lowest: int = LEVEL_MAX
    """The lowest level of the ladder that its caller accepts; its tenant and class must as well."""
    stream: bool = True
    features: tuple[Feature, ...] = ()
    """What it takes of the model beside tokens."""
    fan_out: int = 1
    ttft_ns: DurationNs | None = None
    gap_ns: DurationNs | None = None
    """Tighter bounds of the caller; wider ones than the class's are ignored (FAIR-4)."""
    deferred: bool = False
    """Whether it was handed over before, to be answered later: it was offered then, and is not now."""
    repeat: bool = False
    """Whether it is said to have been asked before, and not answered: then it claims less (SCALE-2)."""
    ttl_ns: DurationNs | None = None
    """How long it may wait in the queue at most; None: as long as its class lets it."""

    def lessened(self, kept: int | None) -> "Request":
        """Return it as it is with only so many optional parts, the first by rank; None: all of them.

        From the first part on that is optional the prompt is another: nothing is known to be cached there, and
        its text teaches nothing of what bytes come to.
        """
        if kept is None or kept >= len(self.optional):
            return self
        left = max(1, self.input_tokens - sum(self.optional[kept:]))
        return replace(
            self,
            input_tokens=Tokens(left),
            input_margin=Tokens(self.input_margin * left // max(1, self.input_tokens)),
            text=None,
            prefix=self.prefix[: self.prefix_kept],
            optional=self.optional[:kept],
        )
