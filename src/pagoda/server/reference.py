"""docs/reference/api.md, made of the OpenAPI description: python -m pagoda.server.reference > FILE"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from pagoda.sampling_params import SamplingParams
from pagoda.server.app import create_app
from pagoda.server.metrics import ServerMetrics
from pagoda.server.middleware import ADMIN_PREFIXES, OPEN_PATHS
from pagoda.server.params import SAME_NAME
from pagoda.server.state import ServerConfig, ServerState

Schema = Mapping[str, Any]

# What an absent field means where neither the schema nor `SamplingParams` says it. Of most booleans: false.
DEFAULTS = {"add_special_tokens": True, "cache": True, "parallel_tool_calls": True, "priority": 0}
NO_DEFAULT = ("add_generation_prompt",)  # its meaning says it

HEAD = """\
# API reference

Made by `python -m pagoda.server.reference` of the server's OpenAPI description, which a running server \
has at `GET /openapi.json`. How to use it is in the [serving guide](../guides/serving.md).

Every field of a body that is not required takes `null` as if it were absent. Errors \
are `{"error": {"message", "type", "param", "code"}}`.
"""


def reference() -> str:
    """The whole document, in Markdown."""
    state = ServerState(ServerConfig(served_model_names=("model",)), ServerMetrics("model"))
    description = create_app(state).openapi()
    schemas = description["components"]["schemas"]
    lines = [HEAD]
    referenced: dict[str, None] = {}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            lines += _route(path, method, operation, schemas)
            referenced.update(dict.fromkeys(_names_in(_body(operation, schemas))))
    pending, shown = list(referenced), set()
    while pending:
        name = pending.pop(0)
        if name not in shown:
            shown.add(name)
            lines += [f"## {name}\n", *_described(schemas[name]), *_fields(schemas[name])]
            pending += _names_in(schemas[name])
    return "\n".join(lines).rstrip() + "\n"


def _route(path: str, method: str, operation: Schema, schemas: Schema) -> Iterator[str]:
    yield f"## {method.upper()} {path}\n"
    yield from _described(operation)
    if path.startswith(ADMIN_PREFIXES):
        yield "Needs an admin key where the server has any.\n"
    if path in OPEN_PATHS:
        yield "Needs no key.\n"
    if parameters := operation.get("parameters"):
        yield from _table(
            (p["name"], {**p["schema"], "description": p.get("description", "")}, p["required"], p["in"])
            for p in parameters
        )
    if body := _body(operation, schemas):
        yield from _fields(body)


def _body(operation: Schema, schemas: Schema) -> Schema:
    """Schema of the JSON body; empty when the route has none."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return schemas[content["schema"]["$ref"].rsplit("/", 1)[1]] if content else {}


def _described(documented: Schema) -> Iterator[str]:
    if text := documented.get("description"):
        yield re.sub(r"\s*\n(?!\n)\s*", " ", text).strip() + "\n"


def _fields(schema: Schema) -> Iterator[str]:
    required = schema.get("required", ())
    return _table((name, field, name in required, "") for name, field in schema["properties"].items())


def _table(rows: Any) -> Iterator[str]:
    """Rows are (name, schema, whether it is required, "" or where it stands)."""
    yield "| name | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, schema, required, place in rows:
        where = f" ({place})" if place else ""
        default = "required" if required else _default(name, schema)
        yield f"| `{name}`{where} | {_type(schema)} | {default} | {schema.get('description', '')} |"
    yield ""


def _default(name: str, schema: Schema) -> str:
    """What an absent field means: for sampling, as `SamplingParams` has it."""
    default = schema.get("default")
    if default is None and name in SAME_NAME:
        default = next(f.default for f in fields(SamplingParams) if f.name == name)
    if default is None:
        default = DEFAULTS.get(name, False if _type(schema) == "boolean" and name not in NO_DEFAULT else None)
    return "" if default is None or default is MISSING else f"`{json.dumps(default)}`"


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(s) for s in schema["anyOf"] if s.get("type") != "null")
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    values = schema.get("additionalProperties")
    if schema.get("type") == "object" and isinstance(values, Mapping):
        return f"object of {_type(values)}"
    return str(schema.get("type", "any"))


def _names_in(schema: object) -> list[str]:
    """Names of the schemas that this one refers to."""
    return re.findall(r"#/components/schemas/(\w+)", json.dumps(schema))


if __name__ == "__main__":
    sys.stdout.write(reference())
