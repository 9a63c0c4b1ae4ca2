"""The configuration: arithmetic of the budget, command line, documentation of every field."""

import dataclasses
import json
import logging
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import HfArgumentParser
from trl import GRPOConfig, TrlParser

from trace_trl import TRACEConfig
from trace_trl.allocation import allocate_roots


INHERITED = {field.name for field in dataclasses.fields(GRPOConfig)}
OWN = [field for field in dataclasses.fields(TRACEConfig) if field.name not in INHERITED]


def config(**kwargs) -> TRACEConfig:
    defaults = dict(output_dir="out", use_cpu=True, bf16=False, report_to="none")
    return TRACEConfig(**(defaults | kwargs))


# Budget


@pytest.mark.parametrize(
    ("options", "budget", "pool"),
    [
        # generation_batch_size, num_generations, N -> M = G / (1 + N); B = factor * G / num_generations
        (dict(generation_batch_size=48, num_generations=8, continuations_per_root=2), 16, 12),
        (dict(generation_batch_size=48, num_generations=8, continuations_per_root=0), 48, 12),
        (dict(generation_batch_size=48, num_generations=8, continuations_per_root=5), 8, 12),
        (
            dict(
                generation_batch_size=3072, num_generations=8, continuations_per_root=2, per_device_train_batch_size=64
            ),
            1024,
            768,
        ),
        (dict(generation_batch_size=48, num_generations=8, candidate_pool_factor=1.0), 16, 6),
        (dict(generation_batch_size=48, num_generations=8, candidate_pool_factor=1.5), 16, 9),
        # 1.1 * 6 = 6.6 prompts: the pool holds no fewer than asked for
        (dict(generation_batch_size=48, num_generations=8, candidate_pool_factor=1.1), 16, 7),
        # 1.6 * 15 / 3 is 8.000000000000002 in floating point, but 8 prompts
        (
            dict(
                generation_batch_size=15, num_generations=3, per_device_train_batch_size=3, candidate_pool_factor=1.6
            ),
            5,
            8,
        ),
        (dict(per_device_train_batch_size=4, gradient_accumulation_steps=3, num_generations=4), 4, 6),
        (dict(per_device_train_batch_size=4, steps_per_generation=6, num_generations=4), 8, 12),
    ],
)
def test_budget_and_pool_follow_from_the_batch(options, budget, pool):
    args = config(**options)
    assert args.rollout_budget == budget
    assert args.candidate_pool_size == pool
    assert args.generation_batch_size == budget * (1 + args.continuations_per_root)


@pytest.mark.parametrize(
    ("processes", "options", "budget", "pool"),
    [
        (2, dict(generation_batch_size=48, num_generations=8), 16, 12),
        # 12 candidates over 8 processes: 2 each
        (8, dict(generation_batch_size=96, num_generations=16, per_device_train_batch_size=4), 32, 16),
        # 32 leaves over 2 processes: N=2 does not divide, N=1 and N=3 do, and the smaller is nearer by convention
        (2, dict(generation_batch_size=32, num_generations=8), 16, 8),
    ],
)
def test_every_process_gets_as_much(monkeypatch, processes, options, budget, pool):
    monkeypatch.setattr(GRPOConfig, "world_size", property(lambda self: processes))
    args = config(**options)
    assert args.rollout_budget == budget
    assert args.rollout_budget % processes == 0
    assert args.candidate_pool_size == pool
    assert args.candidate_pool_size % processes == 0


def test_dapo_splits_no_group_between_processes(monkeypatch):
    options = dict(root_allocation="dapo", continuations_per_root=0, num_generations=4, per_device_train_batch_size=2)
    config(**options, generation_batch_size=12)
    monkeypatch.setattr(GRPOConfig, "world_size", property(lambda self: 2))
    config(**options, generation_batch_size=16)
    with pytest.raises(ValueError, match="replaces whole groups.* `generation_batch_size` to a multiple of 8"):
        config(**options, generation_batch_size=12)


@pytest.mark.parametrize(
    ("options", "processes", "fits"),
    [
        (dict(generation_batch_size=48, num_generations=8), 4, True),
        (dict(generation_batch_size=24, num_generations=4), 8, False),  # one rollout each
        (
            dict(generation_batch_size=36, num_generations=2, max_rollouts_per_root=2, per_device_train_batch_size=4),
            4,
            False,
        ),  # three each, in pairs
    ],
)
def test_a_processs_own_part_of_the_budget(options, processes, fits):
    args = config(**options, continuations_per_root=2)
    if fits:
        args.check_parts(processes)
    else:
        with pytest.raises(
            ValueError, match="Without a `train_dataset`, each of the .* raise `generation_batch_size`"
        ):
            args.check_parts(processes)


def test_defaults_of_the_budget():
    args = config(generation_batch_size=24, num_generations=4, per_device_train_batch_size=4)
    assert args.continuations_per_root == 2
    assert args.max_rollouts_per_root == 4
    assert args.candidate_pool_factor == 2.0
    assert config(root_allocation="uniform").candidate_pool_factor == 1.0


@pytest.mark.parametrize(
    ("group", "continuations", "expected"), [(8, 2, 2), (8, 1, 4), (8, 0, 8), (6, 2, 2), (4, 2, 2), (12, 2, 4)]
)
def test_rollouts_per_group(group, continuations, expected):
    args = config(
        generation_batch_size=group * 6,
        num_generations=group,
        per_device_train_batch_size=group,
        continuations_per_root=continuations,
    )
    assert args.rollouts_per_group == expected


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        (dict(), True),
        (dict(root_allocation="uniform"), True),
        (dict(root_allocation="uniform", prefix_allocation="random"), False),
        (dict(root_allocation="uniform", continuations_per_root=0), False),
        (dict(root_allocation="dapo", continuations_per_root=0), False),
        (dict(root_allocation="pcl", continuations_per_root=0), True),
        (dict(root_allocation="active", continuations_per_root=0), True),
    ],
)
def test_predictor_is_needed_where_an_allocation_reads_values(options, needed):
    assert config(**options).needs_predictor is needed


def test_batch_of_trl_defaults_gets_the_nearest_split_without_a_warning(caplog):
    with caplog.at_level(logging.INFO, logger="trace_trl.config"):
        args = config()
    # 8 leaves: not 3 * M, and with N = 1 there are 4 bare rollouts and 4 continuations
    assert (args.generation_batch_size, args.continuations_per_root, args.rollout_budget) == (8, 1, 4)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "continuations_per_root is 1." in caplog.text


@pytest.mark.parametrize(
    ("processes", "limits", "warned"),
    [
        (2, dict(env_timeout=30, ddp_timeout=60), True),
        (2, dict(env_timeout=29, ddp_timeout=60), False),
        (2, dict(env_timeout=None, ddp_timeout=60), False),
        (1, dict(env_timeout=90, ddp_timeout=60), False),
        (2, {}, False),
    ],
)
def test_an_environment_that_outlasts_the_other_processes_gives_a_warning(
    caplog, monkeypatch, processes, limits, warned
):
    monkeypatch.setattr(GRPOConfig, "world_size", property(lambda self: processes))
    with caplog.at_level(logging.WARNING, logger="trace_trl.config"):
        config(generation_batch_size=48, num_generations=4, **limits)
    assert ("one that hangs would end the run" in caplog.text) == warned


def test_batch_that_divides_gives_no_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="trace_trl.config"):
        config(generation_batch_size=24)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("batch", "group", "expected"),
    [
        # With m_max = 2, bare rollouts come in pairs of at most 2 * batch / group candidates
        (30, 5, 2),  # 10 bare rollouts
        (18, 6, 2),  # 6 bare rollouts of 6 candidates
        (9, 3, None),  # 3 with N = 2, 9 with N = 0: no pairs
        (12, 12, 2),  # 4 of 2 candidates
        (36, 12, 2),  # 12 of 6 candidates
        (48, 48, 11),  # 2 candidates take 4: N = 11
    ],
)
def test_unset_continuations_are_the_nearest_number_whose_bare_rollouts_fit_the_pool(batch, group, expected):
    options = dict(generation_batch_size=batch, num_generations=group, per_device_train_batch_size=group)
    if expected is None:
        with pytest.raises(ValueError, match="max_rollouts_per_root"):
            config(**options, max_rollouts_per_root=2)
    else:
        assert config(**options, max_rollouts_per_root=2).continuations_per_root == expected


@settings(max_examples=100, deadline=None)
@given(data=st.data(), generations=st.integers(2, 16), prompts=st.integers(1, 12))
def test_any_batch_that_trl_takes_is_taken_with_default_options(data, generations, prompts):
    batch = generations * prompts
    micro_batch = data.draw(st.sampled_from([number for number in range(1, batch + 1) if batch % number == 0]))
    args = config(
        per_device_train_batch_size=micro_batch,
        steps_per_generation=batch // micro_batch,
        num_generations=generations,
        candidate_pool_factor=data.draw(st.sampled_from([None, 1.0, 1.5, 3.0])),
    )
    assert args.rollout_budget * (1 + args.continuations_per_root) == batch
    # The allocator takes what the configuration let through
    counts = allocate_roots([0.5] * args.candidate_pool_size, args.rollout_budget, args.max_rollouts_per_root)
    assert sum(counts) == args.rollout_budget


# Command line


COMMAND_LINE = {
    "root_allocation": "dapo",
    "prefix_allocation": "random",
    "continuations_per_root": 1,
    "candidate_pool_factor": 3.0,
    "max_rollouts_per_root": 6,
    "success_threshold": 0.3,
    "advantage_estimator": "treerl",
    "turn_weighting": "on_policy",
    "value_backup": "child_mean",
    "train_predictor": True,
    "predictor_hidden_size": 0,
    "predictor_learning_rate": 0.01,
    "predictor_weight_decay": 0.0,
    "headroom_exponent": 1.5,
    "skip_zero_advantage_rows": False,
    "predictor_certainty": True,
    "predictor_passes": 2,
    "predictor_batch_size": 32,
    "predictor_buffer_size": 100,
    "predictor_forward_tokens": 5000,
    "max_turns": 5,
    "max_turn_length": 64,
    "turn_stop_strings": ["Observation:", "]\n"],
    "env_timeout": 5.0,
    "env_max_workers": 4,
    "vllm_rollout_mode": "lockstep",
    "log_trees": True,
    "tree_log_max_megabytes": 1.5,
    "tree_log_max_files": 3,
    "show_rollout_progress": False,
}


def arguments(options) -> list[str]:
    words = []
    for name, value in options.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def test_every_option_is_tried_with_another_value_than_its_default():
    assert set(COMMAND_LINE) == {field.name for field in OWN}
    for field in OWN:
        assert COMMAND_LINE[field.name] != field.default


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_command_line_sets_every_option(parser):
    common = ["--output_dir", "out", "--use_cpu", "True", "--bf16", "False", "--report_to", "none"]
    common += ["--use_vllm", "True"]
    (args,) = parser((TRACEConfig,)).parse_args_into_dataclasses(common + arguments(COMMAND_LINE))
    assert {name: getattr(args, name) for name in COMMAND_LINE} == COMMAND_LINE
    assert all(type(getattr(args, name)) is type(value) for name, value in COMMAND_LINE.items())


def test_command_line_without_options_gives_the_defaults():
    common = ["--output_dir", "out", "--use_cpu", "True", "--bf16", "False", "--report_to", "none"]
    (args,) = TrlParser((TRACEConfig,)).parse_args_into_dataclasses(common)
    default = config()
    assert all(getattr(args, field.name) == getattr(default, field.name) for field in OWN)


def test_yaml_file_sets_options(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "output_dir: out\nuse_cpu: true\nbf16: false\nreport_to: none\nroot_allocation: pcl\n"
        "turn_stop_strings: ['a', 'b c']\nenv_timeout: null\ncontinuations_per_root: 3\n"
    )
    (args,) = TrlParser((TRACEConfig,)).parse_args_and_config(["--config", str(path)])
    assert (args.root_allocation, args.turn_stop_strings) == ("pcl", ["a", "b c"])
    assert (args.env_timeout, args.continuations_per_root) == (None, 3)


@pytest.mark.parametrize(
    "name", ["root_allocation", "prefix_allocation", "advantage_estimator", "turn_weighting", "value_backup"]
)
def test_command_line_refuses_an_unknown_choice_and_names_the_known_ones(name, capsys):
    with pytest.raises(SystemExit):
        TrlParser((TRACEConfig,)).parse_args_into_dataclasses(["--output_dir", "out", f"--{name}", "nonsense"])
    message = capsys.readouterr().err
    assert f"--{name}" in message and "choose from" in message


# Documentation


def documented() -> dict[str, str]:
    """Entries of the class docstring: the line of each option's type and default."""
    entries = re.findall(r"^        (\w+) \((.*?)\):$", TRACEConfig.__doc__, re.MULTILINE)
    return dict(entries)


def test_every_option_is_documented_and_none_that_is_not_there():
    assert list(documented()) == [field.name for field in OWN]


@pytest.mark.parametrize("field", OWN, ids=lambda field: field.name)
def test_documented_default_is_the_default(field):
    kind, *default = re.split(r", \*optional\*(?:, defaults to )?", documented()[field.name])
    assert kind.strip("`") == TRACEConfig.__annotations__[field.name].removesuffix(" | None")
    if field.default is None:
        assert default == [""]
    else:
        assert eval(default[0].strip("`")) == field.default


@pytest.mark.parametrize("field", OWN, ids=lambda field: field.name)
def test_every_option_has_help(field):
    text = field.metadata["help"]
    assert len(text) > 15 and text.endswith(".")


# Round trip


def test_to_dict_holds_every_option_and_makes_the_same_configuration():
    args = config(generation_batch_size=24, log_trees=True, turn_stop_strings=["]"], env_timeout=None)
    saved = json.loads(args.to_json_string())
    assert {field.name for field in OWN} <= set(saved)
    # TRL refuses both of these together, though it sets both
    del saved["steps_per_generation"]
    known = {name: value for name, value in saved.items() if name in {f.name for f in dataclasses.fields(TRACEConfig)}}
    again = TRACEConfig(**known)
    assert all(getattr(again, field.name) == getattr(args, field.name) for field in OWN)
    assert again.rollout_budget == args.rollout_budget
    assert again.candidate_pool_size == args.candidate_pool_size
