"""A block: a key and where its bytes are, a page of each pool group."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeGuard, TypeVar

from hostmem.describing import one_line
from hostmem.device import DONE
from kvtier.page import Page

__all__ = ["Block", "Columns", "Key", "failed", "is_there"]

Key = TypeVar("Key", bound=Hashable)

Columns = list[list[Page | None]]
"""The pages of some blocks by pool group; None where a block has none, or it is not meant."""


class Block(Generic[Key]):
    """A key and its pages, one of each pool group. Pages know their block as their owner."""

    __slots__ = ("key", "pages")

    def __init__(self, key: Key | None) -> None:
        self.key = key
        """Names the content; None until the block is committed under one."""
        self.pages: tuple[Page | None, ...] = ()
        """By pool group; None where a window does not show the block any more. Empty once the
        block is gone: a page knows its block, and nothing is left for the garbage collector."""

    def holds(self, page: Page) -> bool:
        """Tell whether a page is still one of the block's."""
        return bool(self.pages) and self.pages[page.group] is page

    def put(self, group: int, page: Page | None) -> None:
        """Change the page of one pool group."""
        self.pages = (*self.pages[:group], page, *self.pages[group + 1 :])

    @one_line
    def __repr__(self) -> str:
        return f"block {self.key!r}"


def failed(page: Page) -> bool:
    """Tell whether the copy that was to bring a page's bytes failed; forget it if it did not."""
    if page.ready is DONE or not page.ready.query():
        return False
    if page.ready.error is not None:
        return True
    page.ready = DONE
    return False


def is_there(page: Page | None) -> TypeGuard[Page]:
    """Tell whether there is a page that can be read, now or once it has been brought."""
    return page is not None and not failed(page)
