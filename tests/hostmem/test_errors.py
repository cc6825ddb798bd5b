"""One error tree, whose members carry their facts and cross processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from hostmem import errors
from hostmem.errors import (
    CuOOMError,
    DiskOOMError,
    HostmemError,
    HostOOMError,
    OutOfMemoryError,
    OutOfPagesError,
)

ALL = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling_with_its_facts(kind: type[HostmemError], protocol: int) -> None:
    error = kind("the call failed", call="mmap", nbytes=4096, node=None)
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is kind
    assert str(again) == "the call failed"
    assert again.facts == {"call": "mmap", "nbytes": 4096, "node": None}
    assert (again.call, again.nbytes, again.node) == ("mmap", 4096, None)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_an_error_is_copied_with_its_facts(kind: type[HostmemError]) -> None:
    again = copy.deepcopy(kind("no", offset=3))
    assert (type(again), again.args, again.offset) == (kind, ("no",), 3)


def test_a_fact_that_an_error_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="HostOOMError has no fact 'node'"):
        _ = HostOOMError("no").node


def test_every_error_is_one_of_ours() -> None:
    assert all(issubclass(kind, HostmemError) for kind in ALL)


@pytest.mark.parametrize("kind", [HostOOMError, DiskOOMError, CuOOMError])
def test_memory_that_ran_out_is_a_memory_error(kind: type[HostmemError]) -> None:
    assert issubclass(kind, OutOfMemoryError)
    assert issubclass(kind, MemoryError)


def test_slots_that_ran_out_are_not_memory_that_ran_out() -> None:
    assert not issubclass(OutOfPagesError, MemoryError)


@pytest.mark.parametrize("one", ALL, ids=lambda kind: kind.__name__)
def test_causes_are_told_apart_by_type(one: type[HostmemError]) -> None:
    # Nobody but the two bases has subclasses: an except clause catches one cause.
    above = {HostmemError, OutOfMemoryError, one}
    assert [kind for kind in ALL if issubclass(one, kind) and kind not in above] == []
