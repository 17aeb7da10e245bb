"""Whatever a GGUF file says of its vocabulary, a tokenizer comes out of it or one error of ours."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.engine.tokenizer import Tokenizer
from pagoda.errors import ModelFileError, UnsupportedError
from tests.engine import tiny_vocabularies as tiny

KEYS = (
    *("ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type", "ggml.scores", "ggml.merges"),
    *("ggml.bos_token_id", "ggml.eos_token_id", "ggml.unknown_token_id", "ggml.padding_token_id"),
    *("ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_space_prefix", "chat_template"),
)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([tiny.byte_level(), tiny.spm({"a": -1.0, "▁a": -2.0}, add_space_prefix=True)]),
    st.dictionaries(
        st.sampled_from(KEYS),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-(2**63), 2**64 - 1),
            st.floats(),
            st.text(max_size=4),
            st.lists(st.text(max_size=3), max_size=300),
            st.lists(st.integers(-3, 300), max_size=4).map(lambda v: np.array(v, np.int32)),
            st.integers(1, 600).map(lambda n: np.arange(n, dtype=np.float32)),
            st.integers(1, 600).map(lambda n: np.ones(n, np.int8)),
            st.integers(1, 600).map(lambda n: [str(i) for i in range(n)]),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_any_metadata_makes_a_tokenizer_or_is_refused(metadata: dict[str, Any], changes: Any) -> None:
    """D04: one that is made encodes and decodes."""
    try:
        tokenizer = Tokenizer.from_gguf(
            metadata | {f"tokenizer.{name}": value for name, value in changes.items()}
        )
    except (ModelFileError, UnsupportedError) as error:
        assert len(error.message) < 1000
        return
    tokenizer.decode(tokenizer.encode("a the<s>\n日<|im_end|>"))
