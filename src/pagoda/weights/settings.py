"""`Settings`: what a model file says about its model, read by key, each error naming the key.

GGUF metadata and a Hugging Face config.json are read alike; JSON's null is a key that is absent.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.weights.metadata import Metadata, get_bool, get_float, get_int, get_str, get_strings

CONVERT_AGAIN = "convert the model again with a current converter"
MAX_SIZE = 1 << 24


class Settings:
    """Keys of one model. `prefix` stands before each in the file (`llama.`); `file` leads messages.

    It remembers which keys were asked for: a key that would change the result and that nothing read is an
    error (`refuse_unread`).
    """

    def __init__(self, values: Metadata, *, prefix: str = "", file: str | None = None) -> None:
        self.values = values
        self.prefix = prefix
        self.file = file
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        return f"{self.prefix}{key}"

    def label(self, key: str) -> str:
        place = "" if self.file is None else f"{self.file}: "
        return f"{place}metadata key {self.name(key)!r}"

    def _note(self, key: str) -> str:
        self._read.add(key)
        return self.name(key)

    def has(self, key: str) -> bool:
        """Whether the key has a value. Asking does not count as reading."""
        return self.values.get(self.name(key)) is not None

    def was_read(self, key: str) -> bool:
        return key in self._read

    def integer(self, key: str) -> int | None:
        return get_int(self.values, self._note(key), file=self.file)

    def number(self, key: str) -> float | None:
        return get_float(self.values, self._note(key), file=self.file)

    def flag(self, key: str, default: bool = False) -> bool:
        value = get_bool(self.values, self._note(key), file=self.file)
        return default if value is None else value

    def text(self, key: str) -> str | None:
        return get_str(self.values, self._note(key), file=self.file)

    def require(self, key: str, *allowed: str) -> None:
        """Refuse text other than `allowed`; a key that is absent means the first of them.

        Raises:
            UnsupportedError: it says something else.
        """
        value = self.text(key)
        if value is not None and value not in allowed:
            raise UnsupportedError(
                f"{self.label(key)} = {value!r:.80} is not supported", hint=f"only {', '.join(allowed)} is"
            )

    def texts(self, key: str) -> list[str] | None:
        return get_strings(self.values, self._note(key), file=self.file)

    def numbers(self, key: str) -> list[float] | None:
        """An array of finite numbers."""
        value = self.values.get(self._note(key))
        if value is None:
            return None
        array = np.asarray(value)
        if array.dtype.kind not in "iuf" or array.ndim != 1 or not np.isfinite(array).all():
            raise ModelFileError(f"{self.label(key)} must be an array of finite numbers", hint=CONVERT_AGAIN)
        return [float(v) for v in array]

    def flags(self, key: str, length: int) -> list[bool] | None:
        """An array of `length` truth values."""
        value = self.values.get(self._note(key))
        if value is None:
            return None
        array = np.asarray(value)
        if array.dtype.kind not in "biu" or array.shape != (length,):
            raise ModelFileError(f"{self.label(key)} must be an array of {length} truth values")
        return [bool(v) for v in array]

    def part(self, key: str) -> Settings | None:
        """The settings nested under a key of a config.json."""
        value = self.values.get(self._note(key))
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ModelFileError(f"{self.label(key)} must be an object, it is {value!r:.80}")
        return Settings(value, prefix="", file=f"{self.file}: {self.name(key)}" if self.file else key)

    def size(self, key: str, maximum: int = MAX_SIZE, default: int | None = None) -> int:
        """A count that must lie within [1, maximum], and be there unless it has a default."""
        value = self.integer(key)
        if value is None:
            value = default
        if value is None:
            raise self.missing(key)
        if not 1 <= value <= maximum:
            raise ModelFileError(
                f"{self.label(key)} must lie between 1 and {maximum}, it is {value}", hint=CONVERT_AGAIN
            )
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key)
        if value is None:
            value = default
        if value is None:
            raise self.missing(key)
        if value <= 0:
            raise ModelFileError(f"{self.label(key)} must be positive, it is {value}", hint=CONVERT_AGAIN)
        return value

    def missing(self, key: str) -> ModelFileError:
        return ModelFileError(f"{self.label(key)} is missing", hint=CONVERT_AGAIN)

    def refuse_unread(self, neutral: Mapping[str, object], architecture: str) -> None:
        """Refuse keys of `neutral` that nothing has read, unless they have the value that changes nothing."""
        for key, harmless in neutral.items():
            if key in self._read or not self.has(key):
                continue
            read = (
                get_bool
                if isinstance(harmless, bool)
                else get_str
                if isinstance(harmless, str)
                else get_float
            )
            value = read(self.values, self.name(key), file=self.file)
            if value != harmless:
                raise UnsupportedError(
                    f"{architecture} with {self.label(key)} = {value} is not supported",
                    hint=f"only {harmless} is",
                )
