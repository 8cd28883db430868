"""What does a configuration file say? Strictly: any doubt is an error with file, line and path."""

from pathlib import Path
from typing import TypeVar

from headrace.config.build import build, read_text, with_profiles
from headrace.config.tree import read_tree

T = TypeVar("T")


def load(path: Path, type_: type[T]) -> T:
    """Return a YAML or JSON file as the type.

    Raises ConfigError, and nothing else, whatever the file holds.
    """
    return parse(read_text(path), type_, str(path), path.parent)


def parse(text: str, type_: type[T], name: str, folder: Path = Path()) -> T:
    """Return a YAML or JSON text as the type; errors call it by `name`.

    Where a `Profile` belongs, a packaged one's name may stand, or a file's path from `folder`.
    Raises ConfigError, and nothing else, whatever the text is.
    """
    return build(with_profiles(read_tree(text, name), type_, folder), type_)
