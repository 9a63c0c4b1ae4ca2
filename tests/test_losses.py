"""From trees through rows to TRL's loss: the right numbers on the right tokens, and nothing on the others."""

import asyncio
import dataclasses
import json
import math
import random
import re

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig

from toys import (
    CounterEnvironment,
    ScriptedGenerator,
    call,
    few_words,
    length_reward,
    make_config,
    make_model,
    make_tokenizer,
    make_trainer,
    string_dataset,
    usual,
)
from trace_trl import StepResult, TRACETrainer
from trace_trl.engine import RootPlan
from trace_trl.generation import Sample
from trace_trl.tree import RolloutTree


TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_id
LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
OBSERVATION = " red yes no"  # three tokens
STD = 3**-0.5 + 1e-4  # of two equal rewards and a third that differs by 1, as all estimators divide by it


def env_step(state, action, messages):
    """A turn `end R` ends the episode with reward R (none for `end`); any other is answered."""
    words = action.split()
    if words[:1] != ["end"]:
        return StepResult(observation=OBSERVATION)
    return StepResult(done=True, reward=float(words[1]) if len(words) > 1 else None)


# The example of the algorithm's page below "go": bare rollouts a1 a2 a3 (R=0) and b1 b2 (R=1), and a continuation c3
# (R=1) after a2. Below "hi" three rollouts without a branch.
BRANCHED = {
    "go": ["a1", "b1"],
    f"goa1{OBSERVATION}": ["a2"],
    f"goa1{OBSERVATION}a2{OBSERVATION}": ["end 0", "end 1"],
    f"gob1{OBSERVATION}": ["end 1"],
    "hi": ["end 1", "xx1", "end 0"],
    f"hixx1{OBSERVATION}": ["end 0"],
}
# (prompt, bare rollouts, continuations)
PLANS = (("go", 2, 1), ("hi", 3, 0))
VALUES = {"a1": 0.2, "a2": 0.9, "b1": 0.9}  # so that the continuation starts after a2


class Scripted:
    """A trainer whose policy says what a script of `history: [turn, turn, ..]` says.

    A turn that ends with `|` is cut there: no end token follows, as none does where `~` stands for a stop string.
    `plans` tells how often each prompt is rolled out.
    """

    def __init__(self, output_dir, script=BRANCHED, plans=PLANS, tokenizer=TOKENIZER, mode="train", **kwargs):
        self.script = {history: list(turns) for history, turns in script.items()}
        self.plans = plans
        self.tokenizer = tokenizer
        leaves = sum(bare + continuations for _, bare, continuations in plans)
        trainer_kwargs = {key: kwargs.pop(key) for key in ("env_step", "reward_funcs") if key in kwargs}
        defaults = {
            "per_device_train_batch_size": leaves,
            "num_generations": 2,
            "max_rollouts_per_root": 8,
            "continuations_per_root": 1,
            "max_completion_length": 64,
            "train_predictor": False,
        }
        folder = output_dir / "model"  # TRL loads the reference model of `beta` by name
        make_model().save_pretrained(folder)
        self.trainer = TRACETrainer(
            model=str(folder),
            args=make_config(output_dir, **(defaults | kwargs)),
            train_dataset=Dataset.from_dict({"prompt": [prompt for prompt, _, _ in plans] * 4}),
            processing_class=tokenizer,
            **({"env_step": env_step} | trainer_kwargs),
        )
        self.trainer.current_gradient_accumulation_steps = self.trainer.args.gradient_accumulation_steps
        self.trainer._engine.generate = ScriptedGenerator(self.say, [EOS])
        self.trainer._engine.predict = self.predict
        self.trainer._roll_out_training = self.roll_out
        self.trainer.model.train()

    def say(self, request):
        text = self.script[self.tokenizer.decode(request.context, skip_special_tokens=True)].pop(0)
        ids = usual(self.tokenizer, text.rstrip("|~"))
        if text[-1:] in ("|", "~"):
            return Sample(ids, "length" if text[-1] == "|" else "stop")
        return [*ids, EOS]

    def predict(self, leaves):
        for turn in {turn for leaf in leaves for turn in leaf.path()}:
            turn.value = VALUES.get(turn.text, 0.5)

    def roll_out(self, inputs):
        engine, plans = self.trainer._engine, []
        rows = [({"prompt": prompt}, prompt) for prompt, _, _ in self.plans]
        for (prompt, bare, continuations), episode in zip(self.plans, engine.reset(rows), strict=True):
            ids = usual(self.tokenizer, prompt)
            tree = RolloutTree.from_prompt(prompt, ids, {"prompt": prompt}, index=len(plans), budget=bare)
            plans.append(RootPlan(tree, episode, bare, continuations))
        stats = engine.run(plans, seed=0)
        self.trees = [plan.tree for plan in plans]
        self.trainer._share_roots(self.trees)
        return self.trees, stats

    def batch(self):
        return self.trainer._generate_and_score_completions([{"prompt": prompt} for prompt, _, _ in self.plans])


def loss_mask(batch):
    return batch["completion_mask"] * batch["tool_mask"]


def spelled(*turns):
    """Ids of a completion: turns that end by themselves, an observation after each but the last; and who spoke."""
    ids, sampled = [], []
    for number, text in enumerate(turns):
        cut = text.endswith("|")
        turn = usual(TOKENIZER, text.removesuffix("|")) + ([] if cut else [EOS])
        observation = usual(TOKENIZER, OBSERVATION) if number < len(turns) - 1 else []
        ids += turn + observation
        sampled += [number + 1] * len(turn) + [0] * len(observation)
    return ids, sampled


ROWS = [("a1", "a2", "end 0"), ("b1", "end 1"), ("a1", "a2", "end 1"), ("end 1",), ("xx1", "end 0"), ("end 0",)]
GROUP = [
    [-1 / 6 / STD, -1 / 6 / STD, -0.5 / (0.5**0.5 + 1e-4)],
    [1 / 3 / STD, 1 / 3 / STD],
    [-1 / 6 / STD, -1 / 6 / STD, 0.5 / (0.5**0.5 + 1e-4)],
    [2 / 3 / STD],
    [-1 / 3 / STD, -1 / 3 / STD],
    [-1 / 3 / STD],
]
NONE = [[-1 / 6, -1 / 6, -0.5], [1 / 3, 1 / 3], [-1 / 6, -1 / 6, 0.5], [2 / 3], [-1 / 3, -1 / 3], [-1 / 3]]
WEIGHTS = {
    "once": [[1, 1, 1], [1, 1], [0, 0, 1], [1], [1, 1], [1]],
    "per_leaf": [[1, 1, 1], [1, 1], [1, 1, 1], [1], [1, 1], [1]],
    # three leaves: a path of chance 1/2 weighs 1.5, one that branches into two 0.75
    "on_policy": [[0.75] * 3, [1.5] * 2, [0.75] * 3, [1.0], [1.0, 1.0], [1.0]],
}


def by_token(per_turn, rows=ROWS):
    """Numbers of turns, spread over their tokens and padded; 0 on observations."""
    pairs = zip(per_turn, rows, strict=True)
    spread = [[0.0 if turn == 0 else float(row[turn - 1]) for turn in spelled(*turns)[1]] for row, turns in pairs]
    width = max(map(len, spread))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in spread])


# The method's example, from sampled turns to tensors


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("weighting", WEIGHTS)
def test_the_methods_example_end_to_end(tmp_path, scale, weighting):
    scripted = Scripted(tmp_path, scale_rewards=scale, turn_weighting=weighting)
    batch = scripted.batch()
    go, hi = scripted.trees
    values = {turn.text: turn.target for turn in go.root.turns()}
    assert values[""] == pytest.approx(2 / 3) and values["a2"] == values["a1"] == 0.5 and values["b1"] == 1.0
    assert [(leaf.leaf.kind, leaf.leaf.reward) for leaf in go.leaves()] == [
        ("bare", 0.0),
        ("bare", 1.0),
        ("continuation", 1.0),
    ]
    assert batch["completion_ids"].shape == batch["advantages"].shape
    for row, turns in enumerate(ROWS):
        ids, _ = spelled(*turns)
        assert batch["completion_ids"][row, : len(ids)].tolist() == ids
        assert batch["completion_mask"][row].tolist() == [1] * len(ids) + [0] * (
            batch["completion_ids"].size(1) - len(ids)
        )
        prompt = usual(TOKENIZER, "go" if row < 3 else "hi")
        assert batch["prompt_ids"][row, -len(prompt) :].tolist() == prompt
    weights = by_token(WEIGHTS[weighting])
    assert loss_mask(batch).tolist() == (weights > 0).int().tolist()
    expected = by_token(GROUP if scale == "group" else NONE) * weights
    torch.testing.assert_close(batch["advantages"], expected, rtol=1e-6, atol=1e-7)
    assert batch["num_items_in_batch"] == (weights > 0).sum()


def test_the_methods_numbers():
    """The decimals of the algorithm's page are those the rows are tested against."""
    assert [GROUP[0][0], GROUP[0][2], GROUP[1][0], GROUP[2][2]] == pytest.approx(
        [-0.288625, -0.707007, 0.577250, 0.707007], abs=1e-6
    )


# The loss, by hand from log-probs of single rows


def log_probs(model, prompt, turns):
    """Log-prob of every token of a completion, from a row without padding."""
    prompt_ids, (ids, _) = usual(TOKENIZER, prompt), spelled(*turns)
    logits = model(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]


def hand_loss(model, loss_type, advantages, weights, old=None, rows=ROWS, max_completion_length=64):
    """PPO's clipped loss of every trained token, then what each loss type divides by."""
    sums, counts = [], []
    for row, turns in enumerate(rows):
        speakers = spelled(*turns)[1]
        log_prob = log_probs(model, "go" if row < 3 else "hi", turns)
        reference = log_prob.detach() if old is None else old[row, : len(speakers)]
        total, count = torch.zeros(()), 0
        for token, speaker in enumerate(speakers):
            if speaker == 0 or weights[row][speaker - 1] == 0:
                continue
            advantage = advantages[row][speaker - 1] * weights[row][speaker - 1]
            ratio = torch.exp(log_prob[token] - reference[token])
            total = total - torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            count += 1
        sums.append(total)
        counts.append(count)
    if loss_type == "grpo":
        return sum(total / max(count, 1) for total, count in zip(sums, counts, strict=True)) / len(rows)
    divisor = len(rows) * max_completion_length if loss_type == "dr_grpo" else max(sum(counts), 1)
    return sum(sums) / divisor


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_loss(trainer, batch, expected):
    """Equal in value and in every gradient."""
    loss = trainer._compute_loss(trainer.model, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    found, wanted = gradients(trainer.model, loss), gradients(trainer.model, expected)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)
    return wanted


@pytest.mark.parametrize("off_policy", [False, True], ids=["on", "off"])
@pytest.mark.parametrize("weighting", WEIGHTS)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
def test_loss_of_a_branched_batch_by_hand(tmp_path, loss_type, weighting, off_policy):
    scripted = Scripted(tmp_path, loss_type=loss_type, turn_weighting=weighting)
    batch, old = scripted.batch(), None
    model = scripted.trainer.model
    if off_policy:
        # As after an update: ratios from 0.6 to 1.6, so that both clips bind
        noise = torch.rand(batch["completion_ids"].shape, generator=torch.Generator().manual_seed(1)) - 0.5
        old = torch.zeros_like(noise)
        with torch.no_grad():
            for row, turns in enumerate(ROWS):
                log_prob = log_probs(model, "go" if row < 3 else "hi", turns)
                old[row, : len(log_prob)] = log_prob
        batch["old_per_token_logps"] = old = old + noise
    expected = hand_loss(model, loss_type, GROUP, WEIGHTS[weighting], old)
    wanted = assert_same_loss(scripted.trainer, batch, expected)
    assert max(gradient.abs().max() for gradient in wanted.values()) > 1e-2


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_loss_of_a_branched_batch_over_accumulated_steps(tmp_path, loss_type):
    """The parts of a generation batch add up to its loss, whatever order TRL shuffles its rows into."""
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "num_generations": 3}
    scripted = Scripted(tmp_path, loss_type=loss_type, max_steps=1, **sizes)
    trainer, losses = scripted.trainer, []
    compute_loss = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: losses.append(compute_loss(model, inputs)) or losses[-1]
    expected = hand_loss(trainer.model, loss_type, GROUP, WEIGHTS["once"]).item()
    trainer.train()
    assert len(losses) == 2 and losses[0].item() != pytest.approx(losses[1].item(), abs=1e-3)
    assert sum(loss.item() for loss in losses) == pytest.approx(expected, rel=1e-4)


# Masks


def test_case_03_an_end_token_that_is_the_padding_token(tmp_path):
    def step(state, action, messages):
        return StepResult(observation=OBSERVATION) if action == "a" else StepResult(done=True, reward=float(action))

    script = {"go": ["a", "a"], f"goa{OBSERVATION}": ["1", "a"], f"goa{OBSERVATION}a{OBSERVATION}": ["0"]}
    tokenizer = make_tokenizer(pad_token="<|im_end|>")
    scripted = Scripted(
        tmp_path, script, [("go", 2, 0)], tokenizer, env_step=step, continuations_per_root=0, root_allocation="uniform"
    )
    batch = scripted.batch()
    a, one, zero = (usual(tokenizer, text)[0] for text in ("a", "1", "0"))
    observed = usual(tokenizer, OBSERVATION)
    assert tokenizer.pad_token_id == EOS and len(observed) == 3
    assert batch["completion_ids"].tolist() == [
        [a, EOS, *observed, one, EOS, EOS, EOS, EOS, EOS, EOS],
        [a, EOS, *observed, a, EOS, *observed, zero, EOS],
    ]
    assert batch["completion_mask"].tolist() == [[1] * 7 + [0] * 5, [1] * 12]
    trained = [[1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]]
    assert loss_mask(batch).tolist() == trained
    assert batch["num_items_in_batch"] == 10

    attention = []
    hook = scripted.trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: attention.append(kwargs["attention_mask"]), with_kwargs=True
    )
    _, gradient = loss_and_gradient_by_token(scripted.trainer, batch)
    hook.remove()
    assert attention[-1].tolist() == [
        [1] * len(usual(tokenizer, "go")) + row for row in batch["completion_mask"].tolist()
    ]
    # The turns' own end tokens are trained, padding is not, though both are the same token
    assert (gradient > 0).int().tolist() == trained


def loss_and_gradient_by_token(trainer, batch):
    """The loss, and the size of its gradient with respect to the hidden state that each completion token is predicted
    from: whatever reads a token's log-prob or the entropy in its place goes through that hidden state."""
    trainer.args.skip_zero_advantage_rows = False  # else states would be those of the other rows only
    states = []
    hook = trainer.model.get_decoder().register_forward_hook(lambda module, args, output: states.append(output[0]))
    loss = trainer._compute_loss(trainer.model, batch)
    hook.remove()
    states[-1].retain_grad()
    trainer.model.zero_grad()
    loss.backward()
    gradient = states[-1].grad.abs().sum(-1)
    start = batch["prompt_ids"].size(1) - 1
    # What comes before the completion, and the last token, predict nothing
    assert not gradient[:, :start].any() and not gradient[:, -1].any()
    return loss.item(), gradient[:, start:-1]


def test_case_13_these_are_all_loss_types():
    (field,) = (field for field in dataclasses.fields(GRPOConfig) if field.name == "loss_type")
    sentence = field.metadata["help"].split("Supported values are ")[1].split(".")[0]
    assert set(re.findall(r"'(\w+)'", sentence)) == set(LOSS_TYPES)


@pytest.mark.parametrize("extra", [{}, {"beta": 0.2, "entropy_coef": 0.1}], ids=["policy", "kl-entropy"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_case_13_no_gradient_through_observations(tmp_path, loss_type, extra):
    scripted = Scripted(tmp_path, loss_type=loss_type, **extra)
    trainer, batch = scripted.trainer, scripted.batch()
    mask = loss_mask(batch)
    noise = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    if "beta" in extra:
        batch["ref_per_token_logps"] = batch["ref_per_token_logps"] + noise
    for trainer.importance_sampling_level in ("token", "sequence"):
        loss, gradient = loss_and_gradient_by_token(trainer, batch)
        assert (gradient > 0).int().tolist() == mask.int().tolist()
        # What stands as an advantage where nothing is trained is never read
        changed = batch | {"advantages": torch.where(mask > 0, batch["advantages"], 1e4 * noise)}
        assert changed["advantages"].abs().max() > 1e3
        other_loss, other_gradient = loss_and_gradient_by_token(trainer, changed)
        assert loss == other_loss
        assert gradient.tolist() == other_gradient.tolist()


@pytest.mark.parametrize("loss_type", ["grpo", "cispo"])
@pytest.mark.parametrize("extra", [{"top_entropy_quantile": 0.5}, {"off_policy_mask_threshold": 0.1}])
def test_case_13_token_selection_sees_trained_tokens_only(tmp_path, loss_type, extra):
    scripted = Scripted(tmp_path, loss_type=loss_type, **extra)
    batch = scripted.batch()
    trained = loss_mask(batch).bool()
    if "off_policy_mask_threshold" in extra:
        # The policy is far off on observed tokens, which says nothing about its own
        batch["old_per_token_logps"] = torch.zeros(trained.shape)
        with torch.no_grad():
            for row, turns in enumerate(ROWS):
                log_prob = log_probs(scripted.trainer.model, "go" if row < 3 else "hi", turns)
                batch["old_per_token_logps"][row, : len(log_prob)] = log_prob
        batch["old_per_token_logps"][~trained] += 50
    _, gradient = loss_and_gradient_by_token(scripted.trainer, batch)
    assert not gradient[~trained].any()
    share = (gradient[trained] > 0).float().mean().item()
    assert share == (1.0 if "off_policy_mask_threshold" in extra else pytest.approx(0.5, abs=0.02))


# Truncated rows


def last_number(completions, **kwargs):
    """The last digit of a completion, for leaves that no environment could judge."""
    return [float(re.findall(r"\d", completion)[-1]) for completion in completions]


def silent_step(state, action, messages):
    done = action.startswith("end")
    return StepResult(done=done, observation=None if done else OBSERVATION)


# The same trees and rewards, but three of six leaves are cut: a3, and two below "hi"
TRUNCATED = BRANCHED | {
    f"goa1{OBSERVATION}a2{OBSERVATION}": ["end 0|", "end 1"],
    "hi": ["end 1|", "xx1", "end 0|"],
}
TRUNCATED_ROWS = [("a1", "a2", "end 0|"), ("b1", "end 1"), ROWS[2], ("end 1|",), ROWS[4], ("end 0|",)]
# The turns that the cut leaf shares are trained in the row of the other leaf below them
TRUNCATED_WEIGHTS = {
    "once": [[0, 0, 0], [1, 1], [1, 1, 1], [0], [1, 1], [0]],
    "per_leaf": [[0, 0, 0], [1, 1], [1, 1, 1], [0], [1, 1], [0]],
    "on_policy": [[0, 0, 0], [1.5] * 2, [0.75] * 3, [0], [1, 1], [0]],
}


def truncated(tmp_path, script=TRUNCATED, plans=PLANS, **kwargs):
    kwargs = {"env_step": silent_step, "reward_funcs": [last_number], "mask_truncated_completions": True} | kwargs
    return Scripted(tmp_path, script, plans, **kwargs)


@pytest.mark.parametrize("weighting", WEIGHTS)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
def test_case_14_half_of_the_rows_masked(tmp_path, loss_type, weighting):
    scripted = truncated(tmp_path, loss_type=loss_type, turn_weighting=weighting)
    batch = scripted.batch()
    weights = TRUNCATED_WEIGHTS[weighting]
    assert batch["num_items_in_batch"] == loss_mask(batch).sum() == (by_token(weights, TRUNCATED_ROWS) > 0).sum()
    expected = hand_loss(scripted.trainer.model, loss_type, GROUP, weights, rows=TRUNCATED_ROWS)
    assert_same_loss(scripted.trainer, batch, expected)


@pytest.mark.parametrize("extra", [{}, {"beta": 0.2, "entropy_coef": 0.1}], ids=["policy", "kl-entropy"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_case_14_all_rows_masked(tmp_path, loss_type, extra):
    script = {"go": ["1|", "0 0|"], "hi": ["0|", "1 1 1|"]}
    scripted = truncated(tmp_path, script, [("go", 2, 0), ("hi", 2, 0)], loss_type=loss_type, **extra)
    batch = scripted.batch()
    assert batch["num_items_in_batch"] == loss_mask(batch).sum() == 0
    if "beta" in extra:
        batch["ref_per_token_logps"] = batch["ref_per_token_logps"] + 0.5
    for scripted.trainer.importance_sampling_level in ("token", "sequence"):
        loss, gradient = loss_and_gradient_by_token(scripted.trainer, batch)
        assert loss == 0.0
        assert not gradient.any()
        assert not any(parameter.grad.any() for parameter in scripted.trainer.model.parameters())


@pytest.mark.parametrize("weighting", WEIGHTS)
def test_case_15_truncated_rows_are_zero_throughout(tmp_path, weighting):
    batch = truncated(tmp_path, turn_weighting=weighting).batch()
    for row in (0, 3, 5):
        for key in ("completion_mask", "tool_mask", "advantages"):
            assert not (batch[key][row, : len(spelled(*TRUNCATED_ROWS[row])[0])]).any(), (row, key)
    weights = by_token(TRUNCATED_WEIGHTS[weighting], TRUNCATED_ROWS)
    assert loss_mask(batch).tolist() == (weights > 0).int().tolist()
    # Their rewards count among their siblings' all the same, as in TRL
    torch.testing.assert_close(batch["advantages"], by_token(GROUP, TRUNCATED_ROWS) * weights, rtol=1e-6, atol=1e-7)


def test_case_15_without_the_option_truncated_rows_are_trained(tmp_path):
    batch = truncated(tmp_path, mask_truncated_completions=False).batch()
    weights = by_token(WEIGHTS["once"], TRUNCATED_ROWS)
    assert loss_mask(batch).tolist() == (weights > 0).int().tolist()
    torch.testing.assert_close(batch["advantages"], by_token(GROUP, TRUNCATED_ROWS) * weights, rtol=1e-6, atol=1e-7)


def test_case_15_what_counts_as_truncated(tmp_path):
    """A limit on turns cuts an episode whose last token is an end token; the environment ends one without any."""
    script = {"go": ["xx1", "end 1~", "end 0", "end 1|"], f"goxx1{OBSERVATION}": ["xx5"]}
    scripted = truncated(tmp_path, script, [("go", 4, 0)], max_turns=2)
    batch = scripted.batch()
    assert [leaf.leaf.truncated for leaf in scripted.trees[0].leaves()] == [True, False, False, True]
    assert (loss_mask(batch).sum(dim=1) > 0).tolist() == [False, True, True, False]
    tokens = len(usual(TOKENIZER, "end 1")) + len(usual(TOKENIZER, "end 0")) + 1
    assert batch["num_items_in_batch"] == loss_mask(batch).sum() == tokens
    assert (batch["advantages"].abs().sum(dim=1) > 0).tolist() == [False, True, True, False]


# Rewards


@pytest.mark.parametrize("turns", [(1, 1, 1, 1), (1, 2, 3, 4)])
def test_case_16_rewards_of_four_leaves(tmp_path, turns):
    rewards, rows, script = (3, 0, 0, 1), [], {"go": []}
    for name, (reward, count) in enumerate(zip(rewards, turns, strict=True)):
        row = [f"{name}x{turn}" for turn in range(count - 1)] + [f"end {reward}"]
        history = "go"
        for turn in row:
            script.setdefault(history, []).append(turn)
            history += turn + OBSERVATION
        rows.append(row)
    scripted = Scripted(tmp_path, script, [("go", 4, 0)])
    advantages = scripted.batch()["advantages"]
    std = 2**0.5 + 1e-4
    leaves = [2 / std, -1 / std, -1 / std, 0.0]
    expected = by_token([[leaf] * len(row) for leaf, row in zip(leaves, rows, strict=True)], rows)
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)
    assert advantages[:, 0].sum().item() == pytest.approx(0.0, abs=1e-6)


NAN = float("nan")


def unscored(values):
    """A reward function that gives each leaf, by the name of its last turn, one of `values`."""

    def reward(completions, **kwargs):
        return [values[re.findall(r"end \d", completion)[-1]] for completion in completions]

    return reward


@pytest.mark.parametrize("with_function", [False, True], ids=["env_step alone", "with a reward function"])
def test_a_rollout_that_a_limit_ends_without_a_reward_has_failed(tmp_path, with_function):
    """Else a policy that rambles would never be told; where a reward function can tell it, its answer stands."""

    def ends(state, action, messages):
        return StepResult(done=True, reward=None if action == "end 2" else 1.0)

    kwargs = {"reward_funcs": [unscored({"end 1": 0.5, "end 2": 0.5, "end 3": 0.5})]} if with_function else {}
    scripted = Scripted(
        tmp_path, {"go": ["end 1", "end 2", "end 3|", "end 3"]}, [("go", 4, 0)], env_step=ends, **kwargs
    )
    scripted.batch()
    rewards = [leaf.leaf.reward for leaf in scripted.trees[0].leaves()]
    assert [leaf.leaf.truncated for leaf in scripted.trees[0].leaves()] == [False, False, True, False]
    expected = [1.5, 0.5, 0.5, 1.5] if with_function else [1.0, NAN, 0.0, 1.0]
    assert rewards == pytest.approx(expected, nan_ok=True)


FOUR = {"go": ["end 1", "end 2", "end 3", "end 4"]}


@pytest.mark.parametrize("nothing", [None, NAN], ids=["None", "nan"])
def test_case_17_one_function_without_an_answer(tmp_path, nothing):
    first = unscored({"end 1": 1.0, "end 2": nothing, "end 3": 0.0, "end 4": 1.0})
    second = unscored({"end 1": 1.0, "end 2": 2.0, "end 3": nothing, "end 4": nothing})
    kwargs = {"env_step": silent_step, "reward_funcs": [first, second], "reward_weights": [2.0, 0.5]}
    scripted = Scripted(tmp_path, FOUR, [("go", 4, 0)], **kwargs)
    batch = scripted.batch()
    leaves = [leaf.leaf for leaf in scripted.trees[0].leaves()]
    # What is there is summed: 2 + 0.5, 1, 0, 2
    assert [leaf.reward for leaf in leaves] == [2.5, 1.0, 0.0, 2.0]
    assert [leaf.success for leaf in leaves] == [True, True, False, True]
    mean, std = 1.375, (sum((r - 1.375) ** 2 for r in (2.5, 1.0, 0.0, 2.0)) / 3) ** 0.5 + 1e-4
    expected = by_token([[(r - mean) / std] for r in (2.5, 1.0, 0.0, 2.0)], [(turn,) for turn in FOUR["go"]])
    torch.testing.assert_close(batch["advantages"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("nothing", [None, NAN], ids=["None", "nan"])
def test_case_17_a_row_without_any_reward(tmp_path, caplog, nothing, scale, aggregation):
    first = unscored({"end 1": 1.0, "end 2": nothing, "end 3": 0.0, "end 4": 0.0})
    second = unscored({"end 1": None, "end 2": NAN, "end 3": None, "end 4": nothing})
    kwargs = {"scale_rewards": scale, "multi_objective_aggregation": aggregation}
    scripted = Scripted(tmp_path, FOUR, [("go", 4, 0)], env_step=silent_step, reward_funcs=[first, second], **kwargs)
    batch = scripted.batch()
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "trace_trl.rewards"]
    # The first words are TRL's, which its own tests look for
    assert warning.startswith("All reward functions returned None for the following kwargs:")
    assert "got no reward" in warning and "'end 2'" in warning and "'go'" in warning
    unscored_leaf = scripted.trees[0].leaves()[1].leaf
    assert unscored_leaf.success is None
    assert scripted.trees[0].root.target == pytest.approx(1 / 3)  # neither a success nor a failure
    differences = torch.tensor([2 / 3, 0.0, -1 / 3, -1 / 3])
    if aggregation == "normalize_then_sum":
        differences /= STD
        scale_by = 1 / (3**-0.5 / STD + 1e-4)
    else:
        scale_by = 1.0 if scale == "none" else 1 / STD
    torch.testing.assert_close(batch["advantages"][:, 0], differences * scale_by, rtol=1e-5, atol=1e-6)
    assert torch.isfinite(batch["advantages"]).all()
    assert not batch["advantages"][1].any()
    _, gradient = loss_and_gradient_by_token(scripted.trainer, batch)
    assert not gradient[1].any() and gradient[[0, 2, 3]][:, 0].all()


def test_case_17_no_row_with_a_reward(tmp_path):
    """Weights do not move, and what is logged has no NaN in it."""
    kwargs = {"env_step": silent_step, "reward_funcs": [unscored(dict.fromkeys(FOUR["go"]))], "max_steps": 1}
    scripted = Scripted(tmp_path, FOUR, [("go", 4, 0)], train_predictor=True, **kwargs)
    trainer = scripted.trainer
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train()
    assert all(torch.equal(before[name], weight) for name, weight in trainer.model.state_dict().items())
    assert all(leaf.leaf.success is None for leaf in scripted.trees[0].leaves())
    assert scripted.trees[0].root.target is None
    step = trainer.state.log_history[0]
    assert step["reward"] is None and "success_rate" not in step and step["effective_ratio"] == 0.0
    json.dumps(trainer.state.log_history, allow_nan=False)


@pytest.mark.parametrize("weighting", ["once", "per_leaf"])
def test_case_17_in_a_tree(tmp_path, weighting):
    """An unscored rollout is not continued; an unscored continuation leaves the tail beside it its advantage."""
    script = {
        "go": ["a1", "b1", "end 9"],
        f"goa1{OBSERVATION}": ["end 8"],
        f"gob1{OBSERVATION}": ["end 1", "end 9", "end 0", "end 0"],
        "hi": ["c1", "end 0"],
        f"hic1{OBSERVATION}": ["end 1", "end 9"],
    }
    values = {"end 0": 0.0, "end 1": 1.0, "end 8": None, "end 9": NAN}
    kwargs = {"env_step": silent_step, "reward_funcs": [unscored(values)], "scale_rewards": "none"}
    kwargs |= {"num_generations": 3, "continuations_per_root": 2, "turn_weighting": weighting}
    scripted = Scripted(tmp_path, script, [("go", 3, 3), ("hi", 2, 1)], **kwargs)
    batch = scripted.batch()
    go, hi = scripted.trees
    branched = [turn for tree in (go, hi) for turn in tree.turns() if len(turn.children) > 1]
    assert [turn.text for turn in branched] == ["b1", "c1"]
    assert go.root.target == pytest.approx(1 / 3) and hi.root.target == 0.5
    rows = [("a1", "end 8"), ("b1", "end 1"), ("end 9",), ("b1", "end 9"), ("b1", "end 0"), ("b1", "end 0")]
    rows += [("c1", "end 1"), ("end 0",), ("c1", "end 9")]
    # Of three scored leaves, all below b1: nothing to compare b1 with, but its tails with each other
    expected = [[0, 0], [0, 2 / 3], [0], [0, 0], [0, -1 / 3], [0, -1 / 3], [0.5, 0.5], [-0.5], [0, 0]]
    torch.testing.assert_close(batch["advantages"], by_token(expected, rows), rtol=1e-6, atol=1e-6)
    # A turn that a scored leaf shares is not trained in the row of an unscored one
    shared = int(weighting == "per_leaf")
    trained = [[1, 1], [1, 1], [1], [0, 1], [shared, 1], [shared, 1], [1, 1], [1], [0, 1]]
    assert loss_mask(batch).tolist() == by_token(trained, rows).int().tolist()


# Every kind of reward function


def test_case_18_weighted_and_async_functions_and_columns(tmp_path):
    numbers = []

    def from_column(prompts, completions, number, **kwargs):
        assert [prompt == "what is red" for prompt in prompts] == [n == 0 for n in number]
        numbers.extend(number)
        return [n / 10 + len(completion) for n, completion in zip(number, completions, strict=True)]

    async def from_ids(completion_ids, trainer_state, **kwargs):
        await asyncio.sleep(0)
        return [float(len(ids)) for ids in completion_ids]

    def some(completions, **kwargs):
        return [1.0 if len(set(completion)) % 2 else None for completion in completions]

    trainer = make_trainer(
        tmp_path,
        dataset=string_dataset(),
        reward_funcs=[from_column, from_ids, some],
        reward_weights=[0.5, -0.25, 3.0],
        continuations_per_root=0,
    )
    trees = watched(trainer)
    trainer.train()
    assert trees and len(numbers) == sum(len(tree.leaves()) for tree in trees)
    for tree in trees:
        for turn in tree.leaves():
            text = TOKENIZER.decode(turn.token_ids, skip_special_tokens=True)
            expected = [
                tree.example["number"] / 10 + len(text),
                float(len(turn.token_ids)),
                1.0 if len(set(text)) % 2 else NAN,
            ]
            assert turn.leaf.rewards == pytest.approx(expected, nan_ok=True)
            total = 0.5 * expected[0] - 0.25 * expected[1] + (0.0 if math.isnan(expected[2]) else 3.0)
            assert turn.leaf.reward == pytest.approx(total)


@pytest.mark.parametrize("remove", [False, True])
def test_case_18_columns_that_are_removed_as_in_trl(tmp_path, remove):
    seen = []

    def reward(prompts, completions, number=None, **kwargs):
        seen.append(number)
        return length_reward(completions)

    kwargs = {"remove_unused_columns": remove, "reward_funcs": reward, "dataset": string_dataset()}
    make_trainer(tmp_path, continuations_per_root=0, max_steps=1, **kwargs).train()
    assert len(seen) == 1
    assert (seen[0] is None) == remove


def watched(trainer):
    """A list that all trees of a training run are added to."""
    trees, roll_out = [], trainer._roll_out_training

    def watching(inputs):
        grown, stats = roll_out(inputs)
        trees.extend(grown)
        return grown, stats

    trainer._roll_out_training = watching
    return trees


def random_calls(seed):
    """Turns that add a random number once or twice, or answer."""
    random_ = random.Random(seed)
    add = [call("add", amount=amount) for amount in (1, 2, 5)]
    turns = [add[0], add[1], add[0] + add[2], "the answer is 3", "yes"]
    return lambda request: [*usual(TOKENIZER, random_.choice(turns)), EOS]


@pytest.mark.parametrize("continuations", [0, 2])
def test_case_18_each_leaf_is_scored_once_with_its_own_environment(tmp_path, continuations):
    rows = []

    def reward(prompts, completions, environments, number, **kwargs):
        for prompt, completion, environment, n in zip(prompts, completions, environments, number, strict=True):
            calls = [c["function"]["arguments"]["amount"] for m in completion for c in m.get("tool_calls") or []]
            results = [message for message in completion if message["role"] == "tool"]
            # Calls of a last turn that no room was left for are not run
            assert environment.count == sum(calls[: len(results)])
            assert prompt[-1]["content"].endswith(f" Task {n}.")
            rows.append(completion)
        return [environment.count % 2 for environment in environments]

    trainer = make_trainer(
        tmp_path,
        script=random_calls(seed=3),
        model=make_model(max_position_embeddings=2048),
        reward_funcs=[reward],
        environment_factory=CounterEnvironment.fresh(),
        continuations_per_root=continuations,
        per_device_train_batch_size=12,
        max_completion_length=300,
        max_steps=1,
    )
    trees = watched(trainer)
    trainer.train()
    leaves = [turn for tree in trees for turn in tree.leaves()]
    assert len(leaves) == len(rows) == 12
    kinds = {turn.leaf.kind for turn in leaves}
    assert kinds == ({"bare"} if not continuations else {"bare", "continuation"}) or kinds == {
        "bare",
        "continuation",
        "extra",
    }
    for turn in leaves:
        # `get_reward` is count / 10
        odd, tenth = turn.leaf.rewards
        assert odd == round(10 * tenth) % 2


@pytest.mark.parametrize("allocation", ["active", "dapo"])
def test_case_18_no_leaf_is_scored_twice(tmp_path, allocation):
    """Not with expansions, and not where prompts whose rollouts agree are replaced; those are scored as well."""
    scored = []

    def reward(completions, **kwargs):
        scored.extend(completions)
        return [float(len(completion) % 2) for completion in completions]

    def step(state, action, messages):
        return StepResult(observation=None if len(action) % 5 == 0 else OBSERVATION, done=len(action) % 5 == 0)

    trainer = make_trainer(
        tmp_path,
        dataset=string_dataset(),
        reward_funcs=[reward],
        env_step=step,
        root_allocation=allocation,
        continuations_per_root=2,
        max_turn_length=4,
        max_completion_length=40,
        per_device_train_batch_size=12,
        generation_kwargs=few_words(),
    )
    trees = watched(trainer)
    trainer.train()
    assert sum(len(tree.leaves()) for tree in trees) == 24
    discarded = sum(entry.get("rollout/discarded_leaves", 0) for entry in trainer.state.log_history)
    assert len(scored) == 24 + discarded
    assert (discarded > 0) == (allocation == "dapo")


def test_case_19_a_zero_length_completion(tmp_path):
    """It has a reward that its siblings are compared with, and no token; theirs stay where they are."""
    rows = [("end 3",), ("end 0",), ("xx1", "end 1")]
    script = {"go": ["end 3", "|", "end 0", "xx1"], f"goxx1{OBSERVATION}": ["end 1"]}
    values = {"end 3": 3.0, "end 0": 0.0, "end 1": 1.0}

    def reward(completions, **kwargs):
        return [values[completion[-5:]] if completion else 0.0 for completion in completions]

    scripted = Scripted(
        tmp_path, script, [("go", 4, 0)], env_step=silent_step, reward_funcs=[reward], loss_type="grpo"
    )
    batch = scripted.batch()
    assert [leaf.leaf.reward for leaf in scripted.trees[0].leaves()] == [3.0, 0.0, 0.0, 1.0]
    std = 2**0.5 + 1e-4
    expected = by_token([[2 / std], [-1 / std], [0.0, 0.0]], rows)
    siblings = [0, 2, 3]
    torch.testing.assert_close(batch["advantages"][siblings], expected, rtol=1e-6, atol=1e-6)
    for row, turns in zip(siblings, rows, strict=True):
        ids, speakers = spelled(*turns)
        assert batch["completion_ids"][row, : len(ids)].tolist() == ids
        assert loss_mask(batch)[row, : len(ids)].tolist() == [int(speaker > 0) for speaker in speakers]
    assert not loss_mask(batch)[1].any() and not batch["advantages"][1].any()
    assert batch["num_items_in_batch"] == sum(speaker > 0 for turns in rows for speaker in spelled(*turns)[1])
    # A row of no tokens is still one of the rows that `grpo` takes the mean over
    by_hand = hand_loss(scripted.trainer.model, "grpo", [[2 / std], [-1 / std], [0, 0]], [[1], [1], [1, 1]], rows=rows)
    assert_same_loss(scripted.trainer, batch, by_hand * 3 / 4)
