"""One sequence of tokens and the hot pages that hold what was computed for them."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostmem import ClosedError, Event, ResourceBusyError
from hostmem.closing import Closable
from hostmem.courier import closings
from hostmem.describing import one_line
from hostmem.device import DONE
from hostmem.spans import span
from kvtier.arguments import check_event, whole_number
from kvtier.blocks import BlockCache
from kvtier.holding import Holding, unproven
from kvtier.keys import Tokens, chain_keys, token_ids
from kvtier.layout import GroupLayout
from kvtier.page_tables import PageTables
from kvtier.storage import TierStorage

__all__ = ["KVSequence", "SequenceTerms"]


@dataclass(frozen=True, slots=True)
class SequenceTerms:
    """What the sequences of a manager have in common."""

    storage: TierStorage
    cache: BlockCache[bytes]
    groups: tuple[GroupLayout, ...]
    tokens_per_block: int
    layout: bytes
    """Goes into every key."""
    max_util: float
    """Share of the hot level up to which a sequence may resume."""


class KVSequence(Closable):
    """Tokens in order, and a page of every pool group for each block of them.

    Made by `KVCacheManager.create_sequence`. Full blocks are in the cache, where others find them;
    the last, partly filled one is private. An engine drives it so, each step::

        sequence.grow(n)                       # room for the tokens of the step
        table = sequence.page_table(group)     # where the kernel reads and writes
        sequence.events                        # what its stream has to wait for before
        sequence.commit(tokens, ready=event)   # once the kernel is submitted

    Notes
    -----
    Calls may come from any thread and are ordered by a lock of the sequence's own, inside which the
    storage's is taken when pages come or go. Only `wait` blocks for copies; but who makes room by
    moving down the partly filled block of a suspended sequence blocks until it has arrived. A
    sequence that is dropped without `close` is closed on another thread, with a `ResourceWarning`.
    """

    __slots__ = (
        "__weakref__",
        "_cached",
        "_capacity",
        "_fences",
        "_finalizer",
        "_forgotten",
        "_held",
        "_keys",
        "_lock",
        "_n_tokens",
        "_priority",
        "_salt",
        "_state",
        "_tables",
        "_tail",
        "_terms",
    )

    def __init__(
        self, terms: SequenceTerms, keys: Sequence[bytes], salt: bytes, priority: int
    ) -> None:
        closings.start()  # not from the finalizer, which may run where no thread can be started
        self._terms = terms
        self._salt = salt
        self._priority = priority
        self._lock = threading.Lock()
        self._tail = array("q")  # tokens of the private block
        self._held = Holding(terms.cache, terms.cache.acquire(keys))
        self._tables = PageTables(len(terms.groups))
        self._fences: list[Event] = []
        self._begin(keys)
        self._cached = self._n_tokens
        self._state = "active"
        self._finalizer = weakref.finalize(self, _dropped, self._held, os.getpid())
        self._finalizer.atexit = False

    def _begin(self, keys: Sequence[bytes]) -> None:
        """Start from the leading blocks, which the lease holds."""
        lease = self._held.lease
        self._keys = list(keys[: len(lease)])
        self._forgotten = [0] * len(self._terms.groups)
        self._n_tokens = self._capacity = len(lease) * self._terms.tokens_per_block
        self._tables.put(0, lease)

    # ---------------------------------------------------------------------------- how it stands

    @property
    def num_tokens(self) -> int:
        """Tokens that were committed, those of reused blocks included."""
        return self._n_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that were found in the cache when the sequence was created."""
        return self._cached

    @property
    def capacity(self) -> int:
        """Tokens that the pages have room for; a multiple of ``tokens_per_block``."""
        return self._capacity

    @property
    def suspended(self) -> bool:
        """Whether it was suspended, and not resumed or closed since."""
        return self._state == "suspended"

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._state == "closed"

    def page_table(self, group: int = 0) -> NDArray[np.int32]:
        """Give the hot slot of each block's page of one pool group.

        Returns
        -------
        int32 array, shape (blocks,), read-only
            As many entries as there are blocks in `capacity`; -1 where the page was let go, or
            never brought, because its tokens are outside the group's sliding window.

        Raises
        ------
        ClosedError, ValueError
            The sequence is closed, or suspended.

        Notes
        -----
        It is the same object until a slot changes or is added. Then another one is returned, and
        the contents of the first follow or not: copy what must last beyond the next `grow`,
        `commit`, `suspend` or `close`.
        """
        table = self._tables.views[group]
        if table is None:
            with self._lock:
                if self._state != "active":
                    raise self._refusal()
                table = self._tables.view(group)
        return table

    @property
    def events(self) -> tuple[Event, ...]:
        """What the stream of the next step must wait for before it reads or writes the pages.

        Copies that bring reused blocks, and earlier uses of slots that are new here. Mostly none;
        those that have finished well are left out.
        """
        held = self._held
        if not held.arrivals and not self._fences:
            return ()
        with self._lock:
            held.arrivals = unproven(held.arrivals)
            self._fences = [event for event in self._fences if not event.query()]
            return (*held.arrivals, *self._fences)

    @span("wait for pages", "wait", domain="kvtier")
    def wait(self) -> None:
        """Block until the pages may be read and written.

        Raises
        ------
        OSError, CuError
            A reused block could not be brought. `suspend` and `resume`, which says how many tokens
            were lost by it, or `close`.
        """
        for event in self._held.arrivals:
            event.synchronize()
        for event in self._fences:
            event.wait_finished()

    # ------------------------------------------------------------------------------------ steps

    def grow(self, tokens: int) -> None:
        """Make room for so many tokens behind those committed; all or nothing.

        Nothing happens where there is room already, which costs no lock of the storage.

        Raises
        ------
        OutOfPagesError
            Pages that cannot go leave no room; nothing has changed. Suspend or close others.
        ClosedError, ValueError
            The sequence is closed, or suspended.
        """
        tokens = whole_number(tokens, "tokens")
        with self._lock:
            if self._state != "active":
                raise self._refusal()
            missing = self._n_tokens + tokens - self._capacity
            if missing > 0:
                self._grow(-(-missing // self._terms.tokens_per_block))

    def _grow(self, blocks: int) -> None:
        room = self._terms.cache.reserve([None] * blocks, priority=self._priority)
        self._fences = [fence for fence in (*self._fences, *room.fences) if not fence.query()]
        self._tables.put(self._tables.blocks, room)
        self._held.add(room)
        self._capacity += blocks * self._terms.tokens_per_block

    def commit(self, tokens: Tokens, ready: Event = DONE) -> None:
        """Add tokens whose keys and values are written, or will be when ``ready`` has finished.

        Blocks that get full enter the cache. Where one of the same tokens is in the hot level
        already, the sequence goes on with that and gives its own page back.

        Parameters
        ----------
        tokens : sequence of int or integer array, shape (tokens,)
            Those at positions ``num_tokens`` and following. None at all notes ``ready`` alone, for
            a step that uses the pages and computes nothing to keep.
        ready : Event
            Of the step that computes them, and reads the pages meanwhile.

        Raises
        ------
        ValueError
            There is no room for them: `grow` first. Or the sequence is suspended, or a token is
            out of 0..2**63 - 1. Nothing has changed.
        TypeError
            Tokens that are no integers; nothing has changed.
        ClosedError
            The sequence is closed.

        Notes
        -----
        If a step fails, so does every block that is filled in it or after it: none is served.
        """
        check_event(ready, "ready")
        ids = token_ids(tokens)
        with self._lock:
            if self._state != "active":
                raise self._refusal()
            total = self._n_tokens + len(ids)
            if total > self._capacity:
                raise ValueError(
                    f"tokens: {len(ids)} after {self._n_tokens} do not fit into the capacity of "
                    f"{self._capacity} tokens; call grow first"
                )
            steps = self._held.steps
            if ready is not DONE and not (steps and steps[-1] is ready):
                steps.append(ready)
            self._tail += ids
            self._n_tokens = total
            if len(self._tail) >= self._terms.tokens_per_block:
                self._commit_full()

    def _commit_full(self) -> None:
        """Let the full blocks of the tail enter the cache."""
        keys = self._chain(self._tail, self._keys[-1] if self._keys else None)
        full = self._held.commit(keys)
        self._tables.put(len(self._keys), full)
        self._held.lease.extend(full)
        self._keys += keys
        del self._tail[: len(keys) * self._terms.tokens_per_block]
        self._forget()

    def _chain(self, tokens: Tokens, parent: bytes | None) -> list[bytes]:
        terms = self._terms
        if parent is not None:
            return chain_keys(tokens, terms.tokens_per_block, parent=parent)
        return chain_keys(tokens, terms.tokens_per_block, salt=self._salt, layout=terms.layout)

    def _forget(self) -> None:
        """Let go of the pages that no window shows any more to the tokens to come."""
        for group, layout in enumerate(self._terms.groups):
            first, end = layout.stale_blocks(self._n_tokens, self._terms.tokens_per_block)
            first = max(first, self._forgotten[group])
            if first < end:
                self._held.forget(group, end)
                self._tables.hide(group, first, end)
                self._forgotten[group] = end

    # ------------------------------------------------------------------------ pauses and the end

    def suspend(self) -> None:
        """Let the hot pages go, for others to use. Idempotent.

        Full blocks stay in the cache as long as others leave them there; the partly filled one may
        move down, but is kept. Room that holds no tokens is given back.

        Raises
        ------
        ClosedError
            The sequence is closed.

        Notes
        -----
        Steps that were told to `commit` may still run: their slots are fenced until they finish.
        """
        with self._lock:
            if self._state == "suspended":
                return
            if self._state != "active":
                raise self._refusal()
            self._held.put_away(partly_filled=bool(self._tail))
            self._stop("suspended")

    def resume(self) -> int:
        """Bring the pages back to the hot level.

        Returns
        -------
        int
            Tokens that were lost, because other sequences needed the room of all levels or a copy
            failed: `num_tokens` is so much smaller, and what followed must be computed and
            committed again. 0 if it was not suspended.

        Raises
        ------
        ResourceBusyError
            Pages in use would fill more than ``max_util_for_resume`` of the hot level; try when
            other sequences have ended. Not raised where nobody uses any.
        OutOfPagesError
            They do not fit beside those in use. The sequence stays suspended.
        ClosedError
            The sequence is closed.

        Notes
        -----
        As after creation, there is room for the committed tokens alone: `grow`.
        """
        with self._lock:
            if self._state == "active":
                return 0
            if self._state == "closed":
                raise self._refusal()
            before = self._n_tokens
            with self._terms.storage.lock:  # the room is still there when it is taken
                self._check_room()
                partly_filled = self._held.take_back(self._keys)
                self._fences = []
                self._begin(self._keys)
                if partly_filled is None:
                    del self._tail[:]
                else:
                    self._tables.put(self._tables.blocks, partly_filled)
                    self._n_tokens += len(self._tail)
                    self._capacity += self._terms.tokens_per_block
            self._state = "active"
            return before - self._n_tokens

    def _check_room(self) -> None:
        """Refuse to resume where that would leave too little room for those that run."""
        terms = self._terms
        private = 1 if self._tail else 0
        for group, needed in enumerate(terms.cache.room_for(self._keys)):
            used = terms.storage.leased(group)
            slots = terms.storage.levels[0].groups[group].slots.n_slots
            if used and used + needed + private > terms.max_util * slots:
                raise ResourceBusyError(
                    f"pool group {group}: {used} of {slots} hot pages are in use, and with "
                    f"{needed + private} more to resume this sequence that is above "
                    f"max_util_for_resume, {terms.max_util}; try when others have ended",
                    group=group,
                    used=used,
                    needed=needed + private,
                    slots=slots,
                )

    def close(self) -> None:
        """Let everything go, as `suspend` does, and the partly filled block, too. Idempotent."""
        with self._lock:
            if self._state == "closed":
                return
            self._finalizer.detach()
            self._held.release()
            self._stop("closed")

    def abandon(self) -> None:
        """Close in a forked child, which has neither the pages nor the threads."""
        self._lock = threading.Lock()
        self._finalizer.detach()
        self._stop("closed")

    def _stop(self, state: str) -> None:
        self._state = state
        self._tables.clear()

    def _refusal(self) -> Exception:
        if self._state == "closed":
            return ClosedError("the sequence was closed, or belongs to the parent of this process")
        return ValueError("the sequence is suspended; call resume first")

    @one_line
    def __repr__(self) -> str:
        state = "" if self._state == "active" else f", {self._state}"
        return f"<KVSequence of {self._n_tokens} tokens{state}>"


def _dropped(held: Holding, pid: int) -> None:
    if pid != os.getpid():
        return
    # The garbage collector runs this on any thread, perhaps within the storage's lock.
    closings.post(held.release)  # first: the warning may be turned into an error
    warnings.warn("a KVSequence was dropped without close()", ResourceWarning, stacklevel=2)
