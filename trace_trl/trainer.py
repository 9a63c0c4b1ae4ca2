"""
[`TRACETrainer`]: binds the rooms of this package to the seams of TRL's [`~trl.GRPOTrainer`]. It holds no algorithm.

    dataset rows ─▶ candidates ─▶ values ─▶ root allocation ─▶ TreeRolloutEngine ─▶ trees ─▶ backup ─▶ predictor
                                                                                     └─▶ advantages ─▶ rows ─▶ TRL's
                                                                                     loss
"""

from __future__ import annotations

import inspect
import logging
import os
import textwrap
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch.utils.data import Sampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler, get_config_model_id, repeat_iterable_dataset, start_event_loop_in_daemon

from . import seams
from .advantages import GRPO_WITHOUT_BRANCHES, RewardStats, compute_advantages, normalize_then_sum, reward_statistics
from .checks import check_arguments, check_datasets, check_row, first_row, row_is_conversational
from .codec import Codec
from .config import TRACEConfig
from .engine import Limits, RootPlan, Stats, TreeRolloutEngine
from .environments.base import Environment, Episode
from .environments.callback import CallbackEnvironment, EnvReset, EnvStep
from .environments.none import SingleTurnEnvironment
from .environments.runner import ConcurrentRunner
from .environments.tools import RESERVED_METHODS, ToolEnvironment
from .generation import TransformersGenerator
from .metrics import effective
from .pool import Candidate, allocate, make_plans, shares
from .predictor import HiddenStates, PredictorTrainer, SuccessPredictor
from .processes import AcceleratorSync, share_roots
from .progress import RolloutProgress, StepLineCallback
from .reports import extra_columns, leaf_advantages, length_metrics, record, sampled_lengths, summarise
from .rewards import RewardScorer, step_reward
from .rows import Rows, build_rows
from .tree import RolloutTree
from .tree_log import TreeLogger, tree_to_dict
from .values import AnchorValues


logger = logging.getLogger(__name__)

PREDICTOR_STATE = "predictor_state.pt"


class TRACETrainer(GRPOTrainer):
    """
    Trainer for TRACE (Tree Rollout Allocation for Contrastive Exploration), which spends a fixed budget of agentic
    rollouts on the prompts, and on the turn-level prefixes, whose outcomes are most likely mixed. It was proposed in
    [TRACE](https://huggingface.co/papers/2606.11119). Takes every argument of [`~trl.GRPOTrainer`], and an `env_step`.

    Example:

    ```python
    from trace_trl import StepResult, TRACEConfig, TRACETrainer


    def env_step(state, action, messages):
        if "finish[" in action:
            return StepResult(done=True, reward=float(state["answer"] in action))
        return StepResult(observation="Observation: nothing found.")


    trainer = TRACETrainer(
        model="Qwen/Qwen3-0.6B",
        args=TRACEConfig(generation_batch_size=48, continuations_per_root=2),
        train_dataset=dataset,  # columns "prompt" and "answer"
        env_step=env_step,
    )
    trainer.train()
    ```

    Args:
        env_step (`Callable`, *optional*):
            `env_step(state, action: str, messages) -> StepResult`, sync or async, called once per turn of a live
            branch.
            `action` is the decoded turn, `messages` the conversation so far. Excludes `tools` and
            `environment_factory`.
        env_reset (`Callable`, *optional*):
            `env_reset(example: dict) -> state`, sync or async. Defaults to a copy of the dataset row.
        **kwargs:
            All other arguments are those of [`~trl.GRPOTrainer`]. `args` must be a [`TRACEConfig`]; `rollout_func` is
            not supported, since the engine is the rollout function.

    Raises:
        ValueError: for combinations of arguments that exclude each other, for images, and for budgets that don't fit.
        TypeError: if `args` is a plain [`~trl.GRPOConfig`].
        ImportError: if the installed TRL is not one this package was built against.
    """

    _tag_names = ["trl", "grpo", "trace"]
    _name = "TRACE"
    _paper = {
        "title": "TRACE: Tree Rollout Allocation for Contrastive Exploration",
        "id": "2606.11119",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{trace2026,
                title        = {{TRACE: Tree Rollout Allocation for Contrastive Exploration}},
                year         = 2026,
                eprint       = {arXiv:2606.11119},
            }"""),
    }

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: TRACEConfig | None = None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools: list[Callable] | None = None,
        rollout_func=None,
        environment_factory=None,
        env_step: EnvStep | None = None,
        env_reset: EnvReset | None = None,
    ):
        seams.check_trl()
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = TRACEConfig(f"{name.split('/')[-1]}-TRACE")
        check_arguments(args, tools, rollout_func, environment_factory, env_step, env_reset)
        check_datasets(train_dataset, eval_dataset)

        # Copied: TRL appends to the list it is given
        reward_funcs = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else reward_funcs
        only_steps = env_step is not None and not reward_funcs
        super().__init__(
            model=model,
            reward_funcs=[step_reward] if only_steps else reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            environment_factory=environment_factory,
        )
        seams.check_trainer(self)
        if env_step is not None and not only_steps:
            # As TRL adds an environment's `get_reward`: one more source, of weight 1
            self.reward_funcs.append(step_reward)
            self.reward_func_names.append("env_step")
            self.reward_processing_classes.append(None)
            self.reward_weights = torch.cat([self.reward_weights, torch.ones(1)])
        elif only_steps:
            self.reward_func_names = ["env_step"]
        self.env_step = env_step
        self.env_reset = env_reset
        self._drop_reserved_tools()
        self._pool_size = self._fitted_pool_size()

        self.runner = ConcurrentRunner(args.env_max_workers, loop=self._event_loop)
        self.scorer = RewardScorer(self, args.success_threshold)
        self.predictor_trainer = self._make_predictor()
        self.values = None if self.predictor_trainer is None else self._make_values()
        self.tree_logger = None
        if args.log_trees and self.accelerator.is_main_process:
            self.tree_logger = TreeLogger(
                os.path.join(args.output_dir, "trees"),
                max_bytes=int(args.tree_log_max_megabytes * 2**20),
                max_files=args.tree_log_max_files,
                success_threshold=args.success_threshold,
            )
        self.progress = RolloutProgress(args.show_rollout_progress and self.accelerator.is_main_process)
        if args.show_rollout_progress:
            self.add_callback(StepLineCallback())

        self._rows: Rows | None = None  # the rows TRL is told of while it prepares a batch
        self._engine: TreeRolloutEngine | None = None
        example = first_row(self.train_dataset)
        if example is not None:
            # Built now, so that a chat template that can't carry an answer is refused before anything is sampled
            self._engine = self._make_engine(conversational=row_is_conversational(example))

    # Construction

    @property
    def predictor(self) -> SuccessPredictor | None:
        """The value head, or `None` where nothing uses one."""
        return None if self.predictor_trainer is None else self.predictor_trainer.predictor

    def _drop_reserved_tools(self) -> None:
        """Takes `close` and `fork` of environments off the tools that TRL offers to the policy."""
        if self.environment_factories is None:
            return
        for name, tools in self._env_tools.items():
            self._env_tools[name] = [tool for tool in tools if not _is_reserved(tool)]
        self.tools = [tool for tool in self.tools if not _is_reserved(tool)]

    def _fitted_pool_size(self) -> int:
        """Candidates per generation: the configured number, or what the dataset has."""
        pool, processes = self.args.candidate_pool_size, self.accelerator.num_processes
        if isinstance(self.train_dataset, Dataset) and len(self.train_dataset) < pool:
            pool = len(self.train_dataset) // processes * processes
            if not pool:
                raise ValueError(
                    f"The train dataset has {len(self.train_dataset)} rows for {processes} processes: give each "
                    "process at least one."
                )
            self.args.check_pool(pool)
        return pool

    def _make_predictor(self) -> PredictorTrainer | None:
        args = self.args
        if not (args.needs_predictor or args.train_predictor):
            return None
        size = self.model.config.get_text_config().hidden_size
        predictor = SuccessPredictor(size, args.predictor_hidden_size, seed=args.seed).to(self.accelerator.device)
        several = self.accelerator.num_processes > 1
        return PredictorTrainer(
            predictor,
            learning_rate=args.predictor_learning_rate,
            weight_decay=args.predictor_weight_decay,
            passes=args.predictor_passes,
            batch_size=args.predictor_batch_size,
            buffer_size=args.predictor_buffer_size,
            seed=args.seed + self.accelerator.process_index,
            reduce=(lambda gradient: self.accelerator.reduce(gradient, "mean")) if several else None,
        )

    def _make_values(self) -> AnchorValues:
        hidden_states = HiddenStates(
            model=self.model,
            pad_token_id=self._tokenizer.pad_token_id,
            batch_size=max(self.args.per_device_train_batch_size, self.args.per_device_eval_batch_size),
            context=self.accelerator.autocast,
            most=AcceleratorSync(self.accelerator).most,
        )
        return AnchorValues(hidden_states, self.predictor_trainer)

    @property
    def _trains_predictor(self) -> bool:
        return self.predictor_trainer is not None and self.args.train_predictor is not False

    def _event_loop(self):
        """The loop TRL runs async rewards and tools on, started here if TRL had no reason to."""
        if not hasattr(self, "async_loop"):
            self.async_loop_thread, self.async_loop, ready = start_event_loop_in_daemon(name="TRACETrainer-AsyncLoop")
            ready.wait()
        return self.async_loop

    def _make_environment(self, codec: Codec) -> Environment:
        if self.env_step is not None:
            return CallbackEnvironment(self.env_step, self.env_reset, codec.conversational, self._event_loop)
        if not self.tools and self.environment_factories is None:
            return SingleTurnEnvironment()
        rounds = [
            self.args.max_tool_calling_iterations,
            None if self.args.max_turns is None else self.args.max_turns - 1,
        ]
        return ToolEnvironment(
            self._standalone_tools,
            factories=self.environment_factories,
            # TRL made one instance of each environment to look at its methods
            idle=self._environment_pool if self.environment_factories is not None else None,
            # What a tool answers to the last turn nobody would read
            max_rounds=min((limit for limit in rounds if limit is not None), default=None),
            malformed=codec.looks_like_call,
            loop=self._event_loop,
        )

    def _make_engine(self, conversational: bool) -> TreeRolloutEngine:
        args = self.args
        codec = Codec(
            self._tokenizer, self.eos_token_ids, conversational, self.chat_template, self.chat_template_kwargs
        )
        if self.tools or self.env_step is not None:
            codec.check("tool" if self.tools else "user")
        return TreeRolloutEngine(
            generate=TransformersGenerator(self, args.turn_stop_strings),
            codec=codec,
            environment=self._make_environment(codec),
            score=self.scorer,
            limits=Limits(args.max_completion_length, self._context_length(), args.max_turn_length, args.max_turns),
            predict=None if self.values is None else self.values.predict_prefixes,
            prefix_allocation=args.prefix_allocation,
            is_mixed=(lambda tree: effective(tree, args.success_threshold))
            if args.root_allocation == "dapo"
            else None,
            runner=self.runner,
            timeout=args.env_timeout,
            sync=AcceleratorSync(self.accelerator),
            tools=self._tools_of,
            progress=self.progress.update,
        )

    def _context_length(self) -> int | None:
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def _environment_name(self, example: dict[str, Any]) -> str | None:
        return example.get("environment") if self._multi_environment else None

    def _tools_of(self, tree: RolloutTree) -> list[Callable] | None:
        if self.environment_factories is None:
            return self.tools
        return self._env_tools[self._environment_name(tree.example)]

    # Data: each candidate comes once, where TRL repeats every prompt `num_generations` times

    def get_train_dataloader(self):
        dataset = self.train_dataset
        if isinstance(dataset, IterableDataset):
            if self.shuffle_dataset:
                dataset = dataset.shuffle(seed=self.args.seed)
            dataset = repeat_iterable_dataset(
                dataset,
                mini_repeat_count=1,
                batch_size=self._pool_size,
                repeat_count=self.num_iterations * self.args.steps_per_generation,
            )
        return self._get_dataloader(
            dataset=dataset,
            description="Training",
            batch_size=self._pool_size // self.accelerator.num_processes,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, dataset=None) -> Sampler:
        return RepeatSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=1,
            batch_size=self._pool_size,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )

    # One generation batch

    def _generate_and_score_completions(self, inputs):
        if self._engine is None:
            self._engine = self._make_engine(conversational=row_is_conversational(inputs[0]))
        if not self.model.training:
            trees, stats = self._roll_out_evaluation(inputs)
            output = self._prepare_batch(self._build_rows(trees))
            self._log_rollouts("eval", trees, stats)
            return output

        trees, stats = self._roll_out_training(inputs)
        self._assign_advantages(trees)
        rows = self._build_rows(trees)
        if len(rows) * self.accelerator.num_processes != self.args.generation_batch_size:
            raise RuntimeError(
                f"The engine returned {len(rows)} leaves on process {self.accelerator.process_index}, but the "
                f"generation batch holds {self.args.generation_batch_size} over {self.accelerator.num_processes} process(es)."
            )
        output = self._prepare_batch(rows)
        if not self._is_plain_grpo(trees):
            output["advantages"] = rows.advantage_tensor(like=output["completion_ids"])
        self._correct_group_logs(rows)
        self._log_rollouts("train", trees, stats)
        self._log_trees(trees)
        return output

    def _candidates(self, inputs: list[dict[str, Any]]) -> tuple[list[Candidate], list[Episode]]:
        """Resets an episode per row and encodes its prompt."""
        error = None
        try:
            # Only an environment that owns the data may leave the prompt out, as in TRL
            empty = [{"role": "user", "content": ""}] if self.environment_factories is not None else None
            prompts = [row.get("prompt", empty) if empty else row["prompt"] for row in inputs]
            for row, prompt in zip(inputs, prompts, strict=True):
                check_row(row, prompt)
            episodes = self._engine.reset(list(zip(inputs, prompts, strict=True)))
            prompts = [episode.prompt for episode in episodes]
            prompt_ids = self._encode_prompts(inputs, prompts)
        except Exception as caught:
            error = caught
        # A row that can't be used ends all processes, not only the one that was given it
        AcceleratorSync(self.accelerator).check(error)
        rows = zip(inputs, prompts, prompt_ids, strict=True)
        return [Candidate(row, prompt, ids) for row, prompt, ids in rows], episodes

    def _encode_prompts(self, inputs: list[dict[str, Any]], prompts: list[Any]) -> list[list[int]]:
        self._batch_environments = [self._environment_name(row) for row in inputs]
        prompt_ids = [list(ids) for ids in self._tokenize_prompts(prompts)[0]]
        longest = self._context_length()
        for prompt, ids in zip(prompts, prompt_ids, strict=True):
            if longest is not None and len(ids) >= longest:
                raise ValueError(
                    f"A prompt has {len(ids)} tokens, but the model takes {longest} with its completion: shorten or "
                    f"drop the row whose prompt starts with {str(prompt)[:80]!r}."
                )
        return prompt_ids

    def _roll_out_training(self, inputs: list[dict[str, Any]]) -> tuple[list[RolloutTree], Stats]:
        args, processes = self.args, self.accelerator.num_processes
        started = time.perf_counter()
        local, episodes = self._candidates(inputs)
        offset = self.accelerator.process_index * len(local)
        predicting = 0.0
        if args.root_allocation in ("active", "pcl"):
            self.values.predict_roots(local)
            predicting = time.perf_counter() - started
        pool = gather_object(local) if processes > 1 else local
        # Depends on where training stands only, so that a resumed run allocates as an uninterrupted one
        seed = np.random.SeedSequence([args.seed, self.state.global_step, self._step % args.steps_per_generation])
        root_seed, prefix_seed = (int(number) for number in seed.generate_state(2))
        counts = allocate(pool, args, root_seed)
        plans, reserves = make_plans(
            pool,
            counts,
            own=shares(counts, self.accelerator.process_index, processes),
            local={offset + position: episode for position, episode in enumerate(episodes)},
            continuations=args.continuations_per_root,
            reset=self._engine.reset,
            with_reserves=args.root_allocation == "dapo",
        )
        if self.values is not None:
            self.values.plant([plan.tree for plan in plans + reserves], offset)
        with self.progress:
            stats = self._engine.run(plans, reserves, seed=prefix_seed + self.accelerator.process_index)
        trees = [plan.tree for plan in plans + reserves if plan.bare]
        self._share_roots(trees)
        if self._trains_predictor:
            learning = time.perf_counter()
            self.values.learn(trees)
            predicting += time.perf_counter() - learning
        if self.values is not None:
            self.values.forget()
        stats.seconds["predictor"] += predicting
        stats.seconds["total"] = time.perf_counter() - started
        return trees, stats

    def _roll_out_evaluation(self, inputs: list[dict[str, Any]]) -> tuple[list[RolloutTree], Stats]:
        """One plain rollout per row: TRL's sampler repeats each prompt `num_generations_eval` times."""
        candidates, episodes = self._candidates(inputs)
        plans = [
            RootPlan(RolloutTree.from_prompt(c.prompt, c.prompt_ids, c.example, index=i, budget=1), episode, bare=1)
            for i, (c, episode) in enumerate(zip(candidates, episodes, strict=True))
        ]
        with self.progress:
            stats = self._engine.run(plans)
        return [plan.tree for plan in plans], stats

    # Values

    def _share_roots(self, trees: list[RolloutTree]) -> None:
        """Backs outcomes up, at a root that spans processes over all of its rollouts."""
        for tree in trees:
            tree.backup(self.args.value_backup)
        share_roots(trees, self.accelerator.process_index, self.accelerator.num_processes)
        for tree in trees:
            tree.backup(self.args.value_backup)

    def training_step(self, model, inputs, num_items_in_batch):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._trains_predictor and self.accelerator.sync_gradients:
            predictor_loss = self.predictor_trainer.update()
            if predictor_loss is not None:
                self._metrics["train"]["predictor/loss"].append(predictor_loss)
        return loss

    # Advantages and rows

    def _assign_advantages(self, trees: list[RolloutTree]) -> None:
        args = self.args
        if self.multi_objective_aggregation == "normalize_then_sum":
            # One reward per leaf that is normalised already stands in for the sum while advantages are computed
            original = self._substitute_normalized(trees)
            compute_advantages(trees, args.advantage_estimator, "none")
            for leaf, reward in original:
                leaf.reward = reward
            share_roots(trees, self.accelerator.process_index, self.accelerator.num_processes)
            return
        batch_std = None
        if self.scale_rewards == "batch":
            rewards = gather_object([turn.leaf.reward for tree in trees for turn in tree.leaves()])
            batch_std = RewardStats.of(rewards).std
        compute_advantages(trees, args.advantage_estimator, self.scale_rewards, batch_std)

    def _substitute_normalized(self, trees: list[RolloutTree]) -> list[tuple[Any, float]]:
        leaves = [(tree.index, turn.leaf) for tree in trees for turn in tree.leaves()]
        rows = gather_object([(self.accelerator.process_index, index, leaf.rewards) for index, leaf in leaves])
        normalized = normalize_then_sum(
            [rewards for _, _, rewards in rows], [index for _, index, _ in rows], self.reward_weights.tolist()
        )
        own = [r for r, (process, _, _) in zip(normalized, rows) if process == self.accelerator.process_index]
        original = [(leaf, leaf.reward) for _, leaf in leaves]
        for (leaf, _), reward in zip(original, own, strict=True):
            leaf.reward = reward
        share_roots(trees, self.accelerator.process_index, self.accelerator.num_processes)
        return original

    def _is_plain_grpo(self, trees: list[RolloutTree]) -> bool:
        """Whether every prompt has `num_generations` rollouts and no branch. TRL's groups are then the prompts, and its
        own numbers stand: equal to the trees' but for rounding, so that a GRPO setting trains bit for bit as in TRL."""
        return (
            self.args.root_allocation != "dapo"
            and self.args.continuations_per_root == 0
            and self.args.advantage_estimator in GRPO_WITHOUT_BRANCHES
            and all(tree.budget == self.num_generations for tree in trees)
        )

    def _build_rows(self, trees: list[RolloutTree]) -> Rows:
        return build_rows(
            trees,
            self.args.turn_weighting if self.model.training else "per_leaf",
            self.mask_truncated_completions,
            self._tokenizer.pad_token_id,
        )

    def _prepare_batch(self, rows: Rows) -> dict[str, Any]:
        """TRL's own preparation (padding, old and reference log-probs, reward logs) with the trees' answers."""
        self._log_lengths(rows)
        with self._answering(rows):
            output = super()._generate_and_score_completions([{"prompt": prompt} for prompt in rows.prompts])
        if self.mask_truncated_completions:
            truncated = torch.tensor(rows.truncated, device=output["completion_mask"].device)
            output["completion_mask"] = output["completion_mask"] * (~truncated).unsqueeze(1).int()
        return output

    @contextmanager
    def _answering(self, rows: Rows):
        """While TRL prepares `rows`, environments and tools are out of its sight: they have done their work."""
        hidden = {
            "environment_factories": None,
            "environments": None,
            "tools": [],
            # TRL calls every row truncated whose last token is no end-of-turn token; an environment may end an episode
            # elsewhere, so the loss mask of `rows` decides
            "mask_truncated_completions": False,
        }
        saved = {name: getattr(self, name) for name in hidden}
        self._rows = rows
        self._pending_extra_logs.update(extra_columns(rows))
        try:
            for name, value in hidden.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in saved.items():
                setattr(self, name, value)
            self._rows = None

    def _generate(self, prompts):
        rows = self._rows
        completions = self.scorer.completions(rows.leaves, rows.completion_ids)
        # A mask of ones is no mask: without an environment TRL's batch has none
        masked = any(0 in mask for mask in rows.loss_mask)
        return (
            rows.prompt_ids,
            rows.completion_ids,
            rows.loss_mask if masked or not self._single_turn else None,
            completions,
            rows.logprobs,
            {},
            None,
            [],
        )

    @property
    def _single_turn(self) -> bool:
        return isinstance(self._engine.environment, SingleTurnEnvironment)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = [turn.leaf.rewards for _, turn in self._rows.leaves]
        return self.accelerator.gather(torch.tensor(rewards, dtype=torch.float32, device=self.accelerator.device))

    # Logs

    def _log(self, mode: str, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            self._metrics[mode][key].append(value)

    def _log_lengths(self, rows: Rows) -> None:
        """What TRL logs where it generates: the length metrics, counting what the policy sampled."""
        mode = "train" if self.model.training else "eval"
        lengths = sampled_lengths(rows)
        own = list(zip(lengths, rows.truncated, map(len, rows.prompt_ids), strict=True))
        everyone = gather_object(own)
        sampled, truncated, prompts = zip(*everyone, strict=True)
        if mode == "train":
            self.state.num_input_tokens_seen += sum(sampled) + sum(prompts)
        self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        self._log(mode, length_metrics(sampled, truncated))

    def _log_rollouts(self, mode: str, trees: list[RolloutTree], stats: Stats) -> None:
        records = gather_object([record(trees, stats, self.args.success_threshold)])
        self._log(mode, summarise(records, training=mode == "train"))
        if self.tools:
            calls = sum(r["stats"]["environment_calls"] for r in records)
            failures = sum(r["stats"]["environment_failures"] for r in records)
            leaves = sum(len(r["depths"]) for r in records)
            frequency = {"tools/call_frequency": calls / leaves, "tools/failure_frequency": failures / max(calls, 1)}
            self._log(mode, frequency)

    def _correct_group_logs(self, rows: Rows) -> None:
        """TRL takes groups of `num_generations` rows for prompts; here the trees say what belongs together."""
        std = {id(tree): reward_statistics(tree)[tree.root].std for tree, _ in rows.leaves}
        own = [(std[id(tree)] < 1e-8, a) for (tree, _), a in zip(rows.leaves, leaf_advantages(rows), strict=True)]
        everyone = gather_object(own)
        if self.scale_rewards != "batch":
            zero_std = [float(zero) for zero, _ in everyone]
            self._metrics["train"]["frac_reward_zero_std"][-1] = sum(zero_std) / len(zero_std)
        logged = self._logs["advantages"]
        for _ in range(min(len(everyone), len(logged))):
            logged.pop()
        logged.extend(advantage for _, advantage in everyone)

    def _log_trees(self, trees: list[RolloutTree]) -> None:
        if self.args.log_trees:
            everyone = gather_object(
                [tree_to_dict(tree, success_threshold=self.args.success_threshold) for tree in trees]
            )
            if self.tree_logger is not None:
                self.tree_logger.log(everyone, step=self.state.global_step)

    # Checkpoints

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if self.predictor is not None:
            self.predictor.save_pretrained(output_dir if output_dir is not None else self.args.output_dir)

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        if self.predictor_trainer is not None and self.args.should_save:
            folder = os.path.join(
                self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            )
            self.predictor.save_pretrained(folder)
            torch.save(self.predictor_trainer.state_dict(), os.path.join(folder, PREDICTOR_STATE))

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or self.predictor_trainer is None:
            return
        path = os.path.join(checkpoint, PREDICTOR_STATE)
        if os.path.exists(path):
            self.predictor.load_state_dict(SuccessPredictor.from_pretrained(checkpoint).state_dict())
            self.predictor_trainer.load_state_dict(torch.load(path, weights_only=True))


def _is_reserved(tool: Callable) -> bool:
    return inspect.ismethod(tool) and tool.__name__ in RESERVED_METHODS
