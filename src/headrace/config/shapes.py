"""What may stand at a place of the configuration? Reads the answer off the types.

Knows structs, unions told apart by a tag, lists, mappings, enumerations and what wraps them.
"""

import types
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from msgspec import Struct
from msgspec.structs import FieldInfo

_SEQUENCES = (tuple, list, set, frozenset)


def options(type_: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type, freed of bounds, new names and unions."""
    while hasattr(type_, "__supertype__"):
        type_ = type_.__supertype__
    origin = get_origin(type_)
    if origin is Annotated:
        return options(get_args(type_)[0])
    if origin in (Union, types.UnionType):
        return tuple(one for part in get_args(type_) for one in options(part))
    return (type_,)


def structs(type_: Any) -> tuple[type[Struct], ...]:
    """Return the alternatives that are structs."""
    return tuple(one for one in options(type_) if isinstance(one, type) and issubclass(one, Struct))


def tags(type_: Any) -> dict[str, type[Struct]]:
    """Return the structs of a tagged union by their tags."""
    return {
        str(one.__struct_config__.tag): one
        for one in structs(type_)
        if one.__struct_config__.tag is not None
    }


def tag_field(type_: Any) -> str | None:
    """Return the name of the field that tells a tagged union's members apart."""
    for one in structs(type_):
        if one.__struct_config__.tag_field is not None:
            return one.__struct_config__.tag_field
    return None


def struct_of(type_: Any, tag: object = None) -> type[Struct] | None:
    """Return the struct meant here: the only one, or the one of the tag."""
    found = structs(type_)
    if len(found) == 1:
        return found[0]
    return tags(type_).get(tag) if isinstance(tag, str) else None


def fields(struct: type[Struct]) -> dict[str, FieldInfo]:
    """Return a struct's fields by their names in the text."""
    return {field.encode_name: field for field in msgspec.structs.fields(struct)}


def item_type(type_: Any, index: int) -> Any | None:
    """Return the type of a list's item, or None if no list belongs here."""
    for one in options(type_):
        if get_origin(one) in _SEQUENCES:
            args = get_args(one)
            if len(args) == 1 or args[1:] == (...,):
                return args[0]
            return args[index] if index < len(args) else None
    return None


def value_type(type_: Any) -> Any | None:
    """Return the type of a mapping's values, or None if no mapping of free keys belongs here."""
    for one in options(type_):
        if get_origin(one) is dict:
            return get_args(one)[1]
    return None


def is_text(type_: Any) -> bool:
    """Return whether every word is text here, as `1` is for a revision."""
    return any(isinstance(one, type) and issubclass(one, str) for one in options(type_))


def members(type_: Any) -> tuple[str, ...]:
    """Return the words of an enumeration."""
    return tuple(
        str(member.value)
        for one in options(type_)
        if isinstance(one, type) and issubclass(one, Enum)
        for member in one
    )
