"""How large is an image? Read from the first bytes of its base64, of which little is decoded."""

from binascii import a2b_base64
from collections.abc import Callable

Size = tuple[int, int]
"""Width and height in pixels."""

_SEGMENTS_MAX = 64  # of a JPEG; photographs have a dozen before their size
_SOS, _EOI = 0xDA, 0xD9  # where a JPEG's data begins and ends: its size comes before
_NOT_FRAMES = (0xC4, 0xC8, 0xCC)  # among SOF0 to SOF15: tables, and a reserved one
_WEBP_BYTES = 30


def size(data: str) -> Size | None:
    """Return an image's size, or None if its beginning does not tell. Line breaks hide it."""
    head = _bytes(data, 0, 12)
    for magic, reader in _READERS:
        if head.startswith(magic):
            found = reader(data)
            return found if found is not None and min(found) > 0 else None
    return None


def _bytes(data: str, start: int, count: int) -> bytes:
    """Return bytes of what is encoded, fewer if there are none; nothing if it is not base64."""
    first, last = start // 3, (start + count + 2) // 3
    try:
        return a2b_base64(data[first * 4 : last * 4])[start - first * 3 :][:count]
    except ValueError:
        return b""


def _png(data: str) -> Size | None:
    """The header chunk comes first."""
    field = _bytes(data, 16, 8)
    if len(field) < 8:  # noqa: PLR2004  # two numbers of four bytes
        return None
    return int.from_bytes(field[:4], "big"), int.from_bytes(field[4:], "big")


def _gif(data: str) -> Size | None:
    """The logical screen's."""
    field = _bytes(data, 6, 4)
    if len(field) < 4:  # noqa: PLR2004  # two numbers of two bytes
        return None
    return int.from_bytes(field[:2], "little"), int.from_bytes(field[2:], "little")


def _jpeg(data: str) -> Size | None:
    """From segment to segment, to the one that begins a frame."""
    at = 2
    for _ in range(_SEGMENTS_MAX):
        segment = _bytes(data, at, 9)
        if len(segment) < 9 or segment[0] != 0xFF:  # noqa: PLR2004  # marker, length, a frame's size
            return None
        kind = segment[1]
        if 0xC0 <= kind <= 0xCF and kind not in _NOT_FRAMES:  # noqa: PLR2004  # SOF0 to SOF15
            return int.from_bytes(segment[7:9], "big"), int.from_bytes(segment[5:7], "big")
        if kind in (_SOS, _EOI):
            return None
        if kind == 0xFF:  # noqa: PLR2004  # a fill byte before a marker
            at += 1
        else:
            at += 2 + int.from_bytes(segment[2:4], "big")
    return None


def _webp(data: str) -> Size | None:
    """Of the three kinds of first chunk."""
    head = _bytes(data, 0, _WEBP_BYTES)
    if len(head) < _WEBP_BYTES or head[8:12] != b"WEBP":
        return None
    match head[12:16]:
        case b"VP8 ":
            return (
                int.from_bytes(head[26:28], "little") & 0x3FFF,
                int.from_bytes(head[28:30], "little") & 0x3FFF,
            )
        case b"VP8L":
            bits = int.from_bytes(head[21:25], "little")
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X":
            return (
                int.from_bytes(head[24:27], "little") + 1,
                int.from_bytes(head[27:30], "little") + 1,
            )
        case _:
            return None


_READERS: tuple[tuple[bytes, Callable[[str], Size | None]], ...] = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8", _jpeg),
    (b"GIF8", _gif),
    (b"RIFF", _webp),
)
