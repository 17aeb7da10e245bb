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
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from pagoda.engine import template_work as work

_MAX_INDENT = 64

# Filters that look at their first argument's items, not at what those hold.
_SHALLOW_FILTERS = frozenset(
    {"attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject"}
    | {"rejectattr", "reverse", "select", "selectattr", "slice"}
)
_PADDING_FILTERS = frozenset({"batch", "center", "indent", "round", "slice", "truncate", "wordwrap"})
_PADDING_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"})
_USELESS_FILTERS = ("pprint", "urlize", "xmlattr")  # costly, and of no use in a prompt


class TemplateRaisedError(jinja2.TemplateError):
    """The template called `raise_exception`; the message is the template's own."""


def render(template: jinja2.Template, variables: Mapping[str, Any], max_work: int = work.MAX_WORK) -> str:
    """Render within a budget of work. Raises what the template raises, and `WorkLimitError`."""
    with work.budget(max_work):
        pieces, num_chars = [], 0
        for piece in template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > work.MAX_OUTPUT_CHARS:
                limit = f"the chat template's text is longer than {work.MAX_OUTPUT_CHARS} characters"
                raise work.WorkLimitError(limit)
        return "".join(pieces)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with every loop, call, comparison, operator and filter charged to the budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            finalize=_charged_output,
        )
        for name in _USELESS_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters = {name: _charged_filter(name, function) for name, function in self.filters.items()}
        self.tests = {name: _charged_test(function) for name, function in self.tests.items()}
        self.filters |= {"tojson": _to_json, "_counted": _counted, "_joined": _joined, "_walked": _walked}
        self.globals |= {
            "range": _charged_range,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _PublicNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: now().strftime(format),
        }

    def compile_source(self, source: str) -> jinja2.Template:
        """Compile within a budget: Jinja evaluates constant expressions meanwhile."""
        with work.budget():
            return self.from_string(source)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _ChargeNodes().visit(template)
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        work.charge(work.CALL)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, (str, bytes, int, list, tuple)):
            if name in _PADDING_METHODS:
                work.refuse_wide([*args, *kwargs.values()])
            if isinstance(owner, str):
                work.charge_text_method(name, owner, [*args, *kwargs.values()])
            else:
                work.charge_walk([owner, args])
        elif isinstance(__obj, Macro) and __obj.catch_varargs:
            work.charge_walk(args)  # they become a tuple, which can be hashed
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        work.charge_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: marks the assistant's own text for training, a no-op here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ChargeNodes(NodeTransformer):
    """Routes through filters what the sandbox has no hook for: loops, `~`, comparisons and tuples."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_walked")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_walked")
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_walked") if node.ctx == "load" else node


def _filtered(node: nodes.Node, name: str) -> nodes.Expr:
    if isinstance(node, nodes.Const):
        return node
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


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


def _raise_exception(message: object) -> None:
    work.charge_walk(message)
    raise TemplateRaisedError(str(message))


def _charged_range(*bounds: int) -> range:
    numbers = range(*bounds)
    work.charge(work.STEP * len(numbers))
    return numbers


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it for templates: no escapes for HTML, none for Unicode unless asked."""
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > _MAX_INDENT:
        raise work.WorkLimitError(f"tojson: indent is at most {_MAX_INDENT}")
    work.charge_walk(value)
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:  # noncharacters stay themselves, so that marks set before rendering are found after it
        text = re.sub(r"(\\\\)|\\u(fdd[0-9a-f]|fde[0-9a-f])", _unescape_noncharacter, text)
    work.charge(len(text))
    return text


def _unescape_noncharacter(match: re.Match[str]) -> str:
    return match[1] or chr(int(match[2], 16))


def _counted(items: Any) -> Iterator[Any]:
    for item in items:
        work.charge(work.STEP)
        yield item


def _joined(parts: list[Any]) -> str:
    work.charge(work.STEP)
    work.charge_walk(parts)
    return "".join(map(str, parts))


def _walked(value: Any) -> Any:
    work.charge(work.STEP)
    work.charge_walk(value)
    return value


def _charged_output(value: Any) -> Any:
    work.charge(work.STEP)
    work.charge_walk(value)
    return value


def _charged_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    has_context = hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        value, *options = args[1:] if has_context else args
        options += kwargs.values()
        work.charge(work.FILTER)
        if name in _PADDING_FILTERS:
            work.refuse_wide(options)
        (work.charge_size if name in _SHALLOW_FILTERS else work.charge_walk)(value)
        if name == "join":  # the separator is the text, the items are the argument
            separator = next((option for option in options if isinstance(option, str)), "")
            work.charge_text_method(name, separator, [value])
        elif isinstance(value, str):
            work.charge_text_method(name, value, options)
        else:
            work.charge_walk(options)
        result = function(*args, **kwargs)
        work.charge_size(result)
        return result

    return charged


def _charged_test(function: Any) -> Callable[..., Any]:
    has_context = hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)
    def charged(*args: Any) -> Any:
        work.charge(work.STEP)
        operands = args[1:] if has_context else args
        if len(operands) > 1:  # a comparison; the others only look at the value itself
            work.charge_walk(operands)
        return function(*args)

    return charged
