"""
[`TRACETrainer`]: binds the rooms of this package to the seams of TRL's [`~trl.GRPOTrainer`]. It holds no algorithm.

    dataset rows ─▶ candidates ─▶ values ─▶ root allocation ─▶ TreeRolloutEngine ─▶ trees ─▶ backup ─▶ predictor
                                                                                     └─▶ advantages ─▶ rows ─▶ loss
"""

from __future__ import annotations

import logging
import math
import os
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from . import advice, checkpoints, checks, hub, model_card, seams
from .advantages import GRPO_WITHOUT_BRANCHES, compute_advantages
from .allocation import ROOT_ALLOCATORS, reads_values
from .codec import Codec
from .config import TRACEConfig
from .continuous import ContinuousRun
from .engine import Limits, RootPlan, Stats, TreeRolloutEngine
from .environments.base import Episode, describe
from .environments.callback import EnvReset, EnvStep
from .environments.from_trainer import drop_reserved_tools, make_environment
from .environments.none import SingleTurnEnvironment
from .environments.runner import ConcurrentRunner
from .environments.tools import EMPTY_PROMPT
from .generation import Backend, make_backend
from .metrics import effective
from .pool import Candidate, PoolSampler, allocate, fill_first_pool, make_plans, shares
from .predictor import PredictorTrainer, SuccessPredictor
from .processes import AcceleratorSync, batch_reward_std, gather_on_main, normalized_rewards, share_roots
from .progress import RolloutProgress, StepLineCallback
from .reports import extra_columns, gather_groups, gather_lengths, gather_records, length_metrics, rollout_metrics
from .rewards import RewardScorer, step_reward
from .rows import Rows, build_rows
from .seams import (
    EnvironmentFactory,
    GRPOTrainer,
    RewardFunc,
    RolloutFunc,
    get_config_model_id,
    repeat_iterable_dataset,
    start_event_loop_in_daemon,
)
from .sparse_loss import needed_rows_only
from .tables import loggable
from .tree import RolloutTree
from .tree_log import TreeLogger, tree_to_dict
from .values import AnchorValues, make_values


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig


logger = logging.getLogger(__name__)


class TRACETrainer(GRPOTrainer):
    """
    Trainer for TRACE (Tree Rollout Allocation for Contrastive Exploration), which spends a fixed budget of agentic
    rollouts on the prompts, and on the turn-level prefixes, whose outcomes are most likely mixed. It was proposed in
    [TRACE](https://huggingface.co/papers/2606.11119). Takes every argument of [`~trl.GRPOTrainer`], and an
    `env_step`.

    Example:

    ```python
    from trace_trl import StepResult, TRACEConfig, TRACETrainer


    def env_step(state, action, messages):
        if "finish[" in action:
            return StepResult(done=True, reward=float(state["answer"] in action))
        return StepResult(observation="Observation: nothing found.")


    trainer = TRACETrainer(
        model="Qwen/Qwen2.5-1.5B-Instruct",
        args=TRACEConfig(generation_batch_size=48, continuations_per_root=2),
        train_dataset=dataset,  # columns "prompt" and "answer"
        env_step=env_step,
    )
    trainer.train()
    ```

    Args:
        env_step (`Callable`, *optional*):
            `env_step(state, action: str, messages) -> StepResult`, sync or async, called once per turn of a live
            branch. `action` is the decoded turn, `messages` the conversation so far. Excludes `tools` and
            `environment_factory`.
        env_reset (`Callable`, *optional*):
            `env_reset(example: dict) -> state`, sync or async. Defaults to a copy of the dataset row.
        args ([`TRACEConfig`], *optional*):
            Defaults to `TRACEConfig("<model>-TRACE")`.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`, *optional*):
            As in TRL; may be left out with `env_step`, whose last `reward` is one more reward function. Each is called
            with a part of the batch at a time, so it must judge each completion by itself.
        rollout_func (`RolloutFunc`, *optional*):
            Refused: the engine is the rollout function.
        model, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks, optimizers, \
quantization_config, peft_config, tools, environment_factory:
            As in [`~trl.GRPOTrainer`].

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
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: TRACEConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable] | None = None,
        rollout_func: RolloutFunc | None = None,
        environment_factory: EnvironmentFactory | dict[str, EnvironmentFactory] | None = None,
        env_step: EnvStep | None = None,
        env_reset: EnvReset | None = None,
    ):
        seams.check_trl()
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = TRACEConfig(f"{name.split('/')[-1]}-TRACE")
        checks.check_arguments(args, reward_funcs, tools, rollout_func, environment_factory, env_step, env_reset)
        if args.use_vllm:
            checks.check_vllm_model(model, args.vllm_mode)
        checks.check_datasets(train_dataset, eval_dataset, needs_prompt=environment_factory is None)

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
        checks.check_tokenizer(self._tokenizer)
        if args.beta:
            # Else the copy of an adapter that TRL makes for reference is trained in its place. What is only to be
            # evaluated needs no reference, and may be frozen
            checks.check_trainable(self.model)
        checks.check_continuous_batching(args, self.is_fsdp_enabled)
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
        drop_reserved_tools(self)
        if self.tools:
            checks.check_tool_datasets(eval_dataset)  # the training set's first row is looked at below
        self._sync = AcceleratorSync(self.accelerator)
        self._environment_owns_data = train_dataset is None
        if self._environment_owns_data:
            # TRL's placeholder has as many rows as GRPO needs prompts; the environment can fill a whole pool
            self.train_dataset = Dataset.from_list([{"prompt": EMPTY_PROMPT}] * args.candidate_pool_size)
            args.check_parts(self.accelerator.num_processes)
        self._pool_size = self._fitted_pool_size()

        self.runner = ConcurrentRunner(args.env_max_workers, loop=self._event_loop)
        self.scorer = RewardScorer(self, args.success_threshold)
        self._outcomes = advice.OutcomeWatch(args.success_threshold)
        self._told_of_cuts = False
        if not args.remove_unused_columns:
            checks.check_reward_columns([train_dataset, eval_dataset], self.scorer.reserved_columns)
        self.values = self._make_values()
        self._note = getattr(self.values, "note", None)
        self.tree_logger = None
        if args.log_trees and self.accelerator.is_main_process:
            self.tree_logger = TreeLogger(
                os.path.join(args.output_dir, "trees"),
                max_bytes=int(args.tree_log_max_megabytes * 2**20),
                max_files=args.tree_log_max_files,
            )
        self.progress = RolloutProgress(
            args.show_rollout_progress and not args.disable_tqdm and self.accelerator.is_main_process
        )
        if args.show_rollout_progress:
            self.add_callback(StepLineCallback())

        self._staging: str | None = None  # where checkpoints are written while one is
        self._last_generation = (-1, 0)  # optimizer step, and number of the generation within it
        self._counts: list[int] = []  # bare rollouts of each candidate of the pool, over all processes
        self._rows: Rows | None = None  # the rows TRL is told of while it prepares a batch
        self._engine: TreeRolloutEngine | None = None  # of the rows at hand
        self._engines: dict[bool, TreeRolloutEngine] = {}  # of chats, of strings: a turn is answered in its own form
        self._backend: Backend | None = None
        example = checks.first_row(self.train_dataset)
        if example is not None:
            # Built now, so that a chat template that can't carry an answer is refused before anything is sampled
            self._prepare_engine(example)

    # Construction

    @property
    def predictor_trainer(self) -> PredictorTrainer | None:
        return None if self.values is None else self.values.predictor_trainer

    @property
    def predictor(self) -> SuccessPredictor | None:
        """The value head, or `None` where nothing uses one."""
        return None if self.predictor_trainer is None else self.predictor_trainer.predictor

    def _make_values(self) -> AnchorValues | None:
        """What predicts anchors, or `None`. A subclass may return anything with the methods of [`AnchorValues`] and a
        `predictor_trainer`, which is `None` where nothing learns."""
        return make_values(self, self._sync.most)

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

    @property
    def _trains_predictor(self) -> bool:
        return self.predictor_trainer is not None and self.args.train_predictor is not False

    def _event_loop(self):
        """The loop TRL runs async rewards and tools on, started here if TRL had no reason to."""
        if not hasattr(self, "async_loop"):
            self.async_loop_thread, self.async_loop, ready = start_event_loop_in_daemon(name="TRACETrainer-AsyncLoop")
            ready.wait()
        return self.async_loop

    def _prepare_engine(self, row: dict[str, Any]) -> None:
        if self.tools:
            checks.check_tool_row(row)
        conversational = checks.row_is_conversational(row)
        if conversational not in self._engines:
            self._engines[conversational] = self._make_engine(conversational)
        self._engine = self._engines[conversational]

    def _make_engine(self, conversational: bool) -> TreeRolloutEngine:
        args = self.args
        codec = Codec(
            self._tokenizer, self.eos_token_ids, conversational, self.chat_template, self.chat_template_kwargs
        )
        if self.tools or self.env_step is not None:
            codec.check("tool" if self.tools else "user")
        if self._backend is None:
            self._backend = make_backend(self, args.turn_stop_strings, with_states=self._note is not None)
        backend = self._backend
        return TreeRolloutEngine(
            generate=backend,
            generating=backend.session,
            schedule=ContinuousRun if args.is_continuous else None,
            codec=codec,
            environment=make_environment(self, codec, self._event_loop),
            score=self.scorer,
            score_together=self.accelerator.num_processes > 1 and self.scorer.has_models,
            limits=Limits(args.max_completion_length, self._context_length(), args.max_turn_length, args.max_turns),
            predict=None if self.values is None else self.values.predict_prefixes,
            note=self._note,
            prefix_allocation=args.prefix_allocation,
            is_mixed=self._is_mixed if args.root_allocation == "dapo" else None,
            runner=self.runner,
            timeout=args.env_timeout,
            sync=self._sync,
            tools=self._tools_of,
            encode=self._encode_prompts,
            progress=self.progress.update,
        )

    def _is_mixed(self, tree: RolloutTree) -> bool:
        return effective(tree)

    def _context_length(self) -> int | None:
        # vLLM may take less than the model does: `vllm_max_model_length`
        own = None if self._backend is None else self._backend.context_length
        lengths = [getattr(self.model.config.get_text_config(), "max_position_embeddings", None), own]
        shortest = min((length for length in lengths if length is not None), default=None)
        adapters = getattr(self.model, "peft_config", {}).values()
        virtual = max((getattr(adapter, "num_virtual_tokens", None) or 0 for adapter in adapters), default=0)
        return None if shortest is None else shortest - virtual

    def _environment_name(self, example: dict[str, Any]) -> str | None:
        return example.get("environment") if self._multi_environment else None

    def _tools_of(self, tree: RolloutTree) -> list[Callable] | None:
        if self.environment_factories is None:
            return self.tools
        return self._env_tools[self._environment_name(tree.example)]

    # Running

    def train(self, *args, **kwargs):
        checks.check_trainable(self.model)
        self._forget_loaded_weights()
        try:
            return super().train(*args, **kwargs)
        finally:
            self._close_environments()

    def evaluate(self, *args, **kwargs):
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            if not self.is_in_train:
                self._close_environments()

    @torch.no_grad()
    def rollout(self, rows: Sequence[dict[str, Any]]) -> list[RolloutTree]:
        """Plays one episode per row with the present policy and scores it, as an evaluation does. Nothing is trained.

        Args:
            rows (`Sequence[dict]`):
                Dataset rows; a row that comes twice is played twice. All processes call this together, each with at
                least one row of its own.

        Returns:
            `list[RolloutTree]`: one tree per row, in their order; `tree.leaves()[0]` holds the turns, the reward and
            how the episode ended.

        Raises:
            ValueError: if there is no row, or one that can't be used.
        """
        if not rows:
            raise ValueError("`rollout` needs at least one row.")
        with self._sync.together():
            self._prepare_engine(rows[0])
        training = self.model.training
        self.model.eval()
        try:
            return self._roll_out_evaluation(list(rows))[0]
        finally:
            self.model.train(training)
            if not self.is_in_train:
                self._close_environments()

    def _close_environments(self) -> None:
        """Closes what environments and threads are kept for the next generation; one that comes makes new ones."""
        for engine in self._engines.values():
            engine.environment.close()
        self.runner.close()

    # Data: each candidate comes once, where TRL repeats every prompt `num_generations` times

    def get_train_dataloader(self):
        dataset = self.train_dataset
        if isinstance(dataset, IterableDataset):
            if self.shuffle_dataset:
                dataset = dataset.shuffle(seed=self.args.seed)
            dataset = repeat_iterable_dataset(
                fill_first_pool(dataset, self._pool_size),
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
        return PoolSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=1,
            batch_size=self._pool_size,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
            epoch=lambda: int(self.state.epoch or 0),
        )

    # One generation batch

    def _generate_and_score_completions(self, inputs):
        with self._sync.together():
            self._prepare_engine(inputs[0])
        if not self.model.training:
            (count,) = self._sync.totals(len(inputs))
            checks.check_evaluation_batch(count, self.args, self.num_generations_eval)
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
                f"generation batch holds {self.args.generation_batch_size} over {self.accelerator.num_processes} "
                "process(es)."
            )
        output = self._prepare_batch(rows)
        if not self._is_plain_grpo:
            output["advantages"] = rows.advantage_tensor(like=output["completion_ids"])
            self._correct_group_logs(rows)
        self._log_rollouts("train", trees, stats)
        self._log_trees(trees)
        return output

    def _candidates(self, inputs: list[dict[str, Any]]) -> tuple[list[Candidate], list[Episode]]:
        """Resets an episode per row and encodes its prompt."""
        episodes: list[Episode] = []
        # A row that can't be used ends all processes, not only the one that was given it
        with self._engine.closing_on_error(episodes), self._sync.together():
            # Only an environment that owns the data may leave the prompt out, as in TRL
            needs_prompt = self.environment_factories is None
            rows, reserved = [(row, row.get("prompt")) for row in inputs], self.scorer.reserved_columns
            for row, prompt in rows:
                checks.check_row(row, prompt, needs_prompt)
                checks.check_columns(row, reserved)
            episodes += self._engine.reset(rows)
            prompts = [episode.prompt for episode in episodes]
            prompt_ids = self._encode_prompts(inputs, prompts)
        return [Candidate(*row) for row in zip(inputs, prompts, prompt_ids, strict=True)], episodes

    def _encode_prompts(self, rows: list[dict[str, Any]], prompts: list[Any]) -> list[list[int]]:
        """Token ids of what environments made of the rows' prompts.

        Raises:
            ValueError: for a prompt that can't be used.
        """
        checks.check_prompt_kinds(rows, prompts)
        self._batch_environments = [self._environment_name(row) for row in rows]
        encoded = [list(ids) for ids in self._tokenize_prompts(prompts)[0]]
        for row, prompt, ids in zip(rows, prompts, encoded, strict=True):
            checks.check_prompt_length(row, prompt, ids, self._context_length())
        return encoded

    def _roll_out_training(self, inputs: list[dict[str, Any]]) -> tuple[list[RolloutTree], Stats]:
        started = time.perf_counter()
        local, episodes = self._candidates(inputs)
        predicting = 0.0
        with self._engine.closing_on_error(episodes):
            if reads_values(ROOT_ALLOCATORS, self.args.root_allocation):
                asked = time.perf_counter()
                self.values.predict_roots(local)
                predicting = time.perf_counter() - asked
            root_seed, prefix_seed = self._allocation_seeds()
            plans, reserves = self._plan(local, episodes, root_seed)
        taken = {plan.episode for plan in plans + reserves}
        self._engine.close([episode for episode in episodes if episode not in taken])
        # Nothing can be chosen by outcomes that are all the same
        self._engine.prefix_allocation = "uniform" if self._outcomes.is_blind else self.args.prefix_allocation
        stats = self._play(plans, reserves, seed=prefix_seed + self.accelerator.process_index)
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

    def _plan(
        self, local: list[Candidate], episodes: list[Episode], seed: int
    ) -> tuple[list[RootPlan], list[RootPlan]]:
        """Spends the budget on the candidates of all processes. Episodes that are reset here for another process's
        candidates are appended to `episodes`."""
        args, process, processes = self.args, self.accelerator.process_index, self.accelerator.num_processes
        offset = process * len(local)
        pool = gather_object(local) if processes > 1 else local

        def reset(rows: list[tuple[dict[str, Any], Any]]) -> list[Episode]:
            fresh = self._engine.reset(rows)
            episodes.extend(fresh)
            return fresh

        with self._sync.together():
            # Another process's candidates are played by this one's engine, which is of one kind
            checks.check_prompt_kinds([c.example for c in pool], [c.prompt for c in pool])
            # A task that an environment made up is known to its own process only
            parts = processes if self._environment_owns_data else 1
            self._counts = counts = allocate(pool, args, seed, parts=parts, uniform=self._outcomes.is_blind)
            plans, reserves = make_plans(
                pool,
                counts,
                own=shares(counts, process, processes),
                local={offset + position: episode for position, episode in enumerate(episodes)},
                continuations=args.continuations_per_root,
                reset=reset,
                encode=self._encode_prompts,
                with_reserves=args.root_allocation == "dapo",
            )
        if self.values is not None:
            self.values.plant([plan.tree for plan in plans + reserves], offset)
        return plans, reserves

    def _allocation_seeds(self) -> list[int]:
        """Depend on where training stands only, so that a resumed run allocates as an uninterrupted one."""
        step, number = self._last_generation
        # One optimizer step may hold several generations
        number = number + 1 if step == self.state.global_step else 0
        self._last_generation = self.state.global_step, number
        return np.random.SeedSequence([self.args.seed, *self._last_generation]).generate_state(2).tolist()

    def _roll_out_evaluation(self, inputs: list[dict[str, Any]]) -> tuple[list[RolloutTree], Stats]:
        """One plain rollout per row: TRL's sampler repeats each prompt `num_generations_eval` times."""
        candidates, episodes = self._candidates(inputs)
        plans = [
            RootPlan(RolloutTree.from_prompt(c.prompt, c.prompt_ids, c.example, index=i, budget=1), episode, bare=1)
            for i, (c, episode) in enumerate(zip(candidates, episodes, strict=True))
        ]
        stats = self._play(plans)
        return [plan.tree for plan in plans], stats

    def _play(self, plans: list[RootPlan], reserves: Sequence[RootPlan] = (), seed: int | None = None) -> Stats:
        """Runs the engine. An environment whose every call failed, on all processes, ends the run: nothing is learned
        from what the policy reads then."""
        with self.progress:
            stats = self._engine.run(plans, reserves, seed=seed)
        calls, errors = self._sync.totals(stats.environment_calls, stats.environment_errors)
        if errors and errors == calls:
            with self._sync.together():
                if self._engine.first_error is not None:
                    raise RuntimeError(
                        f"Each of the {calls} environment calls of this generation failed, first with "
                        f"{type(self._engine.first_error).__name__}: {describe(self._engine.first_error)} Mend the "
                        "environment."
                    ) from self._engine.first_error
        return stats

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

    def _compute_loss(self, model, inputs):
        # In a GRPO setting every number is TRL's, whose loss computes all rows
        if not (self.args.skip_zero_advantage_rows and self.model.training) or self._is_plain_grpo:
            return super()._compute_loss(model, inputs)
        with needed_rows_only(self, inputs):
            return super()._compute_loss(model, inputs)

    # Advantages and rows

    def _assign_advantages(self, trees: list[RolloutTree]) -> None:
        estimator = self.args.advantage_estimator
        if self.multi_objective_aggregation == "normalize_then_sum":
            process = self.accelerator.process_index, self.accelerator.num_processes
            with normalized_rewards(trees, self.reward_weights.tolist(), *process):
                compute_advantages(trees, estimator, "none")
        else:
            batch_std = batch_reward_std(trees) if self.scale_rewards == "batch" else None
            compute_advantages(trees, estimator, self.scale_rewards, batch_std)

    @property
    def _is_plain_grpo(self) -> bool:
        """Whether every prompt of all processes has `num_generations` rollouts and no branch. TRL's groups are then
        the prompts, and its own numbers stand: equal to the trees' but for rounding, so that a GRPO setting trains bit
        for bit as in TRL."""
        return (
            self.args.root_allocation != "dapo"
            and self.args.continuations_per_root == 0
            and self.args.advantage_estimator in GRPO_WITHOUT_BRANCHES
            and set(self._counts) <= {0, self.num_generations}
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
        for column in self._logs["extra"].values():
            # A column that a reward function has only begun to log
            column.extendleft([None] * (len(self._logs["prompt"]) - len(column)))
        if self.mask_truncated_completions:
            truncated = torch.tensor(rows.truncated, device=output["completion_mask"].device)
            output["completion_mask"] = output["completion_mask"] * (~truncated).unsqueeze(1).int()
        return output

    @contextmanager
    def _answering(self, rows: Rows):
        """While TRL prepares `rows`, environments and tools are out of its sight: they have done their work."""
        hidden: dict[str, Any] = {
            "environment_factories": None,
            "environments": None,
            "tools": [],
            # TRL calls every row truncated whose last token is no end-of-turn token; an environment may end an episode
            # elsewhere, so the loss mask of `rows` decides
            "mask_truncated_completions": False,
        }
        saved = {name: getattr(self, name) for name in hidden}
        self._rows = rows
        self._pending_extra_logs.update(extra_columns(rows, known=self._logs["extra"]))
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

    def log(self, logs, start_time=None):
        kept = self._logs
        if self.log_completions and self.accelerator.is_main_process:
            self._logs = loggable(kept)
        try:
            super().log(logs, start_time)
        finally:
            self._logs = kept

    def _log(self, mode: str, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            # What is undefined, such as the AUROC of equal outcomes, is left out: TRL would log `None`
            if not math.isnan(value):
                self._metrics[mode][key].append(value)

    def _log_lengths(self, rows: Rows) -> None:
        """What TRL logs where it generates: the length metrics, counting what the policy sampled."""
        mode = "train" if self.model.training else "eval"
        lengths, truncated, tokens = gather_lengths(rows)
        if mode == "train":
            self.state.num_input_tokens_seen += tokens
        self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        self._log(mode, length_metrics(lengths, truncated))

    def _log_rollouts(self, mode: str, trees: list[RolloutTree], stats: Stats) -> None:
        records = gather_records(trees, stats)
        metrics = rollout_metrics(records, training=mode == "train", tools=bool(self.tools))
        self._log(mode, metrics)
        if mode == "train":
            self._advise(records, metrics)

    def _advise(self, records: list[dict[str, Any]], metrics: dict[str, float]) -> None:
        blind = self._outcomes.see(
            [success for record in records for success in record["successes"]],
            [reward for record in records for reward in record["rewards"]],
        )
        cut = None if self._told_of_cuts else advice.cut_leaves(metrics)
        self._told_of_cuts = self._told_of_cuts or cut is not None
        for text in (blind, cut):
            if text is not None and self.accelerator.is_main_process:
                logger.warning(text)

    def _correct_group_logs(self, rows: Rows) -> None:
        """TRL takes groups of `num_generations` rows for prompts; here the trees say what belongs together."""
        zero_std, advantages = gather_groups(rows)
        if self.scale_rewards != "batch":
            self._metrics["train"]["frac_reward_zero_std"][-1] = sum(zero_std) / len(zero_std)
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(advantages)

    def _log_trees(self, trees: list[RolloutTree]) -> None:
        if self.args.log_trees:
            process = {"process": self.accelerator.process_index}
            own = [{**process, **tree_to_dict(tree)} for tree in trees]
            everyone = gather_on_main(own, self.accelerator)
            if self.tree_logger is not None:
                step, number = self._last_generation
                self.tree_logger.log(everyone, step=step, generation=number)

    # Checkpoints

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        self._save_head(output_dir)
        if self.args.should_save:
            model_card.correct_base_model(os.path.join(output_dir, "README.md"), self.model)

    def _save_head(self, output_dir: str) -> None:
        if self.predictor is not None and self.args.should_save:
            self.predictor.save_pretrained(output_dir)

    def _forget_loaded_weights(self) -> None:
        """Has the weights pushed to vLLM again, where they may differ from those pushed at the same step."""
        if self.use_vllm:
            self._last_loaded_step = -1

    def _load_best_model(self):
        super()._load_best_model()
        self._forget_loaded_weights()
        if self.predictor is not None:
            checkpoints.load_head(self.predictor, self.state.best_model_checkpoint)

    def _get_output_dir(self, trial):
        return self._staging or super()._get_output_dir(trial)

    def _save_checkpoint(self, model, trial):
        with checkpoints.staged(self, super()._get_output_dir(trial)) as (self._staging, checkpoint):
            try:
                super()._save_checkpoint(model, trial)
                # Also where the policy's weights are saved in another way, as FSDP's shards are
                self._save_head(checkpoint)
                if not self.args.save_only_model:
                    checkpoints.save_state(self, checkpoint)
            finally:
                self._staging = None
        if self.args.push_to_hub:
            self._push_from_checkpoint(os.path.join(super()._get_output_dir(trial), os.path.basename(checkpoint)))

    def _push_from_checkpoint(self, checkpoint_folder):
        # Asked for while the checkpoint is being written: pushed when it lies where it belongs
        if self._staging is None and hub.will_push(self):
            hub.bring_head(checkpoint_folder, self.args.output_dir)
            super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        super().create_model_card(model_name, dataset_name, tags)
        if self.is_world_process_zero():
            model_card.complete(os.path.join(self.args.output_dir, "README.md"), self)
            if self.args.log_trees and self.hub_model_id is not None:
                hub.keep_trees_local(self.args.output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            checkpoints.load_state(self, checkpoint)
