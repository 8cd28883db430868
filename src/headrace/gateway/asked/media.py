"""How many tokens are images, sounds and documents?

By the published rules of the APIs they come in: models differ, and the engine's own count settles
every account. Base64 never counts as text.
"""

from binascii import a2b_base64

from headrace.gateway.asked import pixels
from headrace.gateway.asked.prompt import BYTES_PER_TOKEN, Weight
from headrace.units import ceil_div

# OpenAI's rule for images of high detail: shrunk into a square of 2,048 px, then to a shorter side of
# 768 px, then cut into tiles of 512 px.
_BOX_PX, _SIDE_PX, _TILE_PX = 2_048, 768, 512
_IMAGE_BASE = 85
"""Tokens of any image, and all of one of low detail."""
_IMAGE_TILE = 170
"""Tokens of each tile."""
_IMAGE_TILES, _IMAGE_TILES_MAX = 4, 8
"""Of an image whose size is not known: four, as of 1,024 by 1,024 px. No image has more than
eight."""
LOW = Weight(_IMAGE_BASE)
UNKNOWN = Weight(
    _IMAGE_BASE + _IMAGE_TILE * _IMAGE_TILES, _IMAGE_TILE * (_IMAGE_TILES_MAX - _IMAGE_TILES)
)
"""765 tokens, and up to 1,445."""

_AREA_PX_PER_TOKEN, _AREA_MAX = 750, 1_600
"""Anthropic's rule: an image is a token for 750 px and at most 1,600, being shrunk first."""
AREA_UNKNOWN = Weight(1_334, _AREA_MAX - 1_334)
"""1,000 by 1,000 px."""

_SOUND_TOKENS_PER_S = 10
"""OpenAI's rule: 100 ms of a caller's sound are a token."""
_SOUND_MARGIN_PER_S = 15
"""Qwen-Audio and its kin take 25 tokens for a second."""
_SOUND_BYTES_PER_S = {
    "wav": 48_000,  # 16 bits, 24 kHz, mono: what OpenAI's sound APIs speak, if the header is silent
    "pcm16": 48_000,
    "flac": 24_000,  # about half of that
    "opus": 4_000,  # 32 kbit/s, usual for speech
    "ogg": 4_000,
    "webm": 4_000,
}
_SOUND_BYTES_PER_S_ELSE = 16_000
"""128 kbit/s: what MP3 and AAC are encoded at unless told otherwise."""
_SOUND_LINKED_S = 30
"""Seconds of sound behind a link: one window of Whisper's encoder."""
_WAV_HEAD_BYTES = 44

_FILM_TOKENS_PER_S = 300
"""Gemini's rule: 258 tokens for the one frame of a second, and 32 for its sound."""
_FILM_BYTES_PER_S = 125_000
"""1 Mbit/s: 720p as phones and meetings record it."""
_FILM_LINKED_S = 10
"""Seconds of film behind a link."""

_PAGE_TOKENS = 2_250
"""Anthropic tells 1,500 to 3,000 tokens of text for a page of a PDF."""
_PAGE_BYTES = 50_000
"""Bytes of a page, between 10,000 of plain type and 100,000 of a scan."""
_PAGES_MAX = 100
"""The APIs take no more."""
_PAGED = ("JVBERi", "UEsDB")
"""How base64 of a PDF and of an office document begins. Their bytes are no text."""
LINKED_DOCUMENT = Weight(_PAGE_TOKENS, 3 * _PAGE_TOKENS)
"""A document known by its address alone: a page, or a few."""


def payload(url: str) -> str | None:
    """Return the data of a data URL; None of any other."""
    return url.partition(",")[2] if url.startswith("data:") else None


def decoded_bytes(data: str) -> int:
    """Return how many bytes base64 encodes, without decoding it."""
    return len(data) * 3 // 4 - data[-2:].count("=")


def tiled(data: str | None, detail: str | None) -> Weight:
    """Return the weight of an image by its tiles, `data` its base64 if it is there."""
    if detail == "low":
        return LOW
    size = None if data is None else pixels.size(data)
    return UNKNOWN if size is None else Weight(_IMAGE_BASE + _IMAGE_TILE * _tiles(*size))


def _tiles(width: int, height: int) -> int:
    """Return into how many tiles an image is cut."""
    longer, shorter = max(width, height), min(width, height)
    if longer > _BOX_PX:
        longer, shorter = _BOX_PX, ceil_div(shorter * _BOX_PX, longer)
    if shorter > _SIDE_PX:
        longer, shorter = ceil_div(longer * _SIDE_PX, shorter), _SIDE_PX
    return ceil_div(longer, _TILE_PX) * ceil_div(shorter, _TILE_PX)


def by_area(data: str | None) -> Weight:
    """Return the weight of an image by its area."""
    size = None if data is None else pixels.size(data)
    if size is None:
        return AREA_UNKNOWN
    return Weight(min(_AREA_MAX, ceil_div(size[0] * size[1], _AREA_PX_PER_TOKEN)))


def sound(data: str | None, form: str | None) -> Weight:
    """Return the weight of a sound by how long it lasts; None is one behind a link."""
    if data is None:
        return _sounding(_SOUND_LINKED_S, 1)
    size = decoded_bytes(data)
    if form in (None, "wav"):
        head = _head(data)
        if head[:4] == b"RIFF" and head[8:16] == b"WAVEfmt " and len(head) == _WAV_HEAD_BYTES:
            frames = int.from_bytes(head[24:28], "little")
            per_s = frames * int.from_bytes(head[32:34], "little")
            if per_s:
                return _sounding(max(0, size - _WAV_HEAD_BYTES), per_s)
    return _sounding(size, _SOUND_BYTES_PER_S.get(form or "", _SOUND_BYTES_PER_S_ELSE))


def _head(data: str) -> bytes:
    """Return as much of the beginning as a WAV's header has."""
    try:
        return a2b_base64(data[:60])[:_WAV_HEAD_BYTES]
    except ValueError:
        return b""


def _sounding(size: int, per_s: int) -> Weight:
    """Return the weight of so many bytes, so many to the second."""
    return Weight(
        ceil_div(size * _SOUND_TOKENS_PER_S, per_s), ceil_div(size * _SOUND_MARGIN_PER_S, per_s)
    )


def film(data: str | None) -> Weight:
    """Return the weight of a film by how long it should last; None is one behind a link."""
    if data is None:
        tokens = _FILM_LINKED_S * _FILM_TOKENS_PER_S
    else:
        tokens = ceil_div(decoded_bytes(data) * _FILM_TOKENS_PER_S, _FILM_BYTES_PER_S)
    return Weight(tokens, tokens)


def document(data: str) -> Weight:
    """Return the weight of a document in base64: text by its bytes, others by their likely pages."""
    size = decoded_bytes(data)
    tokens = ceil_div(size, BYTES_PER_TOKEN)
    if not data.startswith(_PAGED):
        return Weight(tokens, tokens // 4)
    pages = min(_PAGES_MAX, ceil_div(size, _PAGE_BYTES))
    tokens = min(tokens, pages * _PAGE_TOKENS)
    return Weight(tokens, tokens)
