"""A stand-in for an inference engine: it computes every byte, and knows each one again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hostmem import (
    ClosedError,
    CudaDevice,
    CudaMemory,
    Device,
    Event,
    StaticHostMem,
    resolve_device,
)
from hostmem.closing import Closable
from hostmem.device import DONE, DeviceLike
from hostmem.units import Size, align_up, parse_size
from kvtier.plan import CachePlan
from kvtier.storage import TierStorage
from kvtier.testing.contents import Words, mix, prefix_states
from kvtier.testing.hot_pages import HotPages, Part
from kvtier.testing.wrong_bytes import Search, WrongBytes

__all__ = ["FakeEngine"]

_SCRUBBED = 0xA5


class FakeEngine(Closable):
    """Writes what a model would compute into hot pages, and verifies every byte of it later.

    Every byte is a function of the tokens up to its own, the layer, the role and the position. So
    stale bytes, swapped layers or blocks, blocks moved by a token, torn ones and those of another
    tenant are all found, in blocks that are full or filled in part.

    Parameters
    ----------
    plan : CachePlan
        What a block is made of: ``config.plan()``, or that of a storage.
    buffers : mapping of (layer_id, role) to (base, stride)
        Where the hot pages are: page i of a buffer begins at address ``base + i * stride``.
    n_pages : int or sequence of int
        How many pages there are, or how many of each pool group.
    device : int, Device or str
        Whose memory it is.
    staging : int or str
        Bytes of the page-locked buffer through which the bytes go; at least one block's in one
        buffer.

    Raises
    ------
    ValueError
        Not the buffers of the plan, or pages that overlap.

    Notes
    -----
    May be used from several threads, which take turns.

    Examples
    --------
    >>> import kvtier
    >>> buffers = [kvtier.BufferConfig("key", 4096), kvtier.BufferConfig("value", 4096)]
    >>> layers = [kvtier.AttentionLayerConfig(n, buffers) for n in range(2)]
    >>> tiers = [kvtier.GpuCacheTierConfig("2MiB"), kvtier.HostCacheTierConfig("4MiB")]
    >>> config = kvtier.KVCacheManagerConfig(16, tiers, layers)
    >>> with FakeEngine.with_pages(config.plan(), 8, device="cpu") as engine:
    ...     engine.write([5, 6, 7] * 10, [3, 1]).synchronize()  # 30 tokens: a block and a half
    ...     engine.verify([5, 6, 7] * 10, [3, 1])
    ...     engine.find_wrong([5, 6, 7] * 10, [1, 3]).origin
    "that is token 16 of layer 0 'key'"
    """

    def __init__(
        self,
        plan: CachePlan,
        buffers: Mapping[tuple[int, str], tuple[int, int]],
        n_pages: int | Sequence[int],
        *,
        device: DeviceLike = "auto",
        staging: Size = "8MiB",
    ) -> None:
        self.buffers = dict(buffers)
        """Where the pages of each (layer_id, role) are: (base, stride)."""
        counts = (n_pages,) * len(plan.groups) if isinstance(n_pages, int) else tuple(n_pages)
        self._pages = HotPages(plan, self.buffers, counts)
        largest = max(kind.contents.size for kind in self._pages.kinds)
        self._room = max(parse_size(staging, "staging"), largest)
        self._lock = threading.Lock()
        self._owned: list[StaticHostMem | CudaMemory] = []
        self._busy: Event = DONE  # the last work that uses the staging buffer
        self._expected = np.empty(self._room, np.uint8)
        where = resolve_device(device)
        self._stream = where.stream()
        try:
            self._memory = StaticHostMem(self._room, device=where)
        except BaseException:
            self._stream.close()
            raise
        self._staging: NDArray[np.uint8] | None = self._memory.view()

    @classmethod
    def over(cls, storage: TierStorage, *, staging: Size = "8MiB") -> Self:
        """Make an engine whose hot pages are the slots of a storage's hot level.

        Close it before the storage.

        Raises
        ------
        ValueError
            The storage has no hot level: the engine owns the hot pages.
        """
        level = storage.plan.levels[0]
        if not level.hot:
            raise ValueError("storage: its first level is not hot; use FakeEngine.with_pages")
        buffers = storage.hot_buffers()
        return cls(storage.plan, buffers, level.max_slots, device=storage.device, staging=staging)

    @classmethod
    def with_pages(
        cls,
        plan: CachePlan,
        n_pages: int,
        *,
        device: DeviceLike = "auto",
        padding: int = 0,
        staging: Size = "8MiB",
    ) -> Self:
        """Make an engine with hot pages of its own: a memory for each layer and role.

        Parameters
        ----------
        plan, device, staging
            As above.
        n_pages : int
            Pages of each buffer.
        padding : int
            Bytes between the pages of a buffer.

        Raises
        ------
        HostOOMError, CuOOMError, RegistrationError
            There is no such memory, or no staging buffer; nothing was kept.
        """
        where = resolve_device(device)
        with contextlib.ExitStack() as undo:
            owned: list[StaticHostMem | CudaMemory] = []
            buffers = {}
            for layout in plan.groups:
                for place in (place for pool in layout.pools for place in pool.buffers):
                    stride = place.size + padding
                    memory = _allocate(where, n_pages * stride)
                    undo.callback(memory.close)
                    owned.append(memory)
                    buffers[place.layer_id, place.role] = memory.address, stride
            engine = cls(plan, buffers, n_pages, device=where, staging=staging)
            engine._owned = owned
            undo.pop_all()
        return engine

    def write(
        self,
        tokens: ArrayLike,
        pages: ArrayLike,
        *,
        first_block: int = 0,
        start: int = 0,
        salt: bytes = b"",
        after: Iterable[Event] = (),
    ) -> Event:
        """Compute tokens into hot pages, and touch no other byte.

        Parameters
        ----------
        tokens : sequence of int
            The whole sequence so far, from its beginning.
        pages : int array, shape (blocks,) or (groups, blocks)
            The page of each block, of all pool groups or of each; -1 for none.
        first_block : int
            Number in the sequence of the block that the first page is of.
        start : int
            The first token to compute; those before are there.
        salt : bytes
            Whose sequence it is.
        after : events
            What may still use the pages. What fails there belongs to others.

        Returns
        -------
        Event
            Of the copy that writes them. What does not fit in the staging buffer at once is
            written before this returns.

        Raises
        ------
        ValueError
            A page that there is not, or one for a block behind the last token.
        """
        states = self._states(tokens, salt)
        parts = self._parts(pages, first_block, start, len(np.asarray(tokens)))
        with self._lock:
            staging = self._open_staging()
            for event in after:
                self._stream.wait(event)
            event, used = DONE, self._room
            for part in parts:
                if used + part.nbytes > self._room:
                    event.synchronize()
                    self._busy.wait_finished()
                    used = 0
                made = _rows(staging[used:], part)
                part.buffers.contents.fill(mix(part.states_of(states[first_block:])), made)
                event = self._copy(part, used, to_pages=True)
                used = align_up(used + part.nbytes, 8)
            return event

    def scrub(self, pages: ArrayLike) -> None:
        """Overwrite all bytes of pages, so that what is verified later was brought there."""
        with self._lock:
            staging = self._open_staging()
            self._busy.wait_finished()
            staging[:] = _SCRUBBED
            tokens = np.asarray(pages).shape[-1] * self._pages.tokens_per_block
            for part in self._parts(pages, 0, 0, tokens):
                self._copy(part, 0, to_pages=True).synchronize()

    def verify(
        self,
        tokens: ArrayLike,
        pages: ArrayLike,
        *,
        first_block: int = 0,
        start: int = 0,
        salt: bytes = b"",
        after: Iterable[Event] = (),
    ) -> None:
        """Compare every byte of tokens in hot pages with what was computed.

        Parameters
        ----------
        tokens, pages, first_block, start, salt
            As for `write`. A last block that is not full is compared up to its last token.
        after : events
            What brings the bytes; what fails there is raised.

        Raises
        ------
        AssertionError
            A byte is wrong; it says where, as `WrongBytes` does.
        """
        wrong = self.find_wrong(
            tokens, pages, first_block=first_block, start=start, salt=salt, after=after
        )
        if wrong is not None:
            raise AssertionError(str(wrong))

    def find_wrong(
        self,
        tokens: ArrayLike,
        pages: ArrayLike,
        *,
        first_block: int = 0,
        start: int = 0,
        salt: bytes = b"",
        after: Iterable[Event] = (),
    ) -> WrongBytes | None:
        """Compare as `verify` does; say what is wrong, or None."""
        for event in after:
            event.synchronize()
        states = self._states(tokens, salt)
        parts = self._parts(pages, first_block, start, len(np.asarray(tokens)))
        search = Search(first_block)
        with self._lock:
            staging = self._open_staging()
            for part in parts:
                self._busy.wait_finished()
                expected, found = _rows(self._expected, part), _rows(staging, part)
                part.buffers.contents.fill(mix(part.states_of(states[first_block:])), expected)
                np.invert(expected, out=found)  # a byte that is not copied is a wrong one
                self._copy(part, 0, to_pages=False).synchronize()
                _overlook(part, expected, found)
                search.compare(part, expected, found)
        return search.result(states, self._pages.kinds)

    def _states(self, tokens: ArrayLike, salt: bytes) -> Words:
        """Give the states of each block's tokens; after the last token there are zeros."""
        states = prefix_states(tokens, salt)
        per_block = self._pages.tokens_per_block
        padded = np.zeros((-(-len(states) // per_block), per_block), np.uint64)
        padded.ravel()[: len(states)] = states
        return padded

    def _parts(self, pages: ArrayLike, first_block: int, start: int, stop: int) -> Iterator[Part]:
        return self._pages.parts(pages, first_block, start, stop, self._room)

    def _copy(self, part: Part, at: int, *, to_pages: bool) -> Event:
        """Submit the copies between pages and the staging buffer, from byte ``at`` of it on."""
        offsets = part.first.astype(np.uint64)
        rows = np.arange(len(part.which), dtype=np.uint64) * np.uint64(part.buffers.contents.size)
        near = np.uint64(self._memory.address + at) + rows + offsets
        far = part.addresses + offsets
        to, source = (far, near) if to_pages else (near, far)
        self._stream.copy(to, source, (part.stop - part.first).astype(np.uint64))
        self._busy = self._stream.record()
        return self._busy

    def _open_staging(self) -> NDArray[np.uint8]:
        if self._staging is None:
            raise ClosedError("the fake engine was closed")
        return self._staging

    def close(self) -> None:
        """Finish what was submitted and give all memory back. Idempotent."""
        with self._lock:
            self._staging = None
            with contextlib.ExitStack() as stack:  # all of it, whatever one of them raises
                for memory in self._owned:
                    stack.callback(memory.close)
                stack.callback(self._memory.close)
                stack.callback(self._stream.close)


def _rows(memory: NDArray[np.uint8], part: Part) -> NDArray[np.uint8]:
    """Show the beginning of a memory as the blocks of a part."""
    shape = len(part.which), part.buffers.contents.size
    return memory[: part.nbytes].reshape(shape)


def _overlook(part: Part, expected: NDArray[np.uint8], found: NDArray[np.uint8]) -> None:
    """Make the bytes alike that are not meant: of other tokens in the first and last block."""
    cut = (part.first > 0) | (part.stop < part.buffers.contents.size)
    for n in np.flatnonzero(cut).tolist():
        for outside in (np.s_[: part.first[n]], np.s_[part.stop[n] :]):
            found[n, outside] = expected[n, outside]


def _allocate(device: Device, nbytes: int) -> StaticHostMem | CudaMemory:
    if isinstance(device, CudaDevice):
        return CudaMemory(device, nbytes, nbytes, nbytes)
    return StaticHostMem(nbytes, device=device)
