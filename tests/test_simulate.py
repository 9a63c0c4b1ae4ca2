"""The simulator: its martingale is one, its comparisons are fair, and it runs without a training stack."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trace_trl.simulate import (
    METHODS,
    SimulationConfig,
    draw_evidence,
    draw_paths,
    evidence_of,
    format_table,
    main,
    predict,
    simulate,
    value_of,
)


@pytest.fixture(scope="module")
def default_results():
    return {result["method"]: result for result in simulate(SimulationConfig())}


class TestMartingale:
    @pytest.mark.parametrize("value", [0.02, 0.3, 0.5, 0.9])
    def test_mean_value_at_every_turn_is_the_first_value(self, value):
        rng, turns, draws = np.random.default_rng(0), 4, 40_000
        paths = draw_paths(evidence_of(np.full(draws, value)), turns, rng)
        values = value_of(paths, np.arange(turns + 1), turns)
        errors = values.std(axis=0) / np.sqrt(draws)
        assert (np.abs(values.mean(axis=0) - value) <= 4 * errors + 1e-12).all()

    def test_mean_value_after_a_turn_is_the_value_before_it_wherever_the_path_went(self):
        rng, turns, draws = np.random.default_rng(1), 5, 60_000
        paths = draw_paths(evidence_of(rng.beta(0.5, 0.5, size=draws)), turns, rng)
        values = value_of(paths, np.arange(turns + 1), turns)
        for turn in range(turns):
            bins = np.digitize(values[:, turn], [0.2, 0.4, 0.6, 0.8])
            for group in range(5):
                change = (values[:, turn + 1] - values[:, turn])[bins == group]
                assert abs(change.mean()) <= 4.5 * change.std() / np.sqrt(change.size)

    def test_values_are_chances_and_end_at_an_outcome(self):
        rng = np.random.default_rng(2)
        paths = draw_paths(evidence_of(rng.random(500)), 6, rng)
        values = value_of(paths, np.arange(7), 6)
        assert ((values >= 0) & (values <= 1)).all()
        assert set(values[:, -1]) == {0.0, 1.0}
        np.testing.assert_array_equal(values[:, -1] == 1, paths[:, -1] > 0)

    def test_continuations_succeed_as_often_as_the_prefix_value_says(self):
        rng, turns, done, draws = np.random.default_rng(3), 5, 2, 40_000
        for evidence in (-0.8, 0.0, 0.5):
            value = float(value_of(np.array(evidence), done, turns))
            won = draw_evidence(np.full(draws, evidence), turns - done, turns, rng) > 0
            assert won.mean() == pytest.approx(value, abs=4 * np.sqrt(value * (1 - value) / draws))

    def test_evidence_and_value_are_inverse_at_the_root(self):
        values = np.array([1e-6, 0.1, 0.5, 0.77, 1 - 1e-6])
        np.testing.assert_allclose(value_of(evidence_of(values), 0, 5), values, rtol=1e-9)

    def test_an_oracle_sees_the_value_and_noise_is_in_logits(self):
        rng, values = np.random.default_rng(4), np.array([0.1, 0.5, 0.9])
        np.testing.assert_allclose(predict(values, 0.0, rng), values)
        seen = predict(np.full(40_000, 0.2), 1.5, rng)
        assert (np.log(seen / (1 - seen)) - np.log(0.25)).std() == pytest.approx(1.5, rel=0.02)
        assert np.isfinite(predict(np.array([0.0, 1.0]), 3.0, rng)).all()


class TestComparison:
    def test_defaults_are_the_budget_of_the_paper(self):
        config = SimulationConfig()
        assert (config.rollouts, config.continuations, config.leaves) == (1024, 2, 3072)

    def test_effective_ratio_rises_from_grpo_over_pcl_to_trace(self, default_results):
        ratio = {name: result["effective_ratio"] for name, result in default_results.items()}
        assert ratio["GRPO"] < ratio["PCL"] < ratio["TRACE"]
        assert ratio["TreePO-style"] < ratio["root stage only"] < ratio["TRACE"]
        assert ratio["TreePO-style"] < ratio["prefix stage only"] < ratio["TRACE"]

    def test_grpo_ratio_is_what_its_groups_of_eight_give(self, default_results):
        # E[1 - V^8 - (1 - V)^8] for V ~ Beta(a, a) is 1 - 2 (a)_8 / (2a)_8, with rising factorials.
        a, steps = 0.15, np.arange(8)
        expected = 1 - 2 * np.prod((a + steps) / (2 * a + steps))
        assert default_results["GRPO"]["effective_ratio"] == pytest.approx(expected, abs=0.03)

    def test_active_prefixes_mix_more_anchors_than_random_ones(self, default_results):
        ratio = {name: result["mixed_anchor_ratio"] for name, result in default_results.items()}
        assert ratio["TreePO-style"] < ratio["prefix stage only"]
        assert ratio["root stage only"] < ratio["TRACE"]

    @pytest.mark.parametrize(("rollouts", "continuations", "turns"), [(64, 2, 5), (64, 0, 3), (50, 3, 2), (40, 2, 1)])
    def test_all_methods_have_equal_leaves(self, rollouts, continuations, turns):
        results = simulate(
            SimulationConfig(rollouts=rollouts, continuations=continuations, turns=turns, repeats=2, max_per_root=16)
        )
        assert [result["method"] for result in results] == list(METHODS)
        assert {result["leaves"] for result in results} == {rollouts * (1 + continuations)}

    def test_shared_prefixes_make_branching_cheaper_at_equal_leaves(self, default_results):
        turns = {name: result["sampled_turns"] for name, result in default_results.items()}
        assert turns["GRPO"] == turns["PCL"] == 3072 * 5
        for name in ("TreePO-style", "root stage only", "prefix stage only", "TRACE"):
            assert 1024 * 5 + 2048 <= turns[name] <= 1024 * 5 + 2048 * 4

    def test_single_turn_continuations_become_rollouts_from_the_root(self):
        results = simulate(SimulationConfig(rollouts=64, turns=1, repeats=2))
        assert {result["sampled_turns"] for result in results} == {64 * 3}
        for result in results:
            assert result["branched_anchors"] == result["active_prompts"]
            assert result["mixed_anchor_ratio"] == result["effective_ratio"]

    def test_ratios_are_shares_of_the_counts_beside_them(self):
        for result in simulate(SimulationConfig(rollouts=128, repeats=1)):
            assert result["effective_ratio"] == pytest.approx(result["mixed_prompts"] / result["active_prompts"])
            assert 0 <= result["mixed_anchor_ratio"] <= 1

    def test_methods_that_are_the_same_without_continuations_draw_the_same(self):
        """Without continuations, TRACE is its root stage, and GRPO the trees that never branch."""
        config = SimulationConfig(rollouts=96, continuations=0, repeats=3)
        found = {result.pop("method"): result for result in simulate(config)}
        assert found["TRACE"] == found["root stage only"] != found["GRPO"]
        assert found["GRPO"] == found["TreePO-style"] == found["prefix stage only"] != found["PCL"]

    def test_one_seed_gives_one_result(self):
        config = SimulationConfig(rollouts=64, repeats=2, seed=5)
        assert simulate(config) == simulate(config)
        assert simulate(config) != simulate(SimulationConfig(rollouts=64, repeats=2, seed=6))

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"rollouts": 1}, "rollouts is 1: set it to 2 or more"),
            ({"turns": 0}, "turns is 0: set it to 1 or more"),
            ({"pool_factor": 0.5}, "pool_factor is 0.5: set it to 1 or more"),
            ({"noise": -1.0}, "noise is -1.0: set it to 0 or more"),
            ({"prompts_shape": (0.0, 1.0)}, "both parameters of a Beta are positive"),
        ],
    )
    def test_impossible_settings_say_what_to_change(self, wrong, message):
        with pytest.raises(ValueError, match=message):
            SimulationConfig(**wrong)


class TestCommandLine:
    def test_default_run_prints_an_aligned_table_and_imports_no_torch(self):
        code = (
            "import sys, runpy; sys.argv = ['simulate', '--repeats', '2'];"
            "runpy.run_module('trace_trl.simulate', run_name='__main__');"
            "loaded = {'torch', 'trl', 'transformers', 'accelerate'} & set(sys.modules);"
            "assert not loaded, loaded"
        )
        root = Path(__file__).parents[1]
        done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        head, blank, *table = done.stdout.splitlines()
        assert head.startswith("3072 leaves = M 1024 x (1 + N 2)")
        assert blank == ""
        assert len(table) == 1 + len(METHODS)
        assert len({len(line) for line in table}) == 1
        for line, name in zip(table[1:], METHODS, strict=True):
            assert line.startswith(name)

    def test_json_holds_the_settings_and_one_result_per_method(self, capsys):
        flags = (
            "--rollouts 64 --continuations 3 --pool-factor 3 --turns 4 --num-generations 4 --max-per-root 6 "
            "--noise 0.5 --seed 7 --prompts-shape 0.3,0.6 --repeats 2 --json"
        )
        main(flags.split())
        printed = json.loads(capsys.readouterr().out)
        config = SimulationConfig(
            rollouts=64,
            continuations=3,
            pool_factor=3.0,
            turns=4,
            num_generations=4,
            max_per_root=6,
            noise=0.5,
            prompts_shape=(0.3, 0.6),
            repeats=2,
            seed=7,
        )
        assert SimulationConfig(**{**printed["config"], "prompts_shape": (0.3, 0.6)}) == config
        assert printed["config"]["prompts_shape"] == [0.3, 0.6]
        assert printed["results"] == simulate(config)

    def test_one_shape_parameter_stands_for_both(self, capsys):
        main(["--rollouts", "16", "--repeats", "1", "--prompts-shape", "0.4", "--json"])
        assert json.loads(capsys.readouterr().out)["config"]["prompts_shape"] == [0.4, 0.4]

    def test_an_impossible_budget_is_a_usage_error_with_its_reason(self, capsys):
        with pytest.raises(SystemExit) as stopped:
            main(["--rollouts", "33", "--continuations", "0", "--max-per-root", "2", "--num-generations", "2"])
        assert stopped.value.code == 2
        assert "make the budget even or raise max_per_root" in capsys.readouterr().err

    def test_table_is_aligned(self, default_results):
        lines = format_table(list(default_results.values())).splitlines()
        assert len({len(line) for line in lines}) == 1
