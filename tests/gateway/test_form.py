"""Forms taken apart as they come, and lines measured."""

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.asked import InvalidError
from headrace.gateway.jobs.form import Form, Ruler
from tests.gateway.filing import BOUNDARY, form

KIND = f'multipart/form-data; boundary="{BOUNDARY}"'.encode()


def read(content: bytes, cuts: list[int], kind: bytes = KIND) -> tuple[Form, bytes]:
    """Feed a form in parts."""
    found, file = Form(kind), b""
    edges = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    for begin, end in pairwise(edges):
        file += found.feed(content[begin:end])
    return found, file


@given(
    st.binary(max_size=200) | st.sampled_from([b"\r\n--of-the-tes", b"--of-the-test", b"\n\r\n"]),
    st.lists(st.integers(0, 1_000), max_size=20),
)
def test_a_file_comes_through_whole_however_its_form_was_cut(
    content: bytes, cuts: list[int]
) -> None:
    if f"\r\n--{BOUNDARY}".encode() in content:
        return
    found, file = read(form(content, "é.jsonl", more="1"), cuts)
    assert file == content
    assert found.end() == "é.jsonl"
    assert found.fields == {"purpose": "batch", "more": "1"}


@pytest.mark.parametrize(
    "kind",
    [b"", b"application/json", b"multipart/form-data", b"multipart/mixed; boundary=x", b"\xff;="],
)
def test_what_is_no_form_is_refused(kind: bytes) -> None:
    with pytest.raises(InvalidError):
        Form(kind)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no form at all", "not the form"),
        (form(b"x")[:-20], "ends within"),
        (form(b"x").replace(b'"file"', b'"other"'), "no file"),
        (form(b"x")[:-17] + form(b"y"), "two files"),
        (form(b"x", purpose="p" * 5_000), "longer than"),
        (form(b"x", **{f"f{n}": "" for n in range(20)}), "more than"),
        (b"--of-the-test\r\nx: y\r\n\r\n\r\n" * 20 + form(b"x"), "more than"),
        (
            form(b"x", a="").partition(
                b'--of-the-test\r\nContent-Disposition: form-data; name="file'
            )[0]
            * 20
            + form(b"x"),
            "more than",
        ),
        (form(b"x").replace(b"Content-Type", b"Content Type"), "not the form"),
        (form(b"x").replace(b"Content-Type: ", b"Content-Type: " + b"y" * 9_999), "not the form"),
    ],
)
def test_a_form_at_fault_is_refused_and_told_why(content: bytes, said: str) -> None:
    with pytest.raises(InvalidError, match=said):
        read(content, [])[0].end()


@given(
    st.lists(
        st.binary(max_size=30)
        | st.sampled_from(
            [
                f"--{BOUNDARY}".encode(),
                b"\r\n",
                b"--",
                b'Content-Disposition: form-data; name="file"',
                b":",
            ]
        ),
        max_size=30,
    )
)
def test_whatever_is_no_form_is_refused_and_nothing_else_happens(parts: list[bytes]) -> None:
    with suppress(InvalidError):
        read(b"".join(parts), [])[0].end()


@given(
    st.lists(st.integers(0, 6), max_size=8),
    st.booleans(),
    st.lists(st.integers(0, 60), max_size=8),
    st.integers(0, 8),
    st.integers(0, 6),
)
def test_lines_are_measured_alike_however_they_come(
    sizes: list[int], ended: bool, cuts: list[int], lines_max: int, bytes_max: int
) -> None:
    content = b"\n".join(b"x" * size for size in sizes) + (b"\n" if ended and sizes else b"")
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    fits = len(lines) <= lines_max and all(len(one) <= bytes_max for one in lines)
    ruler = Ruler(lines_max, bytes_max)
    edges = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    try:
        for begin, end in pairwise(edges):
            ruler.feed(content[begin:end])
        ruler.end()
    except InvalidError:
        assert not fits
    else:
        assert fits
