"""Envelopes in a configuration: read from a file into it, explained, and held against what runs."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from headrace.config.errors import ConfigError
from headrace.config.explain import rows
from headrace.config.resolve import Resolved, resolved
from headrace.model.envelope import DECLARED_RATE, MISMATCH_MARGIN, Envelope
from headrace.policy.catalog import canonical, decode
from headrace.policy.envelopes import fingerprint, reading
from tests.config.configs import BASE

FILE = "      profile: h100-8b-tp1"


def settled(folder: Path, *extra: str, after: str = "", **flags: str) -> Resolved:
    """Return BASE with settings added to its pool, and after all."""
    lines = "".join(f"\n      {line}" for line in extra)
    text = BASE.replace(FILE, FILE + lines) + after
    return resolved(text, "d", folder, {}, {k.replace("__", "."): v for k, v in flags.items()})


def measured(folder: Path, work_rate: float = 0.6, mix: str = "conv", step: int = 512) -> Envelope:
    """Return what somebody measured of BASE's pool."""
    plane = settled(folder).settings.deployment
    mark = fingerprint(plane, plane.pools[0])
    promises = {"interactive": mark.promises["interactive"]}
    return Envelope(
        fingerprint=replace(
            mark, engine="emulated 0", mix=mix, step_tokens=step, promises=promises
        ),
        work_rate=work_rate,
        low=work_rate * 0.9,
        high=work_rate * 1.1,
        request_rate=20.0,
        attainment={"interactive": 0.9},
        seeds=(0, 1, 2),
        measured_at_s=1,
    )


def write(folder: Path, *some: Envelope, name: str = "c.json") -> None:
    """Write a file as the command does, as far as a configuration reads it."""
    told = {"format": "headrace.capacity/1", "envelopes": some, "measured": []}
    (folder / name).write_bytes(msgspec.json.encode(told))


def rate_of(found: Resolved) -> float:
    plane = found.settings.deployment
    return reading(plane, plane.pools[0]).work_rate


def work_rate_row(found: Resolved) -> tuple[object, str]:
    return next(
        (row.value, row.source)
        for row in rows(found)
        if row.path == "deployment.pools[0].work_rate"
    )


def test_a_file_of_envelopes_stands_in_the_configuration_itself(tmp_path: Path) -> None:
    write(tmp_path, measured(tmp_path), measured(tmp_path, 0.5, "reasoning"))
    found = settled(tmp_path, "envelopes: c.json")
    assert found.warnings == ()
    assert rate_of(found) == 0.5
    assert rate_of(settled(tmp_path, "envelopes: c.json", "mix: conv")) == 0.6
    again = decode(canonical(found.settings.deployment))
    assert again.pools[0].envelopes == found.settings.deployment.pools[0].envelopes
    assert reading(again, again.pools[0]).work_rate == 0.5


def test_explain_tells_where_a_work_rate_comes_from(tmp_path: Path) -> None:
    write(tmp_path, measured(tmp_path))
    assert work_rate_row(settled(tmp_path)) == (DECLARED_RATE, "default")
    assert work_rate_row(settled(tmp_path, "work_rate: 0.4")) == (0.4, "d:8")
    value, source = work_rate_row(settled(tmp_path, "envelopes: c.json"))
    assert (value, source) == (
        0.6,
        "default: envelope of mix conv, 3 seeds, emulated 0, fits; measured 1970-01-01",
    )


def test_what_is_declared_wins_and_the_check_says_so(tmp_path: Path) -> None:
    write(tmp_path, measured(tmp_path))
    found = settled(tmp_path, "envelopes: c.json", "work_rate: 0.3")
    assert rate_of(found) == 0.3
    (warned,) = found.warnings
    assert "not read: `work_rate` is given, and wins" in str(warned)


def test_one_of_other_steps_counts_less_and_is_shown_until_measured_again(tmp_path: Path) -> None:
    write(tmp_path, measured(tmp_path, 0.6, step=2_048))
    found = settled(tmp_path, "envelopes: c.json")
    lowest = 0.6 * 0.9 * (1 - MISMATCH_MARGIN)
    assert rate_of(found) == pytest.approx(lowest)
    (warned,) = found.warnings
    assert "lowest of its kind less 10 %: other step_tokens" in str(warned)
    assert "other step_tokens" in work_rate_row(found)[1]


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (("mix: code",), "no envelope of mix `code`; there are: conv"),
        (("revision: '2'",), "other revision"),
        (("profile: h200-8b-tp1",), "none is of this model and hardware"),
    ],
)
def test_what_an_envelope_says_nothing_of_is_a_warning(
    tmp_path: Path, extra: tuple[str, ...], told: str
) -> None:
    write(tmp_path, measured(tmp_path))
    text = BASE.replace(FILE, "") if extra[0].startswith("profile") else BASE
    text = text.rstrip() if text == BASE else text
    lines = "".join(f"\n      {line}" for line in (*extra, "envelopes: c.json"))
    text = text.replace("      model: m", "      model: m" + lines)
    found = resolved(text, "d", tmp_path, {}, {})
    assert any(told in str(warned) for warned in found.warnings)


def test_real_engines_behind_a_simulated_envelope_are_a_warning(tmp_path: Path) -> None:
    write(tmp_path, measured(tmp_path))
    real = "\nupstreams: [{url: 'http://h:1', pool: p}]\n"
    found = settled(tmp_path, "envelopes: c.json", after=real)
    assert any("its engines are real" in str(warned) for warned in found.warnings)


def test_a_flag_may_name_the_file(tmp_path: Path) -> None:
    write(tmp_path, measured(tmp_path))
    found = settled(tmp_path, deployment__pools__0__envelopes="c.json")
    assert rate_of(found) == 0.6


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "envelopes"),
        (b"{}", "none there"),
        (b"[1]", "expected `mapping`"),
        (b'{"envelopes": [{"work_rate": 0}]}', "missing field `fingerprint`"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes | None, told: str) -> None:
    if content is not None:
        (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        settled(tmp_path, "envelopes: c.json")
