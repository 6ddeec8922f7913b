"""Arrays without elements: shape and dtype of token rows, so that role programs run where the rows would not fit.

Writes vanish and reads give the shape of what numpy would give. At W = 1,024 the rows of one microbatch are 2 GiB on the
dispatch switch alone; the simulator needs how many they are, not what they hold.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np


class CountedRows:
    """Stands for `numpy.empty(shape, dtype)` in role programs; supports what they do with rows."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.shape, self.dtype = shape, dtype if type(dtype) is np.dtype else np.dtype(dtype)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: Any) -> CountedRows:
        if type(index) is int:
            return CountedRows(self.shape[1:], self.dtype)
        if type(index) is slice:
            return CountedRows((len(range(*index.indices(self.shape[0]))), *self.shape[1:]), self.dtype)
        index = index if isinstance(index, tuple) else (index,)
        shape: list[int] = []
        arrays = [i for i in index if isinstance(i, np.ndarray)]
        for axis, i in enumerate(index):
            if isinstance(i, slice):
                shape.append(len(range(*i.indices(self.shape[axis]))))
            elif i is Ellipsis:
                return CountedRows((*shape, *self.shape[axis:]), self.dtype)
            elif arrays and i is arrays[0]:
                shape += i.shape
        return CountedRows((*shape, *self.shape[len(index) :]), self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        """A write: there is nothing to hold it."""

    def __iadd__(self, other: Any) -> CountedRows:
        return self

    def astype(self, dtype: Any) -> CountedRows:
        return CountedRows(self.shape, np.dtype(dtype))

    def reshape(self, *shape: int) -> CountedRows:
        known = prod(n for n in shape if n >= 0) or 1
        return CountedRows(tuple(prod(self.shape) // known if n < 0 else n for n in shape), self.dtype)
