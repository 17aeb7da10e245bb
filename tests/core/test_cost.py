"""Block counts agree with what a sequence holds when it is walked token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.core.paged_model import make_spec


@given(
    window=st.one_of(st.none(), st.integers(1, 40)),
    block_size=st.sampled_from([1, 2, 3, 16]),
    num_tokens=st.integers(0, 100),
)
def test_blocks_of_a_growing_sequence(window: int | None, block_size: int, num_tokens: int) -> None:
    spec = make_spec((window,), block_size)
    most = 0
    for position in range(num_tokens):
        first_visible = 0 if window is None else max(0, position - window + 1)
        assert spec.first_visible_block(0, position) == first_visible // block_size
        most = max(most, position // block_size - first_visible // block_size + 1)
    # A window may cut into one block more than a short sequence shows.
    assert most <= spec.max_blocks_for(0, num_tokens) <= most + 1
    next_visible = 0 if window is None else max(0, num_tokens - window + 1)
    blocks = {p // block_size for p in range(num_tokens)}
    held = [b for b in blocks if (b + 1) * block_size > next_visible]
    assert spec.num_blocks_for(0, num_tokens) == len(held)
