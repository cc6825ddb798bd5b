"""Files with a name, which stay."""

from __future__ import annotations

import os

from kvtier.transfer.unnamed_file import open_direct

__all__ = ["open_named"]


def open_named(path: str, *, direct: bool) -> tuple[int, bool]:
    """Open a file as it is or, where there is none, a new one.

    Parameters
    ----------
    path : str
        The file.
    direct : bool
        Bypass the page cache if the file system can.

    Returns
    -------
    fd : int
        The file.
    direct : bool
        Whether it bypasses the page cache.

    Raises
    ------
    OSError
        It cannot be opened. ELOOP: it is a symbolic link, which is not followed.
    """

    def opens(flags: int) -> int:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    return open_direct(opens, direct=direct)
