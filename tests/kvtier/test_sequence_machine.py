"""Sequences against a model that knows only their tokens; every byte is compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from hostmem import OutOfPagesError, ResourceBusyError
from kvtier.manager import KVCacheManager
from kvtier.sequence import KVSequence
from tests.kvtier.sequence_engine import Engine, T, config_of

# Few different tokens, so that sequences share prefixes.
some = st.lists(st.integers(0, 1), min_size=1, max_size=9)
salts = st.sampled_from([b"", b"", b"other"])


class Model:
    """A sequence as it should be."""

    def __init__(self, sequence: KVSequence, salt: bytes, tokens: list[int]) -> None:
        self.sequence = sequence
        self.salt = salt
        self.tokens = tokens
        """Those committed."""


class Sequences(RuleBasedStateMachine):
    """Nothing is lost: the host level has room for all that a run can compute."""

    windows: tuple[tuple[int | None, int | None], ...] = ((None, None), (6, 5))
    gpu = 4  # MiB
    host = 96
    loses = False

    sequences = Bundle("sequences")

    @initialize()
    def build(self) -> None:
        config = config_of(
            self.gpu,
            self.host,
            gpu_max=8,
            windows=self.windows,
            initial_pool_ratio=[1] * len(self.windows),
        )
        self.manager = KVCacheManager(config, device="cpu")
        self.engine = Engine(self.manager)
        self.computed: set[tuple[bytes, tuple[int, ...]]] = set()
        """Salt and tokens of each prefix whose last block is in the cache."""
        self.live: list[Model] = []

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        with self.manager:
            for model in self.live:
                model.sequence.close()
            assert self.engine.held() == [0] * len(self.windows)
            self.manager.cache._check()

    # ------------------------------------------------------------------------------ the model

    def known(self, salt: bytes, tokens: list[int]) -> int:
        """Count the leading tokens whose blocks were computed before."""
        count = 0
        while (salt, tuple(tokens[: count + T])) in self.computed and count + T <= len(tokens):
            count += T
        return count

    def learn(self, model: Model) -> None:
        for end in range(T, len(model.tokens) + 1, T):
            self.computed.add((model.salt, tuple(model.tokens[:end])))

    def step(self, model: Model, tokens: list[int]) -> None:
        """Compute tokens behind those of a sequence, as far as pages go."""
        before = model.sequence.num_tokens, model.sequence.capacity
        try:
            model.sequence.grow(len(tokens))
        except OutOfPagesError:
            assert (model.sequence.num_tokens, model.sequence.capacity) == before
            return
        self.engine.step(model.sequence, model.tokens + tokens)
        model.tokens += tokens
        self.learn(model)

    # ---------------------------------------------------------------------------------- rules

    @rule(target=sequences, prompt=some, more=some, salt=salts, reuse=st.booleans())
    def create(self, prompt: list[int], more: list[int], salt: bytes, reuse: bool) -> Any:
        prompt = prompt + more
        expected = self.known(salt, prompt[:-1]) if reuse else 0
        try:
            sequence = self.manager.create_sequence(prompt, salt=salt, reuse=reuse)
        except OutOfPagesError:
            return multiple()
        cached = sequence.num_cached_tokens
        assert cached <= expected if self.loses else cached == expected
        model = Model(sequence, salt, prompt[:cached])
        self.live.append(model)
        self.step(model, prompt[cached:])
        return model

    @rule(model=sequences, tokens=some)
    def decode(self, model: Model, tokens: list[int]) -> None:
        if not model.sequence.suspended:
            self.step(model, tokens)

    @rule(target=sequences, number=st.integers(0, 1 << 20), more=some)
    def create_again(self, number: int, more: list[int]) -> Any:
        if not self.computed:
            return multiple()
        known = sorted(self.computed)
        salt, prompt = known[number % len(known)]
        return self.create(list(prompt), more, salt, True)

    @precondition(lambda self: self.loses or len(self.computed) < 150)  # or the levels overflow
    @rule(first=st.integers(1, 100), blocks=st.integers(1, 16))
    def pass_by(self, first: int, blocks: int) -> None:
        """Somebody else needs pages for a while, and leaves what nobody asks for again."""
        model = self.create([1000 * first + n for n in range(blocks * T)], [], b"", True)
        if isinstance(model, Model):
            self.close(model)

    @rule(model=sequences, tokens=st.integers(1, 30))
    def grow(self, model: Model, tokens: int) -> None:
        if model.sequence.suspended:
            return
        try:
            model.sequence.grow(tokens)
        except OutOfPagesError:
            return
        assert model.sequence.capacity >= len(model.tokens) + tokens

    @rule(model=sequences)
    def suspend(self, model: Model) -> None:
        model.sequence.suspend()

    @rule(model=sequences)
    def resume(self, model: Model) -> None:
        try:
            lost = model.sequence.resume()
        except (OutOfPagesError, ResourceBusyError):
            assert model.sequence.suspended
            assert any(self.engine.held())
            return
        assert self.loses or not lost
        assert model.sequence.num_tokens == len(model.tokens) - lost
        del model.tokens[len(model.tokens) - lost :]

    @rule(model=sequences, tokens=some)
    def pause(self, model: Model, tokens: list[int]) -> None:
        self.suspend(model)
        self.resume(model)
        self.decode(model, tokens)

    @rule(model=consumes(sequences))
    def close(self, model: Model) -> None:
        model.sequence.close()
        self.live.remove(model)

    @rule(larger=st.booleans())
    def change_quota(self, larger: bool) -> None:
        quota = "8MiB" if larger else f"{self.gpu}MiB"
        try:
            self.manager.storage.adjust_cache_level(0, quota)
        except (ResourceBusyError, OutOfPagesError):
            assert any(self.engine.held())

    # ------------------------------------------------------------------------------ invariants

    def active(self) -> Iterable[Model]:
        return (model for model in self.live if not model.sequence.suspended)

    @invariant()
    def every_byte_is_right(self) -> None:
        for model in getattr(self, "live", ()):
            assert model.sequence.num_tokens == len(model.tokens)
            if not model.sequence.suspended:
                model.sequence.wait()
                self.engine.verify(model.sequence, model.tokens)

    @invariant()
    def what_is_in_use_is_what_the_tables_show(self) -> None:
        if not hasattr(self, "manager"):
            return
        for group, held in enumerate(self.engine.held()):
            shown = {
                slot
                for model in self.active()
                for slot in model.sequence.page_table(group).tolist()
                if slot >= 0
            }
            assert held == len(shown)

    @invariant()
    def pages_that_are_not_full_are_not_shared(self) -> None:
        if not hasattr(self, "manager"):
            return
        private: list[int] = []
        for model in self.active():
            table = model.sequence.page_table(0)
            private += table[len(model.tokens) // T :].tolist()
        assert len(set(private)) == len(private)


class LossySequences(Sequences):
    """There is no other level: what is evicted is gone."""

    host = 0
    loses = True


class PlainSequences(Sequences):
    """One group, all of whose tokens stay visible."""

    gpu = 2
    windows = ((None, None),)


class PlainLossySequences(PlainSequences):
    """Both: one level of few pages."""

    host = 0
    loses = True


@pytest.mark.parametrize(
    "machine", [Sequences, LossySequences, PlainSequences, PlainLossySequences]
)
def test_sequences_are_as_their_model(machine: type[Sequences]) -> None:
    case = machine.TestCase
    case.settings = settings(max_examples=30, stateful_step_count=40)
    case().runTest()
