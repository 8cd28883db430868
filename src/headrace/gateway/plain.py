"""Is a request's head plain, or could two readers understand it differently?

What a parser lets through and a proxy before or an engine behind might read otherwise: that is how
one request is smuggled inside another.
"""

HTTP_1_0 = "1.0"
_OFFERS = (b"upgrade", b"http2-settings")
_VERSIONS = (HTTP_1_0, "1.1")


def is_plain(headers: list[tuple[bytes, bytes]], version: str) -> bool:
    """Return whether it says once for whom it is, and once and plainly how long it is.

    Names are in lower case. Only HTTP/1.1 knows chunks, and only HTTP/1.0 may leave out the host.
    """
    hosts = codings = lengths = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            lengths += 1
            if not value.isdigit():
                return False
        elif name == b"transfer-encoding":
            codings += 1
            if value.strip().lower() != b"chunked":
                return False
    if version not in _VERSIONS or hosts > 1 or lengths + codings > 1:
        return False
    return not codings if version == HTTP_1_0 else hosts == 1


def without_offer(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the lines of a head without those that offer another protocol."""
    lines = []
    for name, value in headers:
        told = value
        if name == b"connection":
            options = [one.strip() for one in value.split(b",")]
            told = b", ".join(one for one in options if one.lower() not in _OFFERS)
        if name not in _OFFERS and (told or not value):
            lines.append(name + b": " + told)
    return lines
