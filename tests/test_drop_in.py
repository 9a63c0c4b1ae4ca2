"""
Drop-in: bodies of ordinary GRPO scripts run with TRL's two names and with this package's, nothing else changed.

Each script is run with both pairs of names, with this package's options at their defaults; [`drop_in`] checks what
must hold of any of them.
"""

import inspect
import json
import math
import random
import re
from collections import Counter

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForSequenceClassification, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from toys import QUESTIONS, chat_dataset, length_reward, make_model, make_tokenizer, speak, string_dataset
from trace_trl import TRACEConfig, TRACETrainer
from trace_trl.pool import allocate


NAMES = {"trl": (GRPOTrainer, GRPOConfig), "trace": (TRACETrainer, TRACEConfig)}


def options(tmp_path, **kwargs):
    """What a script for a CPU sets."""
    defaults = dict(
        output_dir=str(tmp_path / "run"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        num_generations=4,
        max_completion_length=10,
        logging_steps=1,
        max_steps=2,
        save_strategy="no",
        disable_tqdm=True,
    )
    return defaults | kwargs


def drop_in(script):
    """Runs a script with both pairs of names. Returns the trainers, TRL's first."""
    trainers = []
    for Trainer, Config in NAMES.values():
        trainer = script(Trainer, Config)
        assert type(trainer) is Trainer
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert trainer.state.global_step == trainer.args.max_steps
        assert len(logs) == trainer.args.max_steps // trainer.args.logging_steps
        assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]) for entry in logs)
        assert any(entry["grad_norm"] > 0 for entry in logs)
        trainers.append(trainer)
    theirs, ours = ({key for entry in t.state.log_history for key in entry} for t in trainers)
    assert theirs - ours == set()  # whoever watches a metric of TRL's finds it
    counts = [sorted(key for key in t.state.log_history[-1]) for t in trainers]
    assert counts[0] == counts[1]  # the summary at the end of training
    return trainers


def test_constructor_takes_every_argument_of_trl_by_name_and_in_order():
    theirs = list(inspect.signature(GRPOTrainer.__init__).parameters.values())
    ours = list(inspect.signature(TRACETrainer.__init__).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert [p.name for p in ours[len(theirs) :]] == ["env_step", "env_reset"]
    assert all(p.default is None for p in ours[len(theirs) :])


def test_methods_take_every_argument_of_trl():
    for name in ("train", "evaluate", "get_train_dataloader", "training_step"):
        theirs, ours = (inspect.signature(getattr(cls, name)).parameters for cls in (GRPOTrainer, TRACETrainer))
        takes_all = any(p.kind is p.VAR_KEYWORD for p in ours.values())
        assert takes_all or list(ours)[: len(theirs)] == list(theirs)


# Prompts


def test_string_prompts(tmp_path):
    def script(Trainer, Config):
        trainer = Trainer(
            model=make_model(),
            reward_funcs=length_reward,
            args=Config(**options(tmp_path)),
            train_dataset=string_dataset(),
            processing_class=make_tokenizer(template=None),
        )
        trainer.train()
        return trainer

    drop_in(script)


def test_conversational_prompts(tmp_path):
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(completions)
        return length_reward(completions)

    def script(Trainer, Config):
        trainer = Trainer(
            model=make_model(),
            reward_funcs=reward,
            args=Config(**options(tmp_path)),
            train_dataset=chat_dataset(),
            processing_class=make_tokenizer(),
        )
        trainer.train()
        return trainer

    drop_in(script)
    assert all([message["role"] for message in completion] == ["assistant"] for completion in seen)


def test_model_by_path_and_default_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # bf16, TRL's default, is refused where there is neither an accelerator nor `use_cpu`
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    make_model().save_pretrained("tiny-model")
    make_tokenizer().save_pretrained("tiny-model")
    for Trainer, Config in NAMES.values():
        trainer = Trainer("tiny-model", length_reward, train_dataset=string_dataset())
        assert type(trainer.args) is Config
        assert trainer.args.output_dir == f"tiny-model-{Trainer._name}"
        assert trainer.args.generation_batch_size == 8


def test_system_prompt_and_chat_template_kwargs(tmp_path):
    rows = [
        {"prompt": [{"role": "system", "content": "yes or no"}, {"role": "user", "content": q}]} for q in QUESTIONS
    ]

    def script(Trainer, Config):
        trainer = Trainer(
            model=make_model(),
            reward_funcs=[length_reward],
            args=Config(**options(tmp_path, chat_template_kwargs={"enable_thinking": False})),
            train_dataset=Dataset.from_list(rows),
            processing_class=make_tokenizer(),
        )
        trainer.train()
        return trainer

    theirs, ours = drop_in(script)
    for trainer in (theirs, ours):
        assert all(prompt[0]["role"] == "system" for prompt in trainer._logs["prompt"])


def test_callbacks_and_optimizers(tmp_path):
    begun = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            begun.append(state.global_step)

    def script(Trainer, Config):
        begun.clear()
        model = make_model()
        before = {name: p.clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        trainer = Trainer(
            model=model,
            reward_funcs=length_reward,
            args=Config(**options(tmp_path)),
            train_dataset=string_dataset(),
            processing_class=make_tokenizer(template=None),
            callbacks=[Watch()],
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        )
        trainer.train()
        assert begun == [0, 1]
        assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)
        assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())
        return trainer

    drop_in(script)


# Tools and environments: a model that calls `add` now and then, at random


def agent(seed: int = 0):
    """Says a tool call or an answer; in the end an answer."""
    choose = random.Random(seed)

    def say(context: str) -> str:
        if context.count("<tool_response>") > 2 or choose.random() < 0.4:
            return f"answer {choose.randrange(10)}"
        call = {"name": "add", "arguments": {"a": choose.randrange(5), "b": choose.randrange(5)}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    return say


def agent_options(tmp_path, **kwargs):
    return options(tmp_path, max_completion_length=300, **kwargs)


def speaking_model(tokenizer, seed: int = 0):
    model = make_model(max_position_embeddings=2048)
    speak(model, tokenizer, agent(seed))
    return model


def number_of(completion) -> int:
    return int(re.search(r"\d+", completion[-1]["content"])[0])


def answer_reward(completions, **kwargs):
    return [float(number_of(completion) > 4) for completion in completions]


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


async def add_later(a: int, b: int) -> int:
    return a + b


add_later.__name__, add_later.__doc__ = "add", add.__doc__


def check_tool_story(completions):
    """Calls are followed by their own results."""
    calls = 0
    for completion in completions:
        for message, following in zip(completion, completion[1:], strict=False):
            for call in message.get("tool_calls", []):
                calls += 1
                arguments = call["function"]["arguments"]
                assert following["role"] == "tool"
                assert following["content"] == str(arguments["a"] + arguments["b"])
        assert completion[-1]["role"] == "assistant"
    assert calls


@pytest.mark.parametrize("tool", [add, add_later], ids=["sync", "async"])
def test_tools(tmp_path, tool):
    seen = []

    def reward(completions, **kwargs):
        seen.extend(completions)
        return answer_reward(completions)

    def script(Trainer, Config):
        tokenizer = make_tokenizer()
        trainer = Trainer(
            model=speaking_model(tokenizer),
            reward_funcs=reward,
            args=Config(**agent_options(tmp_path)),
            train_dataset=chat_dataset(),
            processing_class=tokenizer,
            tools=[tool],
        )
        trainer.train()
        return trainer

    theirs, ours = drop_in(script)
    check_tool_story(seen)
    for trainer in (theirs, ours):
        assert all(entry["tools/call_frequency"] > 0 for entry in trainer.state.log_history[:-1])
        assert all(entry["tools/failure_frequency"] == 0 for entry in trainer.state.log_history[:-1])


class Sum:
    """Adds up what it is told, and remembers."""

    def __init__(self):
        self.results = None

    def reset(self, **kwargs):
        self.results = []
        self.number = kwargs.get("number")

    def add(self, a: int, b: int) -> int:
        """
        Adds.

        Args:
            a: One number.
            b: Another.

        Returns:
            The sum of all numbers so far.
        """
        self.results.append(a + b + (self.results[-1] if self.results else 0))
        return self.results[-1]


class ScoredSum(Sum):
    def get_reward(self) -> float:
        return float(len(self.results) % 2)


def told(completion) -> list[int]:
    return [int(message["content"]) for message in completion if message["role"] == "tool"]


def test_environment_factory(tmp_path):
    seen = Counter()

    def reward(prompts, completions, environments, number, **kwargs):
        for completion, environment, row in zip(completions, environments, number, strict=True):
            # Row i gets environment i, in the state its own branch has left
            assert environment.results == told(completion)
            assert environment.number == row
            seen[len(environment.results)] += 1
        return answer_reward(completions)

    def script(Trainer, Config):
        tokenizer = make_tokenizer()
        trainer = Trainer(
            model=speaking_model(tokenizer),
            reward_funcs=reward,
            args=Config(**agent_options(tmp_path)),
            train_dataset=chat_dataset(),
            processing_class=tokenizer,
            environment_factory=Sum,
        )
        trainer.train()
        return trainer

    drop_in(script)
    assert len(seen) > 2


def test_environment_that_owns_the_reward(tmp_path):
    def script(Trainer, Config):
        tokenizer = make_tokenizer()
        trainer = Trainer(
            model=speaking_model(tokenizer),
            args=Config(**agent_options(tmp_path)),
            train_dataset=chat_dataset(),
            processing_class=tokenizer,
            environment_factory=ScoredSum,
        )
        trainer.train()
        return trainer

    for trainer in drop_in(script):
        assert trainer.reward_func_names == ["ScoredSum"]
        for completion, reward in zip(trainer._logs["completion"], trainer._logs["rewards"]["ScoredSum"], strict=True):
            assert reward == len(told(completion)) % 2


@pytest.mark.parametrize("with_prompt", [True, False])
def test_environment_factory_of_several(tmp_path, with_prompt):
    class Greeting(Sum):
        def reset(self, **kwargs):
            super().reset(**kwargs)
            assert "environment" not in kwargs and ("prompt" in kwargs) == with_prompt
            return " hello"

    def reward(prompts, completions, environments, environment, **kwargs):
        for prompt, instance, name in zip(prompts, environments, environment, strict=True):
            assert type(instance) is {"sum": ScoredSum, "greeting": Greeting}[name]
            assert prompt[-1]["content"].endswith("hello") == (name == "greeting")
        return answer_reward(completions)

    rows = [{"prompt": [{"role": "user", "content": q}]} if with_prompt else {} for q in QUESTIONS]
    rows = [row | {"environment": ["sum", "greeting"][i % 2]} for i, row in enumerate(rows)]

    def script(Trainer, Config):
        tokenizer = make_tokenizer()
        trainer = Trainer(
            model=speaking_model(tokenizer),
            reward_funcs=reward,
            args=Config(**agent_options(tmp_path, max_steps=3)),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            environment_factory={"sum": ScoredSum, "greeting": Greeting},
        )
        trainer.train()
        return trainer

    for trainer in drop_in(script):
        # The other's rows are left out of the reward that one class gives
        scores = trainer._logs["rewards"]["ScoredSum"]
        assert [math.isnan(s) for s in scores] == [p[-1]["content"].endswith("hello") for p in trainer._logs["prompt"]]


class Quiz(ScoredSum):
    """Makes up a task at every reset, as an environment that owns the data may."""

    made = 0

    def reset(self, **kwargs):
        super().reset()
        type(self).made += 1
        self.task = f"task {type(self).made}"
        return self.task


def test_environment_that_owns_the_data(tmp_path):
    def reward(prompts, completions, environments, **kwargs):
        for prompt, completion, environment in zip(prompts, completions, environments, strict=True):
            assert prompt == [{"role": "user", "content": environment.task}]
            assert environment.results == told(completion)
        return answer_reward(completions)

    groups = []

    def script(Trainer, Config):
        tokenizer = make_tokenizer()
        trainer = Trainer(
            model=speaking_model(tokenizer),
            reward_funcs=reward,
            args=Config(**agent_options(tmp_path)),
            processing_class=tokenizer,
            environment_factory=Quiz,
        )
        if Trainer is TRACETrainer:
            assign = trainer._assign_advantages
            trainer._assign_advantages = lambda trees: (groups.append(trees), assign(trees))
        trainer.train()
        return trainer

    _, ours = drop_in(script)
    # As many tasks are made up as a data set would be asked for
    assert ours._pool_size == ours.args.candidate_pool_size == 6
    assert len(groups) == 2
    for trees in groups:
        prompts = [tree.prompt[0]["content"] for tree in trees]
        assert len(set(prompts)) == len(prompts)
        for tree in trees:
            kinds = Counter(turn.leaf.kind for turn in tree.leaves())
            # Rollouts of one task, though every reset makes up another (`reward` compares)
            assert kinds["bare"] == tree.budget >= 2
            assert kinds["continuation"] + kinds["extra"] == 2 * tree.budget


# Rewards


@pytest.mark.parametrize("remove_unused_columns", [False, True])
def test_case_18_several_weighted_reward_functions(tmp_path, remove_unused_columns):
    calls = {"async": [], "column": [], "sometimes": []}

    async def async_reward(prompts, completions, **kwargs):
        calls["async"].extend(zip(prompts, completions, strict=True))
        return length_reward(completions)

    def column_reward(prompts, completions, number=None, **kwargs):
        assert (number is None) == remove_unused_columns
        calls["column"].extend(zip(prompts, completions, strict=True))
        if number is None:
            return [0.0] * len(prompts)
        # Row i gets the columns of row i
        assert prompts == [QUESTIONS[n] for n in number]
        return [float(n % 3) for n in number]

    def sometimes_reward(prompts, completions, **kwargs):
        calls["sometimes"].extend(zip(prompts, completions, strict=True))
        return [
            None if len(prompt) % 2 else len(completion) / 10
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def script(Trainer, Config):
        for rows in calls.values():
            rows.clear()
        trainer = Trainer(
            model=make_model(),
            reward_funcs=[async_reward, column_reward, sometimes_reward],
            args=Config(
                **options(tmp_path, reward_weights=[0.5, 1.0, 2.0], remove_unused_columns=remove_unused_columns)
            ),
            train_dataset=string_dataset(),
            processing_class=make_tokenizer(template=None),
        )
        trainer.train()
        # Each leaf is scored exactly once, by each function: 2 steps of 12
        logged = Counter(zip(trainer._logs["prompt"], trainer._logs["completion"], strict=True))
        assert sum(logged.values()) == 12
        for rows in calls.values():
            assert len(rows) == 24
            assert Counter(rows[12:]) == logged
        return trainer

    for trainer in drop_in(script):
        rewards, prompts = trainer._logs["rewards"], trainer._logs["prompt"]
        assert list(rewards) == ["async_reward", "column_reward", "sometimes_reward"]
        assert [math.isnan(r) for r in rewards["sometimes_reward"]] == [len(p) % 2 == 1 for p in prompts]
        total = [0.5 * a + c + (0.0 if math.isnan(s) else 2 * s) for a, c, s in zip(*rewards.values(), strict=True)]
        last = [entry for entry in trainer.state.log_history if "reward" in entry][-1]
        assert last["reward"] == pytest.approx(sum(total) / 12, abs=1e-6)


def test_case_55_columns_of_other_names_come_as_in_trl(tmp_path):
    """Columns named like what a reward function gets besides: the same ones are passed, dropped or hidden."""
    names = [
        "completion",
        "completion_ids",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environments",
        "step_rewards",
    ]

    def script(Trainer, Config):
        seen = []

        def reward(completions, **kwargs):
            seen.append({key: value == ["x"] * len(completions) for key, value in kwargs.items()})
            return length_reward(completions)

        dataset = string_dataset()
        for name in names:
            dataset = dataset.add_column(name, ["x"] * len(dataset))
        trainer = Trainer(
            model=make_model(),
            reward_funcs=reward,
            args=Config(**options(tmp_path)),
            train_dataset=dataset,
            processing_class=make_tokenizer(template=None),
        )
        trainer.train()
        trainer.seen = seen
        return trainer

    theirs, ours = drop_in(script)
    assert all(call == theirs.seen[0] for call in [*theirs.seen, *ours.seen])


def test_reward_functions_log_metrics_and_columns(tmp_path):
    def reward(prompts, completions, log_extra, log_metric, trainer_state, **kwargs):
        assert trainer_state.max_steps == 2
        log_extra("first", [completion[:1] for completion in completions])
        log_metric("characters", sum(map(len, completions)) / len(completions))
        return length_reward(completions)

    def script(Trainer, Config):
        trainer = Trainer(
            model=make_model(),
            reward_funcs=reward,
            args=Config(**options(tmp_path)),
            train_dataset=string_dataset(),
            processing_class=make_tokenizer(template=None),
        )
        trainer.train()
        return trainer

    for trainer in drop_in(script):
        assert list(trainer._logs["extra"]["first"]) == [text[:1] for text in trainer._logs["completion"]]
        assert all(entry["characters"] > 0 for entry in trainer.state.log_history if "loss" in entry)


@pytest.mark.parametrize(("conversational", "by_path"), [(False, False), (True, False), (False, True)])
def test_reward_model(tmp_path, conversational, by_path):
    torch.manual_seed(1)
    tokenizer = make_tokenizer()
    size = make_model().config.vocab_size
    judge = Qwen3ForSequenceClassification(
        Qwen3Config(
            vocab_size=size,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=16,
            num_labels=1,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    judge.config._name_or_path = "tiny/judge"
    judge.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")

    def script(Trainer, Config):
        trainer = Trainer(
            model=make_model(),
            reward_funcs=str(tmp_path / "judge") if by_path else judge,
            reward_processing_classes=None if by_path else make_tokenizer(),
            args=Config(**options(tmp_path)),
            train_dataset=chat_dataset() if conversational else string_dataset(),
            processing_class=make_tokenizer(),
        )
        trainer.train()
        return trainer

    for trainer in drop_in(script):
        logs = trainer._logs
        for prompt, completion, reward in zip(
            logs["prompt"], logs["completion"], logs["rewards"]["judge"], strict=True
        ):
            text = (
                tokenizer.apply_chat_template(prompt + completion, tokenize=False)
                if conversational
                else prompt + completion
            )
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                assert judge(input_ids=ids).logits[0, 0].item() == pytest.approx(reward, abs=1e-4)


# PEFT


def test_peft_by_configuration(tmp_path):
    peft = pytest.importorskip("peft")

    def script(Trainer, Config):
        model = make_model()
        before = {name: p.clone() for name, p in model.named_parameters()}
        trainer = Trainer(
            model=model,
            reward_funcs=length_reward,
            args=Config(**options(tmp_path)),
            train_dataset=string_dataset(),
            processing_class=make_tokenizer(template=None),
            peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        )
        trainer.train()
        after = {n.replace(".base_layer", ""): p for n, p in trainer.model.get_base_model().named_parameters()}
        assert all(torch.equal(after[name], value) for name, value in before.items())
        adapters = [p for n, p in trainer.model.named_parameters() if "lora_B" in n]
        assert adapters and any(p.abs().max() > 0 for p in adapters)
        trainer.save_model()
        return trainer

    for trainer in drop_in(script):
        assert (tmp_path / "run" / "adapter_model.safetensors").exists()
        peft.PeftModel.from_pretrained(make_model(), trainer.args.output_dir)


def test_peft_model_with_a_reference(tmp_path):
    peft = pytest.importorskip("peft")

    def script(Trainer, Config):
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        trainer = Trainer(
            model=peft.get_peft_model(make_model(), lora),
            reward_funcs=length_reward,
            args=Config(**options(tmp_path, beta=0.1)),
            train_dataset=string_dataset(),
            processing_class=make_tokenizer(template=None),
        )
        trainer.train()
        return trainer

    for trainer in drop_in(script):
        assert trainer.state.log_history[1]["kl"] > 0


# Evaluation


@pytest.mark.parametrize("several", [False, True])
def test_evaluation(tmp_path, several):
    def script(Trainer, Config):
        trainer = Trainer(
            model=make_model(),
            reward_funcs=length_reward,
            args=Config(
                **options(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, max_steps=2)
            ),
            train_dataset=string_dataset(),
            eval_dataset={"a": string_dataset(2), "b": string_dataset(3)} if several else string_dataset(3),
            processing_class=make_tokenizer(template=None),
        )
        trainer.train()
        return trainer

    for trainer in drop_in(script):
        entries = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
        assert len(entries) == (4 if several else 2)
        assert all(math.isfinite(entry["eval_reward"]) for entry in entries)
        expected = {"eval_a_loss", "eval_b_loss"} if several else {"eval_loss"}
        assert expected <= {key for entry in entries for key in entry}


def test_evaluate_by_hand(tmp_path):
    def script(Trainer, Config):
        trainer = Trainer(
            model=make_model(),
            reward_funcs=length_reward,
            args=Config(**options(tmp_path, per_device_eval_batch_size=4)),
            train_dataset=string_dataset(),
            eval_dataset=string_dataset(2),
            processing_class=make_tokenizer(template=None),
        )
        before = trainer.evaluate()
        trainer.train()
        after = trainer.evaluate(string_dataset(4))
        assert set(before) == set(after) - {"epoch"} | ({"epoch"} & set(before))
        assert math.isfinite(before["eval_reward"]) and math.isfinite(after["eval_reward"])
        trainer.state.log_history = [e for e in trainer.state.log_history if "eval_loss" not in e]
        return trainer

    drop_in(script)


# Data sets


@pytest.mark.parametrize("rows", [8, 3, 1])
def test_streamed_dataset(tmp_path, rows):
    def script(Trainer, Config):
        # TRL drops what does not fill a batch of its own, here one prompt
        trainer = Trainer(
            model=make_model(),
            reward_funcs=length_reward,
            args=Config(
                **options(
                    tmp_path,
                    gradient_accumulation_steps=1,
                    eval_strategy="steps",
                    eval_steps=2,
                    per_device_eval_batch_size=4,
                )
            ),
            train_dataset=string_dataset(rows).to_iterable_dataset(),
            eval_dataset=string_dataset(2).to_iterable_dataset(),
            processing_class=make_tokenizer(template=None),
        )
        trainer.train()
        return trainer

    for trainer in drop_in(script):
        assert [entry["step"] for entry in trainer.state.log_history if "eval_reward" in entry] == [2]


@pytest.mark.parametrize("rows", [3, 4, 5, 7])
def test_dataset_of_fewer_rows_than_the_pool(tmp_path, rows):
    seen = []

    def reward(prompts, completions, number, **kwargs):
        seen.extend(number)
        return length_reward(completions)

    def script(Trainer, Config):
        seen.clear()
        trainer = Trainer(
            model=make_model(),
            reward_funcs=reward,
            args=Config(**options(tmp_path)),
            train_dataset=string_dataset(rows),
            processing_class=make_tokenizer(template=None),
        )
        trainer.train()
        assert len(seen) == 24 and set(seen) <= set(range(rows))
        return trainer

    _, ours = drop_in(script)
    assert ours.args.candidate_pool_size == 6
    assert ours._pool_size == min(rows, 6)


def test_epochs_end(tmp_path):
    def script(Trainer, Config):
        trainer = Trainer(
            model=make_model(),
            reward_funcs=length_reward,
            args=Config(**options(tmp_path, max_steps=-1, num_train_epochs=2)),
            train_dataset=string_dataset(12),
            processing_class=make_tokenizer(template=None),
        )
        trainer.train()
        return trainer

    steps = {name: script(*pair).state.global_step for name, pair in NAMES.items()}
    # 12 prompts an epoch: TRL takes 3 a step, a pool holds twice as many
    assert steps == {"trl": 8, "trace": 4}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("iterations", [1, 2])
def test_every_prompt_is_offered_once_an_epoch(tmp_path, streamed, iterations):
    rows = string_dataset(12)
    run = TRACETrainer(
        model=make_model(),
        reward_funcs=length_reward,
        # Two pools of 6 an epoch, each trained for as many steps as there are iterations
        args=TRACEConfig(**options(tmp_path, num_iterations=iterations, max_steps=4 * iterations)),
        train_dataset=rows.to_iterable_dataset() if streamed else rows,
        processing_class=make_tokenizer(template=None),
    )
    offered = []
    generate = run._generate_and_score_completions
    run._generate_and_score_completions = lambda inputs: (
        offered.append([row["number"] for row in inputs]) or generate(inputs)
    )
    run.train()
    assert [len(pool) for pool in offered] == [6] * 4
    for epoch in (offered[:2], offered[2:]):
        assert sorted(number for pool in epoch for number in pool) == list(range(12))
    assert offered[:2] != offered[2:]  # shuffled anew


# Options of TRL

LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]

OPTIONS = {
    **{f"loss_type={name}": dict(loss_type=name) for name in LOSS_TYPES},
    "num_iterations": dict(num_iterations=2, max_steps=4, off_policy_mask_threshold=0.5),
    "gradient_accumulation_steps": dict(gradient_accumulation_steps=2),
    "short generations": dict(steps_per_generation=2, gradient_accumulation_steps=4),
    "long generations": dict(steps_per_generation=6, gradient_accumulation_steps=2, max_steps=4),
    "generation_batch_size": dict(generation_batch_size=24, gradient_accumulation_steps=1, max_steps=7),
    "beta": dict(beta=0.1, sync_ref_model=True, ref_model_sync_steps=1),
    "truncated": dict(mask_truncated_completions=True, max_completion_length=80),
    "scale of batch": dict(scale_rewards="batch", top_entropy_quantile=0.5),
    "no scale": dict(scale_rewards="none", importance_sampling_level="sequence"),
    "old name of no scale": dict(scale_rewards=False, use_adaptive_entropy=True, entropy_coef=0.01),
    "multi objective": dict(multi_objective_aggregation="normalize_then_sum"),
    "generation": dict(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1, pad_to_multiple_of=8),
    "generation_kwargs": dict(generation_kwargs={"renormalize_logits": True}, cast_lm_head_to_fp32=True),
    "data": dict(shuffle_dataset=False, dataloader_num_workers=1, disable_dropout=True),
    "memory": dict(gradient_checkpointing=True, bf16=True),
    "logs": dict(log_completions=True, log_unique_prompts=True, num_completions_to_print=1, logging_steps=2),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option(tmp_path, name):
    make_model().save_pretrained(tmp_path / "model")  # the reference of `beta` is loaded by name

    def second_reward(prompts, **kwargs):
        return [None if "red" in prompt else len(prompt) / 10 for prompt in prompts]

    def script(Trainer, Config):
        trainer = Trainer(
            model=AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
            reward_funcs=[length_reward, second_reward],
            args=Config(**options(tmp_path, **OPTIONS[name])),
            train_dataset=string_dataset(),
            processing_class=make_tokenizer(template=None),
        )
        trainer.train()
        return trainer

    drop_in(script)


@pytest.mark.parametrize(("per_generation", "accumulation"), [(2, 4), (6, 2), (1, 3)])
def test_generations_come_as_often_as_in_trl(tmp_path, per_generation, accumulation):
    counts = []

    def script(Trainer, Config):
        trainer = Trainer(
            model=make_model(),
            reward_funcs=length_reward,
            args=Config(
                **options(
                    tmp_path,
                    per_device_train_batch_size=4,
                    steps_per_generation=per_generation,
                    gradient_accumulation_steps=accumulation,
                    max_steps=3,
                )
            ),
            train_dataset=string_dataset(48),
            processing_class=make_tokenizer(template=None),
        )
        steps = []
        generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs: (
            steps.append((trainer.state.global_step, trainer._step)) or generate(inputs)
        )
        trainer.train()
        counts.append(steps)
        return trainer

    drop_in(script)
    assert counts[0] == counts[1]


def test_generations_of_one_optimizer_step_draw_differently(tmp_path, monkeypatch):
    seeds = []

    def recording(pool, args, seed, **kwargs):
        seeds.append(seed)
        return allocate(pool, args, seed, **kwargs)

    monkeypatch.setattr("trace_trl.trainer.allocate", recording)
    trainer = TRACETrainer(
        model=make_model(),
        reward_funcs=length_reward,
        args=TRACEConfig(**options(tmp_path, steps_per_generation=2, gradient_accumulation_steps=4)),
        train_dataset=string_dataset(),
        processing_class=make_tokenizer(template=None),
    )
    trainer.train()
    assert len(seeds) == len(set(seeds)) == 4
