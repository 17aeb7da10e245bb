"""A process that serves a model needs its weights once, the KV it has written, and a bounded rest."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.real_models import QWEN2_5_CODER, SMOLLM2, real_model

REST_BYTES = 200 * 2**20

GENERATE = """
import json, re, sys
from pathlib import Path
from pagoda import LLM, SamplingParams

with LLM(sys.argv[1], max_num_batched_tokens=512) as llm:
    llm.generate([list(range(1000, 1700))], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    model = llm.engine.executor.model
    peak_kib = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
    print(json.dumps([peak_kib * 1024, model.native.weight_bytes, model.kv_bytes_resident()]))
"""


@pytest.mark.real_model
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("name", [SMOLLM2, QWEN2_5_CODER])
def test_peak_memory_is_weights_and_kv_in_use_and_200_mib(name: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", GENERATE, str(real_model(name))], capture_output=True, text=True, check=True
    )
    peak_bytes, weight_bytes, kv_bytes = json.loads(process.stdout)
    assert weight_bytes > 0
    assert kv_bytes > 0
    assert peak_bytes < weight_bytes + kv_bytes + REST_BYTES
