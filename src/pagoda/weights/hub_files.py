"""Which of many GGUF files is meant, by their names alone."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Quantisations that can be read, the best trade of size and quality first.
QUANTS = (
    *("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0"),
    *("Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4", "Q5_1", "Q5_0", "BF16", "F16", "F32"),
)
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_QUANT = re.compile(r"(?:^|[-._/])((?:i?q\d\w*|bf16|f16|fp16|f32|mxfp4))(?=[-./]|$)", re.IGNORECASE)


def choose_gguf(names: Iterable[str], wanted: str = "") -> list[str]:
    """The file that is meant, as a list of its parts in order; empty when there is none or no clear one."""
    models = [group for group in whole_models(names) if "mmproj" not in group[0].lower()]
    if wanted:
        stem = wanted.lower().removesuffix(".gguf")
        for key in (_full_name, _base_name, _quant):
            if matches := [group for group in models if key(group[0]) == stem]:
                return min(matches, key=lambda group: (len(group), len(group[0]), group[0]))
        return []
    for quant in QUANTS:
        if matches := [group for group in models if _quant(group[0]) == quant.lower()]:
            return min(matches, key=lambda group: (len(group), len(group[0]), group[0]))
    unlabelled = [group for group in models if not _quant(group[0])]
    return unlabelled[0] if len(unlabelled) == 1 else []


def whole_models(names: Iterable[str]) -> list[list[str]]:
    """Files grouped by model: most alone, split ones together, incomplete splits left out."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf"):
            shard = _SHARD.search(name)
            key = (_SHARD.sub("", name), int(shard[2])) if shard else (name, 1)
            groups.setdefault(key, []).append(name)
    return [group for (_, num_parts), group in groups.items() if len(group) == num_parts]


def _full_name(name: str) -> str:
    return name.lower().removesuffix(".gguf")


def _base_name(name: str) -> str:
    return _full_name(_SHARD.sub("", name)).rpartition("/")[2]


def _quant(name: str) -> str:
    found: list[str] = _QUANT.findall(_full_name(_SHARD.sub("", name)))
    return found[-1].lower().replace("fp16", "f16") if found else ""
