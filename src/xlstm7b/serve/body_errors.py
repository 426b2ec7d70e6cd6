"""Errors of pydantic in words: which field is wrong, what it may be, and what it is."""

import json
from collections.abc import Sequence
from typing import Any

from xlstm7b.report import counted
from xlstm7b.serve.protocol import ApiError

_WANTED = {  # by pydantic's type of error
    "string_type": "a string",
    "string_sub_type": "a string",
    "string_unicode": "valid Unicode, without halves of surrogate pairs",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_too_long": "a string of at most {max_length} characters",
    "string_too_short": "a string that is not empty",
    # Of values in a URL, which are all text:
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "bool_parsing": "true or false",
}
_SHOWN = 60  # characters of a wrong value


def invalid_body(errors: Sequence[Any], body: Any) -> ApiError:
    """The response for a body that pydantic refused with these errors."""
    # A union has errors for each of its types. The one that was meant is the type that fits except
    # for its limits; if none fits, the one with the longest path.
    first = max(errors, key=lambda one: (not one["type"].endswith("_type"), len(one["loc"])))
    if first["type"] == "json_invalid":
        problem, position = first["ctx"]["error"], first["loc"][1] + 1
        return ApiError(400, f"the body is not JSON: {problem} at character {position}")
    path = _field_path(first, body)
    param = ".".join(path)[:200].encode(errors="replace").decode()
    name, kind = param or "the body", first["type"]
    if kind == "missing":
        message = f"{name} is missing"
    elif kind == "extra_forbidden":
        message = f"{name} is not a field that this server knows"
    elif kind == "int_parsing" and first["loc"][0] == "body":  # only keys of objects are text
        message = f"{name}: the keys must be token ids"
    elif kind == "value_error":
        message = f"{name}: {first['ctx']['error']}"
    elif kind == "too_long" and not first["ctx"]["max_length"]:
        message = f"{name} must be an empty list: this server does not support it"
    elif kind == "too_long":
        context = first["ctx"]
        most, count = context["max_length"], context["actual_length"] or len(first["input"])
        message = f"{name} must have at most {most} entries, not {count}"
    elif kind == "too_short":
        message = f"{name} must not be empty"
    elif kind not in _WANTED:  # a message of our own
        message = f"{name}: {first['msg']}"
    else:
        # The other types of a union refused the same value.
        alike = [one for one in errors if _field_path(one, body) == path]
        if not kind.endswith("_type"):
            alike = [one for one in alike if one["type"] == kind]
        wanted = " or ".join(dict.fromkeys(_wanted(one) for one in alike if one["type"] in _WANTED))
        message = f"{name} must be {wanted}, not {_shown(first['input'])}"
    return ApiError(400, message, param=param or None)


def _wanted(error: Any) -> str:
    words = _WANTED[error["type"]].format(**error.get("ctx", {}))
    if error["type"] == "literal_error":  # as JSON writes them
        words = words.replace("'", '"').replace("True", "true").replace("False", "false")
    return words


def _shown(value: Any) -> str:
    match value:
        case dict():
            return f"an object of {counted(len(value), 'field')}"
        case list():
            return f"a list of {counted(len(value), 'item')}"
        case str():
            value = value[:_SHOWN] + "…" * (len(value) > _SHOWN)
    return json.dumps(value, ensure_ascii=False)[: _SHOWN + 3]


def _field_path(error: Any, body: Any) -> list[str]:
    """The path of the wrong field, without pydantic's names of the types in a union."""
    if error["loc"][0] == "query":
        return [str(part) for part in error["loc"][1:]]
    path = []
    for part in error["loc"][1:]:
        keys = body if isinstance(body, dict) else range(len(body) if isinstance(body, list) else 0)
        if part in keys:
            body = body[part]
        elif error["type"] != "missing":
            continue
        path.append(str(part))
    return path
