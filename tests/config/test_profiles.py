"""The packaged profiles load, and their stored reference batch is the one its rule gives."""

from pathlib import Path

import pytest

from headrace.config.profiles import load_profile, profile_names
from headrace.units import ms


def test_nine_fits_are_packaged() -> None:
    assert profile_names() == (
        "a100-70b-tp4",
        "a100-8b-tp1",
        "cpu1-smollm2-135m",
        "h100-70b-tp4",
        "h100-70b-tp8",
        "h100-8b-tp1",
        "h200-70b-tp2",
        "h200-70b-tp4",
        "h200-8b-tp1",
    )


@pytest.mark.parametrize("name", profile_names())
def test_packaged_profile_says_who_it_is_and_where_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    measured = "xllamacpp" if name.startswith("cpu") else "ai-dynamo/aiconfigurator"
    assert measured in profile.source


@pytest.mark.parametrize("name", profile_names())
def test_reference_batch_is_the_largest_whose_step_holds_80_ms(name: str) -> None:
    profile = load_profile(name)
    context = profile.reference_context
    bound = min(profile.max_running, profile.kv_capacity_tokens // context)
    fits = [n for n in range(1, bound + 1) if profile.decode_step_ns(n, n * context) <= ms(80)]
    assert profile.reference_batch == fits[-1]


def test_own_profile_loads_by_path(tmp_path: Path) -> None:
    packaged = Path(__file__).parents[2] / "src/headrace/config/profiles/h100-8b-tp1.yaml"
    mine = tmp_path / "mine.yml"
    mine.write_text(packaged.read_text(encoding="utf-8"), encoding="utf-8")
    assert load_profile(str(mine)) == load_profile("h100-8b-tp1")


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown profile 'h100'.*h100-8b-tp1"):
        load_profile("h100")


def test_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"/nowhere/p\.yaml: No such file"):
        load_profile("/nowhere/p.yaml")


def test_wrong_field_is_named_with_its_path(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"name": "bad", "decode": {"a_ms": "6"}}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.json: .*"):
        load_profile(str(bad))
    bad.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.json: "):
        load_profile(str(bad))
