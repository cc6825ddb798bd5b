"""A process to be killed: writes random slots of a named file, and says when each was written.

    python tests/kvtier/persist_writer.py FOLDER SLOT_SIZE SLOTS SEED [COMPRESSION]

What a slot holds follows from its name. Lines to standard output, written before and after what
they tell of: ``w SLOT NAME`` is about to be written, ``d SLOT NAME`` was, ``f SLOT`` is about to be
forgotten.
"""

from __future__ import annotations

import os
import random
import sys

import numpy as np
from numpy.typing import NDArray

from hostmem import StaticHostMem
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.page_events import PageEvents

NAME, LAYOUT = "pages.slots", b"of the test"


def content(name: bytes, nbytes: int) -> NDArray[np.uint8]:
    """Say what a slot of a name holds; a compression finds something to do in its second half."""
    seed = np.uint64(int.from_bytes(name.ljust(8, b"\0")[-8:], "little"))
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) + seed
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    words[len(words) // 2 :] &= np.uint64(0xFF)
    return words.view(np.uint8)[:nbytes]


def say(*lines: str) -> None:
    os.write(1, "".join(f"{line}\n" for line in lines).encode())


def main(folder: str, slot_size: int, slots: int, seed: int, compression: str | None) -> None:
    """Write, until killed."""
    random.seed(seed)
    file = SlotFile(folder, slot_size, slots, name=NAME, layout=LAYOUT, compression=compression)
    memory = StaticHostMem(slots * slot_size, device="cpu")
    pages = memory.view(0, slots * slot_size).reshape(slots, slot_size)
    going: list[tuple[list[int], list[str], PageEvents]] = []
    count = 0
    while True:
        busy = {slot for batch, _, _ in going for slot in batch}
        free = [slot for slot in range(slots) if slot not in busy]
        some = sorted(random.sample(free, random.randint(1, len(free) // 2)))
        if random.random() < 0.2:
            say(*(f"f {slot}" for slot in some[:2]))
            file.forget(np.array(some[:2], np.int32))
        names = []
        for slot in some:
            count += 1
            names.append(f"{seed}.{count}")
            pages[slot] = content(names[-1].encode(), slot_size)
        say(*(f"w {slot} {name}" for slot, name in zip(some, names, strict=True)))
        addresses = np.uint64(memory.address) + np.array(some, np.uint64) * np.uint64(slot_size)
        called = [name.encode() for name in names]
        event = file.write(np.array(some, np.int32), addresses, Dependencies(), called)
        going.append((some, names, event))
        if len(going) > 2:
            batch, written, event = going.pop(0)
            event.synchronize()
            say(*(f"d {slot} {name}" for slot, name in zip(batch, written, strict=True)))


if __name__ == "__main__":
    size, slots, seed = map(int, sys.argv[2:5])
    main(sys.argv[1], size, slots, seed, sys.argv[5] if len(sys.argv) > 5 else None)
