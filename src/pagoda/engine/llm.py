"""`LLM`: offline inference in one object, shaped like vLLM's so that scripts move over."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from os import PathLike
from types import TracebackType
from typing import Any, TypeAlias, cast

from pagoda.config import CacheConfig, KVCacheDtype, SchedulerConfig
from pagoda.engine.engine import Engine
from pagoda.engine.load import load_engine
from pagoda.engine.output import OutputKind, RequestOutput
from pagoda.errors import PagodaError, RequestError, UnsupportedError
from pagoda.sampling_params import SamplingParams

Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = Mapping[str, Any]


class LLM:
    """A model that is loaded once and asked from one thread.

        with LLM("smollm2-135m") as llm:
            outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))
            print(outputs[0].outputs[0].text)

    `model` is a path, a name of the catalogue or a Hugging Face id. `max_model_len` None is the model's
    own, or less where memory is short. `seed` makes requests without one reproducible. `quantization` "q8"
    or "q4" packs weights of floats in that many bits; `revision` is a branch, tag or commit of the hub.

    Raises:
        PagodaError: the model cannot be found, read or held in memory; a setting is out of range.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        max_model_len: int | None = None,
        kv_cache_dtype: KVCacheDtype = "auto",
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        block_size: int = 16,
        seed: int | None = None,
        num_threads: int | None = None,
        backend: str = "cpu",
        progress: bool = False,
        quantization: str | None = None,
        revision: str | None = None,
    ) -> None:
        self.engine = load_engine(
            model,
            max_model_len=max_model_len,
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
            ),
            cache=CacheConfig(
                block_size=block_size,
                kv_cache_dtype=kv_cache_dtype,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                enable_prefix_caching=enable_prefix_caching,
            ),
            backend=backend,
            num_threads=num_threads,
            seed=seed,
            progress=progress,
            quantization=quantization,
            revision=revision,
        )
        self._request_numbers = count()
        self._inboxes: dict[str, deque[RequestOutput]] = {}

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """An `LLM` over an engine that is already there."""
        llm = cls.__new__(cls)
        llm.engine = engine
        llm._request_numbers = count()
        llm._inboxes = {}
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer every prompt, as a batch; outputs are in the order of the prompts.

        A prompt is text or a list of token ids. `sampling_params` is one for all or one a prompt.
        `use_tqdm` shows progress on stderr. A choice that failed (its logits are not finite, say) has
        `finish_reason` "error" and says why in `error`; the others are not affected.

        Raises:
            RequestError: a prompt or its parameters are wrong. Nothing has been generated then.
            PagodaError: every choice of every prompt failed.
        """
        prompt_list = _prompt_list(prompts)
        params_list = _params_list(sampling_params, len(prompt_list))
        request_ids: list[str] = []
        try:
            for prompt, params in zip(prompt_list, params_list, strict=True):
                request_ids.append(self._add(prompt, params, OutputKind.FINAL))
            outputs = self._run(request_ids, use_tqdm)
        finally:
            self._drop(request_ids)
        errors = [choice.error for output in outputs for choice in output.outputs]
        if errors and all(errors):
            raise PagodaError(f"nothing could be generated: {errors[0]}")
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        A message is `{"role": ..., "content": ...}`. `template_options` go to `Tokenizer.encode_chat`.

        Raises:
            RequestError: the model has no chat template, or it does not accept the messages.
        """
        conversations = cast(
            "Sequence[Sequence[Message]]",
            [messages] if messages and isinstance(messages[0], Mapping) else messages,
        )
        prompts = [self._encode_chat(c, template_options) for c in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield what each step adds to the answer of one prompt.

        The request starts with the first `next`; closing the iterator, or leaving it, aborts it.

        Raises (from the first `next`):
            RequestError: the prompt or its parameters are wrong.
        """
        request_id = self._add(prompt, sampling_params or SamplingParams(), OutputKind.DELTA)
        try:
            finished = False
            while not finished:
                output = self._take(request_id)
                finished = output.finished
                yield output
        finally:
            self._drop([request_id])

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **template_options: Any,
    ) -> Iterator[RequestOutput]:
        """`stream`, for a conversation."""
        return self.stream(self._encode_chat(messages, template_options), sampling_params)

    def _add(self, prompt: Prompt, params: SamplingParams, output_kind: OutputKind) -> str:
        request_id = f"llm-{next(self._request_numbers)}"
        self.engine.add_request(request_id, prompt, params, output_kind=output_kind)
        self._inboxes[request_id] = deque()
        return request_id

    def _drop(self, request_ids: Sequence[str]) -> None:
        self.engine.abort(request_ids)  # those that have ended already are not touched
        for request_id in request_ids:
            self._inboxes.pop(request_id, None)

    def _take(self, request_id: str) -> RequestOutput:
        """The next output of the request; what steps bring for other requests waits in their inboxes."""
        inbox = self._inboxes[request_id]
        while not inbox:
            for output in self.engine.step():
                self._inboxes[output.request_id].append(output)
        return inbox.popleft()

    def _run(self, request_ids: Sequence[str], use_tqdm: bool) -> list[RequestOutput]:
        outputs = []
        with _progress(len(request_ids), use_tqdm) as advance:
            for request_id in request_ids:
                outputs.append(self._take(request_id))
                advance()
        return outputs

    def _encode_chat(self, messages: Sequence[Message], template_options: Mapping[str, Any]) -> list[int]:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise UnsupportedError("a chat needs a tokenizer, and this engine has none")
        return tokenizer.encode_chat(messages, **template_options)

    def close(self) -> None:
        """Give weights and KV memory back. Nothing can be asked any more."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and hasattr(prompts[0], "__index__")):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _params_list(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
    if len(sampling_params) != num_prompts:
        raise RequestError(
            f"there are {num_prompts} prompts and {len(sampling_params)} sampling_params; "
            "give one for all or one a prompt",
            param="sampling_params",
        )
    return list(sampling_params)


@contextmanager
def _progress(num_requests: int, enabled: bool) -> Iterator[Callable[[], None]]:
    if not enabled:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr)) as bar:
        task = bar.add_task("prompts", total=num_requests)
        yield lambda: bar.advance(task)
