"""Images, sounds and documents by the rules of the APIs, and base64 that is no text."""

import json
from base64 import b64encode
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.asked import Asked, media, pixels, read
from headrace.gateway.asked.prompt import Weight
from headrace.ports.engine import Route

NOISE = bytes(range(256)) * 40


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + pack(">II", width, height) + NOISE


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + pack("<HH", width, height) + NOISE


def jpeg(width: int, height: int, exif: int = 60_000, frame: int = 0xC0, fill: int = 0) -> bytes:
    """A thumbnail and a table come before the size."""
    head = b"\xff\xd8\xff\xe1" + pack(">H", exif + 2) + b"\xff\xc0" * (exif // 2)
    head += b"\0" * (exif % 2) + b"\xff" * fill + b"\xff\xc4\0\x05abc"
    return head + b"\xff%c\0\x11\x08" % frame + pack(">HH", height, width) + NOISE


def webp(width: int, height: int) -> bytes:
    head = b"RIFF\0\0\0\0WEBPVP8 \0\0\0\0\0\0\0\x9d\x01\x2a"
    return head + pack("<HH", width | 1 << 14, height) + NOISE


def webp_lossless(width: int, height: int) -> bytes:
    bits = width - 1 | height - 1 << 14
    return b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f" + pack("<I", bits) + NOISE


def webp_extended(width: int, height: int) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + sides + NOISE


def text(data: bytes) -> str:
    return b64encode(data).decode()


@pytest.mark.parametrize("make", [png, gif, jpeg, webp, webp_lossless, webp_extended])
@pytest.mark.parametrize("size", [(1, 1), (640, 480), (3_000, 16_383)])
def test_an_images_size_is_in_its_beginning(make: object, size: tuple[int, int]) -> None:
    assert callable(make)
    assert pixels.size(text(make(*size))) == size


@pytest.mark.parametrize("exif", [0, 1, 2, 3, 65_533])
@pytest.mark.parametrize("frame", [0xC0, 0xC1, 0xC2, 0xCF])
def test_a_jpeg_is_followed_to_its_frame_wherever_it_is(exif: int, frame: int) -> None:
    assert pixels.size(text(jpeg(800, 600, exif, frame, fill=exif % 3))) == (800, 600)


@pytest.mark.parametrize(
    "data",
    [
        "",
        "not base64, grüße",
        "A" * 400,
        text(png(5, 5)[:20]),
        text(png(0, 5)),
        text(gif(5, 5)[:8]),
        text(jpeg(5, 5)[:500]),
        text(b"\xff\xd8" + b"\xff\xe0\0\x04ab" * 100),
        text(b"\xff\xd8\xff\xda\0\x04ab" + NOISE),
        text(webp(5, 5)[:20]),
        text(b"RIFF\0\0\0\0WAVEfmt " + NOISE),
        text(b"RIFF\0\0\0\0WEBPVP9 " + NOISE),
    ],
)
def test_what_does_not_tell_its_size_has_none(data: str) -> None:
    assert pixels.size(data) is None


@given(
    st.binary(max_size=80), st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"GIF8", b"RIFF"])
)
def test_any_beginning_has_a_size_or_none(data: bytes, magic: bytes) -> None:
    found = pixels.size(text(magic + data))
    assert found is None or min(found) > 0


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ((1, 1), 255),
        ((512, 512), 255),
        ((513, 512), 425),
        ((1_024, 1_024), 765),  # OpenAI's own examples
        ((2_048, 4_096), 1_105),
        ((4_096, 8_192), 1_105),
        ((768, 2_048), 1_445),
        ((9_000, 10), 85 + 4 * 170),
    ],
)
def test_an_image_is_cut_into_tiles(size: tuple[int, int], tokens: int) -> None:
    assert media.tiled(text(png(*size)), "high") == Weight(tokens)
    assert media.tiled(text(png(*size)), None) == Weight(tokens)
    assert media.tiled(text(png(*size)), "low") == Weight(85)


@given(st.integers(1, 1 << 31), st.integers(1, 1 << 31))
def test_no_image_weighs_more_than_is_allowed_for(width: int, height: int) -> None:
    most = media.tiled(None, None)
    weight = media.tiled(text(png(width, height)), "auto")
    assert 255 <= weight.tokens <= most.tokens + most.margin == 1_445
    assert media.by_area(text(png(width, height))).tokens <= 1_600


@pytest.mark.parametrize(
    ("size", "tokens"), [((200, 200), 54), ((1_000, 1_000), 1_334), ((4_000, 3_000), 1_600)]
)
def test_anthropic_weighs_by_area(size: tuple[int, int], tokens: int) -> None:
    assert media.by_area(text(jpeg(*size))) == Weight(tokens)


def wav(rate: int, channels: int, seconds: int) -> bytes:
    size = rate * channels * 2 * seconds
    head = b"RIFF\0\0\0\0WAVEfmt " + pack("<IHH", 16, 1, channels)
    head += pack("<IIHH", rate, rate * channels * 2, channels * 2, 16) + b"data" + pack("<I", size)
    return head + b"\0" * size


@pytest.mark.parametrize(
    ("data", "form", "seconds"),
    [
        (wav(24_000, 1, 4), "wav", 4),
        (wav(8_000, 2, 4), "wav", 4),
        (wav(0, 1, 0) + b"\0" * 48_000, "wav", 1),
        (b"\0" * 480_000, "wav", 10),
        (b"\0" * 480_000, "mp3", 30),
        (b"", "wav", 0),
        (b"\0" * 48_000, "opus", 12),
        (b"\0" * 160_000, "else", 10),
    ],
)
def test_sound_is_ten_tokens_a_second(data: bytes, form: str, seconds: int) -> None:
    weight = media.sound(text(data), form)
    assert abs(weight.tokens - 10 * seconds) <= 1
    assert abs(weight.margin - 15 * seconds) <= 1


def test_sound_that_is_no_base64_is_weighed_by_its_length() -> None:
    assert media.sound("grüße" * 12_800, "wav") == Weight(10, 15)


def test_a_document_is_weighed_by_bytes_or_by_pages() -> None:
    assert media.document(text(b"a,b\n" * 1_000)) == Weight(1_000, 250)
    small = media.document(text(b"%PDF-1.7" + b"\0" * 2_992))
    assert small == Weight(750, 750)
    assert media.document(text(b"%PDF-1.7" + b"\0" * 150_000)).tokens == 4 * 2_250
    assert media.document(text(b"%PDF-1.7" + b"\0" * 9_000_000)).tokens == 100 * 2_250
    assert media.document(text(b"PK\3\4" + b"\0" * 50_000)).tokens == 2 * 2_250


BIG = text(png(1_024, 1_024) + bytes(1_000_000))
DATA = f"data:image/png;base64,{BIG}"
PDF = text(b"%PDF-1.7" + bytes(600_000))
FILM = text(bytes(1_250_000))
SOUND = text(bytes(480_000))


def read_chat(part: object) -> Asked:
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    return read(Route.CHAT, json.dumps(body).encode())


def read_response(part: object) -> Asked:
    body = {"model": "m", "input": [{"role": "user", "content": [part]}]}
    return read(Route.RESPONSES, json.dumps(body).encode())


def read_message(block: object) -> Asked:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
    return read(Route.MESSAGES, json.dumps(body).encode())


def source(data: str, kind: str = "image", media_type: str = "image/png") -> dict[str, object]:
    return {
        "type": kind,
        "source": {"type": "base64", "media_type": media_type, "data": data},
    }


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        (read_chat({"type": "image_url", "image_url": {"url": DATA}}), 765),
        (read_chat({"type": "image_url", "image_url": DATA}), 765),
        (read_chat({"type": "image_url", "image_url": {"url": DATA, "detail": "low"}}), 85),
        (read_chat({"type": "image_url", "image_url": {"url": "https://a.test/b"}}), 765),
        (read_chat({"type": "input_audio", "input_audio": {"data": SOUND, "format": "mp3"}}), 300),
        (read_chat({"type": "audio_url", "audio_url": {"url": "https://a.test/b"}}), 300),
        (read_chat({"type": "audio_url", "audio_url": f"data:audio/x-wav;base64,{SOUND}"}), 100),
        (read_chat({"type": "video_url", "video_url": {"url": "https://a.test/b"}}), 3_000),
        (read_chat({"type": "video_url", "video_url": f"data:video/mp4;base64,{FILM}"}), 3_000),
        (read_chat({"type": "file", "file": {"file_data": PDF}}), 13 * 2_250),
        (read_chat({"type": "file", "file": {"file_id": "file-1"}}), 2_250),
        (read_response({"type": "input_image", "image_url": DATA}), 765),
        (read_response({"type": "input_image", "image_url": DATA, "detail": "low"}), 85),
        (read_response({"type": "input_image", "file_id": "file-1"}), 765),
        (read_response({"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}),
         100),
        (read_response({"type": "input_file", "file_data": f"data:application/pdf;base64,{PDF}"}),
         13 * 2_250),
        (read_response({"type": "input_file", "file_url": "https://a.test/b"}), 2_250),
        (read_message(source(BIG)), 1_399),
        (read_message({"type": "image", "source": {"type": "url", "url": "https://a.test/b"}}),
         1_334),
        (read_message(source(PDF, "document", "application/pdf")), 13 * 2_250),
        (read_message(source("grüße, no base64")), 1_334),
        (read_message({"type": "document", "source": {"type": "file", "file_id": "f"}}), 2_250),
        (read_message({"type": "tool_result", "content": [source(BIG)]}), 1_399),
    ],
)  # fmt: skip
def test_base64_is_not_text(asked: Asked, tokens: int) -> None:
    assert 0 <= asked.input_tokens - tokens <= 5, "the role, and what was rounded up"
