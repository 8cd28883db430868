"""Does an engine serve the model that it is asked for? By its refusals, and by its own list."""

import json
import re
from functools import cache

import msgspec
from msgspec import Struct

from headrace.adapters.engines.fetch import Answer
from headrace.adapters.upstream.usage import UNREADABLE

MODELS_PATH = "/v1/models"
_REFUSED, _ABSENT = 400, 404
_CODE = b'"model_not_found"'


class _Model(Struct):
    id: str


class _List(Struct):
    data: list[_Model]


_LIST = msgspec.json.Decoder(_List)


def is_unserved(status: int, body: bytes, model: str) -> bool:
    """Return whether a refusal says that there is no such model, and not just no such path.

    OpenAI's code for it, or 404 with the model's name in its words. A 400 may name the model for any
    other reason.
    """
    if status not in (_REFUSED, _ABSENT):
        return False
    return _CODE in body or (status == _ABSENT and _names(model).search(body) is not None)


@cache  # one for each name in the configuration
def _names(model: str) -> re.Pattern[bytes]:
    """Return what finds a model's name in JSON, as a word of its own."""
    spelt = {json.dumps(model, ensure_ascii=plain)[1:-1].encode() for plain in (True, False)}
    return re.compile(rb"(?<!\w)(?:%s)(?!\w)" % b"|".join(map(re.escape, sorted(spelt))))


def is_listed(answer: Answer, model: str) -> bool | None:
    """Return whether a list of models has ours; None if the answer is no such list, or an empty one."""
    if not answer.good:
        return None
    try:
        names = {one.id for one in _LIST.decode(answer.body).data}
    except UNREADABLE:
        return None
    return model in names if names else None
