"""From trees through rows to TRL's loss: the right numbers on the right tokens, and nothing on the others."""

import dataclasses
import re

import pytest
import torch
from datasets import Dataset
from toys import ScriptedGenerator, make_config, make_model, make_tokenizer, usual
from trl import GRPOConfig

from trace_trl import StepResult, TRACEConfig, TRACETrainer
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

    A turn that ends with `|` is cut there: no end token follows. `plans` tells how often each prompt is rolled out.
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
        ids = usual(self.tokenizer, text.removesuffix("|"))
        return Sample(ids, "length") if text.endswith("|") else [*ids, EOS]

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
    spread = [[0.0 if t == 0 else float(row[t - 1]) for t in spelled(*turns)[1]] for row, turns in zip(per_turn, rows)]
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
        assert batch["completion_mask"][row].tolist() == [1] * len(ids) + [0] * (batch["completion_ids"].size(1) - len(ids))
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
