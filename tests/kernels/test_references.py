"""Each kernel's meaning, checked against its formula written out in float64, for every case beside it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from pagoda.kernels.activation.cases import CASES as GATED_CASES
from pagoda.kernels.activation.cases import GatedCase
from pagoda.kernels.activation.reference import gated, softcap
from pagoda.kernels.attention.cases import CASES as ATTENTION_CASES
from pagoda.kernels.attention.cases import AttentionCase, AttentionInputs
from pagoda.kernels.attention.reference import attention, write_kv
from pagoda.kernels.embed.cases import CASES as EMBED_CASES
from pagoda.kernels.embed.cases import EmbedCase
from pagoda.kernels.embed.reference import embed
from pagoda.kernels.experts.cases import ExpertsCase
from pagoda.kernels.experts.reference import experts, route
from pagoda.kernels.layer_norm.cases import CASES as LAYER_NORM_CASES
from pagoda.kernels.layer_norm.cases import LayerNormCase
from pagoda.kernels.layer_norm.reference import layer_norm
from pagoda.kernels.linear.cases import CASES as LINEAR_CASES
from pagoda.kernels.linear.cases import LinearCase
from pagoda.kernels.linear.reference import linear
from pagoda.kernels.quantize.cases import CASES as QUANTIZE_CASES
from pagoda.kernels.quantize.cases import QuantizeCase
from pagoda.kernels.quantize.reference import quantize
from pagoda.kernels.rms_norm.cases import CASES as RMS_NORM_CASES
from pagoda.kernels.rms_norm.cases import RMSNormCase
from pagoda.kernels.rms_norm.reference import rms_norm
from pagoda.kernels.rope.cases import CASES as ROPE_CASES
from pagoda.kernels.rope.cases import RopeCase
from pagoda.kernels.rope.reference import rope
from pagoda.runtime.forward_batch import Float32Array
from pagoda.weights.dequantize import dequantize
from pagoda.weights.tensor import TensorType


def assert_close(result: Float32Array, expected: NDArray[np.float64], tolerance: float = 2e-6) -> None:
    """Errors relative to the largest value, as the tolerances of the cases are."""
    assert result.dtype == np.float32
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("case", LINEAR_CASES, ids=str)
def test_linear(case: LinearCase) -> None:
    x, weight, bias, residual = case.make_inputs()
    matrix = dequantize(weight)
    expected = x.astype(np.float64) @ matrix.T
    for term in (bias, residual):
        expected = expected if term is None else expected + term
    assert_close(linear(x, matrix, bias, residual), expected)


def test_linear_cases_cover_every_tensor_type_with_finite_weights() -> None:
    assert {case.weight_type for case in LINEAR_CASES} == set(TensorType)
    for case in LINEAR_CASES:
        matrix = dequantize(case.make_inputs().weight)
        assert np.isfinite(matrix).all()
        assert abs(matrix.mean()) < 2 * matrix.std()  # a constant offset would hide errors


@pytest.mark.parametrize("case", RMS_NORM_CASES, ids=str)
def test_rms_norm(case: RMSNormCase) -> None:
    x, weight, eps = case.make_inputs()
    runs = x.astype(np.float64).reshape(case.num_tokens, -1, case.run_width)
    norms = np.sqrt((runs**2).mean(axis=2, keepdims=True) + eps)
    assert_close(rms_norm(x, weight, eps), (runs / norms * weight).reshape(x.shape))


@pytest.mark.parametrize("case", LAYER_NORM_CASES, ids=str)
def test_layer_norm(case: LayerNormCase) -> None:
    x, weight, bias, eps = case.make_inputs()
    rows = x.astype(np.float64)
    centred = rows - rows.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + eps) * weight + bias
    assert_close(layer_norm(x, weight, bias, eps), expected)


@pytest.mark.parametrize("normalised", [True, False])
def test_experts_are_summed_by_the_weights_of_the_best(normalised: bool) -> None:
    x, router, *weights = ExpertsCase(11, 6, 3, normalised=normalised).make_inputs()
    gates, ups, downs = ([dequantize(t).astype(np.float64) for t in tensors] for tensors in weights)
    expected = np.zeros(x.shape)
    for row, scores, out in zip(x.astype(np.float64), router.astype(np.float64), expected, strict=True):
        p = np.exp(scores) / np.exp(scores).sum()
        best = np.argsort(-p)[:3]
        for e in best:
            gate = gates[e] @ row
            share = p[e] / p[best].sum() if normalised else p[e]
            out += share * (downs[e] @ (gate / (1 + np.exp(-gate)) * (ups[e] @ row)))
    as_floats = [[a.astype(np.float32) for a in arrays] for arrays in (gates, ups, downs)]
    assert_close(experts(x, router, *as_floats, 3, normalised=normalised), expected)


def test_equal_scores_go_to_the_lower_expert() -> None:
    chosen, shares = route(
        np.array([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]], np.float32), 2, normalised=True
    )
    assert chosen.tolist() == [[1, 2], [0, 1]]
    assert (shares == 0.5).all()


@pytest.mark.parametrize("case", ROPE_CASES, ids=str)
def test_rope_multiplies_pairs_by_unit_complex_numbers(case: RopeCase) -> None:
    x, positions, inv_freq, head_dim, factor = case.make_inputs()
    half = len(inv_freq)
    heads = x.astype(np.float64).reshape(len(x), -1, head_dim)
    pairs = heads[..., :half] + 1j * heads[..., half : 2 * half]
    turned = pairs * factor * np.exp(1j * np.outer(positions, inv_freq))[:, None, :]
    expected = np.concatenate([turned.real, turned.imag, heads[..., 2 * half :]], axis=-1)
    assert_close(rope(x, positions, inv_freq, head_dim, factor), expected.reshape(x.shape))


def test_rope_scores_depend_on_distance_only() -> None:
    case = RopeCase(2, 1, 64, 64)
    q, k = case.make_inputs().x.reshape(2, 1, 64)
    inv_freq = case.make_inputs().inv_freq

    def score(query_position: int, key_position: int) -> float:
        at = [np.asarray([p], np.int32) for p in (query_position, key_position)]
        return float(rope(q, at[0], inv_freq, 64)[0] @ rope(k, at[1], inv_freq, 64)[0])

    assert score(1007, 1000) == pytest.approx(score(7, 0), rel=1e-5)
    assert score(8, 0) != pytest.approx(score(7, 0), rel=1e-2)


@pytest.mark.parametrize("case", GATED_CASES, ids=str)
def test_gated(case: GatedCase) -> None:
    gate, up, kind = case.make_inputs()

    def activation(g: float) -> float:
        if kind == "silu":
            return g / (1 + math.exp(-g)) if g > -700 else 0.0
        return 0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))

    expected = np.asarray([[activation(float(g)) for g in row] for row in gate]) * up
    assert_close(gated(gate, up, kind), expected)


@pytest.mark.parametrize("case", QUANTIZE_CASES, ids=str)
def test_quantised_values_are_within_half_a_step_and_the_largest_of_a_group_stays(case: QuantizeCase) -> None:
    (x,) = case.make_inputs()
    x[0, :32] = 0  # has no scale
    groups, rounded = (rows.reshape(-1, 32) for rows in (x, quantize(x)))
    largest = np.abs(groups).max(axis=1, keepdims=True)
    assert (np.abs(rounded - groups) <= largest / 127 * 0.5001).all()
    np.testing.assert_allclose(np.abs(rounded).max(axis=1, keepdims=True), largest, rtol=1e-6)


def test_softcap_bounds_and_keeps_small_values() -> None:
    x = np.asarray([-1e6, -3.0, -1e-3, 0.0, 1e-3, 3.0, 1e6], np.float32)
    capped = softcap(x, 5.0)
    assert np.abs(capped).max() <= 5.0
    assert_close(capped, 5.0 * np.tanh(x.astype(np.float64) / 5.0))
    assert softcap(x, None) is x


@pytest.mark.parametrize("case", EMBED_CASES, ids=str)
def test_embed(case: EmbedCase) -> None:
    token_ids, weight, scale = case.make_inputs()
    rows = dequantize(weight)
    expected = np.stack([rows[i] * np.float64(scale) for i in token_ids])
    assert_close(embed(token_ids, rows, scale), expected)


def attend(case: AttentionCase, inputs: AttentionInputs, dtype: type = np.float16) -> Float32Array:
    k_cache, v_cache = inputs.k_cache.astype(dtype), inputs.v_cache.astype(dtype)
    write_kv(inputs.k, inputs.v, k_cache, v_cache, inputs.slot_mapping)
    return attention(
        inputs.q,
        k_cache,
        v_cache,
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.block_table,
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
    )


def attend_row(case: AttentionCase, inputs: AttentionInputs, row: int) -> NDArray[np.float64]:
    """One row by definition: head after head, over the positions it sees. Inputs hold this step's k, v."""
    request = int(np.searchsorted(inputs.query_start_loc, row, side="right")) - 1
    position = int(inputs.positions[row])
    first = 0 if case.window is None else max(0, position - case.window + 1)
    seen = range(first, position + 1)
    slots = [(inputs.block_table[request, p // case.block_size], p % case.block_size) for p in seen]
    keys, values = (np.stack([c[slot] for slot in slots]) for c in (inputs.k_cache, inputs.v_cache))
    out = []
    for head, q in enumerate(inputs.q[row].astype(np.float64).reshape(case.num_heads, -1)):
        kv_head = head * case.num_kv_heads // case.num_heads
        scores = case.scale * (keys[:, kv_head] @ q)
        if case.softcap is not None:
            scores = case.softcap * np.tanh(scores / case.softcap)
        weights = np.exp(scores - scores.max())
        out.append(weights / weights.sum() @ values[:, kv_head])
    return np.concatenate(out)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention(case: AttentionCase) -> None:
    """A38, A46: soft cap on every path, head dims that are no multiple of a vector, NaN in fresh slots."""
    inputs = case.make_inputs()
    result = attend(case, inputs)
    last = len(inputs.q) - 1
    rows = sorted({0, last, *np.random.default_rng(0).integers(0, last + 1, 4).tolist()})
    write_kv(inputs.k, inputs.v, inputs.k_cache, inputs.v_cache, inputs.slot_mapping)
    expected = np.stack([attend_row(case, inputs, row) for row in rows])
    assert np.isfinite(result).all()
    assert_close(result[rows], expected, 2e-5)


def test_softcap_of_attention_is_not_ignored() -> None:
    """A38: a cap that matters changes the result."""
    inputs = AttentionCase(((0, 9),)).make_inputs()
    capped = attend(AttentionCase(((0, 9),), softcap=0.5), inputs)
    assert np.abs(capped - attend(AttentionCase(((0, 9),)), inputs)).max() > 1e-2


def test_attention_rounds_keys_and_values_to_the_type_of_the_cache() -> None:
    case = AttentionCase(((0, 20),))
    inputs = case.make_inputs()
    inputs = inputs._replace(k=inputs.k * np.float32(1.0001), v=inputs.v * np.float32(1.0001))
    half, single = attend(case, inputs), attend(case, inputs, np.float32)
    assert 0 < np.abs(half - single).max() < 1e-2


def test_attention_refuses_a_visible_position_without_a_block() -> None:
    case = AttentionCase(((40, 1),))
    inputs = case.make_inputs()
    inputs.block_table[0, 1] = -1
    with pytest.raises(ValueError, match="position 16 is visible"):
        attend(case, inputs)
