"""How does a command ask a running gateway's admin listener?"""

import http.client
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from headrace.cli.address import address_of
from headrace.config.errors import ConfigError, Fault, Origin

URL = "http://127.0.0.1:9090"
KEY_ENV = "HEADRACE_ADMIN_KEY"
TIMEOUT_S = 10.0

Url = Annotated[str, Parameter(help="Address of the admin listener.")]


class UnreadableError(Exception):
    """The listener answered something else than what was asked for."""


def call(url: str, key: str | None, path: str, body: Any = None) -> bytes:
    """Return the answer to a call, a POST if it has a body; raises UnreadableError if that is none.

    OSError has the address, if nobody answers; ConfigError says what is no address, and no key.
    """
    place = address_of(url, URL)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError([Fault(Origin(f"environment {KEY_ENV}"), "no admin key")])
    kind = http.client.HTTPSConnection if place.tls else http.client.HTTPConnection
    connection = kind(place.host, place.port, timeout=TIMEOUT_S)
    content = None if body is None else msgspec.json.encode(body)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        method = "GET" if content is None else "POST"
        connection.request(method, f"{place.path}{path}", body=content, headers=headers)
        answer = connection.getresponse()
        found = answer.read()
    except http.client.HTTPException as error:
        raise UnreadableError(f"{url} does not speak HTTP: {error!r}") from None
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), url) from None
    finally:
        connection.close()
    if answer.status == http.client.UNAUTHORIZED:
        raise UnreadableError(f"{url} wants an admin key, in {KEY_ENV}")
    if answer.status != http.client.OK:
        raise UnreadableError(_why(url, answer.status, found))
    return found


def _why(url: str, status: int, content: bytes) -> str:
    """Return what an error says, if it is one of the listener's."""
    try:
        message = msgspec.json.decode(content)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"{url} answered {status}; is it the admin listener?"
    return f"{message} ({status})"
