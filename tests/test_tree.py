"""Building, walking and backing up rollout trees."""

import copy
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leaves import elsewhere, moved, scored
from trace_trl.tree import Leaf, RolloutTree, Start, Turn, is_success


# A tree is a nested list: a list is a turn and its children, a number a turn that ended its episode with that reward.
REWARDS = st.sampled_from([0.0, 1.0, 0.5, -1.0, math.nan])
SPECS = st.lists(
    st.recursive(REWARDS, lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=12), min_size=1, max_size=4
)


def grow(spec, threshold=0.5):
    tree = RolloutTree.from_prompt("prompt", [1, 2, 3])
    rollouts = iter(range(10**6))

    def add(parent, children):
        for child in children:
            if isinstance(child, list):
                add(tree.add_turn(parent, [4], [5]), child)
            else:
                tree.add_turn(parent, [4], leaf=scored(child, threshold, rollout=next(rollouts)))

    add(tree.root, spec)
    return tree


def method_tree():
    """Bare rollouts a1 a2 a3 (R=0) and b1 b2 (R=1), and one continuation c3 (R=1) after a2."""
    tree = RolloutTree.from_prompt("prompt", [1, 2, 3], budget=2)
    turns = {}
    turns["a1"] = tree.add_turn(tree.root, [10], [11])
    turns["a2"] = tree.add_turn(turns["a1"], [12], [13])
    turns["a3"] = tree.add_turn(turns["a2"], [14], leaf=Leaf(reward=0.0, success=False, rollout=0))
    turns["b1"] = tree.add_turn(tree.root, [20], [21])
    turns["b2"] = tree.add_turn(turns["b1"], [22], leaf=Leaf(reward=1.0, success=True, rollout=1))
    turns["c3"] = tree.add_turn(turns["a2"], [30], leaf=Leaf(kind="continuation", reward=1.0, success=True, rollout=2))
    return tree, turns


def ancestors(turn):
    """`turn` and everything above it, found by parents only."""
    nodes = []
    while turn is not None:
        nodes.append(turn)
        turn = turn.parent
    return nodes


def test_case_41_a_rollout_may_start_with_a_prompt_of_its_own():
    """Two rollouts of one row whose resets answered differently, one of them with a continuation: each history begins
    with what its rollout was shown, and all are compared under one root."""
    tree = RolloutTree.from_prompt("folder a", [1, 2, 3])
    own = Start("folder bb", [7, 8, 9, 10])
    a1 = tree.add_turn(tree.root, [11], leaf=Leaf(reward=0.0, success=False, rollout=0))
    b1 = tree.add_turn(tree.root, [21], [22], start=own)
    b2 = tree.add_turn(b1, [23], leaf=Leaf(reward=1.0, success=True, rollout=1))
    c2 = tree.add_turn(b1, [33], leaf=Leaf(kind="continuation", reward=1.0, success=True, rollout=2))
    assert a1.history_ids() == [1, 2, 3, 11] and a1.history_length == 4
    assert b1.history_ids() == [7, 8, 9, 10, 21, 22] and b1.history_length == 6
    assert b2.history_ids() == [7, 8, 9, 10, 21, 22, 23] and b2.history_length == 7
    assert c2.history_ids() == [7, 8, 9, 10, 21, 22, 33] and c2.history_length == 7
    assert [tree.start(turn).prompt for turn in (tree.root, a1, b1, b2, c2)] == ["folder a"] * 2 + ["folder bb"] * 3
    assert tree.start(tree.root).ids is tree.prompt_ids and tree.start(c2) is own
    assert b1.path() == [b1] and c2.path() == [b1, c2] and tree.root.children == [a1, b1]
    tree.backup("child_mean")
    assert tree.root.target == 0.5


def test_history_is_read_by_walking_up():
    tree, turns = method_tree()
    assert turns["c3"].history_ids() == [1, 2, 3, 10, 11, 12, 13, 30]
    assert turns["a2"].history_ids() == [1, 2, 3, 10, 11, 12, 13]
    assert tree.root.history_ids() == tree.prompt_ids == [1, 2, 3]
    assert turns["c3"].path() == [turns["a1"], turns["a2"], turns["c3"]]
    assert tree.root.path() == []
    assert [turns[name].depth for name in ("a1", "a2", "a3", "c3")] == [1, 2, 3, 3]


def test_walks_and_their_order():
    tree, turns = method_tree()
    assert list(tree.turns()) == [turns[name] for name in ("a1", "a2", "a3", "c3", "b1", "b2")]
    # Depth-first order would put the continuation second; rows follow the order in which rollouts were started.
    assert tree.leaves() == [turns["a3"], turns["b2"], turns["c3"]]
    assert list(tree.anchors()) == [tree.root, turns["a1"], turns["a2"], turns["b1"]]
    assert tree.rewards_below(turns["a2"]) == [0.0, 1.0]
    assert sorted(tree.rewards_below(tree.root)) == [0.0, 1.0, 1.0]


def test_rewards_below_the_root_include_other_processes():
    tree, turns = method_tree()
    tree.remote = [elsewhere([0.25, math.nan], target=0.0)]
    assert sorted(tree.rewards_below(tree.root)) == [0.0, 0.25, 1.0, 1.0]
    assert tree.rewards_below(turns["b1"]) == [1.0]


def test_history_ids_is_a_new_list():
    tree, turns = method_tree()
    turns["a1"].history_ids().append(99)
    tree.root.history_ids().append(99)
    assert turns["a1"].history_ids() == [1, 2, 3, 10, 11]


@given(SPECS)
@settings(deadline=None, database=None)
def test_structure_of_random_trees(spec):
    tree = grow(spec)
    turns = list(tree.turns())
    assert len(set(turns)) == len(turns)
    for turn in turns:
        assert turn in turn.parent.children
        assert turn.depth == len(turn.path()) == turn.parent.depth + 1
        assert turn.history_length == len(turn.history_ids())
        assert turn.path() == ancestors(turn)[-2::-1]
        assert turns.index(turn) > (turns.index(turn.parent) if turn.parent is not tree.root else -1)
        assert list(turn.leaves()) == [leaf for leaf in turns if leaf.leaf and turn in ancestors(leaf)]
    assert [leaf.leaf.rollout for leaf in tree.leaves()] == sorted(turn.leaf.rollout for turn in turns if turn.leaf)


def test_add_turn_after_a_leaf_raises():
    tree, turns = method_tree()
    with pytest.raises(ValueError, match="depth 3 ended its episode"):
        tree.add_turn(turns["a3"], [1])
    assert turns["a3"].children == []


def test_add_turn_refuses_logprobs_of_another_length():
    tree = RolloutTree.from_prompt("prompt", [1])
    with pytest.raises(ValueError, match="1 log-probs for 2 sampled tokens"):
        tree.add_turn(tree.root, [1, 2], logprobs=[-0.5])
    assert tree.root.children == []


def test_add_turn_copies_its_arguments():
    tree = RolloutTree.from_prompt("prompt", [1])
    token_ids, observation_ids, logprobs = [1, 2], [3], [-0.1, -0.2]
    messages = [{"role": "assistant", "tool_calls": [{"arguments": {"x": 1}}]}]
    turn = tree.add_turn(tree.root, token_ids, observation_ids, logprobs=logprobs, messages=messages)
    for mutated in (token_ids, observation_ids, logprobs):
        mutated.append(9)
    messages[0]["tool_calls"][0]["arguments"]["x"] = 2
    assert (turn.token_ids, turn.observation_ids, turn.logprobs) == ([1, 2], [3], [-0.1, -0.2])
    assert turn.messages == [{"role": "assistant", "tool_calls": [{"arguments": {"x": 1}}]}]


def test_case_23_three_children_of_one_node_leave_parent_and_siblings_unchanged():
    tree = RolloutTree.from_prompt("prompt", [1, 2], example={"question": "q"})
    first = tree.add_turn(tree.root, [3], [4], logprobs=[-1.0], text="go", messages=[{"role": "tool", "content": "x"}])
    sibling = tree.add_turn(tree.root, [5], [6])
    before = copy.deepcopy((first.token_ids, first.observation_ids, first.logprobs, first.messages, first.text))
    prompt_before, sibling_before = list(tree.prompt_ids), sibling.history_ids()

    children = []
    for k in range(3):
        history = first.history_ids()
        history.append(100 + k)  # what a branch does to the list it was given stays in that branch
        messages = [{"role": "assistant", "content": f"child {k}"}]
        leaf = Leaf(reward=float(k), rollout=k, extras={"note": k})
        children.append(tree.add_turn(first, [100 + k], [200 + k], text=f"child {k}", messages=messages, leaf=leaf))
        children[k].messages.append({"role": "tool", "content": f"answer {k}"})
        children[k].token_ids.append(300 + k)

    assert (first.token_ids, first.observation_ids, first.logprobs, first.messages, first.text) == before
    assert tree.prompt_ids == prompt_before
    assert sibling.history_ids() == sibling_before
    assert tree.example == {"question": "q"}
    for k, child in enumerate(children):
        assert child.history_ids() == [1, 2, 3, 4, 100 + k, 300 + k, 200 + k]
        assert [message["content"] for message in child.messages] == [f"child {k}", f"answer {k}"]
        assert child.leaf.extras == {"note": k}
        assert child.parent is first


def test_backup_of_the_method_example():
    tree, turns = method_tree()
    tree.backup()
    assert turns["a2"].target == turns["a1"].target == 0.5
    assert tree.root.target == pytest.approx(2 / 3, abs=1e-12)
    assert (turns["a3"].target, turns["b1"].target, turns["c3"].target) == (0.0, 1.0, 1.0)
    tree.backup("child_mean")
    assert turns["a2"].target == 0.5
    assert tree.root.target == 0.75  # two rollouts from the root of 0.5 and 1, whatever was branched below them


def brute_force_target(tree, node, mode):
    outcomes = [
        float(leaf.leaf.success)
        for leaf in tree.leaves()
        if any(above is node for above in ancestors(leaf)) and not math.isnan(leaf.leaf.reward)
    ]
    if not outcomes:
        return None
    if mode == "leaf_mean" or node.leaf is not None:
        return sum(outcomes) / len(outcomes)
    targets = [brute_force_target(tree, child, mode) for child in node.children]
    targets = [target for target in targets if target is not None]
    return sum(targets) / len(targets)


@pytest.mark.parametrize("mode", ["leaf_mean", "child_mean"])
@given(spec=SPECS)
@settings(deadline=None, database=None)
def test_backup_against_brute_force(mode, spec):
    tree = grow(spec)
    tree.backup(mode)
    for turn in tree.root.turns():
        expected = brute_force_target(tree, turn, mode)
        assert turn.target == (None if expected is None else pytest.approx(expected, abs=1e-12))


@pytest.mark.parametrize("mode", ["leaf_mean", "child_mean"])
@given(spec=SPECS, data=st.data())
@settings(deadline=None, database=None)
def test_backup_of_a_prompt_that_spans_processes(mode, spec, data):
    whole = grow(spec)
    whole.backup(mode)
    cut = data.draw(st.integers(0, len(spec)))
    part = grow(spec[:cut])
    part.remote = [moved(child) for child in whole.root.children[cut:]]
    part.backup(mode)
    for ours, theirs in zip(part.root.turns(), [whole.root, *whole.turns()], strict=False):
        assert ours.target == (None if theirs.target is None else pytest.approx(theirs.target, abs=1e-12))


def test_case_17_unscored_leaves_count_for_neither_outcome():
    tree = grow([[0.0, math.nan], [math.nan], 1.0])
    tree.backup()
    assert [child.target for child in tree.root.children] == [0.0, None, 1.0]
    assert tree.root.target == 0.5
    assert tree.root.children[0].children[1].target is None
    nothing = grow([math.nan, [math.nan]])
    nothing.backup()
    assert nothing.root.target is None


def test_a_success_is_what_the_leaf_says_here_and_on_other_processes():
    tree = RolloutTree.from_prompt("prompt", [1])
    for reward in (0.4, 0.6, 0.9):
        tree.add_turn(tree.root, [1], leaf=scored(reward, threshold=0.8))
    tree.backup()
    assert tree.root.target == pytest.approx(1 / 3)
    tree.remote = [elsewhere([0.6, math.nan], 0.0, threshold=0.8)]
    tree.backup()
    assert tree.root.target == pytest.approx(1 / 4) and tree.root.target_variance == pytest.approx(3 / 12)


def test_case_54_rewards_are_judged_once():
    """Two rollouts of one prompt on two processes, rewards 0.4 and 0.4, threshold 0.3: both are successes, so nothing
    is left of their variance (judged again by 0.5, they differ: 0.5)."""
    tree = RolloutTree.from_prompt("prompt", [1])
    tree.add_turn(tree.root, [1], leaf=scored(0.4, threshold=0.3))
    tree.remote = [elsewhere([0.4], 1.0, threshold=0.3)]
    tree.backup()
    assert tree.root.target == 1.0 and tree.root.target_variance == 0.0


def test_a_threshold_beyond_single_precision_is_out_of_reach():
    assert not is_success(3e38, 1e300)


def test_backup_refuses_unknown_modes():
    with pytest.raises(ValueError, match="'leaf_mean', 'child_mean'"):
        grow([1.0]).backup("mean")


def test_a_long_episode_needs_no_recursion():
    tree = RolloutTree.from_prompt("prompt", [1])
    turn: Turn = tree.root
    for _ in range(5000):
        turn = tree.add_turn(turn, [1])
    tree.add_turn(turn, [1], leaf=Leaf(reward=1.0, success=True))
    tree.backup()
    assert tree.root.target == 1.0
    assert len(tree.leaves()[0].path()) == 5001
