"""How long may an answer be whose caller named no limit?

The operator's lever against KV pressure: a default that may be lowered while requests run. Whoever
names a limit was told the model's contract and keeps it, unless it agreed to less; what is reserved
for it is its predicted p90 all the same.
"""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.deployment import Name
from headrace.model.ids import ClassName, ModelName
from headrace.units import REQUEST_TOKENS_MAX, Tokens

_Count = Annotated[int, Meta(ge=1, le=REQUEST_TOKENS_MAX)]
_Counts = Annotated[dict[Name, _Count | None], Meta(max_length=1_000)]


class OutputBudget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Most output tokens of an answer for which its caller named no limit."""

    tokens: _Count | None = None
    """For every class that has none of its own below. None: as many as the model's `output_limit`."""
    classes: _Counts = {}
    """By class, instead of `tokens`; null: none."""
    models: _Counts = {}
    """By model, as well: the least counts. Null: none."""

    def cap(self, model: ModelName, slo_class: ClassName, told: Tokens | None) -> Tokens | None:
        """Return the cap of one request, or None; `told`: the limit that its caller named."""
        if told is not None:
            return None
        found = (self.classes.get(slo_class, self.tokens), self.models.get(model))
        return min((Tokens(one) for one in found if one is not None), default=None)
