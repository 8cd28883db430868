"""Tokens a byte are learnt online by model, script, size and tenant, in bounded memory."""

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.ids import ModelName, RequestId, TenantId
from headrace.model.request import BY_BYTES, Request, TextBytes
from headrace.policy.predict.input import REVISION, InputPrediction
from headrace.policy.predict.windows import Windows
from headrace.units import Tokens, ceil_div

PREDICTION = InputPrediction(window=32, enough=4, groups=16)
MODEL = ModelName("m")
SCRIPTS = ("ascii", "two", "cjk", "other")
TOKENIZERS = {
    "even": dict.fromkeys(SCRIPTS, 250_000),
    "english": {"ascii": 220_000, "two": 480_000, "cjk": 600_000, "other": 900_000},
    "chinese": {"ascii": 260_000, "two": 400_000, "cjk": 210_000, "other": 500_000},
}
"""Millionths of a token for each byte, of made-up tokenizers."""


def prompt(text: TextBytes | None, tenant: str = "a", **more: object) -> Request:
    """Return a request as the edge makes it: four bytes a token, and a quarter of that more."""
    tokens = 100 if text is None else ceil_div(text.total, 4)
    fields = {
        "id": RequestId(1),
        "tenant": TenantId(tenant),
        "model": MODEL,
        "input_tokens": Tokens(tokens),
        "input_margin": Tokens(tokens // 4),
        "input_revision": BY_BYTES,
        "text": text,
    }
    return Request(**{**fields, **more})  # type: ignore[arg-type]


def ascii_only(size: int = 1_000) -> TextBytes:
    return TextBytes(ascii=size)


def taught(*counts: int, text: TextBytes | None = None, tenant: str = "a") -> Windows:
    state = Windows()
    for tokens in counts:
        PREDICTION.learn(state, MODEL, prompt(text or ascii_only(), tenant), tokens)
    return state


def test_before_anything_is_known_the_request_stays_as_it_came() -> None:
    came = prompt(ascii_only())
    assert PREDICTION.fit(Windows(), MODEL, came) is came
    assert PREDICTION.fit(taught(9, 9, 9), MODEL, came) is came, "three are not enough"


def test_an_estimate_is_the_median_and_its_margin_reaches_p90() -> None:
    found = PREDICTION.fit(taught(*range(200, 220)), MODEL, prompt(ascii_only()))
    assert (found.input_tokens, found.input_margin) == (210, 8)
    assert found.input_revision == REVISION
    twice = PREDICTION.fit(taught(*range(200, 220)), MODEL, prompt(ascii_only(2_000)))
    assert (twice.input_tokens, twice.input_margin) == (420, 16), "it is tokens a byte"


@given(st.integers(2, 10**4))
def test_what_may_be_left_out_is_taken_for_as_much_more_or_less_as_the_whole(tokens: int) -> None:
    parts = (Tokens(100), Tokens(50))
    came = prompt(ascii_only(), optional=parts)
    found = PREDICTION.fit(taught(*[tokens] * 4), MODEL, came)
    assert found.optional == tuple(one * tokens // came.input_tokens for one in parts)
    assert sum(found.optional) <= found.input_tokens


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_the_same_prompt_again_is_counted_exactly(size: int, tokens: int) -> None:
    state = taught(*[tokens] * 4, text=ascii_only(size))
    found = PREDICTION.fit(state, MODEL, prompt(ascii_only(size)))
    if tokens <= size * 1_000:
        assert (found.input_tokens, found.input_margin) == (tokens, 0)
    else:
        assert found.input_revision == BY_BYTES, "nobody's text has so many tokens a byte"


@pytest.mark.parametrize(
    ("text", "tenant", "model", "knows"),
    [
        (TextBytes(ascii=1_000), "a", "m", True),
        (TextBytes(ascii=90_000), "a", "m", True),
        (TextBytes(ascii=1_000), "b", "m", True),
        (TextBytes(ascii=980, cjk=20), "a", "m", True),
        (TextBytes(ascii=500, cjk=500), "a", "m", False),
        (TextBytes(two=1_000), "a", "m", False),
        (TextBytes(other=1_000), "a", "m", False),
        (TextBytes(ascii=1_000), "a", "n", False),
    ],
    ids=["same", "longer", "other tenant", "a few signs", "half", "two", "other", "other model"],
)
def test_who_knows_too_little_asks_a_coarser_group_of_the_same_model_and_script(
    text: TextBytes, tenant: str, model: str, *, knows: bool
) -> None:
    found = PREDICTION.fit(taught(500, 500, 500, 500), ModelName(model), prompt(text, tenant))
    assert found.input_revision == (REVISION if knows else BY_BYTES)
    assert found.input_tokens == (ceil_div(text.total, 2) if knows else ceil_div(text.total, 4))


def test_a_tenants_odd_prompts_do_not_raise_what_anothers_are_taken_for() -> None:
    state = taught(250, 250, 250, 250, tenant="plain")
    for _ in range(200):
        PREDICTION.learn(state, MODEL, prompt(ascii_only(), "odd"), 900)
    assert PREDICTION.fit(state, MODEL, prompt(ascii_only(), "plain")).input_tokens == 250
    assert PREDICTION.fit(state, MODEL, prompt(ascii_only(), "odd")).input_tokens == 900


def test_what_a_template_adds_weighs_more_on_short_prompts() -> None:
    state = Windows()
    for size in (40, 4_000) * 8:
        PREDICTION.learn(state, MODEL, prompt(ascii_only(size)), 30 + size // 4)
    assert PREDICTION.fit(state, MODEL, prompt(ascii_only(40))).input_tokens == 40
    assert PREDICTION.fit(state, MODEL, prompt(ascii_only(4_000))).input_tokens == 1_030


@pytest.mark.parametrize(
    ("came", "tokens"),
    [
        (prompt(None), 500),
        (prompt(TextBytes()), 500),
        (prompt(ascii_only()), 0),
        (prompt(ascii_only(1)), 1_001),
    ],
    ids=["not text", "no text", "no count", "more than text could be"],
)
def test_what_is_not_text_or_was_not_counted_teaches_nothing(came: Request, tokens: int) -> None:
    state = Windows()
    for _ in range(8):
        PREDICTION.learn(state, MODEL, came, tokens)
    assert not state.windows
    assert PREDICTION.fit(taught(500, 500, 500, 500), MODEL, prompt(None)) == prompt(None)


def test_the_count_of_a_tokenizer_stands_and_teaches() -> None:
    counted = prompt(
        ascii_only(), input_tokens=Tokens(300), input_margin=Tokens(0), input_revision="engine"
    )
    found = PREDICTION.fit(taught(500, 500, 500, 500), MODEL, counted)
    assert (found.input_tokens, found.input_margin) == (300, 0)
    assert found.input_revision == "engine"
    state = Windows()
    for _ in range(4):
        PREDICTION.learn(state, MODEL, counted, 300)
    assert PREDICTION.fit(state, MODEL, prompt(ascii_only())).input_tokens == 300


def test_a_prefix_chunk_has_as_many_tokens_as_its_bytes() -> None:
    came = prompt(ascii_only(4_096), prefix=(1, 2, 3), prefix_tokens=Tokens(256))
    found = PREDICTION.fit(taught(*[200] * 4), MODEL, came)
    assert found.input_tokens == 820, "a fifth of the bytes"
    assert found.prefix_tokens == 205
    assert len(found.prefix) * found.prefix_tokens < found.input_tokens
    bare = PREDICTION.fit(taught(*[200] * 4), MODEL, prompt(ascii_only(4_096)))
    assert bare.prefix_tokens == 0


def drawn(rng: Random, tokenizer: dict[str, int]) -> tuple[Request, int]:
    """Return a prompt of some mix of scripts, and what a noisy tokenizer makes of it."""
    first, second = rng.choice(SCRIPTS), rng.choice(SCRIPTS)
    size, share = rng.randint(200, 20_000), rng.choice((0, 0, 0, 2, 4))
    parts = dict.fromkeys(SCRIPTS, 0)
    parts[second] += size * share // 8
    parts[first] += size - size * share // 8
    exact = sum(parts[name] * tokenizer[name] for name in SCRIPTS)
    tokens = exact * rng.randint(850_000, 1_150_000) // 10**12
    return prompt(TextBytes(**parts)), max(1, tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_estimate_converges_and_p90_covers_nine_in_ten(name: str) -> None:
    prediction, state, rng = InputPrediction(), Windows(), Random(name)
    errors: list[tuple[float, float]] = []
    covered = 0
    for nth in range(8_000):
        came, tokens = drawn(rng, TOKENIZERS[name])
        found = prediction.fit(state, MODEL, came)
        if nth >= 4_000:
            errors.append(
                (abs(came.input_tokens / tokens - 1), abs(found.input_tokens / tokens - 1))
            )
            covered += tokens <= found.input_tokens + found.input_margin
        prediction.learn(state, MODEL, came, tokens)
    before, after = (sorted(column)[len(errors) // 2] for column in zip(*errors, strict=True))
    assert after < 0.10, "the tokenizer itself spreads by 15 %"
    assert after <= before + 0.01
    assert 0.87 < covered / 4_000 < 0.95


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5_000), st.integers(1, 9_000))))
def test_the_same_lessons_give_the_same_state_and_groups_are_bounded(
    lessons: list[tuple[int, int, int]],
) -> None:
    states = Windows(), Windows()
    for state in states:
        for script, size, tokens in lessons:
            text = TextBytes(**{SCRIPTS[script]: size})
            PREDICTION.learn(state, MODEL, prompt(text, f"t{size % 7}"), tokens)
            assert len(state.windows) <= 16
    one, other = (msgspec.msgpack.encode(state) for state in states)
    assert one == other
    assert msgspec.msgpack.decode(one, type=Windows) == states[0]


def test_a_belief_that_no_window_could_earn_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="more than the window of 8"):
        msgspec.convert({"window": 8, "enough": 9}, InputPrediction)


def test_a_request_of_an_older_journal_is_one_that_nobody_estimated() -> None:
    old = {"id": 1, "tenant": "a", "model": "m", "input_tokens": 5, "input_margin": 1}
    found = msgspec.convert(old, Request)
    assert (found.input_revision, found.text) == ("given", None)
