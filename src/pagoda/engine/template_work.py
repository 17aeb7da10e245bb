"""A budget of work for rendering a chat template, so that no template runs or grows for ever.

Work is counted, not timed, so that the same chat always renders or always fails. Whatever loops, copies or
walks data is charged before it is done: an operation inside the interpreter cannot be stopped half-way.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterator, Sequence, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError

MAX_WORK = 200_000_000  # a second or two; a chat of a few hundred messages takes about a million
WORK_PER_MESSAGE = 100_000  # on top, for each message
MAX_OUTPUT_CHARS = 32_000_000

# What operations cost. The unit is a character copied.
STEP = 100  # an iteration, an output, a comparison
FILTER = 500
CALL = 2000
ELEMENT = 50  # of a list or mapping that is walked

_MAX_WIDTH = 10_000
_MAX_INTEGER_BITS = 4096
_WIDE_FIELD = re.compile(r"\d{5}|\{[^{}]*\{|%[^a-zA-Z%]*\*")  # '{:99999}', '{:{}}', '%99999d', '%*d'


class WorkLimitError(SecurityError):
    """The template asked for more work than any real one needs."""


class Work:
    """What one rendering may still do."""

    def __init__(self, max_work: int) -> None:
        self._left = max_work

    def charge(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise WorkLimitError("the chat template loops too long or builds too much text")


# The budget of the rendering or compilation under way in this thread or task.
_work: ContextVar[Work | None] = ContextVar("pagoda_template_work", default=None)


@contextmanager
def budget(max_work: int = MAX_WORK) -> Iterator[None]:
    """Within it, this thread's or task's charges count against `max_work`."""
    token = _work.set(Work(max_work))
    try:
        yield
    finally:
        _work.reset(token)


def charge(amount: int) -> None:
    """Raises `WorkLimitError` once the budget is spent; free outside of one."""
    work = _work.get()
    if work is not None:
        work.charge(amount)


def charge_walk(value: Any) -> None:
    """Charge for an operation that visits all of `value`: writing it out, comparing it, hashing it.

    Data that shares its parts may be exponentially larger to walk than it is in memory.
    """
    work = _work.get()
    if work is None:
        return
    left = [value]
    while left:
        item = left.pop()
        work.charge(ELEMENT)
        if isinstance(item, (str, bytes)):
            work.charge(len(item))
        elif isinstance(item, (list, tuple)):
            left += item
        elif isinstance(item, dict):
            left += item.keys()
            left += item.values()
        elif isinstance(item, (range, ValuesView, ItemsView)):
            left += item


def charge_size(value: Any) -> None:
    """Charge for an operation that copies `value` or goes over its items once."""
    if isinstance(value, (str, bytes, list, tuple, dict, range)):
        charge(len(value))


def charge_operator(operator: str, left: Any, right: Any) -> None:
    """Charge for `left operator right`, of the operators that can make something large of something small."""
    charge(STEP)
    if operator == "%" and isinstance(left, str):
        refuse_wide_fields(left)
        charge_walk(right)
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_INTEGER_BITS:
            raise WorkLimitError("a number in the chat template is too large")
    elif operator == "*" and isinstance(left, int):
        charge(left * len(right))
    elif operator == "*" and isinstance(right, int):
        charge(len(left) * right)
    charge_size(left)
    charge_size(right)


def charge_text_method(name: str, text: str, args: Sequence[Any]) -> None:
    """Charge for a method of a string, or for the filter of the same name."""
    charge(len(text))
    for arg in args:
        charge_walk(arg)
    texts = [arg for arg in args if isinstance(arg, str)]
    if name in ("format", "format_map"):
        refuse_wide_fields(text)
    elif name == "replace" and len(texts) >= 2:
        charge(text.count(texts[0]) * len(texts[1]))
    elif name == "join" and args and isinstance(args[0], (list, tuple, dict, str)):
        charge(len(text) * len(args[0]))


def refuse_wide_fields(format_string: str) -> None:
    if _WIDE_FIELD.search(format_string):
        raise WorkLimitError("a format string in the chat template has too wide a field")


def refuse_wide(arguments: Sequence[Any]) -> None:
    """For operations that pad their result to a number of characters, bytes or items."""
    if any(isinstance(argument, int) and argument > _MAX_WIDTH for argument in arguments):
        raise WorkLimitError(f"a width in the chat template is larger than {_MAX_WIDTH}")
