"""Types of the extension module (`kernels/module.cpp`)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def isas() -> list[str]: ...
def sample(
    isa: str, logits: NDArray[np.float32], **fields: Any
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]: ...

class Model:
    def __init__(self, isa: str, num_threads: int) -> None: ...
    def add_weight(self, type: int, data: NDArray[np.uint8], rows: int, cols: int) -> int: ...
    def add_vector(self, values: NDArray[np.float32]) -> int: ...
    def add_buffer(self, width: int) -> int: ...
    def add_quant_buffer(self, width: int) -> int: ...
    def add_angles(self, inv_freq: NDArray[np.float64], factor: float) -> int: ...
    def add_group(
        self, num_layers: int, num_kv_heads: int, head_dim: int, num_blocks: int, block_size: int
    ) -> int: ...
    def add_layer(
        self, group: int, index_in_group: int, num_heads: int, scale: float, softcap: float, window: int
    ) -> int: ...
    def row_op(
        self,
        kind: str,
        *,
        a: int = -1,
        b: int = -1,
        out: int = -1,
        weight: int = -1,
        layer: int = -1,
        width: int = 0,
        value: float = 0.0,
        gelu: bool = False,
        on_logits_rows: bool = False,
    ) -> None: ...
    def linear_op(
        self,
        *,
        x: int,
        quant: int,
        out: int,
        weight: int,
        bias: int = -1,
        residual: int = -1,
        on_logits_rows: bool = False,
    ) -> None: ...
    def attention_op(self, *, q: int, out: int, layer: int) -> None: ...
    def experts_op(
        self,
        *,
        x: int,
        router: int,
        out: int,
        gates: list[int],
        ups: list[int],
        downs: list[int],
        width: int,
        ffn_size: int,
        num_active: int,
        normalised: bool,
    ) -> None: ...
    def set_logits(self, buffer: int) -> None: ...
    def forward(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        query_start_loc: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        block_tables: list[NDArray[np.int32]],
        slot_mapping: list[NDArray[np.int32]],
        logits_rows: NDArray[np.int32],
    ) -> NDArray[np.float32]: ...
    def sample(
        self, logits: NDArray[np.float32], *fields: Any
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]: ...
    def copy_block(self, group: int, source: int, target: int) -> None: ...
    def poison(self) -> None: ...
    def write_kv(
        self, layer: int, slots: NDArray[np.int32], keys: NDArray[np.float32], values: NDArray[np.float32]
    ) -> None: ...
    def write_buffer(self, buffer: int, rows: NDArray[np.float32]) -> None: ...
    def unpack_row(self, weight: int, row: int) -> NDArray[np.float32]: ...
    def measure_ceilings(self) -> tuple[float, float]: ...
    def take_profile(self) -> list[tuple[str, float]]: ...
    def set_profile(self, on: bool) -> None: ...
    @property
    def kv_bytes_resident(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
