"""The value head: which position it reads, what it learns from, and that the policy never notices it."""

import math
import os
import random
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig
from torch import nn
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

from leaves import elsewhere, scored
from toys import few_words, make_model, make_tokenizer, make_trainer, usual
from trace_trl import StepResult
from trace_trl.generation import is_random_in_training
from trace_trl.metrics import auroc, brier_score, expected_calibration_error
from trace_trl.predictor import AnchorBuffer, HiddenStates, PredictorTrainer, SuccessPredictor, decoder_of
from trace_trl.tree import RolloutTree


TOKENIZER = make_tokenizer()
LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)}
CHECKPOINTING = {"gradient_checkpointing": True}


def env_step(state, action, messages):
    """Three or four turns, as the prompt's row says, with answers of different lengths."""
    state["turn"] = state.get("turn", 0) + 1
    done = state["turn"] > state["number"] % 2 + 2
    return StepResult(
        observation=None if done else " yes" * (len(action) % 5 + 1),
        done=done,
        reward=float(len(action) % 2) if done else None,
    )


def rows(chat):
    texts = ["the lazy dog", "0", "what is the capital of france", "left or right"] * 2
    return [
        {"prompt": [{"role": "user", "content": text}] if chat else text, "number": i} for i, text in enumerate(texts)
    ]


def babble(seed=0):
    draw, words = random.Random(seed), usual(TOKENIZER, " red green blue yes no")
    return lambda request: [*draw.choices(words, k=draw.randint(1, 5)), TOKENIZER.eos_token_id]


def predicting_trainer(output_dir, chat=False, **kwargs):
    """Active allocation on both stages, over turns that a script says."""
    defaults = {
        "script": babble(),
        "env_step": env_step,
        "env_reset": dict,
        "reward_funcs": None,
        "per_device_train_batch_size": 12,
        "num_generations": 4,
        "max_completion_length": 200,
        "env_max_workers": 1,
    }
    return make_trainer(output_dir, dataset=Dataset.from_list(rows(chat)), **(defaults | kwargs))


def watched(trainer):
    trees, roll_out = [], trainer._roll_out_training

    def watching(inputs):
        grown, stats = roll_out(inputs)
        trees.extend(grown)
        return grown, stats

    trainer._roll_out_training = watching
    return trees


# Which position is read


class PositionHead(nn.Module):
    """Says what `number_positions` wrote."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1000.0))

    def forward(self, hidden_states):
        return hidden_states[..., 0] / self.scale


def number_positions(model):
    """Writes each position's index into the first number of its hidden state."""

    def write(module, args, output):
        states = output.last_hidden_state.clone()
        states[..., 0] = torch.arange(states.size(1), dtype=states.dtype)
        output.last_hidden_state = states
        return output

    return decoder_of(model).register_forward_hook(write)


@pytest.mark.parametrize("chat", [False, True], ids=["string", "chat"])
@pytest.mark.parametrize(
    "kwargs", [{}, LORA, CHECKPOINTING, LORA | CHECKPOINTING], ids=["plain", "lora", "checkpointing", "both"]
)
def test_case_20_the_last_token_before_the_turn(tmp_path, kwargs, chat):
    trainer = predicting_trainer(tmp_path, chat, max_rollouts_per_root=2, **kwargs)
    trainer.values.predictor_trainer.predictor = PositionHead()
    trees = watched(trainer)
    with torch.no_grad():
        number_positions(trainer.model)
        trainer.model.train()
        trainer._roll_out_training([dict(row) for row in rows(chat)[: trainer._pool_size]])
        candidates, _ = trainer._candidates([dict(row) for row in rows(chat)])
        trainer.values.predict_roots(candidates)
    lengths = [len(candidate.prompt_ids) for candidate in candidates]
    assert [round(1000 * candidate.value) for candidate in candidates] == [length - 1 for length in lengths]
    assert len({len(tree.prompt_ids) for tree in trees}) > 1
    anchors = [anchor for tree in trees for anchor in tree.anchors()]
    assert {anchor.depth for anchor in anchors} >= {0, 1, 2}
    for anchor in anchors:
        position = round(1000 * anchor.value)
        history = anchor.history_ids()
        assert position == len(history) - 1
        # One further stands the first token that was sampled behind it
        for child in anchor.children:
            assert child.history_ids()[: position + 2] == [*history, child.token_ids[0]]


@pytest.mark.parametrize(
    "kwargs", [{}, LORA, CHECKPOINTING, LORA | CHECKPOINTING], ids=["plain", "lora", "checkpointing", "both"]
)
def test_case_20_what_stands_there(tmp_path, kwargs):
    """The state of every anchor is that of its history alone, read without padding and with nothing behind it."""
    trainer = predicting_trainer(tmp_path, per_device_train_batch_size=6, gradient_accumulation_steps=2, **kwargs)
    trainer.model.train()
    kept = {}
    forget = trainer.values.forget
    trainer.values.forget = lambda: kept.update(trainer.values._features) or forget()
    trees = watched(trainer)
    trainer._roll_out_training([dict(row) for row in rows(False)[: trainer._pool_size]])
    anchors = [anchor for tree in trees for anchor in tree.anchors()]
    assert set(kept) == set(anchors) and not trainer.values._features
    model = trainer.model.eval()
    for anchor in anchors:
        ids = torch.tensor([anchor.history_ids()])
        with torch.no_grad():
            expected = model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
        torch.testing.assert_close(kept[anchor], expected, rtol=1e-5, atol=1e-5)
        assert not kept[anchor].requires_grad


VIRTUAL = [
    PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, task_type="CAUSAL_LM"),
    PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
]


@pytest.mark.parametrize("config", VIRTUAL, ids=lambda config: config.peft_type.value)
def test_case_47_positions_count_virtual_tokens(tmp_path, config):
    """4 virtual tokens before a prefix of 7: the state of its last token is read, the one that tells it from a prefix
    that differs there only."""
    trainer = predicting_trainer(tmp_path, peft_config=config)
    histories = [usual(TOKENIZER, f"what is the capital of france {end}") for end in ("red", "green")]
    read = trainer.values.hidden_states.read(
        [*histories, histories[0][:-1]], [[len(ids) - 1] for ids in histories] + [[0]]
    )
    assert not torch.allclose(read[0], read[1], atol=1e-4)
    model = trainer.model.eval()
    for ids, states in zip(histories, read, strict=False):
        with torch.no_grad():
            expected = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][:, -1]
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", VIRTUAL, ids=lambda config: config.peft_type.value)
def test_case_47_a_policy_with_virtual_tokens_trains(tmp_path, config):
    """Rollouts, values and losses of a policy with 4 virtual tokens; they take 4 places of the model's context."""
    trainer = make_trainer(
        tmp_path,
        peft_config=config,
        generation_batch_size=12,
        continuations_per_root=2,
        env_step=env_step,
        env_reset=dict,
        reward_funcs=None,
        dataset=Dataset.from_list(rows(False)),
        generation_kwargs=few_words("red green"),
        max_completion_length=40,
        max_steps=1,
    )
    assert trainer._context_length() == trainer.model.config.max_position_embeddings - 4
    trainer.train()
    assert trainer.state.global_step == 1


LM_HEAD = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])}


@pytest.mark.parametrize("kwargs", [{}, LORA, LM_HEAD], ids=["plain", "lora", "lm_head trained in full"])
def test_case_48_the_head_is_as_wide_as_the_last_hidden_state(tmp_path, kwargs):
    """OPT, whose last hidden state of 16 is projected from a `hidden_size` of 32: it trains, and the head reads 16."""
    config = OPTConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        word_embed_proj_dim=16,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
        bos_token_id=None,
        dropout=0.0,
    )
    trainer = make_trainer(
        tmp_path,
        model=OPTForCausalLM(config),
        dataset=Dataset.from_list(rows(False)),
        generation_batch_size=12,
        continuations_per_root=2,
        max_steps=1,
        **kwargs,
    )
    assert trainer.predictor.input_size == 16
    trainer.train()
    assert trainer.predictor_trainer.buffer.features.size(1) == 16


@pytest.mark.parametrize("lengths", [(1,), (5, 1, 3, 3, 9, 2, 7)])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_hidden_states_of_unequal_sequences(lengths, batch_size):
    model = make_model()
    reader = HiddenStates(lambda: model, TOKENIZER.pad_token_id, batch_size, nullcontext)
    draw = random.Random(0)
    sequences = [[draw.randrange(9, 300) for _ in range(length)] for length in lengths]
    positions = [sorted(draw.sample(range(length), k=min(length, 2))) for length in lengths]
    for sequence, wanted, states in zip(sequences, positions, reader.read(sequences, positions), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([sequence]), output_hidden_states=True).hidden_states[-1][0, wanted]
        torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
        assert states.dtype == torch.float32 and states.device.type == "cpu"
    assert reader.read([], []) == []


@pytest.mark.parametrize(
    ("tokens", "widths"),
    [
        (0, [(2, 9), (2, 5), (2, 3), (1, 1)]),  # rows and length of each pass
        (18, [(2, 9), (3, 5), (2, 2)]),
        (44, [(4, 9), (3, 3)]),
        (1000, [(7, 9)]),
    ],
)
def test_a_pass_takes_sequences_up_to_a_number_of_tokens(tokens, widths):
    model, seen = make_model(), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    reader = HiddenStates(lambda: model, TOKENIZER.pad_token_id, 2, nullcontext, tokens=tokens)
    sequences = [[7] * length for length in (5, 1, 3, 3, 9, 2, 7)]
    read = reader.read(sequences, [[0]] * 7)
    assert len(read) == 7 and sum(rows for rows, _ in seen) == 7
    assert seen == widths
    # Whatever a pass holds, a sequence's states are its own
    alone = HiddenStates(lambda: model, TOKENIZER.pad_token_id, 1, nullcontext).read(sequences, [[0]] * 7)
    torch.testing.assert_close(torch.stack(read), torch.stack(alone), rtol=1e-5, atol=1e-5)


def test_processes_run_equally_many_passes():
    model, passes = make_model(), []
    model.register_forward_hook(lambda module, args, output: passes.append(1))
    reader = HiddenStates(lambda: model, TOKENIZER.pad_token_id, 2, nullcontext, most=lambda count: count + 3)
    assert len(reader.read([[1, 2], [3], [4]], [[0], [0], [0]])) == 3
    assert len(passes) == 2 + 3
    assert reader.read([], []) == [] and len(passes) == 5 + 3


# States that sampling had


def generating_trainer(output_dir, **kwargs):
    """Samples its turns itself, each of which ends at the first word or two."""
    return predicting_trainer(
        output_dir,
        script=None,
        turn_stop_strings=["n"],
        **{"generation_kwargs": few_words("red green"), **kwargs},
    )


def counted_passes(trainer):
    passes, forward = [], trainer.values.hidden_states._forward
    trainer.values.hidden_states._forward = lambda *args: passes.append(1) or forward(*args)
    return passes


def roll_out(trainer):
    """A generation; its trees, and the states that values were predicted from."""
    trainer.model.train()
    kept, forget = {}, trainer.values.forget
    trainer.values.forget = lambda: kept.update(trainer.values._features) or forget()
    trees, _ = trainer._roll_out_training([dict(row) for row in rows(False)[: trainer._pool_size]])
    return trees, kept


@pytest.mark.parametrize(
    "kwargs",
    [{}, LORA, CHECKPOINTING, {"prefix_allocation": "random"}, {"root_allocation": "uniform"}],
    ids=["plain", "lora", "checkpointing", "learning only", "uniform roots"],
)
def test_states_that_sampling_had_are_not_read_again(tmp_path, kwargs):
    trainer = generating_trainer(tmp_path, **kwargs)
    passes = counted_passes(trainer)
    trees, kept = roll_out(trainer)
    # The prompts of the pool, before anything is sampled
    assert len(passes) == (1 if trainer.args.root_allocation == "active" else 0)
    anchors = [anchor for tree in trees for anchor in tree.anchors()]
    assert set(kept) >= set(anchors) and {anchor.depth for anchor in anchors} >= {0, 1, 2}
    model = trainer.model.eval()
    for anchor in anchors:
        with torch.no_grad():
            output = model(torch.tensor([anchor.history_ids()]), output_hidden_states=True)
            expected = output.hidden_states[-1][0, -1]
            value = trainer.predictor(expected)
        torch.testing.assert_close(kept[anchor], expected, rtol=1e-4, atol=1e-5)
        assert kept[anchor].dtype == torch.float32 and not kept[anchor].requires_grad
        # Not a view of the states of all positions
        assert kept[anchor].untyped_storage().nbytes() <= 4 * 32 * len(anchors)
        assert anchor.value == pytest.approx(value.item(), abs=1e-5)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"model": make_model(attention_dropout=0.5)},
        {"peft_config": LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj"])},
        {"neftune_noise_alpha": 5.0},
        {"generation_kwargs": few_words("red green") | {"prefill_chunk_size": 4}},
    ],
    ids=["attention dropout", "adapter dropout", "noise on embeddings", "prefill in chunks"],
)
def test_states_that_sampling_had_not_or_blurred_are_read(tmp_path, kwargs):
    trainer = generating_trainer(tmp_path, **kwargs)
    passes = counted_passes(trainer)
    trees, kept = roll_out(trainer)
    assert len(passes) > 1
    model = trainer.model.eval()
    for anchor in (anchor for tree in trees for anchor in tree.anchors()):
        with torch.no_grad():
            output = model(torch.tensor([anchor.history_ids()]), output_hidden_states=True)
        torch.testing.assert_close(kept[anchor], output.hidden_states[-1][0, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "random"),
    [
        ({"attention_dropout": 0.0, "router_jitter_noise": 0.0, "use_dropout": False}, False),
        ({"router_jitter_noise": 0.01}, True),
        ({"attn_config": {"attn_pdrop": 0.1}}, True),
        ({"moe_jitter_eps": 0.01}, True),
    ],
)
def test_what_is_random_in_training_is_found_in_the_configuration(options, random):
    model = make_model()
    model.config.update(options)
    assert is_random_in_training(model, SimpleNamespace(neftune_noise_alpha=None)) is random


def test_evaluation_keeps_no_states(tmp_path):
    trainer = generating_trainer(tmp_path)
    trainer.rollout([dict(row) for row in rows(False)])
    assert not trainer.values._features


# The policy does not notice


def hooks(model):
    return {name: len(module._forward_hooks) for name, module in model.named_modules()}


def test_the_hook_is_there_during_value_passes_only(tmp_path):
    trainer = predicting_trainer(tmp_path, max_steps=2)
    decoder, before = decoder_of(trainer.model), hooks(trainer.model)
    assert not decoder._forward_hooks
    seen = {"generation": [], "loss": [], "values": []}
    generate, compute_loss = trainer._engine.generate, trainer._compute_loss
    forward = trainer.values.hidden_states._forward

    def watch(stage, function):
        def watched_function(*args):
            seen[stage].append(len(decoder._forward_hooks))
            return function(*args)

        return watched_function

    trainer._engine.generate = watch("generation", generate)
    trainer._compute_loss = watch("loss", compute_loss)
    trainer.values.hidden_states._forward = watch("values", forward)
    trainer.train()
    assert set(seen["generation"]) == set(seen["loss"]) == {0}
    assert set(seen["values"]) == {1}
    assert hooks(trainer.model) == before


def test_the_hook_is_gone_after_an_error():
    model = make_model()
    model.train()
    reader = HiddenStates(lambda: model, TOKENIZER.pad_token_id, 2, nullcontext)
    with pytest.raises(IndexError):
        reader.read([[1, 2], [model.vocab_size + 5]], [[0], [0]])
    assert not decoder_of(model)._forward_hooks
    assert model.training and all(module.training for module in model.modules())


def random_states():
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


def test_global_random_states_are_left_alone():
    model = make_model(attention_dropout=0.5)
    model.train()
    before = random_states()
    predictor = SuccessPredictor(32, 16, seed=3)
    assert random_states() == before
    states = HiddenStates(lambda: model, TOKENIZER.pad_token_id, 2, nullcontext).read([[5, 6, 7], [8]], [[0, 2], [0]])
    assert random_states() == before
    trainer = PredictorTrainer(predictor, batch_size=2)
    trainer.observe(torch.cat(states), [0.0, 1.0, 0.5])
    trainer.update()
    assert random_states() == before
    # Weights come from the seed alone
    torch.manual_seed(9)
    again, other = SuccessPredictor(32, 16, seed=3), SuccessPredictor(32, 16, seed=4)
    torch.manual_seed(10)
    assert torch.equal(again.hidden.weight, SuccessPredictor(32, 16, seed=3).hidden.weight)
    assert not torch.equal(again.hidden.weight, other.hidden.weight)


def test_case_13_the_predictors_loss_reaches_no_policy_weight(tmp_path):
    trainer = predicting_trainer(tmp_path)
    trainer.model.train()
    trainer._roll_out_training([dict(row) for row in rows(False)[: trainer._pool_size]])
    for _ in range(3):
        trainer.predictor_trainer.update()
    assert not trainer.predictor_trainer.buffer.features.requires_grad
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert all(parameter.grad.any() for parameter in trainer.predictor.parameters())
    policy = {id(parameter) for parameter in trainer.model.parameters()}
    for group in trainer.predictor_trainer.optimizer.param_groups:
        assert not policy & {id(parameter) for parameter in group["params"]}


@pytest.mark.parametrize("kwargs", [{}, LORA | CHECKPOINTING], ids=["plain", "lora-checkpointing"])
def test_case_34_the_policy_trains_alike_with_and_without_a_predictor(tmp_path, kwargs):
    """With real sampling: not one random number is drawn for the predictor from where sampling draws its own."""
    weights, completions = [], []
    for train_predictor in (None, True):
        trainer = predicting_trainer(
            tmp_path,
            script=None,
            root_allocation="uniform",
            prefix_allocation="random",
            train_predictor=train_predictor,
            generation_kwargs=few_words(),
            max_completion_length=60,
            max_steps=3,
            model=make_model(attention_dropout=0.1),
            **kwargs,
        )
        trees = watched(trainer)
        trainer.train()
        weights.append(trainer.model.state_dict())
        completions.append([turn.token_ids for tree in trees for turn in tree.turns()])
        assert (trainer.predictor is not None) == bool(train_predictor)
    assert completions[0] == completions[1]
    assert all(torch.equal(weights[0][name], weight) for name, weight in weights[1].items())
    before = make_model(attention_dropout=0.1).state_dict()
    assert kwargs or not all(torch.equal(before[name], weight) for name, weight in weights[1].items())


# The head


@pytest.mark.parametrize("hidden_size", [0, 1, 64])
def test_untrained_it_says_one_half(hidden_size):
    states = torch.randn(7, 3, 12, generator=torch.Generator().manual_seed(0)) * 1e4
    values = SuccessPredictor(12, hidden_size)(states)
    assert values.shape == (7, 3)
    assert (values == 0.5).all()


def test_a_head_without_a_hidden_layer_is_linear():
    head = SuccessPredictor(12, 0)
    assert isinstance(head.hidden, nn.Identity) and head.output.in_features == 12
    nn.init.normal_(head.output.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    normed = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(head(x), torch.sigmoid(normed @ head.output.weight[0]))


def test_values_are_float32_for_half_precision_states():
    values = SuccessPredictor(8)(torch.ones(3, 8, dtype=torch.bfloat16))
    assert values.dtype == torch.float32


@pytest.mark.parametrize("hidden_size", [0, 32])
def test_saved_and_loaded_it_says_the_same(tmp_path, hidden_size):
    head = SuccessPredictor(16, hidden_size)
    trainer = PredictorTrainer(head, learning_rate=0.05)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(40, 16, generator=generator)
    trainer.observe(states, (states[:, 0] > 0).float().tolist())
    for _ in range(5):
        trainer.update()
    head.save_pretrained(str(tmp_path / "new" / "folder"))
    loaded = SuccessPredictor.from_pretrained(str(tmp_path / "new" / "folder"))
    assert torch.equal(loaded(states), head(states))
    assert head(states).std() > 0.05
    with pytest.raises(FileNotFoundError, match="holds no value_head_config.json"):
        SuccessPredictor.from_pretrained(str(tmp_path))


def test_training_goes_on_where_a_saved_state_left_it():
    def fresh():
        return PredictorTrainer(SuccessPredictor(8, 4), learning_rate=0.02, batch_size=3, buffer_size=10, seed=5)

    def show(trainer, seed):
        states = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
        trainer.observe(states, (states[:, 1] > 0).float().tolist())
        return trainer.update()

    whole, first, second = fresh(), fresh(), fresh()
    expected = [show(whole, seed) for seed in range(4)]
    found = [show(first, seed) for seed in range(2)]
    second.predictor.load_state_dict(first.predictor.state_dict())
    second.load_state_dict(first.state_dict())
    found += [show(second, seed) for seed in range(2, 4)]
    assert found == expected and len(set(found)) == 4
    for name, weight in whole.predictor.state_dict().items():
        assert torch.equal(second.predictor.state_dict()[name], weight)


def test_case_35_a_trainers_checkpoint_holds_the_head(tmp_path):
    trainer = predicting_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    trainer.save_model(str(tmp_path / "final"))
    for folder in ("checkpoint-2", "final"):
        loaded = SuccessPredictor.from_pretrained(os.path.join(tmp_path, folder))
        assert torch.equal(loaded(states), trainer.predictor(states))
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32).state_dict()
        assert all(torch.equal(plain[name], weight) for name, weight in trainer.model.state_dict().items())
    assert not (trainer.predictor(states) == 0.5).any()


# What it learns from


@given(
    sizes=st.lists(st.integers(0, 7), max_size=12),
    size=st.integers(1, 9),
)
@settings(deadline=None, database=None)
def test_the_buffer_keeps_the_last_generation_and_the_latest_before(sizes, size):
    buffer, shown, number = AnchorBuffer(size), [], 0
    for count in sizes:
        new = list(range(number, number + count))
        number += count
        buffer.extend(torch.tensor([[float(n), -float(n)] for n in new]).reshape(-1, 2), torch.tensor(new) / 1000)
        # The last generation is kept whole, whatever the size
        shown = (shown + new)[-max(size, count) :]
        assert len(buffer) == len(shown)
        assert buffer.features.tolist() == [[float(n), -float(n)] for n in shown]
        assert buffer.targets.tolist() == pytest.approx([n / 1000 for n in shown])


def test_mini_batches_are_of_the_asked_size_and_from_the_whole_buffer():
    head = SuccessPredictor(4, 0)
    trainer = PredictorTrainer(head, batch_size=3, passes=50, seed=1)
    seen = []
    head.register_forward_pre_hook(lambda module, args: seen.append(args[0][:, 0].tolist()))
    trainer.observe(torch.arange(8.0).repeat_interleave(4).reshape(8, 4), [0.5] * 8)
    trainer.update()
    assert len(seen) == 50 and all(len(batch) == len(set(batch)) == 3 for batch in seen)
    assert {value for batch in seen for value in batch} == set(map(float, range(8)))


def test_the_loss_is_the_mean_squared_error_to_the_targets():
    trainer = PredictorTrainer(SuccessPredictor(4, 8), passes=1)
    trainer.observe(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), [0.0, 1.0, 0.5, 0.25])
    assert trainer.update() == pytest.approx((0.25 + 0.25 + 0.0 + 0.0625) / 4)


def test_without_anchors_nothing_is_trained():
    trainer = PredictorTrainer(SuccessPredictor(4))
    assert trainer.update() is None
    trainer.observe(torch.empty(0, 4), [])
    assert trainer.update() is None


@pytest.mark.parametrize("anchors, taken", [(1, 1), (20, 3), (64, 8), (255, 32), (256, 32), (4096, 32)])
def test_few_anchors_are_not_learned_by_heart(anchors, taken):
    head = SuccessPredictor(4, 0)
    trainer = PredictorTrainer(head, batch_size=256, passes=32)
    passes = []
    head.register_forward_pre_hook(lambda module, args: passes.append(1))
    trainer.observe(torch.zeros(anchors, 4), [0.5] * anchors)
    trainer.update()
    assert len(passes) == taken == min(32, math.ceil(anchors / 8))


def test_a_process_without_anchors_takes_part_in_averaging():
    averaged, asked = [], []
    trainer = PredictorTrainer(
        SuccessPredictor(4),
        passes=9,
        reduce=lambda gradient: averaged.append(gradient.clone()) or gradient,
        most=lambda passes: asked.append(passes) or 2,  # another process takes two
    )
    assert trainer.update() is None
    assert asked == [0]
    # Two averages of the gradient, and one of the loss, to which it has nothing to add
    weights = sum(parameter.numel() for parameter in trainer.predictor.parameters())
    assert [len(gradient) for gradient in averaged] == [weights, weights, 2]
    assert not any(gradient.any() for gradient in averaged)


def test_the_loss_is_the_mean_over_processes_with_anchors():
    """This process has a loss of 0.25 in each of two mini-batches, another had a sum of 1 in two, a third none."""
    told = []

    def reduce(tensor):
        if len(tensor) > 2:
            return tensor
        told.append(tensor.tolist())
        return (tensor + torch.tensor([1.0, 2.0])) / 3

    trainer = PredictorTrainer(
        SuccessPredictor(4, 8), passes=2, learning_rate=0.0, reduce=reduce, most=lambda passes: 2
    )
    trainer.observe(torch.ones(2, 4), [0.0, 1.0])
    assert trainer.update() == pytest.approx((0.25 + 0.25 + 1.0) / 4)
    assert told == [[0.5, 2.0]]


def test_targets_are_the_backed_up_success_rates_of_all_visited_anchors(tmp_path):
    trainer = predicting_trainer(tmp_path)
    trainer.model.train()
    trees = watched(trainer)
    trainer._roll_out_training([dict(row) for row in rows(False)[: trainer._pool_size]])
    rates = []
    for tree in trees:
        for anchor in tree.anchors():
            outcomes = [leaf.leaf.reward >= 0.5 for leaf in anchor.leaves()]
            rates.append(sum(outcomes) / len(outcomes))
    assert sorted(trainer.predictor_trainer.buffer.targets[:, 0].tolist()) == pytest.approx(sorted(rates))
    assert any(anchor.depth == 2 for tree in trees for anchor in tree.anchors())


@pytest.mark.parametrize("threshold", [0.7, 0.9])
def test_a_reward_at_the_threshold_is_a_success(tmp_path, threshold):
    def reward(prompts, **kwargs):
        return [threshold for _ in prompts]

    trainer = predicting_trainer(
        tmp_path,
        env_step=lambda s, a, m: StepResult(done=True),
        reward_funcs=[reward],
        success_threshold=threshold,
    )
    trainer.model.train()
    trees = watched(trainer)
    trainer._roll_out_training([dict(row) for row in rows(False)[: trainer._pool_size]])
    assert all(leaf.leaf.success for tree in trees for leaf in tree.leaves())
    assert set(trainer.predictor_trainer.buffer.targets[:, 0].tolist()) == {1.0}


def test_outcomes_on_other_processes_are_judged_by_the_threshold(tmp_path, monkeypatch):
    """Four rollouts of one prompt, two of them elsewhere, all failures: nothing is left of their variance."""
    trainer = predicting_trainer(tmp_path, success_threshold=0.9)
    tree = RolloutTree.from_prompt("prompt", [1])
    for _ in range(2):
        tree.add_turn(tree.root, [1], leaf=scored(0.6, threshold=0.9))

    def share(trees, *process):
        trees[0].remote = [elsewhere([0.6], 0.0, threshold=0.9)] * 2

    monkeypatch.setattr("trace_trl.trainer.share_roots", share)
    trainer._share_roots([tree])
    assert tree.root.target == 0.0 and tree.root.target_variance == 0.0


def test_an_anchor_without_a_scored_leaf_teaches_nothing(tmp_path):
    unscored = []

    def reward(prompts, completions, **kwargs):
        unscored.append(prompts[0])
        return [None if prompt == unscored[0] else 1.0 for prompt in prompts]

    trainer = predicting_trainer(tmp_path, env_step=lambda s, a, m: StepResult(done=True), reward_funcs=[reward])
    trainer.model.train()
    trees = watched(trainer)
    trainer._roll_out_training([dict(row) for row in rows(False)[: trainer._pool_size]])
    scored = [tree for tree in trees if tree.prompt != unscored[0]]
    assert 0 < len(scored) < len(trees)
    assert trainer.predictor_trainer.buffer.targets[:, 0].tolist() == [1.0] * len(scored)


def test_logged_scores_are_of_values_given_before_the_outcomes(tmp_path):
    trainer = predicting_trainer(tmp_path, max_steps=3)
    trees, before, updates = watched(trainer), {}, []
    score, update = trainer._engine.score, trainer.predictor_trainer.update

    def note_roots(leaves):
        before.update({tree: (tree.root.value, len(updates)) for tree, _ in leaves})
        score(leaves)

    trainer._engine.score = note_roots
    trainer.predictor_trainer.update = lambda: updates.append(update()) or updates[-1]
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "predictor/brier" in entry]
    assert len(steps) == len(updates) == 3
    for number, entry in enumerate(steps):
        generation = [tree for tree in trees if before[tree][1] == number]
        pairs = []
        for tree in generation:
            assert tree.root.value == before[tree][0]
            for leaf in tree.leaves():
                if leaf.leaf.kind == "bare":
                    pairs += [(node.depth, node.value, leaf.leaf.success) for node in (tree.root, *leaf.path()[:-1])]
        depths, values, outcomes = zip(*pairs, strict=True)
        assert entry["predictor/brier"] == pytest.approx(brier_score(values, outcomes))
        assert entry["predictor/ece"] == pytest.approx(expected_calibration_error(values, outcomes))
        assert entry["predictor/auroc"] == pytest.approx(auroc(values, outcomes))
        roots = [(value, outcome) for depth, value, outcome in pairs if depth == 0]
        assert entry["predictor/brier_depth_0"] == pytest.approx(brier_score(*zip(*roots, strict=True)))
        assert set(depths) >= {0, 1, 2}
    # Untrained in the first generation, and not in the third
    assert steps[0]["predictor/brier"] == 0.25 != steps[2]["predictor/brier"]
