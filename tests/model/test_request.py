"""A request in a lesser form: less of the prompt, and of what is known of it."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.model.ids import ModelName, RequestId, TenantId
from headrace.model.request import Request, TextBytes
from headrace.units import Tokens

PARTS = st.lists(st.integers(0, 1_000).map(Tokens), max_size=6).map(tuple)


def request(optional: tuple[Tokens, ...], rest: int) -> Request:
    tokens = Tokens(sum(optional) + rest)
    return Request(
        id=RequestId(1),
        tenant=TenantId("t"),
        model=ModelName("m"),
        input_tokens=tokens,
        input_margin=Tokens(tokens // 4),
        text=TextBytes(ascii=4 * tokens),
        prefix=(1, 2, 3),
        prefix_kept=2,
        optional=optional,
    )


@given(PARTS, st.integers(0, 1_000), st.one_of(st.none(), st.integers(0, 8)))
def test_only_the_first_optional_parts_are_left(
    optional: tuple[Tokens, ...], rest: int, kept: int | None
) -> None:
    whole = request(optional, rest)
    less = whole.lessened(kept)
    if kept is None or kept >= len(optional):
        assert less is whole
        return
    assert less.optional == optional[:kept]
    assert less.input_tokens == max(1, rest + sum(optional[:kept]))
    assert less.input_margin <= whole.input_margin
    assert (less.prefix, less.text) == ((1, 2), None)
    assert less.lessened(kept) is less
