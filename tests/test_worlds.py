"""The worlds of the benchmark, their policies, and runs in them."""

import dataclasses
import functools
import itertools
import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import equal_cost  # noqa: E402
import predictor_limits  # noqa: E402
from worlds import WORLDS  # noqa: E402
from worlds.policy import RightPaths, load, make_tokenizer, success_chances  # noqa: E402
from worlds.tool_loop import WorldEnvironment, make_chat_tokenizer, turn_starts  # noqa: E402
from worlds.training import ExactValues, branching_depths, train  # noqa: E402

from trace_trl import allocation  # noqa: E402
from trace_trl.tree import Leaf, RolloutTree  # noqa: E402


@pytest.fixture(params=sorted(WORLDS))
def world(request):
    return WORLDS[request.param]()


@pytest.fixture(scope="module")
def policies():
    return {name: load(make()) for name, make in WORLDS.items()}


def test_right_turns_succeed_and_any_wrong_one_fails(world):
    draw = random.Random(0)
    for row in world.rows(300, "right turns"):
        turns = world.right_turns(row)
        observations, reward = world.play(row, turns)
        assert reward == 1.0 and len(observations) == len(turns)
        wrong = list(turns)
        place = draw.randrange(len(turns))
        words = [word for word in world.words if word[0] == turns[place].split()[-1][0]]
        wrong[place] = " ".join([*turns[place].split()[:-1], draw.choice([w for w in words if w not in turns[place]])])
        if world.policy == "hops" and place < len(turns) - 1:
            # The answer is right all the same if it is known by heart: what a wrong search spoils is the way to it
            wrong = wrong[: place + 1] + ["search[ n00"] * len(turns)
        assert world.play(row, wrong)[1] == 0.0, (row, wrong)


def test_nonsense_ends_a_hops_episode_after_its_searches():
    world = WORLDS["hops"]()
    row = next(row for row in world.rows(50, "nonsense") if len(row["relations"]) == 2)
    observations, reward = world.play(row, ["of of", "search[ boss", "]", "answer["])
    assert observations == ["nothing", "nothing", ""] and reward == 0.0


def test_rows_are_reproducible_and_of_every_level(world):
    rows = world.rows(400, "a")
    assert rows == type(world)().rows(500, "a")[:400] and rows != world.rows(400, "b")
    levels = {world.level(row) for row in rows}
    assert levels == ({2, 3, 4, 5, 6, 7} if world.policy == "chain" else {1, 2, 3, 4})
    # Rows go through `datasets` and come back the same
    assert all(json.loads(json.dumps(row)) == row for row in rows[:5])


def test_contrast_is_scarce_where_most_tasks_are_hard(policies):
    """By the exact chances: fewer than a quarter as many prompts have both outcomes in eight rollouts."""
    mixed = {}
    for kind in ("chain", "scarce_chain"):
        world = WORLDS[kind]()
        model, tokenizer = policies[kind]
        rows = world.rows(1000, "contrast")
        chances = [values[0] for values in success_chances(model, RightPaths(world, tokenizer), rows)]
        mixed[kind] = sum(1 - v**8 - (1 - v) ** 8 for v in chances) / len(chances)
    assert 0.05 < mixed["scarce_chain"] < mixed["chain"] / 4


def test_demonstrations_are_as_often_right_as_the_demonstrator_knows():
    world = WORLDS["chain"]()
    draw = random.Random(1)
    easiest, hardest = world.symbols[-1], world.symbols[0]
    for symbol, known in ((easiest, 0.95), (hardest, 0.05)):
        row = {"prompt": "", "symbols": [symbol]}
        right = sum(world.demonstration(row, draw) == world.right_turns(row) for _ in range(4000)) / 4000
        # One in five mistakes is a guess, which is right by chance once in 24
        assert right == pytest.approx(known + (1 - known) * 0.2 / 24, abs=0.03)


def test_text_is_cut_into_the_worlds_words(world):
    tokenizer = make_tokenizer(world)
    for row in world.rows(50, "text"):
        ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == row["prompt"]
        turn = tokenizer(f"{world.right_turns(row)[0]} {world.end}")["input_ids"]
        assert len(turn) == world.turn_tokens and turn[-1] == tokenizer.eos_token_id
    longest = max(len(RightPaths(world, tokenizer)(row)[0]) for row in world.rows(300, "text"))
    prompt = max(len(row["prompt"].split()) for row in world.rows(300, "text"))
    assert longest <= prompt + world.completion_tokens


@pytest.mark.parametrize("name", equal_cost.ORDINARY)
def test_warm_started_policies_differ_in_what_they_know(name, policies):
    """What the comparison rests on: success from near 0 to near 1, and a few megabytes at most."""
    world = WORLDS[name]()
    model, tokenizer = policies[name]
    rows = world.rows(300, "warm start")
    chances = [row[0] for row in success_chances(model, RightPaths(world, tokenizer), rows)]
    assert 0.1 < sum(chances) / len(chances) < 0.3
    assert min(chances) < 0.01 and max(chances) > 0.6
    assert 100_000 < model.num_parameters() < 1_000_000
    assert sum(file.stat().st_size for file in world.warm_start.iterdir()) < 3_000_000


def test_success_chances_against_products_of_next_token_chances(world, policies):
    model, tokenizer = policies[world.name]
    rows = world.rows(12, "chances")
    paths = RightPaths(world, tokenizer)
    for row, chances in zip(rows, success_chances(model, paths, rows), strict=True):
        ids, turns = tokenizer(row["prompt"])["input_ids"], world.right_turns(row)
        observations, _ = world.play(row, turns)
        steps = []
        for turn, observation in zip(turns, observations, strict=True):
            chance = 1.0
            for token in tokenizer(f"{turn} {world.end}")["input_ids"]:
                with torch.no_grad():
                    chance *= float(torch.softmax(model(torch.tensor([ids])).logits[0, -1], dim=-1)[token])
                ids = [*ids, token]
            ids = ids + tokenizer(observation)["input_ids"]
            steps.append(chance)
        assert chances == pytest.approx([math.prod(steps[depth:]) for depth in range(len(steps))], rel=1e-3)


def test_exact_values_are_0_behind_a_wrong_turn(policies):
    world = WORLDS["chain"]()
    model, tokenizer = policies["chain"]
    paths = RightPaths(world, tokenizer)
    row = next(row for row in world.rows(50, "values") if len(row["symbols"]) == 3)
    ids, ends, turn_ends = paths(row)
    tree = RolloutTree.from_prompt(row["prompt"], ids[: ends[0]], row, index=0, budget=2)
    wrong_id = next(i for i in tokenizer("a00 a01")["input_ids"] if i != ids[ends[0]])

    def grow(first):
        node = tree.root
        for depth, turn in enumerate([first, ids[ends[1] : turn_ends[1]], ids[ends[2] : turn_ends[2]]]):
            observed = ids[turn_ends[depth] : ends[depth + 1]] if depth < 2 else []
            node = tree.add_turn(node, list(turn), observation_ids=observed)
        node.leaf = Leaf()
        return node

    right = grow(ids[ends[0] : turn_ends[0]])
    wrong = grow([wrong_id, tokenizer.eos_token_id])
    values = ExactValues(paths)
    values.model = model
    values.plant([tree], 0)
    values.predict_prefixes([right, wrong])
    ((_, after_one, after_two),) = success_chances(model, paths, [row])
    assert [node.value for node in right.path()[:-1]] == [after_one, after_two]
    assert [node.value for node in wrong.path()[:-1]] == [0.0, 0.0]


def branches(method):
    return equal_cost.METHODS[method].get("continuations_per_root", 2) > 0


def tiny(world="chain"):
    return dataclasses.replace(equal_cost.BUDGETS[world], leaves=24, steps=2, tokens=10)


def records_of(method, world="chain", prepared=None, **options):
    records = []
    train(world, {**equal_cost.METHODS[method], **options}, 0, 1e-3, tiny(world), records.append, prepared)
    return records


@pytest.mark.parametrize("method", [m for m in equal_cost.METHODS if m not in ("grpo", "grpo_trl", "grpo_tools")])
def test_every_method_trains_and_tells(method):
    first, *steps = records_of(method)
    assert [record["step"] for record in (first, *steps)] == [0, 1, 2]
    assert 0 < first["success"] < 0.3
    for before, after in zip([first, *steps], steps, strict=False):
        assert after["leaves"] == before["leaves"] + 24 + after["discarded_leaves"]
        assert after["tokens"] == before["tokens"] + after["sampled_tokens"] > before["tokens"]
        assert after["success"] != before["success"]
        assert sum(after["budget_by_depth"].values()) == 24 and after["seconds"] > 0
        assert after["mixed_anchors"] <= after["branched_anchors"]
        # 24 leaves of 2 to 7 turns of 2 tokens, less what branches share, and what was discarded
        assert (after["discarded_leaves"] > 0) == (method == "dapo")
        assert 24 * 2 <= after["sampled_tokens"] <= (24 + after["discarded_leaves"]) * 7 * 2
        if not branches(method):
            assert after["sampled_tokens"] >= (24 + after["discarded_leaves"]) * 2 * 2
    if method in ("treepo", "uniform", "root_only", "prefix_only", "trace", "trace_oracle", "trace_constant"):
        assert steps[0]["budget_by_depth"]["0"] == 8 and len(steps[0]["budget_by_depth"]) > 1


@pytest.mark.parametrize("learned", [True, False])
def test_certainties_reach_both_allocations(monkeypatch, learned):
    given = {"allocate_roots": [], "allocate_prefixes": []}
    for name, seen in given.items():
        solve = getattr(allocation, name)

        def watched(*args, solve=solve, seen=seen):
            seen.append(list(args[4]))
            return solve(*args)

        monkeypatch.setattr(allocation, name, watched)
    records_of("trace", predictor_certainty=learned)
    for calls in given.values():
        # Untrained, the head says 0.5 of everything
        assert set(calls[0]) == {0.5 if learned else 1.0}
        assert len(set(calls[-1])) > 1 if learned else set(calls[-1]) == {1.0}


@pytest.mark.parametrize("world", equal_cost.ORDINARY)
def test_grpo_is_trls(world):
    """TRL's unmodified trainer, with a rollout loop of its own, and TRACETrainer's GRPO setting: the same numbers."""
    ours, theirs = records_of("grpo", world), records_of("grpo_trl", world)
    keys = ("success", "tokens", "effective_ratio", "mixed_anchors", "train_success")
    assert [[r.get(k) for k in keys] for r in ours] == [[r.get(k) for k in keys] for r in theirs]


def test_conversations_are_rendered_and_parsed_in_the_worlds_own_words(world, policies):
    plain = policies[world.name][1]
    tokenizer = make_chat_tokenizer(world, plain)
    tools = [WorldEnvironment(world).act]
    for row in world.rows(20, "conversations"):
        observations, _ = world.play(row, world.right_turns(row))
        messages, text = [{"role": "user", "content": row["prompt"]}], row["prompt"]
        for turn, observation in zip(world.right_turns(row), observations, strict=True):
            prefix = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
            assert prefix == plain(text)["input_ids"]
            ids = plain(f"{turn} {world.end}")["input_ids"]
            message = tokenizer.parse_response(ids, prefix=prefix, tools=tools)
            if turn.startswith("answer"):
                assert "tool_calls" not in message and message["content"] == f"{turn} {world.end}"
            else:
                (call,) = message["tool_calls"]
                assert call["function"] == {"name": "act", "arguments": {"words": turn}}
            messages += [message, {"role": "tool", "name": "act", "content": observation}]
            text += f" {turn} {world.end} {observation}"
            # One that was cut off calls nothing
            assert "tool_calls" not in tokenizer.parse_response(ids[:-1], prefix=prefix, tools=tools)
    # What is no answer is shown to the world, whatever it is
    odd = ("of of", "answer[", "answer[ <pad>", "answer[ mother") if world.policy == "hops" else ("s003", "<pad>")
    for words in ("", *odd):
        ids = plain(f"{words} {world.end}")["input_ids"]
        (call,) = tokenizer.parse_response(ids, prefix=[3], tools=tools)["tool_calls"]
        assert call["function"]["arguments"]["words"] == words


def test_turns_of_a_completion_start_behind_observations():
    assert turn_starts([5, 9, 6, 6, 9, 9, 7, 5, 9], [3, 0], 9) == [0, 5, 6]


@pytest.mark.parametrize("world", equal_cost.ORDINARY)
def test_trls_tool_loop_plays_the_same_episodes(world):
    """Token by token those of the hand-written rollout, in the world's own language, and the same training."""
    played: dict[str, list] = {"grpo_trl": [], "grpo_tools": []}

    def watch(method, trainer):
        generate = trainer._generate

        def watched(prompts):
            output = generate(prompts)
            played[method].append(output[:3])
            return output

        trainer._generate = watched

    records = {method: records_of(method, world, functools.partial(watch, method)) for method in played}
    assert played["grpo_tools"] == played["grpo_trl"] and len(played["grpo_tools"]) == 2
    for record in (record for method in played for record in records[method]):
        record.pop("seconds", None)
    assert records["grpo_tools"] == records["grpo_trl"]
    made, tokenizer = WORLDS[world](), load(WORLDS[world]())[1]
    by_prompt = {row["prompt"]: row for row in made.rows(4096, "train 0")}
    episodes = [episode for step in played["grpo_tools"] for episode in zip(*step, strict=True)]
    for prompt_ids, completion_ids, masks in episodes:
        row = by_prompt[tokenizer.decode(prompt_ids)]
        pieces = [
            tokenizer.decode([token for token, _ in piece])
            for _, piece in itertools.groupby(zip(completion_ids, masks, strict=True), key=lambda pair: pair[1])
        ]
        whole = [turn for turn in pieces[::2] if turn.endswith(made.end)]
        assert len(whole) >= len(pieces[::2]) - 1  # the last one may be cut off
        turns = [turn.removesuffix(made.end).strip() for turn in whole]
        observations, _ = made.play(row, turns)
        assert [o for o in observations if o] == pieces[1::2]


def test_runs_that_are_complete_are_not_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(equal_cost.BUDGETS, "chain", tiny())
    run = equal_cost.Run("chain", "grpo", 0, 1e-3)
    path = run.path(tmp_path)
    equal_cost.play(run, str(tmp_path), "this command")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["run"]["method"] == "grpo" and lines[0]["budget"]["leaves"] == 24
    assert lines[0]["command"] == "this command"
    assert [line["step"] for line in lines[1:-1]] == [0, 1, 2] and lines[-1]["complete"]
    assert equal_cost.is_complete(run, tmp_path)
    written = path.stat().st_mtime_ns
    assert equal_cost.play_all([run, run], tmp_path, processes=1) == 0
    assert path.stat().st_mtime_ns == written and "1 runs, 1 of them complete" in capsys.readouterr().out
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:-1]))
    assert not equal_cost.is_complete(run, tmp_path)
    path.write_text(path.read_text() + '{"comp')
    assert not equal_cost.is_complete(run, tmp_path)


def test_a_run_with_other_settings_is_another_run(tmp_path, monkeypatch):
    monkeypatch.setitem(equal_cost.BUDGETS, "chain", tiny())
    run = equal_cost.Run("chain", "grpo", 0, 1e-3)
    equal_cost.play(run, str(tmp_path))
    assert equal_cost.is_complete(run, tmp_path)
    half = dataclasses.replace(run, fraction=0.5)
    assert half.path(tmp_path) != run.path(tmp_path)
    monkeypatch.setitem(equal_cost.METHODS, "grpo", {**equal_cost.METHODS["grpo"], "scale_rewards": "none"})
    assert not equal_cost.is_complete(run, tmp_path)
    monkeypatch.undo()
    assert not equal_cost.is_complete(run, tmp_path)  # another budget


def test_suites_name_runs_once_and_sweeps_hold_the_best_rate_inside():
    parser_options = {"worlds": equal_cost.ORDINARY, "rates": None, "ablate": None, "fraction": 1.0}
    for suite, (make_runs, defaults) in equal_cost.SUITES.items():
        runs = make_runs(type("Options", (), {**parser_options, **defaults}))
        paths = [run.path(Path("out")) for run in runs]
        assert len(set(paths)) == len(paths), suite
    for world, rates in equal_cost.RATES.items():
        for method, best in equal_cost.BEST_RATES[world].items():
            assert min(rates) < best < max(rates), (world, method)


def test_branching_depths_counts_leaves_by_the_anchor_they_were_drawn_from():
    tree = RolloutTree.from_prompt("p", [1], {}, index=0, budget=1)

    def child(parent, kind=None):
        turn = tree.add_turn(parent, [2])
        turn.leaf = kind and Leaf(kind=kind)
        return turn

    first = child(tree.root)
    second = child(first)
    child(second, "bare")
    child(child(second), "continuation")
    child(first, "continuation")
    child(tree.root, "extra")
    assert branching_depths([tree]) == {"0": 2, "1": 1, "2": 1}


def test_a_head_that_has_seen_more_prompts_allocates_better(monkeypatch, capsys):
    monkeypatch.setattr(predictor_limits, "POOLS", 6)
    predictor_limits.measure("chain", 0, [8, 600], 150, [0])
    first, *lines = capsys.readouterr().out.splitlines()
    uniform, exact = (float(word.strip(",;")) for word in (first.split()[5], first.split()[8]))
    few, _, many, _ = (float(line.split()[3]) for line in lines)
    assert uniform < few < many < exact


def test_chosen_ablations(tmp_path, monkeypatch):
    played = []
    monkeypatch.setattr(equal_cost, "play_all", lambda runs, *args: played.extend(runs))
    suite = ["--out", str(tmp_path), "--suite", "ablations", "--worlds", "hops", "--seeds", "7"]
    equal_cost.main([*suite, "--rates", "8e-3", "--ablate", "turn_weighting", "value_backup"])
    assert [(run.options, run.learning_rate, run.seed) for run in played] == [
        ((), 8e-3, 7),
        ((("value_backup", "child_mean"),), 8e-3, 7),
        ((("turn_weighting", "per_leaf"),), 8e-3, 7),
        ((("turn_weighting", "on_policy"),), 8e-3, 7),
    ]
    played.clear()
    equal_cost.main(suite[:4])
    assert {run.world for run in played} == {"chain", "hops"}
    assert {name for run in played for name, _ in run.options} >= {"continuations_per_root", "predictor_passes"}
