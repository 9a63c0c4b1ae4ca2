"""
Scores leaves as they end, with every kind of reward function TRL accepts.

TRL scores a whole generation batch at once and gathers the result over processes. Here the bare rollouts of a prompt
are scored while other prompts are still being sampled, in numbers that differ between processes, so nothing may be
gathered.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from .environments.base import copy_plain
from .environments.runner import contained
from .seams import apply_chat_template, is_async_callable, is_conversational, profiling_context
from .tree import RolloutTree, Turn, is_success


logger = logging.getLogger(__name__)


def step_reward(step_rewards: list[float | None], **kwargs: Any) -> list[float | None]:
    """The reward an `env_step` callback gave on the last step, as a reward function of weight 1."""
    return step_rewards


class RewardScorer:
    """
    Args:
        trainer (`GRPOTrainer`): gives the reward functions, their weights and processing classes.
        success_threshold (`float`): a leaf whose reward is at least this is a success.
    """

    def __init__(self, trainer: Any, success_threshold: float):
        self.trainer = trainer
        self.success_threshold = success_threshold
        self._warned = False

    @property
    def reserved_columns(self) -> set[str]:
        """Columns that no data set may have: each would be passed twice, or hidden by what the name stands for."""
        functions = [function for function in self.trainer.reward_funcs if not isinstance(function, nn.Module)]
        reserved = {"prompts", "completions"} if functions else set()
        return reserved | ({"step_rewards"} if step_reward in functions and len(functions) > 1 else set())

    @property
    def has_models(self) -> bool:
        return any(isinstance(function, nn.Module) for function in self.trainer.reward_funcs)

    def __call__(self, leaves: Sequence[tuple[RolloutTree, Turn]]) -> None:
        """Fills `rewards`, `reward` and `success` of each leaf. A reward function sees all `leaves` in one call.

        Without leaves, only reward models are called, on a text that stands for none: other processes wait for the
        parts of their weights that lie here.

        Raises:
            ValueError: if a reward function does not return one reward per leaf, each a number or `None`.
        """
        if not leaves:
            for function, processor in zip(
                self.trainer.reward_funcs, self.trainer.reward_processing_classes, strict=True
            ):
                if isinstance(function, nn.Module):
                    self._model_rewards(function, processor, ["."], ["."])
            return
        rewards = self._rewards(leaves)
        weights = self.trainer.reward_weights.to(rewards.device)
        totals = (rewards * weights.unsqueeze(0)).nansum(dim=1)
        # No function scored this leaf: it is neither a success nor a failure, and carries no signal
        unscored = torch.isnan(rewards).all(dim=1)
        totals[unscored] = torch.nan
        if unscored.any() and not self._warned:
            self._warned = True
            self._warn(*leaves[int(unscored.nonzero()[0])])
        for (_, turn), row, total in zip(leaves, rewards.tolist(), totals.tolist(), strict=True):
            leaf = turn.leaf
            assert leaf is not None
            leaf.rewards, leaf.reward = row, total
            leaf.success = None if math.isnan(total) else is_success(total, self.success_threshold)

    @staticmethod
    def _warn(tree: RolloutTree, turn: Turn) -> None:
        assert turn.leaf is not None
        logger.warning(
            "All reward functions returned None for the following kwargs: "
            f"{dict(prompt=tree.start(turn).prompt, completion=turn.text)}. "
            "So this rollout got no reward (an `env_step` gave none either) and carries no signal; it ended by "
            f"{turn.leaf.reason!r} after {turn.depth} turn(s). Make sure that each rollout gets at least one reward. "
            "Further ones are not reported."
        )

    def _rewards(self, leaves: Sequence[tuple[RolloutTree, Turn]]) -> torch.Tensor:
        """Shape `(leaves, reward functions)`, `nan` where a function returned `None`."""
        trainer = self.trainer
        prompts = [copy_plain(tree.start(turn).prompt) for tree, turn in leaves]
        completion_ids = [[i for t in turn.path() for i in (*t.token_ids, *t.observation_ids)] for _, turn in leaves]
        completions = self.completions(leaves, completion_ids)
        kwargs = self._keyword_arguments(leaves)
        rewards = torch.full((len(leaves), len(trainer.reward_funcs)), torch.nan, device=trainer.accelerator.device)
        waiting = []
        for index, (function, name) in enumerate(zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)):
            if isinstance(function, nn.Module):
                with profiling_context(trainer, name):
                    processor = trainer.reward_processing_classes[index]
                    rewards[:, index] = self._model_rewards(function, processor, prompts, completions)
            elif is_async_callable(function):
                waiting.append((index, function))
            else:
                with profiling_context(trainer, name):
                    answer = function(
                        prompts=prompts, completions=completions, completion_ids=completion_ids, **kwargs
                    )
                rewards[:, index] = self._column(name, answer, len(leaves), rewards.device)
        if waiting:

            async def together():
                return await asyncio.gather(
                    *[
                        # One that exits would end the event loop, and nobody would be told
                        contained(
                            function(prompts=prompts, completions=completions, completion_ids=completion_ids, **kwargs)
                        )
                        for _, function in waiting
                    ]
                )

            answers = asyncio.run_coroutine_threadsafe(together(), trainer.async_loop).result()
            for (index, _), answer in zip(waiting, answers, strict=True):
                name = trainer.reward_func_names[index]
                rewards[:, index] = self._column(name, answer, len(leaves), rewards.device)
        return rewards

    def completions(self, leaves: Sequence[tuple[RolloutTree, Turn]], completion_ids: list[list[int]]) -> list[Any]:
        """Completions as TRL shows them: messages for conversational prompts, decoded text otherwise."""
        if isinstance(leaves[0][0].prompt, str):
            return self.trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        return [[copy_plain(message) for t in turn.path() for message in t.messages] for _, turn in leaves]

    def _keyword_arguments(self, leaves: Sequence[tuple[RolloutTree, Turn]]) -> dict[str, Any]:
        examples = [tree.example for tree, _ in leaves]
        reserved = ("prompt", "completion", "completion_ids")
        columns = [key for key in examples[0] if key not in reserved]
        # Copies, as each completion has its own in TRL: leaves share their prompt's row, and later ones need it too
        kwargs: dict[str, Any] = {key: [copy_plain(row[key]) for row in examples] for key in columns}
        kwargs["trainer_state"] = self.trainer.state
        kwargs["log_metric"] = self.trainer._log_metric

        def log_extra(column: str, values: list) -> None:
            values = list(values)
            if len(values) != len(leaves):
                raise ValueError(
                    f"`log_extra` was given {len(values)} values for the column {column!r}, but {len(leaves)} were "
                    "expected: give it one value per completion."
                )
            # Leaves are scored in another order than they are logged in
            for (_, turn), value in zip(leaves, values, strict=True):
                turn.leaf.extras[str(column)] = value  # type: ignore[union-attr]

        kwargs["log_extra"] = log_extra
        environments = [turn.leaf.environment for _, turn in leaves]  # type: ignore[union-attr]
        if any(environment is not None for environment in environments):
            kwargs["environments"] = environments
        if step_reward in self.trainer.reward_funcs:
            # Where nothing else can score it, a rollout that a limit ended without a reward has failed
            alone = len(self.trainer.reward_funcs) == 1
            kwargs["step_rewards"] = [
                0.0 if alone and leaf.environment_reward is None and leaf.truncated else leaf.environment_reward
                for leaf in (turn.leaf for _, turn in leaves)
                if leaf is not None
            ]
        return kwargs

    def _model_rewards(self, model: nn.Module, processor: Any, prompts: list, completions: list) -> torch.Tensor:
        if is_conversational({"prompt": prompts[0]}):
            chats = [{"messages": p + c} for p, c in zip(prompts, completions, strict=True)]
            kwargs = self.trainer.chat_template_kwargs
            texts = [apply_chat_template(chat, processor, **kwargs)["text"] for chat in chats]
        else:
            texts = [p + c for p, c in zip(prompts, completions, strict=True)]
        inputs = processor(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        inputs = inputs.to(self.trainer.accelerator.device)
        with torch.inference_mode():
            return model(**inputs).logits[:, 0]

    @staticmethod
    def _column(name: str, answer: Any, count: int, device: torch.device) -> torch.Tensor:
        wanted = "return one number, or `None`, per completion, in their order"
        # Iterated over, a dictionary or a text would give something, but no rewards
        if isinstance(answer, (str, bytes, Mapping, Set)) or not _is_iterable(answer):
            raise ValueError(f"The reward function '{name}' returned {_kind_of(answer)}: {wanted}.")
        answer = list(answer)
        if len(answer) != count:
            raise ValueError(
                f"The reward function '{name}' returned {len(answer)} rewards, but {count} were expected (one per "
                "prompt-completion pair). Make sure the reward function returns exactly one reward per completion."
            )
        rewards = []
        for reward in answer:
            try:
                rewards.append(torch.nan if reward is None else float(reward))
            except Exception as error:
                raise ValueError(
                    f"The reward function '{name}' returned {_kind_of(reward)} as one of its rewards: {wanted}."
                ) from error
        return torch.tensor(rewards, dtype=torch.float32, device=device)


def _is_iterable(answer: Any) -> bool:
    try:
        iter(answer)
    except TypeError:
        return False
    return True


def _kind_of(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"
