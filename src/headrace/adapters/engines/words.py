"""Stand-in."""

from headrace.adapters.engines.server.words import DONE
from headrace.adapters.engines.server.words import Writer as _W


class Writer(_W):
    """A writer."""

    end_mark = DONE


def writer(
    kind, name, created, model, prompt_tokens, *, usage_at_end=False, usage_always=False, usage=True
):
    return Writer(
        "chatcmpl-" + name,
        created,
        model,
        prompt_tokens,
        chat=kind.endswith("chat/completions"),
        usage_at_end=usage_at_end,
        usage=usage,
    )
