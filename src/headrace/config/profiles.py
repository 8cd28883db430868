"""Which hardware profile is meant? Packaged ones by name, others by path.

The files of the folder beside this module ship with the package, one profile each, named like it.
"""

from importlib import resources
from pathlib import Path

import msgspec
import yaml

from headrace.model.profile import Profile

_SUFFIXES = (".yaml", ".yml", ".json")
_FOLDER = resources.files("headrace.config").joinpath("profiles")


def profile_names() -> tuple[str, ...]:
    """Return the names of the packaged profiles, sorted."""
    files = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))


def load_profile(name_or_path: str) -> Profile:
    """Return a packaged profile by its name, or the one in a .yaml, .yml or .json file.

    ValueError names the profile, the place in the file and what is wrong there.
    """
    if name_or_path.endswith(_SUFFIXES):
        try:
            text = Path(name_or_path).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"profile {name_or_path}: {error.strerror}") from error
    elif name_or_path in profile_names():
        text = _FOLDER.joinpath(f"{name_or_path}.yaml").read_text(encoding="utf-8")
    else:
        known = ", ".join(profile_names())
        raise ValueError(
            f"unknown profile {name_or_path!r}: give a path ending in .yaml, .yml or .json, "
            f"or one of {known}"
        )
    try:
        # JSON is read as YAML too: it is a subset of it.
        return msgspec.convert(yaml.safe_load(text), Profile)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ValueError(f"profile {name_or_path}: {error}") from error
