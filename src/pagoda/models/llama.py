"""Llama (Touvron et al. 2023) and what shares its shape: Llama 2 and 3, Mistral, SmolLM, TinyLlama."""

from __future__ import annotations

from pagoda.models.config import ModelConfig
from pagoda.runtime.program import ProgramBuilder
