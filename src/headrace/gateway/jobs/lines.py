"""One line of a batch's file: which request it is, or what is wrong with it."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from headrace.gateway.asked import InvalidError, blame
from headrace.gateway.asked.fields import Model
from headrace.ports.batch import LineError
from headrace.ports.engine import Route

ENDPOINTS = (Route.CHAT, Route.COMPLETIONS, Route.RESPONSES, Route.EMBEDDINGS)
"""What batches are made of."""
ENVELOPE_BYTES = 4_096
"""What a line may have beside its body."""
_CUSTOM_ID_MAX = 512


class _Line(Struct):
    custom_id: Annotated[str, Meta(min_length=1, max_length=_CUSTOM_ID_MAX)]
    method: Literal["POST"]
    url: str
    body: Raw


class _Body(Struct):
    model: Model
    stream: bool | None = None


class Line(Struct, frozen=True):
    """A request of a batch."""

    custom_id: str
    model: str
    body: bytes


_line = msgspec.json.Decoder(_Line).decode
_body = msgspec.json.Decoder(_Body).decode


def read(content: bytes, endpoint: Route, body_bytes: int) -> Line:
    """Return which request a line is; raises `FaultError`. Its body is looked into no further than it must."""
    try:
        if not content.isascii():
            content.decode()
        told = _line(content)
    except msgspec.ValidationError as error:
        raise _fault(blame(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FaultError("invalid_json_line", "The line is not JSON.") from None
    if told.url != endpoint:
        raise FaultError("mismatched_url", f"The batch is for {endpoint}.", "url")
    body = bytes(told.body)
    if len(body) > body_bytes:
        message = f"The body is longer than {body_bytes} bytes."
        raise FaultError("request_too_large", message, "body")
    try:
        asked = _body(body)
    except msgspec.ValidationError as error:
        wrong = blame(str(error))
        param = "body" if wrong.param is None else f"body.{wrong.param}"
        raise _fault(InvalidError(wrong.message, param)) from None
    if asked.stream:
        raise FaultError("invalid_value", "An answer of a batch is not streamed.", "body.stream")
    return Line(custom_id=told.custom_id, model=asked.model, body=body)


class FaultError(Exception):
    """What is wrong with a line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        """Hold it, in the words of OpenAI's API."""
        super().__init__(message)
        self.code, self.message, self.param = code, message, param

    def at(self, line: int) -> LineError:
        """Return it as it is told."""
        return LineError(code=self.code, message=self.message, line=line, param=self.param)


def _fault(error: InvalidError) -> FaultError:
    missing = "missing" in error.message
    code = "missing_required_parameter" if missing else "invalid_value"
    return FaultError(code, error.message, error.param)
