"""Regenerate the checked-in ABI modules: ``python -m hostmem._sys.build [FOLDER]``.

The modules are cffi's out-of-line ABI form: pure Python, no compiler, and an import of under a
millisecond where parsing the declarations would cost forty.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hostmem._sys import declarations

__all__ = ["generate"]


def generate(folder: Path) -> list[Path]:
    """Write ``_linux_abi.py`` and ``_cuda_abi.py`` into a folder and return their paths."""
    from cffi import FFI

    texts = {
        "_linux_abi": [s.text for s in declarations.LINUX] + [declarations.LINUX_INTERNAL],
        "_cuda_abi": [s.text for s in declarations.CUDA] + [declarations.CUDA_POINTERS],
    }
    paths = []
    for name, text in texts.items():
        ffi = FFI()
        ffi.cdef("\n".join(text))
        ffi.set_source(f"hostmem._sys.{name}", None)
        paths.append(folder / f"{name}.py")
        ffi.emit_python_code(str(paths[-1]))
    return paths


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent):
        print(path)
