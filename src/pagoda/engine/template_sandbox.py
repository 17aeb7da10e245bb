"""The Jinja environment that chat templates run in.

A chat template comes with a model file, so it is code from a stranger: it gets the sandbox of Jinja, which
keeps it from attributes that lead to the interpreter, no loader, plain data, and a budget of work, so that it
can neither reach the file system nor run or grow for ever. In all else it behaves as under Hugging Face
transformers, which templates are written for.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_WORK = 200_000_000  # about a second: characters copied, plus WORK_PER_STEP for each call and iteration
WORK_PER_STEP = 100
MAX_OUTPUT_CHARS = 32_000_000
_MAX_INTEGER_BITS = 4096

# Stand in rendered text for "no user wrote this": noncharacters, which interchanged text never holds.
# https://www.unicode.org/faq/private_use.html#noncharacters
NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class TemplateRaisedError(jinja2.TemplateError):
    """The template called `raise_exception`; the message is the template's own."""


class WorkLimitError(SecurityError):
    """The template asked for more work than any real one needs."""


class Work:
    """What one rendering may still do."""

    def __init__(self, max_work: int = MAX_WORK) -> None:
        self._left = max_work

    def charge(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise WorkLimitError("the chat template loops too long or builds too much text")


# The rendering under way in this thread or task; none while a template is compiled.
_work: ContextVar[Work | None] = ContextVar("pagoda_template_work", default=None)


def render(template: jinja2.Template, variables: Mapping[str, Any], max_work: int = MAX_WORK) -> str:
    """Render within a budget of work. Raises what the template raises, and `WorkLimitError`."""
    token = _work.set(Work(max_work))
    try:
        pieces, num_chars = [], 0
        for piece in template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_OUTPUT_CHARS:
                raise WorkLimitError(f"the chat template's text is longer than {MAX_OUTPUT_CHARS} characters")
        return "".join(pieces)
    finally:
        _work.reset(token)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with every loop, call, operator and filter charged to the rendering's budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            finalize=_charged_output,
        )
        for name in ("urlize", "xmlattr", "pprint"):  # costly, and of no use in a prompt
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = _charged_filter(function)
        self.filters["tojson"] = _to_json
        self.filters["_counted"] = _counted
        self.filters["_joined"] = _joined
        del self.globals["lipsum"]
        self.globals["range"] = _bounded_range
        self.globals["dict"] = _new_dict
        self.globals["namespace"] = _PublicNamespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _CountLoops().visit(template)
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _charge_arguments(args, kwargs)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _charge_string_method(owner, __obj.__name__, args)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _charge_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: marks the assistant's own text for training, a no-op here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CountLoops(NodeTransformer):
    """Route what a loop iterates over, and what `~` joins, through filters that charge for it."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "_joined", [], [], None, None, lineno=node.lineno)


class _PublicNamespace(Namespace):
    """`namespace()` without names that could shadow the interpreter's."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self=` is a name that templates may use
        self, *rest = args
        names = dict(*rest, **kwargs)
        for name in names:
            _require_public(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template's namespace cannot hold {name!r}: it begins with an underscore")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise TemplateRaisedError(str(message))


def _bounded_range(*bounds: int) -> range:
    numbers = range(*bounds)
    _charge(WORK_PER_STEP * len(numbers))
    return numbers


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it for templates: no escapes for HTML, none for Unicode unless asked."""
    if isinstance(indent, int) and indent > 64:
        raise WorkLimitError("tojson: indent is at most 64")
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:  # noncharacters stay themselves, so that marks set before rendering are found after it
        text = re.sub(r"(\\\\)|\\u(fdd[0-9a-f]|fde[0-9a-f])", _unescape_noncharacter, text)
    _charge(len(text))
    return text


def _unescape_noncharacter(match: re.Match[str]) -> str:
    return match[1] or chr(int(match[2], 16))


def _counted(value: Any) -> Iterator[Any]:
    for item in value:
        _charge(WORK_PER_STEP)
        yield item


def _joined(parts: list[Any]) -> str:
    text = "".join(map(str, parts))
    _charge(WORK_PER_STEP + len(text))
    return text


def _charged_output(value: Any) -> Any:
    _charge(WORK_PER_STEP + _size(value))
    return value


def _charged_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        _charge_arguments(args, kwargs)
        texts = [arg for arg in args if isinstance(arg, str)]
        if texts and function.__name__ in ("do_replace", "do_format"):
            _charge_string_method(texts[0], function.__name__.removeprefix("do_"), tuple(texts[1:]))
        result = function(*args, **kwargs)
        _charge(_size(result))
        return result

    return charged


def _charge_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Each argument costs its size; a number, such as a width, costs its value."""
    _charge(WORK_PER_STEP + sum(map(_size, args)) + sum(map(_size, kwargs.values())))
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and not isinstance(value, bool):
            _charge(abs(value))


def _charge_string_method(owner: str, name: str, args: tuple[Any, ...]) -> None:
    if name in ("format", "format_map", "__mod__") and re.search(r"\d{5}|\{[^{}]*\{|%[^a-zA-Z%]*\*", owner):
        raise WorkLimitError("a format string in the chat template has too wide a field")
    texts = [arg for arg in args if isinstance(arg, str)]
    if name == "replace" and len(texts) >= 2:
        _charge(owner.count(texts[0]) * len(texts[1]))
    elif name == "join" and args:
        _charge(len(owner) * _size(args[0]))
    _charge(len(owner))


def _charge_operator(operator: str, left: Any, right: Any) -> None:
    _charge(WORK_PER_STEP + _size(left) + _size(right))
    if operator == "%" and isinstance(left, str):
        _charge_string_method(left, "__mod__", ())
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_INTEGER_BITS:
            raise WorkLimitError("a number in the chat template is too large")
    elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
        _charge(
            (left if isinstance(left, int) else _size(left))
            * (right if isinstance(right, int) else _size(right))
        )


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 0


def _charge(amount: int) -> None:
    work = _work.get()
    if work is not None:
        work.charge(max(amount, 0))
