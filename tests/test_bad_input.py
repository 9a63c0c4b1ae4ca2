"""Bad input: one sentence, where the configuration or the trainer is made, that says what to change."""

import json
import re

import pytest
from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3ForSequenceClassification
from trl import GRPOConfig

from toys import chat_dataset, length_reward, make_config, make_model, make_tokenizer, string_dataset
from trace_trl import StepResult, TRACEConfig, TRACETrainer


def config(**kwargs) -> TRACEConfig:
    defaults = dict(output_dir="out", use_cpu=True, bf16=False, report_to="none")
    return TRACEConfig(**(defaults | kwargs))


def trainer(tmp_path, model=None, reward_funcs=length_reward, args=None, train_dataset=None, **kwargs) -> TRACETrainer:
    return TRACETrainer(
        model=make_model() if model is None else model,
        reward_funcs=reward_funcs,
        args=make_config(tmp_path) if args is None else args,
        train_dataset=string_dataset() if train_dataset is None else train_dataset,
        processing_class=make_tokenizer(),
        **kwargs,
    )


def says(error, *parts: str) -> None:
    """The message is one line that ends as a sentence does, and holds every part."""
    message = str(error.value)
    assert "\n" not in message.strip()
    assert message.endswith(".")
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


# Numbers


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("continuations_per_root", -1, "0 or more"),
        ("max_rollouts_per_root", 1, "2 or more"),
        ("max_rollouts_per_root", 0, "2 or more"),
        ("candidate_pool_factor", 0.0, "above 0"),
        ("candidate_pool_factor", -1.0, "above 0"),
        ("candidate_pool_factor", float("nan"), "above 0"),
        ("candidate_pool_factor", float("inf"), "above 0"),
        ("success_threshold", float("nan"), "set it to the reward"),
        ("predictor_hidden_size", -1, "0 or more"),
        ("predictor_learning_rate", 0.0, "above 0"),
        ("predictor_weight_decay", -0.1, "0 or more"),
        ("headroom_exponent", -0.1, "0 or more"),
        ("headroom_exponent", float("nan"), "0 or more"),
        ("predictor_passes", 0, "1 or more"),
        ("predictor_batch_size", 0, "1 or more"),
        ("predictor_buffer_size", 0, "1 or more"),
        ("predictor_forward_tokens", 0, "1 or more"),
        ("max_turns", 0, "1 or more"),
        ("max_turn_length", 0, "1 or more"),
        ("env_timeout", 0.0, "above 0"),
        ("env_max_workers", 0, "1 or more"),
        ("tree_log_max_megabytes", 0.0, "above 0"),
        ("tree_log_max_files", 0, "1 or more"),
        ("max_completion_length", None, "the most tokens of a completion"),
        ("max_completion_length", 0, "1 or more"),
        ("max_turns", "6", "is '6': set it to a whole number"),
        ("max_turns", 2.5, "is 2.5: set it to a whole number"),
        ("max_turns", True, "is True: set it to a whole number"),
        ("env_timeout", "60", "is '60': set it to a number"),
        ("headroom_exponent", None, "is None: set it to a number"),
        ("predictor_learning_rate", "1e-3", "is '1e-3': set it to a number"),
        ("success_threshold", None, "is None: set it to the reward"),
        ("success_threshold", "0.5", "is '0.5': set it to the reward"),
        ("turn_stop_strings", ["]", ""], "remove it"),
        ("turn_stop_strings", "]", "pass a list of strings, here [']']"),
    ],
)
def test_number_out_of_range(name, value, remedy):
    with pytest.raises(ValueError) as error:
        config(**{name: value})
    says(error, f"`{name}", remedy)


@pytest.mark.parametrize(
    ("options", "remedies"),
    [
        ({"use_vllm": False, "vllm_rollout_mode": "continuous"}, ["`use_vllm=True`", "remove it"]),
        ({"vllm_rollout_mode": "nonsense"}, ["'continuous', 'lockstep'"]),
        ({"vllm_mode": "nonsense"}, ["`vllm_mode` is 'nonsense'", "'colocate' or 'server'"]),
        ({"vllm_mode": "server", "vllm_rollout_mode": "continuous"}, ["`vllm_mode='colocate'`"]),
        ({"use_transformers_continuous_batching": True}, ["set only one of them"]),
        ({"ds3_gather_for_generation": False}, ["`ds3_gather_for_generation=True`"]),
        ({"generation_kwargs": {"n": 2}}, ["'n'", "remove it"]),
        ({"generation_kwargs": {"seed": 1}}, ["'seed'", "same random numbers"]),
        ({"generation_kwargs": {"max_tokens": 5}}, ["'max_tokens'", "`max_turn_length`"]),
        ({"generation_kwargs": {"stop": ["a"]}}, ["'stop'", "`turn_stop_strings`"]),
        ({"generation_kwargs": {"stop_token_ids": [1]}}, ["'stop_token_ids'", "`eos_token_id`"]),
        ({"generation_kwargs": {"logprobs": 5}}, ["'logprobs'", "remove it"]),
    ],
)
def test_what_vllm_can_not_do(options, remedies):
    with pytest.raises(ValueError) as error:
        config(**({"use_vllm": True} | options))
    says(error, *remedies)


@pytest.mark.parametrize(
    ("kwargs", "remedies"),
    [
        ({"eos_token_id": [2, *range(20, 200)]}, ["'eos_token_id'", "`model.generation_config.eos_token_id`"]),
        ({"eos_token_id": 7}, ["'eos_token_id'", "`model.generation_config.eos_token_id`"]),
        ({"max_new_tokens": 3}, ["'max_new_tokens'", "`max_turn_length`"]),
        ({"stop_strings": ["a"]}, ["'stop_strings'", "`turn_stop_strings`"]),
        ({"num_return_sequences": 2}, ["'num_return_sequences'", "one next turn"]),
        ({"return_dict_in_generate": True}, ["'return_dict_in_generate'", "remove it"]),
    ],
)
def test_what_ends_a_turn_is_no_generation_kwarg(kwargs, remedies):
    """transformers would end turns, or return them, in a way that the engine does not know of."""
    for plain in ({}, {"root_allocation": "uniform", "continuations_per_root": 0}):
        with pytest.raises(ValueError) as error:
            config(generation_kwargs=kwargs, **plain)
        says(error, *remedies)
    # vLLM's options have other names, and are vLLM's to refuse
    assert config(use_vllm=True, generation_kwargs=kwargs).generation_kwargs == kwargs


def test_beams_can_not_be_followed_to_a_stop_string():
    with pytest.raises(ValueError) as error:
        config(generation_kwargs={"num_beams": 2}, turn_stop_strings=["e"])
    says(error, "'num_beams'", "`turn_stop_strings`", "only one of them")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_beams": 2},
        {"max_length": 30},
        {"max_time": 60.0},
        {"min_new_tokens": 50},
        {"forced_eos_token_id": 2},
        {"output_scores": True},
        {"num_return_sequences": 1, "num_beams": 1, "return_dict_in_generate": False, "stop_strings": None},
    ],
)
def test_generation_kwargs_that_work_are_left_to_trl(kwargs):
    assert config(generation_kwargs=kwargs).generation_kwargs == kwargs
    assert config(generation_kwargs=json.dumps(kwargs)).generation_kwargs == kwargs


def test_forced_ends_are_for_single_turns(tmp_path):
    args = make_config(tmp_path, generation_kwargs={"forced_eos_token_id": 2})
    trainer(tmp_path, args=args)
    for other in ({"env_step": env_step}, {"tools": [add], "train_dataset": chat_dataset()}):
        with pytest.raises(ValueError) as error:
            trainer(tmp_path, args=args, **other)
        says(error, "'forced_eos_token_id'", "remove it")


def test_modes_of_vllm():
    assert not config().is_continuous
    assert config(use_vllm=True).is_continuous
    assert not config(use_vllm=True, vllm_rollout_mode="lockstep").is_continuous
    assert not config(use_vllm=True, vllm_mode="server").is_continuous
    # What is TRL's to pass on stays as it is
    kept = {"frequency_penalty": 0.1, "min_tokens": 2}
    assert config(use_vllm=True, generation_kwargs=kept).generation_kwargs == kept
    assert config(generation_kwargs={"seed": 1}).generation_kwargs == {"seed": 1}


@pytest.mark.parametrize(
    ("mode", "name", "value"),
    [
        ("server", "vllm_tensor_parallel_size", 2),
        ("server", "vllm_enable_sleep_mode", True),
        ("server", "vllm_max_model_length", 100),
        ("server", "vllm_gpu_memory_utilization", 0.5),
        ("server", "vllm_model_impl", "transformers"),
        ("colocate", "vllm_server_base_url", "http://localhost:8000"),
        ("colocate", "vllm_group_port", 1),
    ],
)
def test_an_option_of_the_other_mode_is_told_to_do_nothing(caplog, mode, name, value):
    config(use_vllm=True, vllm_mode=mode)
    assert "has no effect" not in caplog.text
    config(use_vllm=True, vllm_mode=mode, **{name: value})
    assert f"`{name}` has no effect with `vllm_mode='{mode}'`" in caplog.text


def test_a_model_that_vllm_can_not_find_again(tmp_path):
    """vLLM reads the model from where its name says, and an object made in memory has none."""
    model = make_model()
    with pytest.raises(ValueError) as error:
        TRACETrainer(
            model,
            length_reward,
            make_config(tmp_path, use_vllm=True),
            chat_dataset(),
            processing_class=make_tokenizer(),
        )
    says(error, "vLLM", "`save_pretrained`")


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("root_allocation", ["active", "uniform", "pcl", "dapo"]),
        ("prefix_allocation", ["active", "uniform", "random"]),
        ("advantage_estimator", ["sibling", "sibling_fallback", "leaf", "treerl", "treepo", "tree_grpo"]),
        ("turn_weighting", ["once", "per_leaf", "on_policy"]),
        ("value_backup", ["leaf_mean", "child_mean"]),
    ],
)
def test_unknown_option_name(name, choices):
    with pytest.raises(ValueError) as error:
        config(**{name: "nonsense"})
    says(error, f"`{name}` is 'nonsense'", *map(repr, choices))
    for choice in choices:
        assert getattr(config(**{name: choice}), name) == choice


def test_unknown_field():
    with pytest.raises(TypeError, match="unexpected keyword argument 'continuations_per_rot'"):
        config(continuations_per_rot=2)


# Budget


def test_batch_that_does_not_split_names_the_three_numbers_and_what_fits():
    with pytest.raises(ValueError) as error:
        config(generation_batch_size=32, num_generations=8, per_device_train_batch_size=8, continuations_per_root=2)
    # Multiples of 8 (TRL) and of 3 (M): 24 and 48. Of 32 leaves: N = 1 (M = 16) and N = 3 (M = 8).
    says(error, "generation_batch_size=32", "continuations_per_root=2", "M a multiple of the 1 process(es)")
    says(error, "`generation_batch_size` to 24 or 48", "`continuations_per_root` to 1 or 3")


def test_batch_that_does_not_split_over_processes(monkeypatch):
    monkeypatch.setattr(GRPOConfig, "world_size", property(lambda self: 4))
    with pytest.raises(ValueError) as error:
        config(generation_batch_size=24, num_generations=8, per_device_train_batch_size=2, continuations_per_root=3)
    # M = 6 can't be split over 4 processes; multiples of lcm(4 * 4, 8, 2 * 4) = 16; N = 1 gives 12, N = 2 gives 8
    says(error, "the 4 process(es)", "`generation_batch_size` to 16 or 32", "`continuations_per_root` to 1 or 2")


def test_lone_bare_rollout():
    with pytest.raises(ValueError) as error:
        config(generation_batch_size=8, num_generations=8, continuations_per_root=7)
    # With N = 7, the least batch that holds two bare rollouts is 16
    says(error, "M >= 2", "`generation_batch_size` to 16 or 24", "`continuations_per_root` to 1 or 3")


SUGGESTION = re.compile(r"`(\w+)` to ([\d or]+)")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    generations=st.integers(2, 12),
    prompts=st.integers(1, 8),
    continuations=st.integers(0, 12),
    most=st.sampled_from([None, 2, 3, 5]),
    factor=st.sampled_from([None, 0.5, 1.0, 2.0]),
    processes=st.sampled_from([1, 2, 4]),
)
def test_what_a_refused_budget_suggests_works(
    monkeypatch, data, generations, prompts, continuations, most, factor, processes
):
    monkeypatch.setattr(GRPOConfig, "world_size", property(lambda self: processes))
    batch = generations * prompts * processes
    per_process = batch // processes
    options = dict(
        generation_batch_size=batch,
        num_generations=generations,
        per_device_train_batch_size=data.draw(
            st.sampled_from([number for number in range(1, per_process + 1) if per_process % number == 0])
        ),
        continuations_per_root=continuations,
        max_rollouts_per_root=most,
        candidate_pool_factor=factor,
    )
    try:
        config(**options)
    except ValueError as error:
        message = str(error)
    else:
        message = ""
    assume(message)
    suggestions = SUGGESTION.findall(message)
    at_least = re.search(r"raise `max_rollouts_per_root` to at least (\d+)", message)
    if at_least:
        suggestions.append(("max_rollouts_per_root", at_least[1]))
        # .. and that is the least
        if int(at_least[1]) > 2:
            with pytest.raises(ValueError):
                config(**options | {"max_rollouts_per_root": int(at_least[1]) - 1})
    if "into pairs" in message:
        suggestions.append(("max_rollouts_per_root", "3"))
    assert suggestions, message
    for name, values in suggestions:
        for value in values.split(" or "):
            assert getattr(config(**options | {name: int(value)}), name) == int(value)


def test_pool_too_small_for_the_budget():
    with pytest.raises(ValueError) as error:
        config(generation_batch_size=64, num_generations=8, continuations_per_root=0, candidate_pool_factor=0.5)
    # 4 candidates at 8 rollouts take 32 of 64
    says(error, "M=64", "pool of 4 candidates", "max_rollouts_per_root=8", "`max_rollouts_per_root` to at least 16")
    says(error, "`candidate_pool_factor`", "`generation_batch_size`")


def test_odd_budget_of_pairs():
    with pytest.raises(ValueError) as error:
        config(
            generation_batch_size=9,
            num_generations=3,
            per_device_train_batch_size=3,
            continuations_per_root=2,
            max_rollouts_per_root=2,
        )
    says(error, "M=3", "max_rollouts_per_root=2", "3 or more", "`generation_batch_size`")


def test_dataset_too_small_for_the_budget(tmp_path):
    args = make_config(
        tmp_path, generation_batch_size=32, continuations_per_root=0, candidate_pool_factor=1.0, num_generations=4
    )
    with pytest.raises(ValueError) as error:
        trainer(tmp_path, args=args, train_dataset=string_dataset(3))
    # 32 bare rollouts of 3 rows: 11 of one of them
    says(error, "M=32", "pool of 3 candidates", "`max_rollouts_per_root` to at least 11")
    args = make_config(
        tmp_path,
        generation_batch_size=32,
        continuations_per_root=0,
        candidate_pool_factor=1.0,
        num_generations=4,
        max_rollouts_per_root=11,
    )
    trainer(tmp_path, args=args, train_dataset=string_dataset(3))


def test_dataset_with_fewer_rows_than_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda self: 4))
    with pytest.raises(ValueError) as error:
        trainer(tmp_path, train_dataset=string_dataset(1))
    says(error, "1 rows for 4 processes", "at least one")


def test_case_33_auto_find_batch_size():
    with pytest.raises(ValueError, match="auto_find_batch_size is not supported .* Set auto_find_batch_size=False"):
        config(auto_find_batch_size=True)


def test_options_of_trl_are_refused_by_trl():
    with pytest.raises(ValueError, match=r"generation_batch_size \(20\) must be divisible by num_generations \(8\)"):
        config(generation_batch_size=20, per_device_train_batch_size=4)
    with pytest.raises(ValueError, match="can not be both configured"):
        config(generation_batch_size=24, steps_per_generation=3)
    with pytest.raises(ValueError, match="requires at least 2 generations"):
        config(num_generations=1)


def test_case_33_several_gpus_in_one_process(tmp_path):
    args = make_config(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="TRACETrainer does not support `nn.DataParallel`.* `accelerate launch`"):
        trainer(tmp_path, args=args)


# Arguments of the trainer


def env_step(state, action, messages):
    return StepResult(done=True, reward=1.0)


def add(a: int, b: int) -> int:
    """
    Adds.

    Args:
        a: One number.
        b: Another.

    Returns:
        The sum.
    """
    return a + b


class Game:
    def reset(self, **kwargs):
        return None

    def move(self, way: str) -> str:
        """
        Moves.

        Args:
            way: Where to.

        Returns:
            What is seen there.
        """
        return "a wall"


@pytest.mark.parametrize("reward_funcs", [None, []])
def test_no_reward_source(tmp_path, reward_funcs):
    with pytest.raises(ValueError) as error:
        trainer(tmp_path, reward_funcs=reward_funcs)
    # The first words are TRL's, which scripts and its own tests look for
    says(error, "No reward source provided", "`reward_funcs`", "`env_step`", "`environment_factory`", "`get_reward`")


@pytest.mark.parametrize("reward_funcs", [None, []])
def test_no_reward_source_with_tools(tmp_path, reward_funcs):
    with pytest.raises(ValueError, match="`reward_funcs`"):
        trainer(tmp_path, reward_funcs=reward_funcs, tools=[add], train_dataset=chat_dataset())


def test_no_reward_source_with_an_environment_that_has_none(tmp_path):
    with pytest.raises(ValueError, match="`reward_funcs`.*`get_reward`"):
        trainer(tmp_path, reward_funcs=None, environment_factory=Game, train_dataset=chat_dataset())


def test_env_step_is_a_reward_source(tmp_path):
    assert trainer(tmp_path, reward_funcs=None, env_step=env_step).reward_func_names == ["env_step"]


@pytest.mark.parametrize(
    ("other", "value"), [("tools", [add]), ("environment_factory", Game), ("environment_factory", {"game": Game})]
)
def test_env_step_with_another_environment(tmp_path, other, value):
    with pytest.raises(ValueError) as error:
        trainer(tmp_path, env_step=env_step, train_dataset=chat_dataset(), **{other: value})
    says(error, "`env_step`", f"`{other}`", "pass only one of them")


def test_env_reset_without_env_step(tmp_path):
    with pytest.raises(ValueError) as error:
        trainer(tmp_path, env_reset=dict)
    says(error, "`env_reset`", "pass `env_step` as well, or remove it")


def test_rollout_func(tmp_path):
    with pytest.raises(ValueError) as error:
        trainer(tmp_path, rollout_func=lambda prompts, trainer: {})
    says(error, "`rollout_func`", "remove it", "`env_step`, `tools` or `environment_factory`")


def test_plain_grpo_config(tmp_path):
    with pytest.raises(TypeError) as error:
        trainer(tmp_path, args=make_config(tmp_path, cls=GRPOConfig))
    says(error, "`args` is a GRPOConfig", "pass a `trace_trl.TRACEConfig`")


def test_dataset_without_prompts(tmp_path):
    rows = Dataset.from_dict({"question": ["a", "b"], "answer": ["c", "d"]})
    for options in (dict(train_dataset=rows), dict(eval_dataset=rows), dict(eval_dataset={"dev": rows})):
        with pytest.raises(ValueError) as error:
            trainer(tmp_path, **options)
        says(error, "no column 'prompt'", "answer, question", "rename or add", "`environment_factory`")


def frozen_adapter():
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(make_model(), lora).requires_grad_(False)


@pytest.mark.parametrize("with_adapter", [True, False])
def test_case_57_a_frozen_model_with_a_reference(tmp_path, with_adapter):
    """No parameter requires a gradient and `beta` is above 0: TRL's copy of the adapter would be trained instead."""
    model = frozen_adapter()
    if not with_adapter:
        make_model().save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path).requires_grad_(False)
    with pytest.raises(ValueError) as error:
        trainer(tmp_path, model=model, args=make_config(tmp_path, beta=0.1))
    says(error, "No parameter of the model requires a gradient", "`is_trainable=True`", "`requires_grad`")


def test_case_57_a_frozen_model_can_be_evaluated_and_not_trained(tmp_path):
    run = trainer(tmp_path, model=frozen_adapter())
    assert len(run.rollout([{"prompt": "what is red"}])) == 1
    with pytest.raises(ValueError) as error:
        run.train()
    says(error, "No parameter of the model requires a gradient")


@pytest.mark.parametrize("streamed", [False, True])
def test_case_58_evaluation_by_hand_with_a_batch_that_does_not_divide(tmp_path, streamed):
    """`evaluate(dataset)` with batches of 8 rows and 6 rollouts of each prompt: a sentence with the numbers, before
    anything is sampled."""
    run = trainer(tmp_path, args=make_config(tmp_path, per_device_eval_batch_size=8, num_generations_eval=6))
    run._engine.generate = None
    with pytest.raises(ValueError) as error:
        run.evaluate(string_dataset(4).to_iterable_dataset() if streamed else string_dataset(4))
    says(error, "8 rows", "`num_generations_eval` is 6", "`per_device_eval_batch_size` to 6 or 12")


def test_case_58_batches_that_hold_whole_prompts_are_evaluated(tmp_path):
    """Fewer rows than a batch, and a last batch that is not full."""
    run = trainer(tmp_path, args=make_config(tmp_path, per_device_eval_batch_size=16, num_generations_eval=6))
    assert "eval_reward" in run.evaluate(string_dataset(2))
    run = trainer(tmp_path, args=make_config(tmp_path, per_device_eval_batch_size=12, num_generations_eval=6))
    assert "eval_reward" in run.evaluate(string_dataset(3))


def with_column(dataset, name):
    return dataset.add_column(name, ["x"] * len(dataset))


@pytest.mark.parametrize("name", ["prompts", "completions", "step_rewards"])
@pytest.mark.parametrize("place", ["train", "eval", "stream", "nameless stream"])
def test_case_55_column_of_a_name_that_rewards_are_called_with(tmp_path, name, place):
    """A data set with a column `completions`, `prompts`, or, with `env_step`, `step_rewards`: refused by name."""
    taken = with_column(string_dataset(), name)
    data = {
        "train": dict(train_dataset=taken),
        "eval": dict(eval_dataset={"dev": taken}),
        "stream": dict(train_dataset=taken.to_iterable_dataset()),
        "nameless stream": dict(train_dataset=IterableDataset.from_generator(lambda: iter(taken))),
    }[place]
    with pytest.raises(ValueError) as error:
        run = trainer(tmp_path, env_step=env_step, **data)
        assert place == "nameless stream"
        run.train()
    says(error, repr(name), "rename or remove")


def test_case_55_rows_to_roll_out_with_such_a_column(tmp_path):
    run = trainer(tmp_path)
    with pytest.raises(ValueError) as error:
        run.rollout([{"prompt": "what is red", "completions": "x"}])
    says(error, "'completions'", "rename or remove")


def test_case_55_columns_that_no_reward_function_gets_are_no_fault(tmp_path):
    """Columns that TRL drops, or where only a model judges."""
    taken = with_column(string_dataset(), "completions")
    trainer(tmp_path, args=make_config(tmp_path, remove_unused_columns=True), train_dataset=taken)
    trainer(tmp_path, train_dataset=with_column(string_dataset(), "step_rewards"))
    judge = Qwen3ForSequenceClassification(make_model().config)
    trainer(tmp_path, reward_funcs=judge, train_dataset=taken, reward_processing_classes=make_tokenizer())


@pytest.mark.parametrize("environment", [dict(tools=[add]), dict(environment_factory=Game)], ids=["tools", "methods"])
def test_tools_with_string_prompts(tmp_path, environment):
    strings, chats = string_dataset(), chat_dataset()
    for train, evaluation in ((strings, None), (chats, strings), (chats, {"dev": strings})):
        with pytest.raises(ValueError) as error:
            trainer(tmp_path, train_dataset=train, eval_dataset=evaluation, **environment)
        says(error, "'what is red' is no conversation", "tools", "list of messages")
    # What can't be looked at before
    of_a_stream = trainer(tmp_path, train_dataset=strings.to_iterable_dataset(), **environment)
    of_chats = trainer(tmp_path, train_dataset=chats, **environment)
    for run in (of_a_stream.train, lambda: of_chats.evaluate(strings), lambda: of_chats.rollout([strings[0]])):
        with pytest.raises(ValueError) as error:
            run()
        says(error, "is no conversation", "tools", "list of messages")


def test_template_that_cannot_carry_an_answer(tmp_path):
    template = "{{ messages[0].content }}<|im_end|>"
    with pytest.raises(ValueError, match="chat template can't append an answer .* use one that can"):
        TRACETrainer(
            make_model(),
            length_reward,
            make_config(tmp_path),
            chat_dataset(),
            processing_class=make_tokenizer(template),
            env_step=env_step,
        )


# Images

IMAGE_PROMPT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is this"}]}]


@pytest.mark.parametrize("column", ["image", "images"])
def test_case_39_column_of_images_is_refused_at_construction(tmp_path, column):
    rows = Dataset.from_dict({"prompt": ["a", "b"], column: [[0], [1]]})
    for options in (dict(train_dataset=rows), dict(eval_dataset=rows), dict(eval_dataset={"dev": rows})):
        with pytest.raises(ValueError) as error:
            trainer(tmp_path, **options)
        says(error, repr(column), "text only", "`dataset.remove_columns`", "GRPOTrainer")


def test_case_39_images_in_messages_are_refused_at_construction(tmp_path):
    rows = Dataset.from_list([{"prompt": IMAGE_PROMPT}] * 4)
    for options in (dict(train_dataset=rows), dict(eval_dataset=rows), dict(eval_dataset={"dev": rows})):
        with pytest.raises(ValueError) as error:
            trainer(tmp_path, **options)
        says(error, "content of type image", "text only", "remove it from the prompts")


def test_case_39_text_blocks_are_no_images(tmp_path):
    prompt = [{"role": "user", "content": [{"type": "text", "text": "what is red"}]}]
    trainer(tmp_path, train_dataset=Dataset.from_list([{"prompt": prompt}] * 4))


@pytest.mark.parametrize(
    "row", [{"prompt": IMAGE_PROMPT}, {"prompt": IMAGE_PROMPT[0]["content"][1]["text"], "image": "red.png"}]
)
def test_case_39_images_of_a_stream_are_refused_at_the_first_row(tmp_path, row):
    rows = IterableDataset.from_generator(lambda: iter([row] * 8))
    run = trainer(tmp_path, train_dataset=rows)
    asked = []
    make_engine = run._make_engine

    def watched(conversational):
        engine = make_engine(conversational)
        engine.generate = lambda requests: asked.append(requests)
        return engine

    run._make_engine = watched
    with pytest.raises(ValueError, match="text only"):
        run.train()
    assert not asked


# Prompts


def stream(*prompts, **columns):
    rows = [{"prompt": prompt, "number": number, **columns} for number, prompt in enumerate(prompts)]
    return IterableDataset.from_generator(lambda: iter(rows * 8))


MESSAGES = [{"role": "user", "content": "what is red"}]
# A prompt, and what is said of it
BAD_PROMPTS = [
    (None, "has no prompt"),
    (["a", "b"], "a list that holds an object of type str"),
    ({"role": "user", "content": "x"}, "an object of type dict"),
    (7, "an object of type int"),
    ([], "an empty list"),
    ([{"from": "user", "value": "x"}], "a message without 'role'"),
    ([{"role": "user"}], "a message without 'content'"),
    ([*MESSAGES, None], "a list that holds an object of type NoneType"),
]


@pytest.mark.parametrize(("prompt", "told"), BAD_PROMPTS)
def test_prompt_of_the_first_row(tmp_path, prompt, told):
    rows = Dataset.from_list([{"prompt": prompt, "number": 41}] * 8)
    for options in (dict(train_dataset=rows), dict(eval_dataset=rows), dict(eval_dataset={"dev": rows})):
        with pytest.raises(ValueError) as error:
            trainer(tmp_path, **options)
        says(error, told, "drop", f"The row is {str(rows[0])[:80]!r}")


@pytest.mark.parametrize(("prompt", "told"), BAD_PROMPTS)
@pytest.mark.parametrize(("good", "first"), [(MESSAGES, False), ("what is red", False), (MESSAGES, True)])
def test_prompt_of_a_row_of_a_stream(tmp_path, prompt, told, good, first):
    run = trainer(tmp_path, train_dataset=stream(prompt, good) if first else stream(good, prompt))
    with pytest.raises(ValueError) as error:
        run.train()
    row = {"prompt": prompt, "number": int(not first)}
    says(error, told, "drop", f"The row is {str(row)[:80]!r}")


def test_a_later_row_without_a_prompt(tmp_path):
    run = trainer(tmp_path, train_dataset=Dataset.from_dict({"prompt": ["a", None] * 4}))
    with pytest.raises(ValueError) as error:
        run.train()
    says(error, "has no prompt", "The row is \"{'prompt': None}\"")


def test_rows_to_roll_out_without_a_prompt(tmp_path):
    for row in ({"number": 7}, {"prompt": None, "number": 7}):
        with pytest.raises(ValueError) as error:
            trainer(tmp_path).rollout([row])
        says(error, "has no prompt", str(row))


@pytest.mark.parametrize("prompts", [("what is red", MESSAGES), (MESSAGES, "what is red")])
def test_text_and_messages_in_one_batch(tmp_path, prompts):
    with pytest.raises(ValueError) as error:
        trainer(tmp_path, train_dataset=stream(*prompts)).train()
    says(error, "make all prompts the one or the other", "'number': 1")


@pytest.mark.parametrize("prompts", [[""] * 8, ["", "what is red"] * 4])
def test_prompt_without_tokens(tmp_path, prompts):
    run = trainer(tmp_path, train_dataset=Dataset.from_dict({"prompt": prompts}))
    with pytest.raises(ValueError) as error:
        run.train()
    says(error, "no tokens", "give it some text, or drop the row", "The row is \"{'prompt': ''}\"")


@pytest.mark.parametrize("pad_token", [None, "<|endoftext|>"])
def test_tokenizer_without_end_of_turn_token(tmp_path, pad_token):
    tokenizer = make_tokenizer()
    tokenizer.eos_token, tokenizer.pad_token = None, pad_token
    with pytest.raises(ValueError) as error:
        TRACETrainer(make_model(), length_reward, make_config(tmp_path), string_dataset(), processing_class=tokenizer)
    says(error, "no end-of-turn token", "`eos_token`")


def test_prompts_that_an_environment_gives(tmp_path):
    """A row may lack its prompt there, also where its column has it for other rows."""

    class Tasks(Game):
        def reset(self, **kwargs):
            return "what is red"

    rows = Dataset.from_dict({"prompt": [None, MESSAGES] * 4})
    run = trainer(tmp_path, environment_factory=Tasks, train_dataset=rows)
    assert run._engine.codec.conversational
    (tree,) = run.rollout([rows[0]])
    assert tree.prompt == MESSAGES
