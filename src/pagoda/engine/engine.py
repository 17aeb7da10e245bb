"""`Engine`: from requests to outputs, step by step: schedule, copy blocks, execute, update, detokenise."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pagoda.core.prefix_pins import PrefixInfo
from pagoda.core.request import FinishReason, Request, RequestOutputDelta
from pagoda.core.scheduler import Scheduler
from pagoda.core.step import Executor
from pagoda.engine.choice import Choice
from pagoda.engine.output import OutputKind, RequestOutput
from pagoda.engine.request_group import RequestGroup
from pagoda.engine.seeds import choice_seed
from pagoda.engine.structured_output import CompiledGrammar, GrammarCompiler
from pagoda.engine.tokenizer import Tokenizer
from pagoda.engine.validation import checked_params, checked_prompt
from pagoda.errors import PagodaError, RequestError
from pagoda.sampling_params import SamplingParams, StructuredOutputsParams

log = logging.getLogger(__name__)


class Engine:
    """Drives a scheduler and an executor; one thread calls it.

    Every accepted request ends exactly once: with "stop", "length", "abort" or "error".

    `clock` counts the seconds of metrics; a simulation passes its virtual one. `seed` makes the seeds of
    unseeded requests reproducible; None draws them from the system. Without a tokenizer prompts are token
    ids, outputs have no text, and stop strings are refused. `on_close` runs after the executor is closed.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        max_model_len: int,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        self._on_close = on_close
        self._grammar_compiler = (
            GrammarCompiler(tokenizer, vocab_size, self._eos_token_ids) if tokenizer is not None else None
        )
        self._closed = False
        self._groups: dict[str, RequestGroup] = {}  # unfinished
        self._choices: dict[str, tuple[RequestGroup, Choice]] = {}  # unfinished, by the scheduler's ids
        self._undelivered: list[RequestOutput] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has something to do or to hand out."""
        return bool(self._groups or self._undelivered)

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        output_kind: OutputKind = OutputKind.FINAL,
        arrival_s: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        use_cache: bool = True,
        deadline_s: float | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Accept a request; from here on it ends exactly once.

        `arrival_s` (now, if None) and `deadline_s` are times on the engine's clock. Each of the `n`
        choices is a request of the scheduler's, with a seed of its own. `grammar` is that of
        `params.structured_outputs`, if `compile_grammar` has been called before.

        Raises:
            RequestError: the request itself is wrong, its id is in use, or it does not fit the model.
            CapacityError: the KV cache could not hold its prompt.
        """
        if self._closed:
            raise RuntimeError("the engine is closed")
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none", param="stop")
        token_ids = checked_prompt(
            self._encode(prompt), params, vocab_size=self.vocab_size, max_model_len=self.max_model_len
        )
        params = checked_params(
            params, len(token_ids), vocab_size=self.vocab_size, max_model_len=self.max_model_len
        )
        if grammar is None and params.structured_outputs is not None:
            grammar = self.compile_grammar(params.structured_outputs)
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        siblings: list[Request] = []  # one computes the prompt, the others fork its blocks
        requests = [
            Request(
                request_id if params.n == 1 else f"{request_id}/{index}",
                token_ids,
                # Choices share the prompt, so its log-probabilities are asked for once.
                replace(params, n=1, prompt_logprobs=params.prompt_logprobs if index == 0 else None),
                seed=choice_seed(seed, index),
                eos_token_ids=self._eos_token_ids,
                arrival_s=self._clock() if arrival_s is None else arrival_s,
                priority=priority,
                cache_salt=cache_salt,
                use_cache=use_cache,
                deadline_s=deadline_s,
                grammar=None if grammar is None else grammar.start(),
                siblings=siblings,
            )
            for index in range(params.n)
        ]
        siblings.extend(requests)
        self._accept(
            RequestGroup(
                request_id,
                requests,
                [Choice(index, r.params, self.tokenizer) for index, r in enumerate(requests)],
                prompt=prompt if isinstance(prompt, str) else None,
                output_kind=output_kind,
                tokenizer=self.tokenizer,
            )
        )

    def compile_grammar(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """What `add_request` needs for structured output. Takes a while, so any thread may call it before.

        Raises:
            RequestError: the constraint cannot be used.
        """
        if self._grammar_compiler is None:
            raise RequestError(
                "structured output needs a tokenizer, and this engine has none", param="structured_outputs"
            )
        return self._grammar_compiler.compile(params)

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError("a prompt as text needs a tokenizer, and this engine has none", param="prompt")
        return self.tokenizer.encode(prompt)

    def _accept(self, group: RequestGroup) -> None:
        """Hand all choices to the scheduler, or none."""
        for num_added, request in enumerate(group.requests):
            try:
                self.scheduler.add(request)
            except Exception:
                for added in group.requests[:num_added]:
                    self.scheduler.abort(added.request_id)
                raise
        self._groups[group.request_id] = group
        for request, choice in zip(group.requests, group.choices, strict=True):
            self._choices[request.request_id] = group, choice

    def step(self) -> list[RequestOutput]:
        """Run one step and hand out what it brought, at most one output a request.

        An exception of the executor ends the requests of this step with an error; the others go on. An
        interrupt (Ctrl-C) does the same and is raised; the next call hands out what it ended.
        """
        outputs, self._undelivered = self._undelivered, []
        step = self.scheduler.schedule()
        if step is None:
            return outputs + self._take_in(self._idle())
        try:
            if step.block_copies:
                self.executor.copy_blocks(step.block_copies)
            result = self.executor.execute(step)
        except Exception as error:
            log.exception("a step of %d requests failed", len(step.requests))
            return outputs + self._take_in(self.scheduler.fail_step(step, describe_error(error)))
        except BaseException:
            self._undelivered = outputs + self._take_in(self.scheduler.fail_step(step, "interrupted"))
            raise
        return outputs + self._take_in(self.scheduler.update(step, result))

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests that nobody waits for any more; their blocks are free when this returns.

        Returns the outputs that are theirs still, with what they have generated. Ids that are unknown
        or whose last output has been handed out are left out.
        """
        wanted = dict.fromkeys(request_ids)
        outputs = [output for output in self._undelivered if output.request_id in wanted]
        self._undelivered = [output for output in self._undelivered if output.request_id not in wanted]
        for group in [self._groups[r] for r in wanted if r in self._groups]:
            changed = [choice for choice in group.choices if not choice.finished]
            for request in group.requests:
                self.scheduler.abort(request.request_id)
                self._choices.pop(request.request_id, None)
            for choice in changed:
                choice.finish(FinishReason.ABORT.value)
                group.note_finished()
            outputs += self._hand_out(group, changed, self._clock())
        return outputs

    def pin_prefix(
        self,
        token_ids: Sequence[int] | None = None,
        ttl_s: float | None = None,
        cache_salt: str | None = None,
        *,
        block_hash: bytes | None = None,
    ) -> PrefixInfo:
        """Keep a cached prefix from eviction, see `Scheduler.pin_prefix`.

        To have it cached, run a request of these tokens with `max_tokens` 0 and the same salt first.
        """
        return self.scheduler.pin_prefix(token_ids, block_hash=block_hash, ttl_s=ttl_s, cache_salt=cache_salt)

    def unpin_prefix(
        self,
        token_ids: Sequence[int] | None = None,
        cache_salt: str | None = None,
        *,
        block_hash: bytes | None = None,
    ) -> bool:
        """Take a pin back; False when there is none."""
        return self.scheduler.unpin_prefix(token_ids, block_hash=block_hash, cache_salt=cache_salt)

    def list_prefixes(self) -> list[PrefixInfo]:
        """The longest cached prefixes and all pinned ones, latest use first."""
        return self.scheduler.list_prefixes()

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no request holds, pinned ones too; returns how many that were."""
        return self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Abort what is unfinished and give the executor's memory back. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._undelivered += self.abort(list(self._groups))
        self.executor.close()
        if self._on_close is not None:
            self._on_close()

    def _idle(self) -> list[RequestOutputDelta]:
        """Nothing can be computed: either nothing is left, or the scheduler is stuck, which is a bug.
        Requests must not wait for ever then."""
        deltas = self.scheduler.collect_finished()
        if deltas or not self.scheduler.has_unfinished:
            return deltas
        stuck = list(self.scheduler.requests)
        log.error("%d requests wait and none can be scheduled", len(stuck))
        for request_id in stuck:
            self.scheduler.finish(request_id, FinishReason.ERROR)
        error = "the scheduler is stuck"
        return [RequestOutputDelta(r, finish_reason=FinishReason.ERROR, error=error) for r in stuck]

    def _take_in(self, deltas: Iterable[RequestOutputDelta]) -> list[RequestOutput]:
        now_s = self._clock()
        changed: dict[str, list[Choice]] = {}
        for delta in deltas:
            group, choice = self._choices[delta.request_id]
            group.add_prompt_logprobs(delta.prompt_logprobs)
            if not delta.sampled and not delta.finished:
                continue  # part of a prompt: nobody is told before there is a token
            num_tokens_before = len(choice.token_ids)
            self._advance(choice, delta)
            if delta.sampled:
                group.note_tokens(len(choice.token_ids) - num_tokens_before, now_s)
            if choice.finished:
                group.note_finished()
                del self._choices[delta.request_id]
            changed.setdefault(group.request_id, []).append(choice)
        outputs = []
        for request_id, choices in changed.items():
            outputs += self._hand_out(self._groups[request_id], choices, now_s)
        return outputs

    def _advance(self, choice: Choice, delta: RequestOutputDelta) -> None:
        """Tokens to text; ends the request in the scheduler when the text ends it."""
        try:
            choice.take(delta)
        except Exception as error:  # of one request, so it must not stop the others
            log.exception("request %s failed while its text was made", delta.request_id)
            choice.finish(FinishReason.ERROR.value, error=describe_error(error))
        if choice.finished and not delta.finished:
            assert choice.finish_reason is not None
            self.scheduler.finish(delta.request_id, FinishReason(choice.finish_reason), choice.stop_reason)

    def _hand_out(self, group: RequestGroup, changed: Sequence[Choice], now_s: float) -> list[RequestOutput]:
        if group.finished:
            del self._groups[group.request_id]
        output = group.take_output(now_s, changed)
        return [] if output is None else [output]


def describe_error(error: BaseException) -> str:
    """One line for the client of a request that failed."""
    return error.message if isinstance(error, PagodaError) else f"{type(error).__name__}: {error}"
