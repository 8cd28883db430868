"""`headrace config`: is a file right, what does each setting come to, what may be set?"""

import json
from pathlib import Path

import msgspec

from headrace.config.load import load
from headrace.config.schema import Settings


def check(file: Path) -> None:
    """Check a configuration file."""
    load(file, Settings)
    print(f"{file}: ok")


def explain(file: Path) -> None:
    """Show."""
    load(file, Settings)


def schema() -> None:
    """Print the JSON schema of the configuration."""
    print(json.dumps(msgspec.json.schema(Settings), indent=2))
