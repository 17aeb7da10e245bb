"""Native kernels against their references, on each instruction set that the machine has.

Beyond closeness they promise equality: the same bits on every instruction set, for any number of threads
and whatever other rows are computed with a row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pagoda import _native
from pagoda.kernels.activation.cases import CASES as GATED_CASES
from pagoda.kernels.activation.cases import GatedCase
from pagoda.kernels.activation.reference import activation as reference_activation
from pagoda.kernels.activation.reference import gated as reference_gated
from pagoda.kernels.activation.reference import softcap as reference_softcap
from pagoda.kernels.attention.cases import CASES as ATTENTION_CASES
from pagoda.kernels.attention.cases import AttentionCase
from pagoda.kernels.attention.reference import attention as reference_attention
from pagoda.kernels.attention.reference import fixed_point, write_kv
from pagoda.kernels.embed.cases import CASES as EMBED_CASES
from pagoda.kernels.embed.cases import EmbedCase
from pagoda.kernels.embed.reference import embed as reference_embed
from pagoda.kernels.experts.cases import CASES as EXPERTS_CASES
from pagoda.kernels.experts.cases import ExpertsCase
from pagoda.kernels.experts.reference import experts as reference_experts
from pagoda.kernels.layer_norm.cases import CASES as LAYER_NORM_CASES
from pagoda.kernels.layer_norm.cases import LayerNormCase
from pagoda.kernels.layer_norm.reference import layer_norm as reference_layer_norm
from pagoda.kernels.linear.cases import CASES as LINEAR_CASES
from pagoda.kernels.linear.cases import LinearCase, random_weight
from pagoda.kernels.linear.reference import linear as reference_linear
from pagoda.kernels.rms_norm.cases import CASES as RMS_NORM_CASES
from pagoda.kernels.rms_norm.cases import RMSNormCase
from pagoda.kernels.rms_norm.reference import rms_norm as reference_rms_norm
from pagoda.kernels.rope.cases import CASES as ROPE_CASES
from pagoda.kernels.rope.cases import RopeCase
from pagoda.kernels.rope.reference import rope as reference_rope
from pagoda.runtime.forward_batch import Float32Array
from pagoda.weights.dequantize import dequantize
from pagoda.weights.tensor import Tensor, TensorType
from tests.kernels.native_ops import NativeOps, attention, experts, linear

ISAS = _native.isas()
# What packing may change, relative to a weight: IQ4_XS has products of scales, rounded to half precision.
PACKING_ERRORS = {TensorType.IQ4_XS: 2.0**-11}
NATIVE_ATTENTION_CASES = [c for c in ATTENTION_CASES if c.block_size % 16 == 0]


def assert_close(result: Float32Array, expected: Float32Array, tolerance: float) -> None:
    """Errors relative to the largest value."""
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def assert_same_bits(results: list[Float32Array]) -> None:
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint32), other.view(np.uint32))


def on_every_isa(run: Callable[[str], Float32Array]) -> Float32Array:
    """The result of `run`, which has to be the same on every instruction set of this machine."""
    results = [run(isa) for isa in ISAS]
    assert_same_bits(results)
    return results[0]


@pytest.mark.parametrize("case", LINEAR_CASES, ids=str)
def test_linear(case: LinearCase) -> None:
    x, weight, bias, residual = case.make_inputs()
    result = on_every_isa(lambda isa: linear(isa, x, weight, bias, residual))
    matrix = dequantize(weight)
    error = result - reference_linear(x, matrix, bias, residual)
    # The size of a result whose terms do not happen to cancel, which a few of them may.
    size = np.mean(x**2 @ (matrix**2).T)
    assert np.sqrt(np.mean(error**2) / size) < case.tolerance


@pytest.mark.parametrize("weight_type", TensorType, ids=str)
def test_linear_is_exact_on_activations_that_eight_bits_hold(weight_type: TensorType) -> None:
    """With nothing lost in quantising x, only the order of float sums differs from the reference."""
    weight = random_weight(weight_type, 48, 512, seed=1)
    x = np.random.default_rng(2).integers(-127, 128, (5, 512)).astype(np.float32)
    x[:, ::32] = 127.0  # every group's scale is then exactly 1
    result = on_every_isa(lambda isa: linear(isa, x, weight))
    tolerance = max(2e-6, PACKING_ERRORS.get(weight_type, 0))
    assert_close(result, reference_linear(x, dequantize(weight)), tolerance)


@pytest.mark.parametrize("weight_type", TensorType, ids=str)
def test_extreme_weights_and_activations_do_not_overflow(weight_type: TensorType) -> None:
    """Sums in 16 bits are sized for the worst case: every product at its largest, all of one sign."""
    weight = random_weight(weight_type, 16, 256)
    data = weight.data.copy()
    if weight_type not in (TensorType.F32, TensorType.F16, TensorType.BF16):
        data = data.reshape(-1, weight_type.block_bytes)
        start = {TensorType.Q4_1: 4, TensorType.Q5_1: 4, TensorType.IQ4_XS: 8, TensorType.MXFP4: 1}
        if weight_type.block_elements == 32:
            start = dict.fromkeys(TensorType, 2) | start
        quants = slice(0, 192) if weight_type is TensorType.Q6_K else slice(start.get(weight_type, 16), None)
        for value in (0xFF, 0x80, 0x00):
            data[:, quants] = value
            full = weight.__class__(weight.name, weight.type, weight.shape, data.reshape(-1))
            for sign in (1.0, -1.0):
                x = np.full((3, 256), sign * 127.0, np.float32)
                result = on_every_isa(lambda isa, x=x, full=full: linear(isa, x, full))  # type: ignore[misc]
                expected = reference_linear(x, dequantize(full))
                # Scales cancel minima here; what counts is the size of the terms, not of their sum.
                size = np.abs(dequantize(full)).max() * 127 * 256 + 1
                tolerance = max(1e-5, PACKING_ERRORS.get(weight_type, 0))
                np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize(
    "weight_type",
    [TensorType.Q4_1, TensorType.Q6_K, TensorType.Q8_0, TensorType.F16, TensorType.BF16],
    ids=str,
)
def test_a_row_does_not_depend_on_the_rows_beside_it(weight_type: TensorType) -> None:
    weight = random_weight(weight_type, 320, 256)
    x = np.random.default_rng(3).standard_normal((67, 256)).astype(np.float32)
    alone = np.concatenate([linear("", x[i : i + 1], weight) for i in range(len(x))])
    for m in (2, 3, 5, 8, 17, 33, 67):
        for num_threads in (1, 2):
            assert_same_bits([alone[:m], linear("", x[:m], weight, num_threads=num_threads)])


@pytest.mark.parametrize("inputs", [1, 63, 2049, 4099])
def test_bf16_pairs_need_no_even_number_of_inputs(inputs: int) -> None:
    """Also beyond the inputs that are rounded at once: sums go on where they stopped."""
    weight = random_weight(TensorType.BF16, 20, inputs, seed=3)
    x = np.random.default_rng(4).integers(-128, 129, (13, inputs)).astype(np.float32)  # exact in bf16
    result = on_every_isa(lambda isa: linear(isa, x, weight))
    assert_close(result, reference_linear(x, dequantize(weight)), 2e-6)


QUANTISED_TYPES = [t for t in TensorType if t not in (TensorType.F32, TensorType.F16, TensorType.BF16)]


@pytest.mark.parametrize("weight_type", QUANTISED_TYPES, ids=str)
def test_a_group_with_an_outlier_loses_no_more_than_others(weight_type: TensorType) -> None:
    """One value a hundred times the rest would round the rest of its group away in a single plane."""
    weight = random_weight(weight_type, 48, 512, seed=6)
    x = np.random.default_rng(7).standard_normal((6, 512)).astype(np.float32)
    x[:, 70] = 100.0
    x[3, 300] = -80.0
    matrix = dequantize(weight)
    result = on_every_isa(lambda isa: linear(isa, x, weight))
    error = result - reference_linear(x, matrix)
    without_outliers = np.where(np.abs(x) > 50, 0, x)
    assert np.sqrt(np.mean(error**2) / np.mean(without_outliers**2 @ (matrix**2).T)) < 0.01


@pytest.mark.parametrize("weight_type", QUANTISED_TYPES, ids=str)
def test_an_outlier_changes_nothing_for_the_rows_beside_it(weight_type: TensorType) -> None:
    weight = random_weight(weight_type, 48, 512, seed=8)
    x = np.random.default_rng(9).standard_normal((9, 512)).astype(np.float32)
    x[4, 33] = 500.0
    alone = np.concatenate([linear("", row[None], weight) for row in x])
    assert_same_bits([alone, on_every_isa(lambda isa: linear(isa, x, weight))])


@pytest.mark.parametrize("case", NATIVE_ATTENTION_CASES, ids=str)
def test_attention(case: AttentionCase) -> None:
    inputs = case.make_inputs()
    result = on_every_isa(lambda isa: attention(isa, case, inputs))
    assert_same_bits([result, attention("", case, inputs, num_threads=2)])
    heads = (-1, case.num_heads, case.head_dim)
    q = fixed_point(inputs.q.reshape(heads)).reshape(inputs.q.shape)
    k_cache, v_cache = fixed_point(inputs.k_cache), fixed_point(inputs.v_cache)
    kv_heads = (-1, case.num_kv_heads, case.head_dim)
    k, v = (fixed_point(x.reshape(kv_heads)).reshape(x.shape) for x in (inputs.k, inputs.v))
    write_kv(k, v, k_cache, v_cache, inputs.slot_mapping)
    expected = reference_attention(
        q,
        k_cache,
        v_cache,
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.block_table,
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
    )
    assert_close(result, expected, case.tolerance)


@pytest.mark.parametrize("case", RMS_NORM_CASES, ids=str)
def test_rms_norm(case: RMSNormCase) -> None:
    x, weight, eps = case.make_inputs()

    def run(isa: str) -> Float32Array:
        ops = NativeOps(isa)
        source, out = ops.buffer(x), ops.model.add_buffer(case.width)
        vector = ops.model.add_vector(weight)
        ops.model.row_op("norm", a=source, out=out, weight=vector, width=case.run_width, value=eps)
        return ops.run(out, [(source, x)])

    assert_close(on_every_isa(run), reference_rms_norm(x, weight, eps), case.tolerance)


@pytest.mark.parametrize("case", LAYER_NORM_CASES, ids=str)
def test_layer_norm(case: LayerNormCase) -> None:
    x, weight, bias, eps = case.make_inputs()

    def run(isa: str) -> Float32Array:
        ops = NativeOps(isa)
        source, out = ops.buffer(x), ops.model.add_buffer(case.width)
        vectors = [ops.model.add_vector(v) for v in (weight, bias)]
        ops.model.row_op("layer_norm", a=source, b=vectors[1], out=out, weight=vectors[0], value=eps)
        return ops.run(out, [(source, x)])

    assert_close(on_every_isa(run), reference_layer_norm(x, weight, bias, eps), case.tolerance)


@pytest.mark.parametrize("case", EXPERTS_CASES, ids=str)
def test_experts(case: ExpertsCase) -> None:
    inputs = case.make_inputs()
    x, router, *weights = inputs

    def run(isa: str, rows: slice = slice(None), num_threads: int = 1) -> Float32Array:
        return experts(isa, case, inputs._replace(x=x[rows], router=router[rows]), num_threads)

    result = on_every_isa(run)
    matrices = [[dequantize(t) for t in tensors] for tensors in weights]
    expected = reference_experts(x, router, *matrices, case.num_active, normalised=case.normalised)
    error = np.sqrt(np.mean((result - expected) ** 2) / np.mean(expected**2))
    assert error < case.tolerance
    # Neither threads nor the tokens beside it change a row.
    assert_same_bits([result, run(ISAS[0], num_threads=3)])
    for rows in (slice(0, 1), slice(2, 5), slice(case.num_tokens - 1, None)):
        assert_same_bits([result[rows], run(ISAS[0], rows)])


@pytest.mark.parametrize("width", [1, 15, 16, 17, 130])
def test_gelu_scale_and_add_position(width: int) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((5, width)).astype(np.float32) * 4
    table = rng.standard_normal((40, width)).astype(np.float32)
    positions = np.array([0, 39, 7, 7, 1], np.int32)

    def run(isa: str) -> Float32Array:
        ops = NativeOps(isa)
        source, out, gelu = ops.buffer(x), ops.model.add_buffer(width), ops.model.add_buffer(width)
        weight = ops.model.add_weight(int(TensorType.F32), table.view(np.uint8).reshape(-1), 40, width)
        ops.model.row_op("gelu", a=source, out=gelu)
        ops.model.row_op("scale", a=gelu, out=gelu, value=1.7)
        ops.model.row_op("add_position", a=gelu, out=out, weight=weight)
        return ops.run(out, [(source, x)], positions=positions)

    expected = reference_activation(x, "gelu_tanh") * np.float32(1.7) + table[positions]
    assert_close(on_every_isa(run), expected, 1e-5)


@pytest.mark.parametrize("case", ROPE_CASES, ids=str)
def test_rope(case: RopeCase) -> None:
    x, positions, inv_freq, head_dim, factor = case.make_inputs()

    def run(isa: str) -> Float32Array:
        ops = NativeOps(isa)
        source, out = ops.buffer(x), ops.model.add_buffer(x.shape[1])
        angles = ops.model.add_angles(np.asarray(inv_freq, np.float64), factor)
        ops.model.row_op("angles", b=angles)
        ops.model.row_op("rope", a=source, b=angles, out=out, width=head_dim)
        return ops.run(out, [(source, x)], positions=positions)

    assert_close(on_every_isa(run), reference_rope(x, positions, inv_freq, head_dim, factor), case.tolerance)


@pytest.mark.parametrize("case", GATED_CASES, ids=str)
def test_gated(case: GatedCase) -> None:
    gate, up, kind = case.make_inputs()

    def run(isa: str) -> Float32Array:
        ops = NativeOps(isa)
        a, b, out = ops.buffer(gate), ops.buffer(up), ops.model.add_buffer(gate.shape[1])
        ops.model.row_op("gated", a=a, b=b, out=out, gelu=kind == "gelu_tanh")
        return ops.run(out, [(a, gate), (b, up)])

    assert_close(on_every_isa(run), reference_gated(gate, up, kind), case.tolerance)


@pytest.mark.parametrize("width", [1, 15, 16, 100])
def test_softcap_and_add(width: int) -> None:
    x = np.random.default_rng(4).standard_normal((3, width)).astype(np.float32) * 50

    def run(isa: str) -> Float32Array:
        ops = NativeOps(isa)
        source, out = ops.buffer(x), ops.model.add_buffer(width)
        ops.model.row_op("add", a=source, b=source, out=out)
        ops.model.row_op("softcap", a=out, value=30.0)
        return ops.run(out, [(source, x)])

    expected = reference_softcap(x + x, 30.0)
    assert_close(on_every_isa(run), expected, 1e-6)


@pytest.mark.parametrize("case", EMBED_CASES, ids=str)
def test_embed(case: EmbedCase) -> None:
    token_ids, weight, scale = case.make_inputs()

    def run(isa: str) -> Float32Array:
        ops = NativeOps(isa)
        out = ops.model.add_buffer(case.width)
        table = ops.model.add_weight(int(weight.type), weight.data, *weight.shape)
        ops.model.row_op("embed", out=out, weight=table, value=scale)
        return ops.run(out, [], token_ids=token_ids, num_rows=len(token_ids))

    tolerance = max(case.tolerance, PACKING_ERRORS.get(weight.type, 0))
    assert_close(on_every_isa(run), reference_embed(token_ids, dequantize(weight), scale), tolerance)


@pytest.mark.parametrize("weight_type", TensorType, ids=str)
def test_packing_loses_nothing(weight_type: TensorType) -> None:
    weight = random_weight(weight_type, 37, 512, seed=5)
    model = _native.Model("", 2)
    packed = model.add_weight(int(weight_type), weight.data, *weight.shape)
    rows = np.stack([model.unpack_row(packed, i) for i in range(37)])
    np.testing.assert_allclose(rows, dequantize(weight), rtol=PACKING_ERRORS.get(weight_type, 0), atol=0)


def test_powers_of_two_that_half_precision_cannot_hold_are_packed_exactly() -> None:
    """MXFP4: scales of 2^-24 to 2^18 keep every value; smaller ones, zero among them, are zero."""
    exponents = np.arange(128 - 24, 128 + 19)
    data = np.random.default_rng(1).integers(0, 256, (len(exponents) + 2, 17), np.uint8)
    data[:, 0] = [*exponents, 0, 128 - 25]
    weight = Tensor("weight", TensorType.MXFP4, (len(data), 32), data.reshape(-1))
    model = _native.Model("", 1)
    packed = model.add_weight(int(weight.type), weight.data, *weight.shape)
    rows = np.stack([model.unpack_row(packed, i) for i in range(len(data))])
    np.testing.assert_array_equal(rows[:-2], dequantize(weight)[:-2])
    assert (rows[-2:] == 0).all()
    assert np.abs(dequantize(weight)[-2:]).max() < 4e-7
