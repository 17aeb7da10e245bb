"""Pagoda: an LLM inference and serving engine whose centre is the KV cache.

Public names are imported on first use, so that `import pagoda` and `pagoda --version` cost next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pagoda.engine.async_engine import AsyncLLM as AsyncLLM
    from pagoda.engine.llm import LLM as LLM
    from pagoda.engine.output import CompletionOutput as CompletionOutput
    from pagoda.engine.output import Logprob as Logprob
    from pagoda.engine.output import RequestMetrics as RequestMetrics
    from pagoda.engine.output import RequestOutput as RequestOutput
    from pagoda.errors import CapacityError as CapacityError
    from pagoda.errors import ModelFileError as ModelFileError
    from pagoda.errors import ModelNotFoundError as ModelNotFoundError
    from pagoda.errors import PagodaError as PagodaError
    from pagoda.errors import RequestError as RequestError
    from pagoda.errors import UnsupportedError as UnsupportedError
    from pagoda.sampling_params import SamplingParams as SamplingParams

_MODULE_OF = {
    "LLM": "pagoda.engine.llm",
    "AsyncLLM": "pagoda.engine.async_engine",
    "CompletionOutput": "pagoda.engine.output",
    "Logprob": "pagoda.engine.output",
    "RequestMetrics": "pagoda.engine.output",
    "RequestOutput": "pagoda.engine.output",
    "CapacityError": "pagoda.errors",
    "ModelFileError": "pagoda.errors",
    "ModelNotFoundError": "pagoda.errors",
    "PagodaError": "pagoda.errors",
    "RequestError": "pagoda.errors",
    "UnsupportedError": "pagoda.errors",
    "SamplingParams": "pagoda.sampling_params",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
