"""JSON schemas of many kinds, each with a name. `REFUSED` are those that cannot be kept to, and say so."""

from __future__ import annotations

from typing import Any

STRING, INTEGER, NUMBER, BOOLEAN, NULL = (
    {"type": t} for t in ("string", "integer", "number", "boolean", "null")
)


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """An object of these properties and no others; all required unless said."""
    required = list(properties) if required is None else required
    schema = {"type": "object", "properties": properties, "required": required}
    return {**schema, "additionalProperties": False, **more}


def array(items: Any, least: int, most: int, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **more}


def text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


SHORT = {"type": "string", "maxLength": 6}
PERSON = closed({"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 130}})
TREE = closed({"value": {"type": "integer"}, "children": array({"$ref": "#/$defs/tree"}, 0, 2)})
LIST = closed({"head": {"type": "boolean"}, "tail": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}})

SCHEMAS: dict[str, Any] = {
    # Plain values.
    "anything": {},
    "true": True,
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "several types": {"type": ["integer", "null", "boolean"]},
    "any object": {"type": "object"},
    "any array": {"type": "array", "maxItems": 3},
    # Bounds of numbers and texts.
    "range of integers": {"type": "integer", "minimum": -20, "maximum": 311},
    "open range": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "range of numbers": {"type": "number", "minimum": 0.5, "maximum": 1.25},
    "multiple of": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    "short text": {"type": "string", "minLength": 2, "maxLength": 5},
    "long text": {"type": "string", "minLength": 40, "maxLength": 60},
    # Enumerations and constants.
    "enum of texts": {"enum": ["red", "green", "blue"]},
    "enum of everything": {"enum": [1, "1", None, True, 2.5, ["a", 1], {"b": []}]},
    "enum with quotes": {"enum": ['say "hi"', "back\\slash", "new\nline", "tab\t"]},
    "large enum": {"enum": [f"value number {i}" for i in range(300)]},
    "const": {"const": {"a": [1, 2, {"b": None}]}},
    # Unicode.
    "unicode enum": {"enum": ["Grüße", "世界", "😀👨‍👩‍👧", "مرحبا", "e\u0301", "\u2028"]},
    "unicode keys": closed({"größe": {"type": "integer"}, "名前": SHORT, "🗝": {"type": "boolean"}}),
    "unicode pattern": text("^[à-ÿ]{2,4}ß?$"),
    "keys with quotes": closed({'a"b': {"type": "null"}, "c\\d": {"type": "null"}, "": {"type": "null"}}),
    # Patterns.
    "pattern": text("^[A-Z]{3}-[0-9]{4}$"),
    "pattern with choices": text("^(cat|dog|bird)s?( and (cat|dog)s?){0,2}$"),
    "pattern of a part": text("[0-9]{3}"),
    "pattern with classes": text("^\\d{1,3}(\\.\\d{1,3}){3}$"),
    "pattern with escapes": text('^["\\\\/]{1,4}$'),
    # Formats.
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "email": {"type": "string", "format": "email"},
    # Objects.
    "person": PERSON,
    "optional keys": closed({"a": INTEGER, "b": BOOLEAN, "c": NULL}, ["b"]),
    "no keys": closed({}),
    "extra keys of a type": {"type": "object", "properties": {"a": NULL}, "additionalProperties": BOOLEAN},
    "pattern of keys": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "nested": closed({"a": closed({"b": closed({"c": closed({"d": array(PERSON, 1, 2)})})})}),
    "many keys": closed({f"key_{i}": [INTEGER, BOOLEAN, NULL][i % 3] for i in range(9)}),
    # Arrays.
    "bounded array": array(BOOLEAN, 2, 4),
    "array of arrays": array(array(INTEGER, 1, 2), 1, 2),
    "tuple": {"type": "array", "prefixItems": [INTEGER, BOOLEAN, SHORT], "items": False, "minItems": 3},
    "empty array": array(INTEGER, 0, 0),
    # Combinations.
    "any of": {"anyOf": [PERSON, BOOLEAN, array(INTEGER, 1, 1)]},
    "any of objects": {
        "anyOf": [closed({"kind": {"const": "a"}, "x": INTEGER}), closed({"kind": {"const": "b"}})]
    },
    "one of apart": {"oneOf": [STRING, INTEGER, NULL]},
    "one of by kind": {"oneOf": [closed({"kind": {"const": k}, k: BOOLEAN}) for k in ("cat", "dog")]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "nullable": closed({"a": {"anyOf": [SHORT, NULL]}}),
    # References.
    "reference": {"$defs": {"p": PERSON}, **closed({"a": {"$ref": "#/$defs/p"}, "b": {"$ref": "#/$defs/p"}})},
    "old definitions": {"definitions": {"x": BOOLEAN}, **array({"$ref": "#/definitions/x"}, 1, 3)},
    "tree": {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
    "linked list": LIST,
    "mutual recursion": {
        "$defs": {
            "a": closed({"b": {"anyOf": [{"$ref": "#/$defs/b"}, NULL]}}),
            "b": closed({"a": {"anyOf": [{"$ref": "#/$defs/a"}, NULL]}}),
        },
        "$ref": "#/$defs/a",
    },
    "escaped reference": {"$defs": {"a/b~c": BOOLEAN}, "$ref": "#/$defs/a~1b~0c"},
    # What cannot be kept to, or is no schema.
    "false": False,
    "not": {"not": {"type": "string"}},
    "unique items": array(INTEGER, 2, 3, uniqueItems=True),
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "if then": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "one of overlapping": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "look-ahead": text("^(?=a)b"),
    "back reference": text("^(a|b)\\1$"),
    "broken pattern": text("(a"),
    "unknown format": {"type": "string", "format": "no-such-format"},
    "property is no schema": {"type": "object", "properties": {"a": "bar"}},
    "properties is no object": {"type": "object", "properties": "bar"},
    "unknown type": {"type": "strin"},
    "dangling reference": {"$ref": "#/$defs/nothing"},
    "remote reference": {"$ref": "https://example.com/schema.json"},
    "endless reference": {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"},
    "contradiction": {"type": "string", "enum": [1]},
    "empty range": {"type": "integer", "minimum": 5, "maximum": 4},
    "own options": {"type": "object", "x-guidance": {"whitespace_pattern": "[ \\n]*"}},
}  # fmt: skip

_NAMES = list(SCHEMAS)
REFUSED = frozenset(_NAMES[_NAMES.index("false") :])
