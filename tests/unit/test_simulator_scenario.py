"""Scenario files: what they say, and how contradictions are refused, with the line and the remedy."""

from __future__ import annotations

import numpy as np
import pytest

from inc_runtime.config import Implementation
from inc_runtime.errors import ConfigurationError
from inc_runtime.simulator.scenario import Scenario, SwitchKind, TopologyKind
from inc_runtime.simulator.scenario_file import EXAMPLE, load_scenario, parse_scenario


def refusal(text: str, **overrides) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parse_scenario(text, "layer.toml", overrides=overrides)
    return str(caught.value)


def test_the_example_holds_the_defaults():
    assert parse_scenario(EXAMPLE, "example") == Scenario(name="olmoe on a real switch")
    assert parse_scenario("", "empty") == Scenario()


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[ranks]\nnum_ranks = 4\n[implementation]\nname = 'megakernel_inc_phased'\nranks_per_phase = 5", 5, "num_ranks = 4"),
        ("[model]\nname = 'olmoe_1b_7b'\n[ranks]\n\nnum_ranks = 65", 5, "replicas = 2"),
        ("[network]\nport_gbps = 0", 2, "above 0"),
        ("[network]\nswitch = 'real'\nport_gbps = -1", 3, "above 0"),
        ("[network]\nplanes = 0", 2, "one switch per role"),
        (
            "[model]\nnum_experts = 4\ntop_k = 5\nhidden_size = 64\nintermediate_size = 8\n[ranks]\nnum_ranks = 2",
            3,
            "at most num_experts = 4",
        ),
        ("[network]\nswitch_memory_mib = 1", 2, "MiB that one phase"),
        ("[implementation]\nname = 'megakernel_inc_phased'\n[network]\nswitch_memory_mib = 1", 4, "one phase"),
        ("name = 'x'\n[model]\nname = 'olmoe'", 3, "one of olmoe_1b_7b"),
        ("name = 'x'\n[implementation]\nname = 'fast'", 3, "one of baseline"),
        ("[routing]\nkind = 'uniform'\n[topology]\nkind = 'torus'", 4, "one of one_switch"),
        ("[network]\nswitch = 'fast'", 2, "one of real, emulated"),
        ("[network]\nport_gpbs = 3", 2, "no such key"),
        ("[netwrk]\nport_gbps = 3", 1, "no such table"),
        ("[ranks]\nnum_ranks = 'four'", 2, "must be a number"),
        ("[ranks]\nnum_ranks = 2.5", 2, "whole number"),
        ("[topology]\nkind = 'leaf_spine'\nranks_per_leaf = 3\nuplink_gbps = 10", 3, "divisor"),
        ("[topology]\nkind = 'leaf_spine'\nranks_per_leaf = 2", 2, "uplink_gbps"),
        ("[topology]\nranks_per_leaf = 2", 2, "left out with one switch"),
        ("[topology]\nkind = 'rails'\nranks_per_leaf = 2\nuplink_gbps = 0", 4, "above 0"),
        ("[network]\nplanes = 2\n[topology]\nkind = 'rails'\nranks_per_leaf = 2\nuplink_gbps = 9", 2, "Fold the planes"),
        ("[model]\nnum_experts = 4", 2, "give also top_k"),
        ("[model]\nname = 'kimi_k2'\ntop_k = 4", 3, "Drop one"),
        ("[routing]\nkind = 'recorded'", 2, "trace"),
        ("[routing]\ntrace = 'x.npy'", 2, "unless the kind is recorded"),
        ("[routing]\nkind = 'recorded'\ntrace = 'x.npy'", 3, "numpy.save"),
        ("[routing]\nkind = 'recorded'\ntrace = 4", 3, "name of a file"),
        ("[routing]\nseed = -1", 2, "0 or more"),
        ("[routing]\nseed = 1.5", 2, "whole number"),
        ("[routing]\nkind = 'zipf'\nexponent = -4", 3, "between 0 and 100"),
        ("[routing]\nkind = 'zipf'\nexponent = 'steep'", 3, "must be a number"),
        ("[ranks]\nnum_ranks = 4\nnum_ranks = 5", 3, "overwrite"),
        ("[ranks]\nnum_ranks = 4.0", 2, "whole number"),
        ("[model]\nname = 'kimi_k2'\nreplicas = 9\n[ranks]\nnum_ranks = 1025", 5, "at most 1024"),
        ("[network]\nport_gbps = inf", 2, "finite"),
        ("[network]\nlocal_bypass = 1", 2, "true or false"),
        ("[network\nport_gbps = 1", 1, "Expected ']'"),
        ("name = 3", 1, "quotes"),
        ("model = 'kimi_k2'", 1, "[model]"),
    ],
)
def test_a_contradiction_is_refused_with_its_line_and_a_remedy(text, line, words):
    message = refusal(text)
    assert message.startswith(f"layer.toml:{line}:" if line else "layer.toml")
    assert words in message


def test_a_value_of_the_command_line_is_named_as_such():
    message = refusal("[ranks]\nnum_ranks = 4", **{"ranks.num_ranks": 65})
    assert "on the command line" in message and "num_ranks = 65" in message


@pytest.mark.parametrize("key", ["num_ranks", "ranks", "ranks.ranks", "foo.bar"])
def test_an_unknown_key_of_the_command_line_says_what_there_is(key):
    assert "there is no such key" in refusal("", **{key: 4}) and "ranks.num_ranks" in refusal("", **{key: 4})


def test_a_missing_file_says_how_to_write_one(tmp_path):
    with pytest.raises(ConfigurationError, match="inc simulate --example"):
        load_scenario(tmp_path / "none.toml")


def test_the_remedy_of_too_many_ranks_works():
    text = "[model]\nname = 'olmoe_1b_7b'\nreplicas = 2\n[ranks]\nnum_ranks = 65"
    scenario = parse_scenario(text, "layer.toml")
    assert scenario.placed_shape.num_experts == 128 and scenario.shape.num_experts == 64


def test_every_table_reaches_the_scenario(tmp_path):
    np.save(tmp_path / "ids.npy", np.zeros((4, 8), np.int32))
    (tmp_path / "layer.toml").write_text(
        "[implementation]\nname = 'megakernel'\n[network]\nswitch = 'real'\nlocal_bypass = false\ndispatch_wire = 'fp8'\n"
        "[topology]\nkind = 'rails'\nranks_per_leaf = 2\nuplink_gbps = 50\n[routing]\nkind = 'recorded'\ntrace = 'ids.npy'\n"
    )
    scenario = load_scenario(tmp_path / "layer.toml")
    assert scenario.implementation is Implementation.MEGAKERNEL
    assert scenario.network.switch is SwitchKind.REAL and scenario.network.topology is TopologyKind.RAILS
    assert scenario.network.dispatch_wire.row_bytes(2048) == 2112
    assert scenario.routing.trace == tmp_path / "ids.npy"
