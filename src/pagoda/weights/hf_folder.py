"""`HFFolder`: what the JSON and Jinja files of a Hugging Face model folder say, weights apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagoda.errors import ModelFileError
from pagoda.weights.json_file import read_bytes, read_json

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# Everything but weights that is read of a folder.
SIDE_FILES = (CONFIG_FILE, TOKENIZER_FILE, GENERATION_FILE, TOKENIZER_CONFIG_FILE)
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
TEMPLATE_FOLDER = "additional_chat_templates"  # of NAME.jinja

_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_TEMPLATE_BYTES = 1 << 20
_MAX_TEMPLATES = 16


@dataclass(frozen=True, slots=True)
class HFFolder:
    """A folder's files, parsed. Those that are absent are empty; `config` never is."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    chat_templates: Mapping[str, str]  # by name; the usual one is "default"

    def read_tokenizer(self) -> bytes:
        """The bytes of tokenizer.json, up to tens of MB.

        Raises:
            ModelFileError: it is missing or cannot be read.
        """
        path = self.path / TOKENIZER_FILE
        if not path.exists():
            models = [p.name for p in self.path.glob("*.model")]
            old = f" ({models[0]} alone is not enough)" if models else ""
            raise ModelFileError(
                f"{self.path}: the folder has no {TOKENIZER_FILE}{old}",
                hint="fetch it, or have transformers write it (AutoTokenizer, save_pretrained)",
            )
        return read_bytes(path, max_bytes=_MAX_TOKENIZER_BYTES)

    def end_token_ids(self) -> frozenset[int]:
        """`eos_token_id` of the generation and the model configuration: one, a list, or none.

        Raises:
            ModelFileError: it is something else.
        """
        found: set[int] = set()
        for name, values in ((GENERATION_FILE, self.generation_config), (CONFIG_FILE, self.config)):
            value = values.get("eos_token_id")
            token_ids = value if isinstance(value, list) else [] if value is None else [value]
            for token_id in token_ids:
                if type(token_id) is not int or not 0 <= token_id < 1 << 31:
                    raise ModelFileError(
                        f"{self.path / name}: 'eos_token_id' must be a token id or a list of them, "
                        f"it is {value!r:.80}"
                    )
                found.add(token_id)
        return frozenset(found)


def read_hf_folder(path: Path) -> HFFolder:
    """Read the configuration files of a folder; neither weights nor the tokenizer.

    Raises:
        ModelFileError: config.json is missing, or a file is damaged.
    """
    if not (path / CONFIG_FILE).is_file():
        raise ModelFileError(
            f"{path}: the folder has no {CONFIG_FILE}", hint="give a folder that transformers can read"
        )
    tokenizer_config = _read_if_there(path / TOKENIZER_CONFIG_FILE)
    return HFFolder(
        path,
        config=read_json(path / CONFIG_FILE),
        generation_config=_read_if_there(path / GENERATION_FILE),
        tokenizer_config=tokenizer_config,
        chat_templates=dict(_chat_templates(path, tokenizer_config)),
    )


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _chat_templates(path: Path, tokenizer_config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Templates by name; later ones win. A file of its own goes before what tokenizer_config.json says."""
    yield from _named(path / TOKENIZER_CONFIG_FILE, tokenizer_config.get("chat_template"))
    if (path / "chat_template.json").exists():
        content = read_json(path / "chat_template.json")
        yield from _named(path / "chat_template.json", content.get("chat_template"))
    if (path / "chat_template.jinja").exists():
        yield "default", _read_text(path / "chat_template.jinja")
    for file in sorted((path / TEMPLATE_FOLDER).glob("*.jinja"))[:_MAX_TEMPLATES]:
        yield file.stem, _read_text(file)


def _named(file: Path, value: object) -> Iterator[tuple[str, str]]:
    """One template, or a list of `{"name": ..., "template": ...}`."""
    if value is None or value == "":
        return
    if isinstance(value, str):
        yield "default", value
        return
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        fields = entry if isinstance(entry, dict) else {}
        name, template = fields.get("name"), fields.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelFileError(f"{file}: 'chat_template' must be text, or a list of names and templates")
        yield name, template


def _read_text(file: Path) -> str:
    try:
        return read_bytes(file, max_bytes=_MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{file}: the file is not UTF-8 ({error.reason})") from None
