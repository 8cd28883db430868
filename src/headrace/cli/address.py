"""What does an address on the command line name?"""

from urllib.parse import urlsplit

from msgspec import Struct

from headrace.config.errors import ConfigError, Fault, Origin

_PORTS = {"http": 80, "https": 443}


class Address(Struct, frozen=True):
    """A server, and where on it."""

    host: str
    port: int
    path: str
    """Without a slash at its end."""
    tls: bool


def address_of(url: str, example: str) -> Address:
    """Return what `--url` names; raises ConfigError for what is no address such as `example`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme not in _PORTS or not host:
        raise ConfigError([Fault(Origin("flag --url"), f"{url} is no address such as {example}")])
    return Address(
        host, port or _PORTS[parts.scheme], parts.path.rstrip("/"), parts.scheme == "https"
    )
