"""What is known of a request once its body is read."""

from msgspec import Struct

from headrace.gateway.asked.marks import NO_OPTIONS, Options
from headrace.model.features import Feature
from headrace.model.request import TextBytes
from headrace.ports.engine import Route
from headrace.units import Tokens


class InvalidError(Exception):
    """A body that cannot be served; what was in it is not repeated."""

    def __init__(self, message: str, param: str | None = None) -> None:
        """Hold what is wrong, and with which field."""
        super().__init__(message)
        self.message, self.param = message, param


class Asked(Struct, frozen=True, kw_only=True, gc=False):
    """One body, as far as decisions need it."""

    route: Route
    model: str
    stream: bool
    usage_shown: bool
    """The caller is to see the usage in its stream."""
    output_cap: Tokens | None
    """The caller's own cap on each answer."""
    fan_out: int
    """How many answers are made."""
    cache_salt: str
    """Prompts with different salts share no cache."""
    user: str = ""
    """For whom of the caller's users it is, as the caller told."""
    prompt: bytes
    """The canonical prompt: equal prompts, equal bytes; tools first, then the system's words."""
    input_tokens: Tokens
    """Tokens of the prompt of one answer, an average where they differ: times `fan_out`, all."""
    input_margin: Tokens
    """By how many that may be short."""
    text: TextBytes | None
    """The prompt's bytes, if all of it is text and nothing else counts as its tokens."""
    longest: Tokens
    """Tokens of the longest single prompt: what the model's context must hold."""
    each_usage_shown: bool = False
    """It is to see it in each frame."""
    priority: int = 0
    """How soon it is wanted, of all that the caller defers; lower is sooner."""
    features: tuple[Feature, ...] = ()
    """What it takes of the model beside tokens."""
    options: Options = NO_OPTIONS
    """What of the prompt may be left out."""
