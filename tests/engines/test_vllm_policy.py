"""Our eviction policy inside vLLM's own manager."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from kvtier.integrations.vllm import ProspectCachePolicy
from tests.engines.vllm_configs import key, keys, request

NAME, MODULE = "ProspectCachePolicy", "kvtier.integrations.vllm"
ANY = ReqContext("any")


def manager(chunks: int) -> CPUOffloadingManager:
    return CPUOffloadingManager(chunks, NAME, MODULE)


def serve(at: CPUOffloadingManager, name: str, prompt: list[OffloadKey]) -> int:
    """Serve one request as the connector does; give how many leading chunks were there."""
    context = request(name, prompt)
    at.on_new_request(context)
    hits = 0
    while hits < len(prompt) and at.lookup(prompt[hits], context) is LookupResult.HIT:
        hits += 1
    if hits:
        at.prepare_load(prompt[:hits], context)
        at.complete_load(prompt[:hits], context)
    if prompt[hits:]:
        stored = at.prepare_store(prompt[hits:], context)
        if stored is not None:
            at.complete_store(stored.keys_to_store, context)
    at.on_request_finished(context)
    return hits


def test_it_is_found_by_configuration_alone() -> None:
    assert CachePolicyFactory.get_cache_policy_cls(NAME, MODULE) is ProspectCachePolicy
    assert issubclass(ProspectCachePolicy, CachePolicy)


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    at = manager(4)
    serve(at, "a", keys(1, 2, 3, 4))
    stored = at.prepare_store(keys(8, 9), request("b", keys(8, 9)))
    assert stored is not None
    assert stored.evicted_keys == keys(4, 3)


def test_a_conversation_that_went_on_outlives_one_that_did_not() -> None:
    at = manager(6)
    serve(at, "a", keys(1, 2))
    serve(at, "a again", keys(1, 2, 3))
    serve(at, "b", keys(11, 12, 13))
    serve(at, "c", keys(21, 22, 23))
    assert serve(at, "a at last", keys(1, 2, 3)) == 3
    assert serve(at, "b at last", keys(11, 12, 13)) == 0


def test_chunks_of_a_request_that_goes_on_are_the_last_to_go() -> None:
    at = manager(4)
    going_on = request("going on", keys(1, 2))
    at.on_new_request(going_on)
    at.prepare_store(keys(1, 2), going_on)
    at.complete_store(keys(1, 2), going_on)
    serve(at, "over", keys(11, 12))
    first = at.prepare_store(keys(21, 22), request("c", keys(21, 22)))
    assert first is not None
    assert first.evicted_keys == keys(12, 11)
    second = at.prepare_store(keys(31), request("d", keys(31)))
    assert second is not None
    assert second.evicted_keys == keys(2)  # of the request that goes on, its end


def test_chunks_of_the_older_request_go_first() -> None:
    at = manager(4)
    for name, prompt in (("a", keys(1, 2)), ("b", keys(11, 12))):
        context = request(name, prompt)
        at.prepare_store(prompt, context)
        at.complete_store(prompt, context)
    stored = at.prepare_store(keys(21, 22, 23), request("c", keys(21, 22, 23)))
    assert stored is not None
    assert stored.evicted_keys == keys(2, 1, 12)


def test_without_positions_the_least_recently_used_goes_first() -> None:
    at = manager(4)
    at.prepare_store(keys(1, 2, 3, 4), ANY)
    at.complete_store(keys(1, 2, 3, 4), ANY)
    at.touch(keys(1), ANY)
    stored = at.prepare_store(keys(3, 5, 6), ANY)  # 3 is asked for, and stays
    assert stored is not None
    assert stored.keys_to_store == keys(5, 6)
    assert stored.evicted_keys == keys(2, 4)
    assert stored.store_spec.block_ids.tolist() == [3, 1]


def test_a_prompt_stored_in_parts_is_one_request() -> None:
    at = manager(4)
    prompt = keys(1, 2, 3, 4)
    context = request("a", prompt)
    for part in (prompt[:2], prompt[2:]):
        at.prepare_store(part, context)
        at.complete_store(part, context)
    stored = at.prepare_store(keys(9), request("b", keys(9)))
    assert stored is not None
    assert stored.evicted_keys == keys(4)


def test_what_another_request_still_writes_may_be_used_by_one_that_ends() -> None:
    at = manager(4)
    first, second = request("a", keys(1, 2)), request("b", keys(1, 2))
    at.prepare_store(keys(1, 2), first)
    at.complete_store(keys(1, 2), first)
    at.prepare_load(keys(1, 2), second)
    at.complete_load(keys(1, 2), second)
    at.on_request_finished(second)
    at.on_request_finished(first)
    assert serve(at, "c", keys(1, 2)) == 2


def test_a_failed_store_leaves_nothing() -> None:
    at = manager(2)
    at.prepare_store(keys(1, 2), ANY)
    at.complete_store(keys(1, 2), ANY, success=False)
    assert at.lookup(key(1), ANY) is LookupResult.MISS
    assert at.prepare_store(keys(3, 4), ANY) is not None


def test_a_store_that_fails_after_its_request_has_ended_leaves_nothing() -> None:
    at = manager(2)
    context = request("a", keys(1, 2))
    at.prepare_store(keys(1, 2), context)
    at.on_request_finished(context)
    at.complete_store(keys(1, 2), context, success=False)
    assert at.lookup(key(1), ANY) is LookupResult.MISS
    assert serve(at, "b", keys(3, 4)) == 0
    assert serve(at, "c", keys(1, 2)) == 0
    assert serve(at, "d", keys(1, 2)) == 2


def test_what_was_evicted_of_a_request_that_goes_on_is_gone() -> None:
    at = manager(2)
    context = request("a", keys(1, 2))
    at.prepare_store(keys(1, 2), context)
    at.complete_store(keys(1, 2), context)
    for number in (3, 4, 5):
        other = request(str(number), keys(number))
        stored = at.prepare_store(keys(number), other)
        assert stored is not None
        assert len(stored.evicted_keys) == 1
        at.complete_store(keys(number), other)
    at.on_request_finished(context)
    assert serve(at, "b", keys(1, 2)) == 0


def test_requests_leave_nothing_behind() -> None:
    at = manager(4)
    for number in range(10):
        serve(at, str(number), keys(number, number + 1))
    assert at._policy._requests == {}
    assert at._policy._going_on == {}


def test_all_or_nothing_goes() -> None:
    policy = ProspectCachePolicy(4)
    for number in range(4):
        policy.insert(key(number), ChunkStatus(number), ANY)
    for number in range(3):
        chunk = policy.get(key(number))
        assert chunk is not None
        chunk.ref_cnt = 0
    assert policy.evict(0, set()) == []
    assert policy.evict(3, {key(0)}) is None  # 3 is being written
    assert [each for each, _ in policy.evict(2, {key(0)}) or ()] == keys(1, 2)
    assert policy.get(key(1)) is None
    assert policy.get(key(0)) is not None


def test_clear_forgets_chunks_in_use_too() -> None:
    at = manager(4)
    serve(at, "a", keys(1, 2))
    at.prepare_load(keys(1), ANY)
    at.prepare_store(keys(3), request("b", keys(3)))
    at.reset_cache()
    assert all(at.lookup(each, ANY) is LookupResult.MISS for each in keys(1, 2, 3))
    assert serve(at, "a", keys(1, 2)) == 0
    assert serve(at, "a", keys(1, 2)) == 2


class Manager(RuleBasedStateMachine):
    """Any order of calls of a scheduler: nothing in use goes, no chunk is given twice."""

    CHUNKS = 6

    def __init__(self) -> None:
        super().__init__()
        self.at = manager(self.CHUNKS)
        self.there: dict[OffloadKey, int] = {}
        self.storing: list[tuple[list[OffloadKey], ReqContext]] = []
        self.loading: list[tuple[list[OffloadKey], ReqContext]] = []
        self.requests: list[ReqContext] = []
        self.names = count()

    @rule(prompt=st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True))
    def begin(self, prompt: list[int]) -> None:
        context = request(f"request {next(self.names)}", keys(*prompt))
        self.at.on_new_request(context)
        self.requests.append(context)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), some=st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True))
    def store(self, data: st.DataObject, some: list[int]) -> None:
        context = data.draw(st.sampled_from(self.requests))
        wanted = keys(*some)
        idle = set(self.there) - self.busy() - set(wanted)
        new = [each for each in wanted if each not in self.there]
        stored = self.at.prepare_store(wanted, context)
        if stored is None:
            assert len(new) > self.CHUNKS - len(self.there) + len(idle)
            return
        assert stored.keys_to_store == new
        assert set(stored.evicted_keys) <= idle
        assert len(stored.evicted_keys) == max(len(new) + len(self.there) - self.CHUNKS, 0)
        for each in stored.evicted_keys:
            del self.there[each]
        self.there.update(zip(new, stored.store_spec.block_ids.tolist(), strict=True))
        if new:
            self.storing.append((new, context))

    @precondition(lambda self: self.storing)
    @rule(data=st.data(), well=st.booleans())
    def stored(self, data: st.DataObject, well: bool) -> None:
        some, context = self.storing.pop(data.draw(st.integers(0, len(self.storing) - 1)))
        self.at.complete_store(some, context, well)
        if not well:
            for each in some:
                del self.there[each]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        context = data.draw(st.sampled_from(self.requests))
        written = {each for some, _ in self.storing for each in some}
        ready = sorted(set(self.there) - written)
        if ready:
            some = data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True))
            spec = self.at.prepare_load(some, context)
            assert spec.block_ids.tolist() == [self.there[each] for each in some]
            self.loading.append((some, context))

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def loaded(self, data: st.DataObject) -> None:
        some, context = self.loading.pop(data.draw(st.integers(0, len(self.loading) - 1)))
        self.at.complete_load(some, context)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        context = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.at.on_request_finished(context)

    @rule()
    def reset(self) -> None:
        self.at.reset_cache()
        self.there, self.storing, self.loading = {}, [], []

    def busy(self) -> set[OffloadKey]:
        return {each for some, _ in (*self.storing, *self.loading) for each in some}

    @invariant()
    def it_knows_what_is_there(self) -> None:
        written = {each for some, _ in self.storing for each in some}
        for each in keys(*range(12)):
            expected = (
                LookupResult.MISS
                if each not in self.there
                else LookupResult.HIT_PENDING
                if each in written
                else LookupResult.HIT
            )
            assert self.at.lookup(each, ANY) is expected
        assert len(set(self.there.values())) == len(self.there)


TestManager = Manager.TestCase
TestManager.settings = settings(max_examples=100, deadline=None)


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_smallest_caches_work(chunks: int) -> None:
    at = manager(chunks)
    for number in range(20):
        serve(at, str(number), keys(number % 3, 5))
