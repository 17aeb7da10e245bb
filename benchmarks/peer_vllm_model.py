"""A GGUF file as the folder of bf16 safetensors that vLLM reads; runs in vLLM's environment.

/tmp/vllm/bin/pip install --no-deps gguf accelerate
/tmp/vllm/bin/python benchmarks/peer_vllm_model.py model.gguf /tmp/model
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    source = {"pretrained_model_name_or_path": args.gguf.parent, "gguf_file": args.gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # What comes from a GGUF file refuses to be saved, though its weights are plain tensors by now.
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    if hasattr(plain.config, "quantization_config"):
        del plain.config.quantization_config
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(args.folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(args.folder)
