"""Does a body have so many parts that reading it would keep everybody else waiting?

JSON is read in one piece, in which the event loop serves nobody, and what tiny parts cost is out of
proportion to their bytes: 8 MiB of `{}` took a second. Text and token ids are cheap, so only strings,
objects and lists are counted.
"""

PARTS_MAX = 50_000
"""Strings, objects and lists of one body, names of fields included. 50,000: some 8,000 messages, read in
tens of milliseconds."""
_OPENERS = (b'"', b"{", b"[")


def is_bounded(content: bytes) -> bool:
    """Return whether a body of JSON has no more than `PARTS_MAX` parts.

    What stands in strings does not count. Each step takes a few milliseconds for 8 MiB at most, and
    bodies of few bytes, or of few openers in all, take the first alone.
    """
    if len(content) <= PARTS_MAX or sum(map(content.count, _OPENERS)) <= PARTS_MAX:
        return True
    plain = content.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in content else content
    strings = plain.count(b'"') // 2
    if strings > PARTS_MAX:
        return False
    outside = b"".join(plain.split(b'"')[::2])
    return strings + outside.count(b"{") + outside.count(b"[") <= PARTS_MAX
