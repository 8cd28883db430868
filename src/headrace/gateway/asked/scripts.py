"""In which scripts is a text written? Told by the lead bytes of its UTF-8.

A long text is told by samples, so that none holds the loop for longer than a short one.
"""

from headrace.model.request import TextBytes

_ASCII = bytes(range(0x80))
_CONTINUED = bytes(range(0x80, 0xC0))
_TWO = bytes(range(0xC2, 0xE0))
_CJK = bytes((*range(0xE3, 0xEE), 0xEF))
"""U+3000 to U+DFFF, Hangul included, and the fullwidth forms. Beyond U+FFFF there is a rare rest."""
_SAMPLE_BYTES, _SAMPLES = 4_096, 16
_WHOLE_MAX = _SAMPLE_BYTES * _SAMPLES
"""Bytes up to which all of a text is read. 64 KiB: about 60 µs where it is not ASCII."""


def scripts(text: bytes) -> TextBytes:
    """Return the bytes of a text by script; of one above 64 KiB, as 16 samples of it have them."""
    size = len(text)
    if text.isascii():
        return TextBytes(ascii=size)
    if size <= _WHOLE_MAX:
        return TextBytes(**_counts(text))
    step = (size - _SAMPLE_BYTES) // (_SAMPLES - 1)
    parts = [text[nth * step : nth * step + _SAMPLE_BYTES] for nth in range(_SAMPLES)]
    seen = _counts(b"".join(parts))
    found = {name: count * size // _WHOLE_MAX for name, count in seen.items()}
    most = max(found, key=lambda name: found[name])
    found[most] += size - sum(found.values())  # what rounding and cut letters left
    return TextBytes(**found)


def _counts(text: bytes) -> dict[str, int]:
    """Return the bytes by script; where a sample cuts a letter, the rest of it counts as other."""
    rest = text.translate(None, _ASCII)
    leads = rest.translate(None, _CONTINUED)
    two = 2 * (len(leads) - len(leads.translate(None, _TWO)))
    cjk = 3 * (len(leads) - len(leads.translate(None, _CJK)))
    other = max(0, len(rest) - two - cjk)
    return {"ascii": len(text) - len(rest), "two": two, "cjk": cjk, "other": other}
