"""What two processes share: pool and allocation, errors, and the duty to fill a batch."""

import json

import pytest
from launching import LIMIT, forests, launch, results


pytestmark = pytest.mark.distributed


ALLOCATIONS = ("active", "pcl", "uniform")


@pytest.fixture(scope="module")
def allocated(tmp_path_factory):
    out = tmp_path_factory.mktemp("allocated")
    for launcher, size in (("one", 8), ("ddp", 4)):
        jobs = [
            {
                "task": "allocate",
                "name": f"{launcher}-{allocation}",
                "root_allocation": allocation,
                "per_device_train_batch_size": size,
            }
            for allocation in ALLOCATIONS
        ]
        launch(launcher, out, *jobs)
    return out


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_case_30_one_and_two_processes_draw_the_same_pool_and_allocate_alike(allocated, allocation):
    found = []
    for launcher in ("one", "ddp"):
        processes = results(allocated, f"{launcher}-{allocation}")
        pools = [sum(parts, []) for parts in zip(*(p["pools"] for p in processes), strict=True)]
        budgets = [
            {index: count for part in parts for index, count in part["budgets"].items()}
            for parts in zip(*(p["generations"] for p in processes), strict=True)
        ]
        found.append((pools, budgets))
    assert found[0] == found[1]
    pools, budgets = found[0]
    assert len(pools) == 3 and pools[0] != pools[1]
    assert all(sum(budget.values()) == 8 for budget in budgets)


def test_case_30_samples_repeat_from_run_to_run_and_differ_between_processes_and_siblings(tmp_path):
    jobs = [{"task": "train", "name": name, "max_steps": 2, "root_allocation": "uniform"} for name in ("one", "again")]
    launch("ddp", tmp_path, *jobs)
    runs = {}
    for job in jobs:
        runs[job["name"]] = [
            [[leaf.history_ids() for leaf in tree.leaves()] for generation in process for tree in generation]
            for process in forests(tmp_path, job["name"])
        ]
    assert runs["one"] == runs["again"]
    siblings = [tree for process in runs["one"] for tree in process]
    assert sum(len(set(map(tuple, tree))) > 1 for tree in siblings) > len(siblings) / 2
    # From the same random numbers a random model would say nearly the same to every prompt
    pairs = list(zip(sampled(tmp_path, 0), sampled(tmp_path, 1), strict=False))
    assert sum(first == second for first, second in pairs) < len(pairs) / 2


def sampled(folder, process):
    trees = [tree for generation in forests(folder, "one")[process] for tree in generation]
    return [turn.token_ids for tree in trees for turn in tree.turns()]


def test_a_process_without_eligible_prefixes_fills_its_leaves(tmp_path):
    launch("zero3_cpu", tmp_path, {"task": "unlucky", "name": "run"})
    lucky, unlucky = results(tmp_path, "run")
    assert lucky["failed"] == unlucky["failed"] == []
    assert len(lucky["kinds"]) == len(unlucky["kinds"]) == 2 * 12
    assert lucky["kinds"].count("continuation") == 2 * 8
    assert unlucky["kinds"].count("extra") == 2 * 8 and "continuation" not in unlucky["kinds"]


def test_processes_go_the_same_way_though_their_prompts_differ(tmp_path):
    """Without continuations, what one process was allotted may look like plain GRPO and what another was may not."""
    # Twelve rollouts each: the first process's groups are those of TRL, the second's are not
    job = {"task": "allotted", "name": "run", "counts": [6, 6, 5, 7, 0, 0, 0, 0], "continuations_per_root": 0}
    launch("ddp", tmp_path, job)
    both = results(tmp_path, "run")
    assert [result["failed"] for result in both] == [[], []]
    budgets = [result["generations"][0]["budgets"] for result in both]
    assert budgets == [{"0": 6, "1": 6}, {"2": 5, "3": 7}]


def test_a_sharded_reward_model_is_called_by_all_processes_together(tmp_path):
    launch("zero3_cpu", tmp_path, {"task": "judged", "name": "run", "seed": 2})
    both = results(tmp_path, "run")
    assert [result["failed"] for result in both] == [[], []]
    rewards = [reward for result in both for reward in result["rewards"]]
    assert len(rewards) == 2 * 2 * 12 and len(set(rewards)) > 10
    turns = [[generation["turns"] for generation in result["generations"]] for result in both]
    assert turns[0] != turns[1]


def test_fsdp_has_its_shards_again_after_values_are_read(tmp_path):
    """A pass without a backward pass leaves some parameters whole, and TRL can't push these to vLLM."""
    launch("fsdp2", tmp_path, {"task": "resharded", "name": "run"})
    for result in results(tmp_path, "run"):
        assert result["failed"] == []
        assert result["whole"] == [[], []]


@pytest.mark.parametrize(
    ("launcher", "gather"),
    [pytest.param("zero3_cpu", True, marks=pytest.mark.slow), ("zero3_cpu", False), ("fsdp2", True)],
)
def test_states_that_sampling_had_are_those_of_a_pass_also_where_weights_are_sharded(launcher, gather, tmp_path):
    launch(launcher, tmp_path, {"task": "noted", "name": "run", "ds3_gather_for_generation": gather})
    for result in results(tmp_path, "run"):
        assert result["failed"] == []
        assert len(result["differences"]) > 8 and max(result["differences"]) < 1e-4


@pytest.mark.parametrize(("launcher", "place"), [("zero3_cpu", "reset"), ("zero3_cpu", "reward"), ("ddp", "reward")])
def test_case_29_an_error_on_one_process_ends_both_with_that_error(launcher, place, tmp_path):
    launch(launcher, tmp_path, {"task": "failing", "name": place}, ok=False)
    other, own = results(tmp_path, "error")
    assert own["error"] == f"Broken: broken by {place}"
    assert "Process 1 failed" in other["error"] and f"Broken: broken by {place}" in other["error"]
    # Neither had to wait for the limit of their process group, which is longer than that of the launch
    assert min(other["ddp_timeout"], own["ddp_timeout"]) > LIMIT


def test_prompts_of_different_kinds_on_two_processes_are_refused_by_both(tmp_path):
    launch("ddp", tmp_path, {"task": "mixed_prompts", "name": "run"}, ok=False)
    for result in results(tmp_path, "error"):
        assert result["error"].startswith("ValueError: The prompt of a dataset row is")
    assert len(results(tmp_path, "error")) == 2


@pytest.mark.parametrize("place", ["generation", "prefixes"])
def test_an_error_within_a_call_of_all_processes_ends_all(place, tmp_path):
    """The other process is in that call, and can't be told: it is ended by the launcher."""
    output = launch("zero3_cpu", tmp_path, {"task": "failing", "name": place}, ok=False)
    assert f"Broken: broken by {place}" in output
    # The other may tell of the lost connection before it is ended
    own = json.loads((tmp_path / "error.1.json").read_text())
    assert own["error"] == f"Broken: broken by {place}"
    assert own["ddp_timeout"] > LIMIT  # it was not that limit which ended the other
