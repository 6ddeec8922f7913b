"""Each rule of the protocol, removed in turn, is caught: by an error of the simulator, or by rows that differ from the reference.

The mutants and the search are in `tests/mutants.py`.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from inc_runtime.backends.base import BasePe
from inc_runtime.backends.simulated import SimulatedPe
from inc_runtime.collectives import inc_all_to_all, inc_all_to_all_phased, phases, relayed
from inc_runtime.errors import ArrivalTimeout, Deadlock, IncError, Mismatch, ProtocolViolation
from inc_runtime.one_sided import Awaited, Flag
from inc_runtime.protocol import Tag, World, has_payload, signal_word
from megakernel import fused_layer, pipeline
from switch_emulator import combine_switch, dispatch_switch, relay_switch
from tests.mutants import (
    ALL_MODELS,
    INC,
    INC_PHASED,
    INC_WITH_EMPTY_SUMS,
    LAYER,
    RELAYED,
    SHAPE,
    TWO_CALLS,
    Model,
    Setting,
    caught,
    model_of,
    run,
    without_quiet_in,
)
from tests.routings import draw_call
from tests.simulate import simulate


@pytest.mark.parametrize("setting", ALL_MODELS, **model_of)
def test_a_constant_magic_is_caught(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sender writes magic 1: the flag that holds it refuses, or the header shows the step, or nobody wakes."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = BasePe._raise_flag

        def raise_flag(self, peer_memory, peer, flag, word):
            original(self, peer_memory, peer, flag, signal_word(1, has_payload(word)))

        patch.setattr(BasePe, "_raise_flag", raise_flag)

    assert isinstance(caught(setting, monkeypatch, mutate), (ProtocolViolation, Mismatch, Deadlock))


@pytest.mark.parametrize("setting", [INC, RELAYED], **model_of)
def test_with_a_constant_magic_a_stale_flag_reads_as_an_arrival(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same mutant where nothing checks the flags: the rows are wrong."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        def raise_flag(self, peer_memory, peer, flag, word):
            self._target(peer_memory, peer, flag.region, ())[flag.index] = signal_word(1, has_payload(word))

        patch.setattr(BasePe, "_raise_flag", raise_flag)
        patch.setattr(Awaited, "threshold", property(lambda self: signal_word(1, False)))

    assert not isinstance(caught(setting, monkeypatch, mutate), ProtocolViolation)


@pytest.mark.parametrize("setting", TWO_CALLS, **model_of)
def test_a_second_call_that_starts_at_the_magic_of_the_first_is_caught(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = fused_layer.run_fused

        def run_fused(pe, *args):
            original(pe, *args)
            pe.memory["magic"][0] = 0

        patch.setattr(fused_layer, "run_fused", run_fused)

    caught(setting, monkeypatch, mutate)


@pytest.mark.parametrize("setting", ALL_MODELS, **model_of)
def test_a_slot_that_is_reused_before_its_combine_is_caught(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of D sets driven with D+1 microbatches in flight."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(fused_layer, "schedule", lambda num, depth: pipeline.schedule(num, depth + 1))

    caught(setting, monkeypatch, mutate)


EMPTY_RANK = (10, 0, 3)


@pytest.mark.parametrize("setting", [replace(INC, tokens=EMPTY_RANK), replace(INC_PHASED, tokens=EMPTY_RANK)], **model_of)
def test_a_rank_without_tokens_that_skips_its_word_is_caught(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = inc_all_to_all.put_tokens

        def put_tokens(pe, magic, num_tokens, plane, inbox_slot):
            if num_tokens:
                original(pe, magic, num_tokens, plane, inbox_slot)

        for module in (inc_all_to_all, inc_all_to_all_phased):
            patch.setattr(module, "put_tokens", put_tokens)

    error = caught(setting, monkeypatch, mutate)
    assert isinstance(error, IncError) and "rank 1" in str(error)


def test_a_sender_that_skips_the_signal_of_an_empty_message_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = relayed.send_message

        def send_message(pe, relay, destination, magic, *, rows, **more):
            if len(rows):
                original(pe, relay, destination, magic, rows=rows, **more)

        patch.setattr("inc_runtime.collectives.all_to_all.send_message", send_message)

    caught(replace(RELAYED, tokens=EMPTY_RANK), monkeypatch, mutate)


def test_a_dispatch_switch_that_skips_an_expert_rank_without_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = dispatch_switch.multicast_to

        def multicast_to(pe, magic, plane, expert_rank, rows):
            if len(rows):
                original(pe, magic, plane, expert_rank, rows)

        patch.setattr(dispatch_switch, "multicast_to", multicast_to)

    error = caught(replace(INC, routing="one_hot_rank"), monkeypatch, mutate)
    assert isinstance(error, IncError) and "EXPERT_ROWS" in str(error)


def test_a_combine_switch_that_skips_a_rank_without_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = SimulatedPe.signal

        def signal(self, peer, flag, word, *, magic):
            if flag.region != "token_sums_arrived":
                original(self, peer, flag, word, magic=magic)

        patch.setattr(SimulatedPe, "signal", signal)

    error = caught(replace(INC, tokens=EMPTY_RANK), monkeypatch, mutate)
    assert isinstance(error, IncError) and "TOKEN_SUMS" in str(error)


def test_a_rank_without_rows_that_skips_its_ready_signal_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = inc_all_to_all.publish_partial_sums

        def publish_partial_sums(pe, call, magic):
            if pe.pe == 0:  # the only rank with rows
                original(pe, call, magic)

        patch.setattr(inc_all_to_all, "publish_partial_sums", publish_partial_sums)

    error = caught(replace(INC, routing="one_hot_rank"), monkeypatch, mutate)
    assert isinstance(error, IncError) and "COMBINE_PARTIAL_SUMS" in str(error)


def test_a_barrier_that_a_rank_without_rows_skips_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = phases.join_barrier
        patch.setattr(inc_all_to_all_phased, "join_barrier", lambda pe, magic: None if pe.pe else original(pe, magic))

    error = caught(replace(INC_PHASED, routing="one_hot_rank"), monkeypatch, mutate)
    assert isinstance(error, IncError) and "DISPATCH_BARRIER" in str(error)


@pytest.mark.parametrize("setting", [INC, INC_PHASED], **model_of)
def test_a_combine_that_adds_before_its_get_is_complete_is_caught(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught(setting, monkeypatch, without_quiet_in("pull_and_add"))


@pytest.mark.parametrize("setting", [INC_WITH_EMPTY_SUMS, INC_PHASED], **model_of)
def test_sums_that_are_overwritten_while_a_put_still_reads_them_are_caught(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pulls of the next sums complete the puts too: the quiet before `sums_out` is rewritten counts where there are none."""
    if setting is INC_PHASED:
        setting = replace(setting, routing="masked_rows")
    caught(setting, monkeypatch, without_quiet_in("return_sums"))


def test_a_phased_dispatch_that_frees_a_place_while_it_is_read_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    caught(INC_PHASED, monkeypatch, without_quiet_in("multicast"))


def test_an_expert_rank_that_takes_a_later_word_for_this_microbatch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a barrier a sender that brought nothing may be a ring ahead of a slow expert rank."""
    original = inc_all_to_all_phased.wait_for_expert_rows

    def slow(pe, call, magic):
        if pe.pe == 1:
            pe.simulation.sleep(1000.0)
        return original(pe, call, magic)

    setting = replace(INC_PHASED, depth=1, nothing_in=(0, 2), barrier=False, jitter_us=0.0)
    monkeypatch.setattr(inc_all_to_all_phased, "wait_for_expert_rows", slow)
    run(setting, 0)
    monkeypatch.setattr(inc_all_to_all_phased, "brought_rows", lambda word, magic: has_payload(word))
    with pytest.raises((AssertionError, IncError)):
        run(setting, 0)


@pytest.mark.parametrize("setting", [RELAYED, Setting(Model.ALL_TO_ALL_PHASED)], **model_of)
def test_a_relay_that_gives_a_credit_before_the_chunk_has_left_is_caught(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught(replace(setting, relay_cells=1), monkeypatch, without_quiet_in("give_back_cells"))


def test_a_sender_that_does_not_wait_for_credits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = SimulatedPe.wait_until

        def wait_until(self, awaited, tag, *, microbatch=-1):
            return 0 if tag is Tag.RELAY_CREDIT else original(self, awaited, tag, microbatch=microbatch)

        patch.setattr(SimulatedPe, "wait_until", wait_until)

    caught(replace(RELAYED, relay_cells=2), monkeypatch, mutate)


@pytest.mark.parametrize("setting", [INC, INC_PHASED], **model_of)
def test_a_second_writer_of_a_flag_is_refused(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 raises the flag of rank 0."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = SimulatedPe.put_signal

        def put_signal(self, peer, segments, flag, word, **more):
            if flag.region in ("tokens_arrived", "combine_requests", "partial_sums_ready") and self.pe == 1:
                flag = Flag(flag.region, (*flag.index[:-1], 0))
            original(self, peer, segments, flag, word, **more)

        patch.setattr(SimulatedPe, "put_signal", put_signal)

    error = caught(setting, monkeypatch, mutate)
    assert isinstance(error, ProtocolViolation) and "rank 0" in str(error) and "rank 1" in str(error)


@pytest.mark.parametrize("setting", ALL_MODELS, **model_of)
def test_a_fabric_that_raises_the_flag_before_the_bytes_have_landed_is_caught(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = SimulatedPe.put_signal

        def put_signal(self, peer, segments, flag, word, *, magic, part=0):
            memory = self.simulation.pes[peer].memory
            copies = [(segment, segment.read().copy()) for segment in segments if segment.num_rows]
            original(self, peer, (), flag, word, magic=magic, part=part)

            def land() -> None:
                for segment, rows in copies:
                    self._target(memory, peer, segment.region, segment.index)[...] = rows

            self.simulation.at(self.simulation.now + 5.0 + self.simulation.jitter(), land)

        patch.setattr(SimulatedPe, "put_signal", put_signal)

    caught(setting, monkeypatch, mutate)


def waits_for_plane_0_only(patch: pytest.MonkeyPatch, tag: Tag) -> None:
    original = SimulatedPe.wait_until

    def wait_until(self, awaited, waited_tag, *, microbatch=-1):
        if waited_tag is tag and awaited.flag.index[1] > 0:
            return self.word(awaited.flag)
        return original(self, awaited, waited_tag, microbatch=microbatch)

    patch.setattr(SimulatedPe, "wait_until", wait_until)


@pytest.mark.parametrize("tag", [Tag.EXPERT_ROWS, Tag.TOKEN_SUMS], ids=lambda tag: tag.name.lower())
def test_a_rank_that_skips_the_word_of_a_plane_is_caught(tag: Tag, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = replace(INC, world=World(3, 2, 2))
    caught(setting, monkeypatch, lambda patch: waits_for_plane_0_only(patch, tag))


@pytest.mark.parametrize("model", list(Model), ids=lambda model: model.value)
def test_a_rank_awaits_the_word_of_every_plane_also_where_the_plane_has_none_of_its_tokens(model: Model) -> None:
    """m_b = 1 and two planes of each role: plane 1 never has a token, and closes the slot all the same."""
    setting = Setting(model, world=World(2, 2, 2), microbatch_tokens=1)
    call = draw_call(np.random.default_rng(0), SHAPE, (5, 0), "uniform", 2)
    _, simulation = simulate(LAYER, model, setting.pipeline, setting.world, [call])
    for rank in range(2):
        for magic in range(1, 6):
            waits = [e.name for e in simulation.pes[rank].trace.events if e.kind == "wait" and e.magic == magic]
            words = 2 if model.in_network else 4  # a relayed message per plane and rank
            assert waits.count("token_sums") == words, (rank, magic)
            if not (model.in_network and model.phased):  # there one wait may see several words
                assert waits.count("expert_rows") == words, (rank, magic)


@pytest.mark.parametrize("ranks_per_phase", [1, 2])
def test_a_rank_that_pushes_without_a_grant_is_caught(ranks_per_phase: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        def request_grant(pe, magic, plane):
            switch = pe.world.dispatch_switch(plane)
            pe.signal(switch, Flag("dispatch_requests", (pe.pe,)), signal_word(magic, True), magic=magic)
            return pe.pe % pe.layout.dims.ranks_per_phase

        patch.setattr(inc_all_to_all_phased, "request_grant", request_grant)

    caught(replace(INC_PHASED, ranks_per_phase=ranks_per_phase), monkeypatch, mutate)


def test_a_phased_sender_that_packs_its_rows_after_those_of_others_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phased forms keep a subregion per sender: without the stride the rows of two senders meet."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        for module in ("inc_runtime.collectives.inc_all_to_all_phased", "switch_emulator.dispatch_switch_phased"):
            patch.setattr(f"{module}.first_row", lambda dims, plane, sender, before: 0)
        patch.setattr("switch_emulator.combine_plan.first_row", lambda dims, plane, sender, before: 0)

    caught(INC_PHASED, monkeypatch, mutate)


@pytest.mark.parametrize("model", list(Model), ids=lambda model: model.value)
@pytest.mark.parametrize("field", ["bound_tokens", "microbatch_tokens", "edge_tokens"])
def test_ranks_that_disagree_are_stopped_with_both_values(model: Model, field: str) -> None:
    """Rank 1 brings another bound, another m_b or another ramp to the same heap."""
    values = {"bound_tokens": (8, 14), "microbatch_tokens": (2, 1), "edge_tokens": (0, 1)}[field]
    setting = Setting(model, tokens=(8, 8, 8), num_microbatches=4)
    for seed in range(5):
        call = draw_call(np.random.default_rng(seed), SHAPE, setting.tokens, "uniform", 3)
        other = replace(setting.pipeline, **{field: values[1]})
        with pytest.raises(Mismatch) as refusal:
            simulate(
                LAYER, model, setting.pipeline, World(3), [call], seed=seed, jitter_us=20.0, rank_pipelines={1: other}
            )
        message = str(refusal.value)
        assert field in message and all(str(value) in message for value in values), message
        assert "rank" in message


def test_a_deadlock_report_lists_role_tag_flag_and_both_magics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 never publishes microbatch 2: the switch waits for it, and the ranks for the switch."""
    original = inc_all_to_all.publish_partial_sums
    monkeypatch.setattr(
        inc_all_to_all,
        "publish_partial_sums",
        lambda pe, call, magic: None if (pe.pe, magic) == (2, 3) else original(pe, call, magic),
    )
    call = draw_call(np.random.default_rng(0), SHAPE, (10, 10, 10), "uniform", 3)
    with pytest.raises(Deadlock) as report:
        simulate(LAYER, Model.INC_ALL_TO_ALL, INC.pipeline, World(3), [call])
    lines = str(report.value).splitlines()
    assert (
        "  combine switch 0 at COMBINE_PARTIAL_SUMS: partial_sums_ready[1, 2] from rank 2, expected magic 3, seen 1" in lines
    )
    assert "  rank 0 at TOKEN_SUMS: token_sums_arrived[1, 0] from combine switch 0, expected magic 3, seen 1" in lines
    assert any(line.startswith("  dispatch switch 0 at DISPATCH_TOKENS: tokens_arrived") for line in lines)


def test_a_wait_that_reaches_its_limit_names_role_tag_microbatch_slot_and_who_is_missing() -> None:
    """Rank 2 is late beyond the limit: whoever gives up first says what it knows."""
    call = draw_call(np.random.default_rng(0), SHAPE, (10, 10, 10), "uniform", 3)
    with pytest.raises(ArrivalTimeout) as timeout:
        simulate(LAYER, Model.ALL_TO_ALL, INC.pipeline, World(3), [call], wait_limit_us=1e6, late_us={2: 3e6})
    record = timeout.value.record
    assert (record.tag, record.microbatch, record.slot, record.magic) == ("EXPERT_ROWS", 1, 0, 2)
    assert record.role in ("rank 0", "rank 1") and record.missing == ["dispatch switch 0 for rank 2"]
    assert record.waited_s == pytest.approx(1.0)
    message = str(timeout.value)
    assert f"{record.role} waited 1 s at EXPERT_ROWS for microbatch 1 (slot 0, magic 2)" in message
    assert "Missing: dispatch switch 0 for rank 2 (its flag holds magic 0)" in message


def test_modules_under_mutation_are_the_ones_that_run() -> None:
    """The mutants above find a quiet by the name of its caller; a rename must not turn them into no-ops."""
    assert combine_switch.return_sums and combine_switch.pull_and_add and relay_switch.RelaySwitch.give_back_cells
    assert "multicast" in vars(sys.modules["switch_emulator.dispatch_switch_phased"])
