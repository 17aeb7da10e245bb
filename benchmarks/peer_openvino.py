"""OpenVINO GenAI's continuous batching pipeline under `peer_steps`; runs in OpenVINO's own environment."""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai
from peer_steps import parse_arguments, report

MAX_NUM_BATCHED_TOKENS = 512
CACHE_GB = 2


class OpenVINO:
    """Defaults of the CPU plugin: weights as the GGUF's reader makes them, keys and values in 8 bits."""

    def __init__(self, model: str, num_threads: int) -> None:
        self.version = openvino_genai.__version__
        config = openvino_genai.SchedulerConfig()
        config.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        config.max_num_seqs = 64
        config.cache_size = CACHE_GB
        config.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": num_threads}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, config, "CPU", properties)
        self.tokenizer = self.pipeline.get_tokenizer()
        self.handles: dict[int, openvino_genai.GenerationHandle] = {}
        self.num_requests = 0

    def add(self, stream: int, prompt: list[int], max_tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        self.num_requests += 1
        ids = openvino.Tensor(np.array([prompt], np.int64))
        self.handles[stream] = self.pipeline.add_request(self.num_requests, ids, config)

    def step(self) -> dict[int, list[int]]:
        self.pipeline.step()
        new: dict[int, list[int]] = {}
        for stream, handle in self.handles.items():
            while handle.can_read():
                for output in handle.read().values():
                    new.setdefault(stream, []).extend(output.generated_ids)
        return new

    def end(self, streams: list[int]) -> None:
        for stream in streams:
            self.handles.pop(stream).stop()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).input_ids.data[0].tolist()

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids)


if __name__ == "__main__":
    arguments = parse_arguments(__doc__)
    report(OpenVINO(arguments.model, arguments.threads), arguments)
