"""What the bytes of a memory object of LMCache's are: shapes, types and format, as a few bytes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache.utils import get_size_bytes
from lmcache.v1.memory_management import MemoryFormat, TensorMemoryObj

if TYPE_CHECKING:
    from lmcache.v1.memory_management import MemoryObj

__all__ = ["ObjectForm"]

# In a file a type is its place here: append only.
_DTYPES = (
    "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "uint8", "int8",
    "int16", "int32", "int64",
)  # fmt: skip


class ObjectForm(NamedTuple):
    """What an object needs beside its bytes to be made again."""

    shapes: tuple[tuple[int, ...], ...]
    """Of each group of layers."""
    dtypes: tuple[str, ...]
    """Of each group of layers, torch's names."""
    fmt: int
    """Value of its ``MemoryFormat``."""

    @classmethod
    def of(cls, memory_obj: MemoryObj) -> ObjectForm | None:
        """Say what an object's bytes are; None if they alone do not make it again.

        Those are byte buffers, objects of which a part is used, positions beside the bytes, and
        types that there is no name for.
        """
        meta = memory_obj.metadata
        if not isinstance(memory_obj, TensorMemoryObj) or meta.cached_positions is not None:
            return None
        shapes = meta.shapes if meta.shapes is not None else [meta.shape]
        dtypes = meta.dtypes if meta.dtypes is not None else [meta.dtype]
        names = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
        whole = memory_obj.get_size() == get_size_bytes(shapes, dtypes)
        if not whole or not set(names) <= set(_DTYPES):
            return None
        return cls(tuple(map(tuple, shapes)), names, meta.fmt.value)

    def layout(self) -> tuple[list[Any], list[Any], MemoryFormat]:
        """Give what LMCache's allocators take: shapes, types and format."""
        import torch

        shapes = [torch.Size(shape) for shape in self.shapes]
        return shapes, [getattr(torch, name) for name in self.dtypes], MemoryFormat(self.fmt)

    @property
    def tokens(self) -> int:
        """Tokens of the object."""
        dimension: int = MemoryFormat(self.fmt).token_dim()
        return self.shapes[0][dimension]

    def encoded(self) -> bytes:
        """Give the form as bytes: two, and for each group two and four for each dimension."""
        parts = [bytes((self.fmt, len(self.shapes)))]
        for shape, name in zip(self.shapes, self.dtypes, strict=True):
            parts.append(struct.pack(f"<BB{len(shape)}I", _DTYPES.index(name), len(shape), *shape))
        return b"".join(parts)

    @classmethod
    def decoded(cls, data: bytes) -> ObjectForm:
        """Read what `encoded` wrote."""
        shapes, names, at = [], [], 2
        for _ in range(data[1]):
            dtype, dimensions = data[at], data[at + 1]
            shapes.append(struct.unpack_from(f"<{dimensions}I", data, at + 2))
            names.append(_DTYPES[dtype])
            at += 2 + 4 * dimensions
        return cls(tuple(shapes), tuple(names), data[0])
