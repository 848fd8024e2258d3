"""The numbers of a converted GGUF file: order of rows, and rounding."""

from __future__ import annotations

import numpy as np

from fourfold_tools.gguf import convert_gguf


def test_unpermute_undoes_the_row_order_of_gguf() -> None:
    heads, rows, columns = 3, 24, 2
    original = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    # llama.cpp permutes a Hugging Face projection so when it writes the file.
    permuted = original.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    assert not np.array_equal(permuted, original)
    assert np.array_equal(convert_gguf._unpermute(permuted, heads), original)


def test_bfloat16_rounds_to_nearest_even() -> None:
    # 1 + 2^-8 lies between two bfloat16 values: the even one wins; a bit more goes up.
    values = np.array([1.0, -2.5, 1 + 2**-8, 1 + 2**-8 + 2**-20, 1 + 3 * 2**-8], np.float32)
    bits = convert_gguf.bfloat16(values)
    back = (bits.astype(np.uint32) << 16).view(np.float32)
    assert back.tolist() == [1.0, -2.5, 1.0, 1 + 2**-7, 1 + 2**-6]
