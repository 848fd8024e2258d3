"""Array types."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

EMPTY_FLOATS: Final[Float32Array] = np.empty(0, np.float32)
EMPTY_INTS: Final[Int32Array] = np.empty(0, np.int32)
