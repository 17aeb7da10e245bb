"""Pagoda: an LLM inference and serving engine whose centre is the KV cache."""

from __future__ import annotations

__version__ = "0.1.0"
