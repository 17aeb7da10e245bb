"""The executors without a model: what they answer, and what they catch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from pagoda.config import CacheConfig, SchedulerConfig
from pagoda.core.cost import KVCacheSpec, LayerGroup
from pagoda.core.scheduler import Scheduler
from pagoda.core.step import BlockCopy, Executor, SamplingInput, ScheduledRequest, SchedulerOutput
from pagoda.engine.engine import Engine
from pagoda.sampling_params import SamplingParams
from pagoda.sim.scripted_executor import ScriptedExecutor
from pagoda.sim.sim_executor import LinearCostModel, SimExecutor, VirtualClock

GREEDY = SamplingParams(temperature=0)


def request(
    prompt: Sequence[int],
    outputs: Sequence[int] = (),
    *,
    start: int = 0,
    table: Sequence[int] = (0, 1),
    params: SamplingParams = GREEDY,
    request_id: str = "x",
) -> ScheduledRequest:
    """Everything from `start` on is computed, then the next token sampled."""
    sampling = SamplingInput(params, 1, array("i", prompt), array("i", outputs))
    tokens = array("i", [*prompt, *outputs][start:])
    return ScheduledRequest(request_id, start, tokens, (array("i", table),), sampling)


def chosen(executor: Executor, *requests: ScheduledRequest) -> list[int]:
    output = executor.execute(SchedulerOutput(requests))
    return [output.sampled[r.request_id].token_id for r in requests]


def test_a_script_is_a_sequence_a_mapping_or_a_function() -> None:
    def sum_of_history(history: Sequence[int]) -> int:
        return sum(history)

    executor = ScriptedExecutor([4, 5], vocab_size=8, block_size=4)
    assert chosen(executor, request([1])) == [4]
    assert chosen(executor, request([1], [4])) == [5]
    assert chosen(executor, request([1], [4, 5])) == [5]  # the last entry goes on
    executor = ScriptedExecutor({"x": [4], "y": [6]}, vocab_size=8, block_size=4)
    assert chosen(executor, request([1]), request([2], request_id="y", table=[2])) == [4, 6]
    executor = ScriptedExecutor(sum_of_history, vocab_size=8, block_size=4)
    assert chosen(executor, request([1, 2], [3])) == [6]


def test_sampling_parameters_keep_their_meaning() -> None:
    executor = ScriptedExecutor([4, [0.0, 0.0, 9.0, 8.0]], vocab_size=4, block_size=4)
    with pytest.raises(IndexError):
        chosen(executor, request([1]))  # token 4 of 4
    executor = ScriptedExecutor([[0.0, 0.0, 9.0, 8.0]], vocab_size=4, block_size=4)
    assert chosen(executor, request([1])) == [2]
    assert chosen(executor, request([1], params=SamplingParams(temperature=0, logit_bias={2: -5}))) == [3]
    executor = ScriptedExecutor([2], vocab_size=4, block_size=4)
    for params in (SamplingParams(temperature=100, seed=3), SamplingParams(frequency_penalty=2, top_p=0.5)):
        assert chosen(executor, request([1], [2] * 6, params=params)) == [2]
    masked = SamplingInput(GREEDY, 1, [1], [], masked_token_ids=(2,))
    step = SchedulerOutput((ScheduledRequest("x", 0, array("i", [1]), (array("i", [0]),), masked),))
    assert executor.execute(step).sampled["x"].token_id == 0


def test_a_table_that_leads_to_other_tokens_is_caught() -> None:
    """A09: two writers of one block, stale content, missing copies: the row does not find its history."""
    executor = ScriptedExecutor([1], vocab_size=4, block_size=4, num_blocks=(4,))
    chosen(executor, request([1, 2, 3]))
    assert chosen(executor, request([1, 2, 3, 0], start=3)) == [1]
    with pytest.raises(AssertionError, match="finds token 3 at position 2"):
        chosen(executor, request([1, 2, 0, 0], start=3))
    with pytest.raises(AssertionError, match="finds token -1 at position 0"):
        chosen(executor, request([1, 2, 3, 0], start=3, table=[2]))
    with pytest.raises(AssertionError, match="written twice"):
        chosen(executor, request([1, 2]), request([1, 2], request_id="y"))
    with pytest.raises(AssertionError, match="beyond a table"):
        chosen(executor, request([1, 2, 3, 0, 1], table=[0]))
    executor.copy_blocks([BlockCopy(0, 0, 3)])
    chosen(executor, request([2, 2, 2]))
    assert chosen(executor, request([1, 2, 0, 0], start=2, table=[3])) == [1]


def test_before_step_may_fail_a_step() -> None:
    def fail(step: SchedulerOutput) -> None:
        raise OSError(f"{len(step.requests)} requests")

    executor = ScriptedExecutor([1], vocab_size=4, before_step=fail)
    with pytest.raises(OSError, match="1 requests"):
        chosen(executor, request([1]))
    assert len(executor.steps) == 1


def test_the_linear_cost_model_adds_up_steps_tokens_and_attention() -> None:
    cost = LinearCostModel(step_s=1.0, token_s=0.1, context_token_s=0.001)
    step = SchedulerOutput((request([1, 2, 3]), request([0] * 10, start=9, table=[2, 3])))
    assert cost.duration_s(step) == pytest.approx(1.0 + 4 * 0.1 + (1 + 2 + 3 + 10) * 0.001)
    assert cost.duration_s(SchedulerOutput(())) == 1.0


def test_a_virtual_clock_moves_forward_only() -> None:
    clock = VirtualClock(5.0)
    clock.advance(0.5)
    assert clock() == 5.5
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)


def sim_engine(*, max_num_seqs: int) -> Engine:
    clock = VirtualClock()
    spec = KVCacheSpec((LayerGroup((0,), 1, 8),))
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
        spec,
        (100,),
        cache=CacheConfig(),
        clock=clock,
    )
    executor = SimExecutor((100,), LinearCostModel(step_s=0.01, token_s=0.001), clock)
    return Engine(executor, scheduler, vocab_size=100, max_model_len=4096, clock=clock, seed=0)


def test_a_simulation_takes_virtual_time_under_the_real_scheduler() -> None:
    """I12: the same trace twice gives the same times; batching pays as the cost model says."""

    def times(max_num_seqs: int) -> list[float | None]:
        engine = sim_engine(max_num_seqs=max_num_seqs)
        for i in range(8):
            engine.add_request(str(i), [i] * 20, SamplingParams(max_tokens=10))
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        assert all(o.outputs[0].finish_reason == "length" for o in outputs)
        return [o.metrics.e2e_s for o in sorted(outputs, key=lambda o: o.request_id)]

    alone, together = times(1), times(8)
    assert alone == times(1) and together == times(8)
    assert alone[0] == pytest.approx(10 * 0.01 + (20 + 9) * 0.001)
    assert max(t or np.inf for t in together) < max(t or np.inf for t in alone) / 2


@pytest.mark.parametrize("params", [SamplingParams(logprobs=0), SamplingParams(prompt_logprobs=1)])
def test_a_simulation_has_no_probabilities_and_says_so(params: SamplingParams) -> None:
    engine = sim_engine(max_num_seqs=1)
    engine.add_request("x", [1, 2, 3], params)
    (output,) = [o for _ in range(2) for o in engine.step()]
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].error == "a simulation has no log-probabilities"
