"""The errors that Pagoda raises on purpose. Everything else that escapes is a bug.

Each carries the message a user reads and an optional `hint`, one line that says what to do next.
"""

from __future__ import annotations


class PagodaError(Exception):
    """Base of every deliberate error; the command line prints it as one `pagoda: error:` line."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ModelFileError(PagodaError):
    """A model file is truncated, inconsistent, of an unknown type, or not a model file at all."""


class ModelNotFoundError(PagodaError):
    """No file, catalogue entry or hub repository has this name."""


class UnsupportedError(PagodaError):
    """The input is valid, but this build cannot honour it: an architecture, a rope kind, a device."""


class CapacityError(PagodaError):
    """The memory, context length or queue that was asked for cannot be had; the message has the numbers."""


class ConfigError(PagodaError):
    """A setting is out of range. `param` names the field; flags have the same name with dashes."""

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class RequestError(PagodaError):
    """One request is wrong. `param` names the offending field, as OpenAI's error object does."""

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param
