"""A store that hosts share, in memory: what it answers, and when, is for the test to say."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.config import RemoteCacheTierConfig
from kvtier.remote.client import Refused
from tests.threads import DEADLINE

__all__ = ["Store", "raw"]


class _Range:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def raw(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Give an array over memory that nobody knows of."""
    interface: Any = _Range(address, nbytes)
    return np.asarray(interface)


class Store:
    """Objects by name, and the clients of them."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.codes: dict[str, int] = {}
        """What every object of a call is answered with instead, by the name of the call."""
        self.ranges: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []
        """Calls so far, and how many objects each was about."""
        self.most = Counter[str]()
        self.up = True
        self.refuses = False
        self.registers = True
        self.closed = 0
        self._holds: dict[str, threading.Event] = {}
        self._reached: dict[str, threading.Event] = {}

    def hold(self, call: str) -> Callable[[], None]:
        """Let a call wait until what is returned is called."""
        self._holds[call], self._reached[call] = threading.Event(), threading.Event()
        return self._holds[call].set

    def wait_reached(self, call: str) -> None:
        """Block until a call that is held has begun."""
        assert self._reached[call].wait(DEADLINE), f"nobody calls {call}"

    def connect(self, config: RemoteCacheTierConfig) -> Store:
        """Be a client of its own."""
        self._begin("connect", 1)
        if self.refuses:
            raise Refused("the master does not answer")
        return self

    def _begin(self, call: str, objects: int) -> None:
        self.calls.append((call, objects))
        if call in self._holds:
            self._reached[call].set()
            assert self._holds[call].wait(DEADLINE), f"{call} was never let go"

    def exist(self, names: Sequence[str]) -> list[int]:
        self._begin("exist", len(names))
        if (code := self.codes.get("exist")) is not None:
            return [code] * len(names)
        return [int(name in self.objects) for name in names]

    def put(
        self, names: Sequence[str], buffers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self._begin("put", len(names))
        if (code := self.codes.get("put")) is not None:
            return [code] * len(names)
        for name, places, lengths in zip(names, buffers, sizes, strict=True):
            parts = [self._bytes(*at).tobytes() for at in zip(places, lengths, strict=True)]
            self.objects.setdefault(name, b"".join(parts))
        return [0] * len(names)

    def get(
        self, names: Sequence[str], buffers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self._begin("get", len(names))
        if (code := self.codes.get("get")) is not None:
            return [code] * len(names)
        return [self._get(*one) for one in zip(names, buffers, sizes, strict=True)]

    def _get(self, name: str, places: list[int], lengths: list[int]) -> int:
        data = self.objects.get(name)
        if data is None:
            return -704
        if len(data) != sum(lengths):
            return -600
        at = 0
        for place, length in zip(places, lengths, strict=True):
            self._bytes(place, length)[:] = np.frombuffer(data[at : at + length], np.uint8)
            at += length
        return at

    def _bytes(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        assert any(
            start <= address and address + nbytes <= start + size
            for start, size in self.ranges.items()
        ), "the memory is not registered in one range"
        return raw(address, nbytes)

    def remove(self, names: Sequence[str]) -> None:
        self._begin("remove", len(names))
        for name in names:
            self.objects.pop(name, None)

    def register(self, address: int, nbytes: int) -> bool:
        assert not any(
            start < address + nbytes and address < start + size
            for start, size in self.ranges.items()
        ), "ranges overlap"
        if self.registers:
            self.ranges[address] = nbytes
        return self.registers

    def unregister(self, address: int) -> None:
        del self.ranges[address]

    def healthy(self) -> bool:
        return self.up

    def reachable(self) -> bool:
        return self.up

    def close(self) -> None:
        self.closed += 1
