"""How many KV blocks to reserve. Sizes come from `core/cost.py`; nothing is allocated here."""

from __future__ import annotations

from pagoda.core.cost import KVCacheSpec
from pagoda.errors import CapacityError

# Half of what is left, because prefix caching ends up using all of it and other programs live here too.
DEFAULT_KV_SHARE = 0.5
# Interpreter, tokenizer, activations and sampling, beside weights and KV.
RUNTIME_BYTES = 200 << 20


def default_kv_bytes(available_bytes: int, weight_bytes: int) -> int:
    """KV memory when nobody says how much: a share of what weights and runtime leave of `available_bytes`."""
    return max(0, int((available_bytes - weight_bytes - RUNTIME_BYTES) * DEFAULT_KV_SHARE))


def longest_sequence(spec: KVCacheSpec, kv_bytes: int, max_num_tokens: int) -> int:
    """The longest sequence, in tokens up to `max_num_tokens`, that `kv_bytes` can hold; 0 when none fits."""
    low, high = 0, max_num_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if _bytes_of(spec, _blocks_of_sequence(spec, middle)) <= kv_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def plan_num_blocks(
    spec: KVCacheSpec, kv_bytes: int, *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int
) -> tuple[int, ...]:
    """Blocks to reserve by layer group: what `kv_bytes` pays for, and never more than can be in use.

    Every group first gets what one sequence of `max_model_len` needs; the rest is shared in proportion to
    what `max_num_seqs` of them would need, and a windowed group holds a step's chunks beside its windows.

    Raises:
        CapacityError: not even one sequence of `max_model_len` tokens fits.
    """
    one = _blocks_of_sequence(spec, max_model_len)
    one_bytes = _bytes_of(spec, one)
    if one_bytes > kv_bytes:
        fits = longest_sequence(spec, kv_bytes, max_model_len)
        raise CapacityError(
            f"a sequence of max_model_len = {max_model_len} tokens needs {one_bytes / 2**20:.1f} MiB of KV "
            f"cache and there are {kv_bytes / 2**20:.1f} MiB",
            hint=f"use --max-model-len {fits} or less, or a larger --kv-cache-memory-bytes",
        )
    num_chunk_blocks = -(-max_num_batched_tokens // spec.block_size)
    others = tuple(
        n * (max_num_seqs - 1) + (0 if group.window is None else num_chunk_blocks)
        for n, group in zip(one, spec.groups, strict=True)
    )
    others_bytes = _bytes_of(spec, others)
    share = min(1.0, (kv_bytes - one_bytes) / others_bytes) if others_bytes else 0.0
    return tuple(n + int(m * share) for n, m in zip(one, others, strict=True))


def _blocks_of_sequence(spec: KVCacheSpec, num_tokens: int) -> tuple[int, ...]:
    return tuple(spec.max_blocks_for(group, num_tokens) for group in range(len(spec.groups)))


def _bytes_of(spec: KVCacheSpec, num_blocks: tuple[int, ...]) -> int:
    return sum(n * spec.block_bytes(group) for group, n in enumerate(num_blocks))
