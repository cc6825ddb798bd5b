"""Prospect: keeps the keys whose room is expected to pay the most hits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from math import inf

from kvtier.eviction.outlook import BODY, LEFT, TIP
from kvtier.eviction.policy import EvictionPolicy, Key
from kvtier.eviction.runs import Cohort, Run
from kvtier.eviction.waiting import Waiting

__all__ = ["Prospect"]

_GHOSTS, _LEAST_GHOSTS = 2, 64
"""Evicted runs that are remembered: a multiple of the keys, and at least so many."""
_UNBOUNDED = 1024
"""Keys to which ages are scaled where there is no capacity."""


class Prospect(EvictionPolicy[Key]):
    """Evicts what is expected to pay the fewest hits for the room it takes.

    Keys are held as a tree of runs (see ``Run``), and only the last key of a leaf is ever the next
    to go. What a leaf is worth depends on how many turns its conversation has had and on the time
    since the last one, in the way that this cache has seen so far (see ``Outlook``). Evicted runs
    are remembered, one entry a run and at most twice as many as there may be keys, so that returns
    that came too late are learned from as well.

    `reference` also decides about admission: new keys that are worth less than all that would have
    to go for them stay out, the last ones of the request first. `insert_many` comes when others
    have gone: new keys that are worth less than these are the next to go.

    A touch of a key that does not follow the key before it begins a request, and `insert_many` ends
    one. Where a cache calls `insert` and `touch`, runs are found from the order of the calls: an
    insertion after an eviction begins a request as well, unless a touch came last. What was joined
    wrongly is parted at its next touch.

    Notes
    -----
    A key costs O(1) amortised. Once in 8,192 references, more often at first, a call takes 1 ms
    longer. Nothing is random.
    """

    __slots__ = (
        "_at", "_first", "_ghosts", "_gone", "_inserted", "_last", "_passed", "_path", "_reading",
        "_request", "_runs", "_spent", "_touched", "_waiting",
    )  # fmt: skip

    def __init__(
        self, capacity: int | None = None, identity: Callable[[Key], Hashable] | None = None
    ) -> None:
        super().__init__(capacity, identity)
        self._runs: dict[Key, Run[Key]] = {}
        self._waiting: Waiting[Key] = Waiting(max((capacity or _UNBOUNDED) // 16, 1))
        self._ghosts: OrderedDict[Hashable, Run[Key]] = OrderedDict()  # by the key they began with
        self._gone: dict[Key, tuple[Run[Key], Cohort[Key]]] = {}  # by the last eviction
        self._spent: list[float] = []  # what the keys were worth that went for the next ones
        # The request that is being noted.
        self._request = 0
        self._path: list[Run[Key]] = []  # runs used, in no cohort meanwhile
        self._at: Run[Key] | None = None  # where its prefix has got to
        self._reading: Run[Key] | None = None  # used from _first to _last, so far
        self._first = self._last = 0
        self._passed: Run[Key] | None = None  # what is left of the run that it was in last
        self._touched = self._inserted = 0

    # ------------------------------------------------------------------------- one key at a time

    def insert(self, key: Key) -> None:
        """Add a key behind the one used before it; ValueError if it is present."""
        if key in self._runs:
            raise ValueError(f"key {key!r} is already present")
        self._leave()
        self._waiting.tick(1)
        self._inserted += 1
        if self._is_passed_through:
            self._begin()
        last = self._path[-1] if self._path else None
        if (
            last is not None
            and last is self._at
            and not last.weight
            and self._name(key) not in self._ghosts
        ):
            last.keys.append(key)  # begun by this request
            self._runs[key] = last
        else:
            self._grow([key], self._born([key]))

    def insert_many(self, keys: Iterable[Key]) -> None:
        """Add the keys that end a request; ValueError, and nothing changed, if one is present.

        Those that are worth less than what was evicted for them, the last ones first, are refused:
        they go before all others, unless they are touched before that.
        """
        keys = list(keys)
        if not self._runs.keys().isdisjoint(keys):
            raise ValueError(f"key {next(filter(self.__contains__, keys))!r} is already present")
        if not keys:
            return
        self._leave()
        self._waiting.tick(len(keys))
        self._touched += len(keys)
        self._pass_by()
        if self._path and not self._path[-1].weight:  # of keys inserted one by one
            self._begin()
        n, run = len(keys), self._born(keys)
        room = min(self._paid_for(run, n), n - 1)
        rest = Run(keys[room:], run.depth, TIP if room == n - 1 else BODY, self._request)
        rest.uses, rest.refused = run.uses, self._paid_for(rest, n) <= room
        if room:
            self._grow(keys[:room], run)
        self._grow(rest.keys, rest)
        self._spent.clear()
        self._join_path()
        self._at = None

    def _paid_for(self, run: Run[Key], n: int) -> int:
        """Of ``n`` new keys, count those for which nothing went that is worth more than they."""
        worth = self._waiting.worth_of_new(run)
        return max(n - sum(spent > worth for spent in self._spent), 0)

    def insert_evicted(self, key: Key, above: EvictionPolicy[Key]) -> None:
        """Add a key with what the level above knows of it, and value it as that does.

        Needs to be the way in for every key, from the first one on.
        """
        if not isinstance(above, Prospect) or key not in above._gone:
            self.insert(key)
            return
        if key in self._runs:
            raise ValueError(f"key {key!r} is already present")
        self._begin()
        self._waiting.follow(above._waiting)
        run, cohort = above._gone[key]
        copy = Run([key], run.depth, run.kind, self._request)
        copy.uses = run.uses
        self._runs[key] = copy
        self._waiting.join(copy, 1, cohort)

    @property
    def _is_passed_through(self) -> bool:
        """Whether keys come and go and are hardly touched, as in a lower level.

        There they come in the order of their eviction, which tells nothing of what follows what,
        and are removed because they were asked for.
        """
        return self._touched * 16 < self._inserted

    def touch(self, key: Key) -> None:
        """Note a use of a key; KeyError if it is absent."""
        run = self._runs[key]
        self._touched += 1
        self._waiting.clock += 1
        if run is self._reading:
            following = self._last + 1
            if following < len(run.keys) and run.keys[following] == key:
                self._last = following
                return
        self._leave()
        self._waiting.tick(0)
        if run.cohort is None:  # a part of the path
            self._begin()
        run = self._runs[key]
        index = 0 if run.keys[0] == key else run.keys.index(key)
        if index or self._at is None or run.parent is not self._at:
            self._begin()
        self._reading, self._first, self._last = run, index, index

    def touch_many(self, keys: Iterable[Key]) -> None:
        """Note that a request uses keys, in the order of its prefix; KeyError at an absent one."""
        keys = list(keys)
        at = 0
        while at < len(keys):
            self.touch(keys[at])
            run, first = self._runs[keys[at]], self._last
            length = _common(run.keys, first, keys, at)
            self._last += length - 1
            self._touched += length - 1
            self._waiting.clock += length - 1
            at += length
            if at < len(keys):
                self._leave()
                self._pass_by()

    def remove(self, key: Key) -> None:
        """Forget a key; KeyError if it is absent."""
        if key not in self._runs:
            raise KeyError(key)
        self._settle()
        if self._is_passed_through:
            self._waiting.note_return(self._runs[key], 1)
        self._drop(key, remember=False)

    # ------------------------------------------------------------------------- a whole request

    def reference(self, keys: Sequence[Key]) -> int:
        """Run one request; see `EvictionPolicy.reference`.

        New keys that are worth less than those present are not inserted; nor is what follows them.
        """
        runs, n = self._runs, len(keys)
        if not isinstance(keys, list):
            keys = list(keys)  # slices of which equal those of a run
        if self._path or self._reading is not None:
            self._settle()
        self._request += 1
        self._at = None
        self._waiting.tick(n)
        self._touched += n
        hits, at, prefix_held = 0, 0, True
        while at < n:
            key = keys[at]
            run = runs.get(key)
            if run is None:
                prefix_held = False
                end = n
                if not runs.keys().isdisjoint(keys[at:]):
                    end = next(i for i in range(at, n) if keys[i] in runs)
                if not self._admit(list(dict.fromkeys(keys[at:end])), whole=end == n):
                    break
                at = end
                continue
            first = 0 if run.keys[0] == key else run.keys.index(key)
            length = _common(run.keys, first, keys, at)
            if run.request != self._request:
                self._use(run, first, first + length)
                if at + length < n:
                    self._pass_by()
            at += length
            if prefix_held:
                hits += length
        self._join_path()
        return hits

    def _admit(self, keys: list[Key], *, whole: bool) -> bool:
        """Insert keys behind the path as far as they are worth it; say whether all were.

        ``whole``: they end the request.
        """
        body = keys[:-1] if whole and len(keys) > 1 else keys
        run = self._born(keys)
        if whole and len(keys) == 1:
            run.kind = TIP
        room = self._make_room(len(body), run)
        if room:
            self._grow(body[:room], run)
        if room < len(body):
            if not room:
                self._shun(body, run)
            return False
        if body is not keys:
            tip = Run(keys[-1:], run.depth, TIP, self._request)
            tip.uses = run.uses
            if self._make_room(1, tip):
                self._grow(keys[-1:], tip)
            else:
                self._shun(keys[-1:], tip)
        return True

    def _make_room(self, n: int, run: Run[Key]) -> int:
        """Make room for ``n`` keys of a new run; give how many there is room for."""
        if self._capacity is None:
            return n
        worth = self._waiting.worth_of_new(run)
        free = self._capacity - len(self._runs)
        while free < n:
            victim = self._waiting.least(worth if free >= 0 else inf)
            if victim is None:
                break
            going = victim.keys[free - n :]
            del victim.keys[free - n :]
            for key in going:
                del self._runs[key]
            free += len(going)
            if not victim.keys:
                self._bury(victim, going[0])
        return max(min(n, free), 0)

    def _shun(self, keys: list[Key], run: Run[Key]) -> None:
        """Remember a new run of which no key was let in."""
        run.keys = []
        self._waiting.join(run, len(keys))
        self._remember(run, keys[0])

    # ------------------------------------------------------------------------- the path

    def _begin(self) -> None:
        """Let a new request begin."""
        self._settle()
        self._request += 1
        self._at = None

    def _leave(self) -> None:
        """Note the use of the run that touches went through, now that they have left it."""
        if self._reading is not None:
            run, self._reading = self._reading, None
            self._use(run, self._first, self._last + 1)

    def _use(self, run: Run[Key], first: int, end: int) -> None:
        """Note a use of ``run.keys[first:end]``."""
        if first:
            self._split(run, first)
        self._passed = None
        if end - first < len(run.keys):
            self._passed, run = run, self._split(run, end - first)
        self._waiting.note_return(run, run.weight)
        self._waiting.part(run)
        run.refused = False
        self._hang(run, self._at)
        run.uses += 1
        run.request = self._request
        self._path.append(run)
        self._at = run

    def _pass_by(self) -> None:
        """Note that the request went another way than the rest of the run that it used last."""
        run, self._passed = self._passed, None
        if run is not None and run.keys and not run.kids and run.parent is self._at:
            cohort = run.cohort
            self._waiting.part(run)
            run.kind = LEFT
            self._waiting.join(run, run.weight, cohort)

    def _born(self, keys: list[Key]) -> Run[Key]:
        """Make a run for new keys behind the path, and learn from those that are remembered."""
        depth, uses = (self._at.depth + 1 if self._at is not None else 1), 1
        names = keys if self._identity is None else list(map(self._identity, keys))
        known = not self._ghosts.keys().isdisjoint(names)
        for name in filter(self._ghosts.__contains__, names) if known else ():
            ghost = self._ghosts.pop(name)
            self._waiting.note_return(ghost, ghost.weight)
            self._waiting.part(ghost)
            depth, uses = ghost.depth, ghost.uses + 1
        run: Run[Key] = Run([], depth, BODY, self._request)
        run.uses = uses
        return run

    def _grow(self, keys: list[Key], run: Run[Key]) -> None:
        """Put a new run with its keys behind the path."""
        run.keys = keys
        self._runs.update(dict.fromkeys(keys, run))
        self._hang(run, self._at)
        self._path.append(run)
        self._at = run

    def _settle(self) -> None:
        """Let the request end here, as far as is known."""
        self._leave()
        if not self._path:
            return
        last = self._path[-1]
        if not last.weight and last.uses == 1:  # inserted key by key, and not remembered
            if len(last.keys) > 1:
                tip = Run([last.keys.pop()], last.depth, TIP, self._request)
                tip.uses = last.uses
                self._grow(tip.keys, tip)
            else:
                last.kind = TIP
            self._at = None
        self._join_path()

    def _join_path(self) -> None:
        """Let the runs of the path age again, as of now."""
        for run in self._path:
            self._waiting.join(run, len(run.keys))
        self._path.clear()

    # ------------------------------------------------------------------------- the tree

    def _split(self, run: Run[Key], at: int) -> Run[Key]:
        """Cut a run in two; give the new run that has the keys before ``at``."""
        head: Run[Key] = Run(run.keys[:at], run.depth, BODY, run.request)
        del run.keys[:at]
        self._runs.update(dict.fromkeys(head.keys, head))
        head.uses, head.cohort, head.weight = run.uses, run.cohort, at
        run.weight -= at
        head.parent, head.kids = run.parent, 1
        run.parent = head
        return head

    def _hang(self, run: Run[Key], parent: Run[Key] | None) -> None:
        """Make a run the child of another, or a root."""
        if run.parent is parent:
            return
        if run.parent is not None:
            self._unhang(run)
        run.parent = parent
        if parent is not None:
            parent.kids += 1
            parent.kind = BODY
            if parent.cohort is not None:
                self._waiting.lift(parent)

    def _unhang(self, run: Run[Key]) -> None:
        """Make a run a root; a parent without other children becomes a leaf."""
        parent, run.parent = run.parent, None
        if parent is not None:
            parent.kids -= 1
            if not parent.kids and parent.keys and parent.cohort is not None:
                self._waiting.lay(parent)

    def _drop(self, key: Key, *, remember: bool) -> None:
        """Take a key out."""
        run = self._runs[key]
        if run.keys[-1] != key:
            run = self._split(run, run.keys.index(key) + 1)
        del run.keys[-1], self._runs[key]
        if run.keys:
            return
        if remember:
            self._bury(run, key)
        else:
            self._waiting.part(run)
            self._unhang(run)

    def _bury(self, run: Run[Key], first: Key) -> None:
        """Remember a run that has lost its last key."""
        assert run.cohort is not None
        self._waiting.lift(run)
        self._unhang(run)
        self._remember(run, first)

    def _remember(self, run: Run[Key], first: Key) -> None:
        """Make a run without keys a ghost, known by the key that it began with."""
        name = self._name(first)
        older = self._ghosts.pop(name, None)
        if older is not None:
            self._waiting.part(older)
        self._ghosts[name] = run
        held = len(self._runs) if self._capacity is None else self._capacity
        most = max(_GHOSTS * held, _LEAST_GHOSTS)
        while len(self._ghosts) > most:
            self._waiting.part(self._ghosts.popitem(last=False)[1])

    # ------------------------------------------------------------------------- who goes

    def victims(self) -> Iterator[Key]:
        """Iterate over all keys, least valuable first and each before those that it follows."""
        self._settle()
        return chain.from_iterable(reversed(run.keys) for run in self._waiting.in_order())

    def evict(self, n: int, evictable: Callable[[Key], bool] | None = None) -> list[Key] | None:
        """Remove the ``n`` least valuable keys, or none; see `EvictionPolicy.evict`."""
        self._gone.clear()
        self._spent.clear()
        return self._evict(n, evictable, self._let_go)

    def _let_go(self, key: Key) -> None:
        """Take an evicted key out, and know it until the next eviction."""
        run = self._runs[key]
        assert run.cohort is not None
        self._gone[key] = run, run.cohort
        self._spent.append(self._waiting.worth_of(run))
        self._drop(key, remember=self._waiting.learns)

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, key: object) -> bool:
        return key in self._runs


def _common(some: list[Key], first: int, others: list[Key], at: int) -> int:
    """Count how many keys two lists have in common, from an index of each."""
    length = min(len(some) - first, len(others) - at)
    if some[first : first + length] == others[at : at + length]:
        return length
    return next(n for n in range(length) if some[first + n] != others[at + n])
