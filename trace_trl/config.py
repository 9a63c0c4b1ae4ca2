"""Configuration of [`TRACETrainer`]: every knob, and the arithmetic of the rollout budget."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, fields
from numbers import Integral, Real

from .advantages import ESTIMATORS, TURN_WEIGHTINGS
from .allocation import PREFIX_ALLOCATORS, ROOT_ALLOCATORS, reads_values
from .seams import GRPOConfig
from .tree import BACKUPS


logger = logging.getLogger(__name__)

DEFAULT_CONTINUATIONS = 2  # N of the paper's main runs
VLLM_ROLLOUT_MODES = ("continuous", "lockstep")
# What `vllm serve` is told by options of its own, and what only a client of it needs
COLOCATE_OPTIONS = (
    *("vllm_model_impl", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization"),
    *("vllm_tensor_parallel_size", "vllm_max_model_length"),
)
SERVER_OPTIONS = (
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
    *("vllm_server_timeout", "vllm_group_port"),
)
# Of vLLM's sampling parameters, those that belong to a turn, and what decides them
VLLM_TURN_OPTIONS = {
    "n": "a branch has one next turn, and branching is decided by `prefix_allocation`: remove it",
    "seed": "every branch would draw the same random numbers: remove it, and set `seed` of the configuration",
    "max_tokens": "set `max_turn_length` and `max_completion_length`",
    "stop": "set `turn_stop_strings`",
    "include_stop_str_in_output": "stop strings stay part of the turn: remove it",
    "stop_token_ids": "set `eos_token_id` of the model's generation config",
    "ignore_eos": "a turn ends with its end-of-turn token: remove it",
    "logprobs": "those of the sampled tokens are always kept: remove it",
    "prompt_logprobs": "nothing reads them: remove it",
    "detokenize": "remove it",
    "skip_special_tokens": "remove it",
    "spaces_between_special_tokens": "remove it",
    "output_kind": "remove it",
}
# The same of transformers' generation config, each with a value that changes nothing
TRANSFORMERS_TURN_OPTIONS = {
    "max_new_tokens": (None, "set `max_turn_length` and `max_completion_length`"),
    "eos_token_id": (None, "set `model.generation_config.eos_token_id`, which also tells where a turn has ended"),
    "stop_strings": (None, "set `turn_stop_strings`"),
    "num_return_sequences": (1, VLLM_TURN_OPTIONS["n"]),
    "return_dict_in_generate": (False, "remove it"),
}


def _is_number(value: object, kind: type) -> bool:
    # In Python a bool is a number, in a configuration it is a mistake
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass
class TRACEConfig(GRPOConfig):
    r"""
    Configuration class for the [`TRACETrainer`].

    This class includes only the parameters that are specific to TRACE training. For a full list of training arguments,
    please refer to the [`~trl.GRPOConfig`] documentation.

    The rollout budget follows from TRL's own numbers. With `N = continuations_per_root`, one generation batch holds
    `generation_batch_size = M * (1 + N)` leaves over all processes: `M` bare rollouts, which stage 1 spends on
    prompts, and `M * N` continuations, which stage 2 spends on prefixes. The candidate pool holds
    `candidate_pool_factor * generation_batch_size / num_generations` prompts.

    Using [`~transformers.HfArgumentParser`] we can turn this class into
    [argparse](https://docs.python.org/3/library/argparse#module-argparse) arguments that can be specified on the
    command line.

    Parameters:
        > Parameters that control the rollout budget

        root_allocation (`str`, *optional*, defaults to `"active"`):
            How bare rollouts are spent on prompts. One of `"active"` (TRACE, stage 1), `"uniform"` (GRPO), `"pcl"`
            (the candidates with predicted value nearest 0.5), `"dapo"` (uniform; a prompt whose rollouts agree is
            replaced by another candidate while the pool lasts).
        prefix_allocation (`str`, *optional*, defaults to `"active"`):
            How continuations are spent on prefixes. One of `"active"` (TRACE, stage 2), `"uniform"`, `"random"`.
        continuations_per_root (`int`, *optional*):
            Continuations `N` per bare rollout. `0` turns stage 2 off. If `None`, it is 2 where `generation_batch_size`
            can be split that way, and the nearest number that fits otherwise.
        candidate_pool_factor (`float`, *optional*):
            Candidates offered to stage 1, as a multiple of the `generation_batch_size / num_generations` prompts that
            GRPO would use. If `None`, it is 2.0, and 1.0 with `root_allocation="uniform"`. An epoch offers every
            prompt once: with a factor of 2.0, it has half as many steps as with GRPO.
        headroom_exponent (`float`, *optional*, defaults to `0.0`):
            How much more a hard prompt is worth to stage 1 than an easy one: the chance of mixed outcomes counts
            `(1 - v) ** headroom_exponent` times, where `v` is the predicted success rate. `0.0`, as in the paper, is
            blind to what a prompt has left to gain.
        max_rollouts_per_root (`int`, *optional*):
            Most bare rollouts of one prompt, `m_max`. If `None`, it is `num_generations`.
        success_threshold (`float`, *optional*, defaults to `0.5`):
            A leaf is a success if its reward is at least this. Allocation and the predictor see successes; advantages
            see rewards.

        > Parameters that control the advantages

        advantage_estimator (`str`, *optional*, defaults to `"sibling"`):
            One of `"sibling"` (TRACE), `"sibling_fallback"` (siblings with equal rewards take the advantage of the
            turn above them), `"leaf"` (GRPO over a prompt's leaves), `"treerl"`, `"treepo"`, `"tree_grpo"`.
        turn_weighting (`str`, *optional*, defaults to `"once"`):
            How a turn shared by several leaves counts in the loss: `"once"` (in one row only), `"per_leaf"` (in every
            row), `"on_policy"` (weighted by the chance of the path without branching).
        skip_zero_advantage_rows (`bool`, *optional*, defaults to `True`):
            Whether the loss leaves out rows that can't move the policy, and what lies behind the others' last trained
            token.
            The gradient is the same up to rounding. With a KL term, an entropy bonus, `top_entropy_quantile` or a
            router's auxiliary loss every row counts, and none is left out; nor is any in a GRPO setting, whose numbers
            are TRL's.
        value_backup (`str`, *optional*, defaults to `"leaf_mean"`):
            How outcomes are backed up into the predictor's targets: `"leaf_mean"` or `"child_mean"` (less biased).

        > Parameters that control the success predictor

        train_predictor (`bool`, *optional*):
            Whether the value head is trained. If `None`, it is trained when an allocation uses it.
        predictor_certainty (`bool`, *optional*, defaults to `False`):
            Whether the predictor also says how exactly it knows a value, and budgets are spent accordingly: less on
            prompts and prefixes that are either solved or hopeless. Else every value is taken for exact, as in the
            paper.
        predictor_hidden_size (`int`, *optional*, defaults to `256`):
            Width of the value head's hidden layer. `0` makes the head linear.
        predictor_learning_rate (`float`, *optional*, defaults to `1e-3`):
            Learning rate of the value head's own AdamW.
        predictor_weight_decay (`float`, *optional*, defaults to `0.01`):
            Weight decay of the value head's own AdamW.
        predictor_passes (`int`, *optional*, defaults to `32`):
            Mini-batches the value head is trained on at every optimizer step; fewer while it has few anchors:
            `predictor_passes * predictor_batch_size` is kept to 32 times their number.
        predictor_batch_size (`int`, *optional*, defaults to `256`):
            Anchors in one of these mini-batches, over all processes.
        predictor_forward_tokens (`int`, *optional*):
            Tokens, padding included, up to which one of the policy's forward passes takes sequences whose hidden
            states the predictor reads; at least `per_device_train_batch_size` of them. If `None`, it is `4 *
            per_device_train_batch_size * max_completion_length`.
        predictor_buffer_size (`int`, *optional*, defaults to `4096`):
            Anchors kept for training, over all processes: those of the last generation, then the most recent earlier
            ones.

        > Parameters that control the environment

        max_turns (`int`, *optional*):
            Most turns of an episode. If `None`, only tokens limit it (and `max_tool_calling_iterations`, with tools).
        max_turn_length (`int`, *optional*):
            Most tokens of one turn. If `None`, a turn may use all that is left of `max_completion_length`.
        turn_stop_strings (`list[str]`, *optional*):
            Strings that end a turn, besides the end-of-turn token. They stay part of the turn.
        env_timeout (`float`, *optional*, defaults to `60.0`):
            Seconds after which an environment step, or all tool calls of a turn, are given up: the policy reads an
            error instead. If `None`, there is no limit.
        env_max_workers (`int`, *optional*, defaults to `1024`):
            Most calls of synchronous environments at once, each in a thread. Threads are started as calls are seen to
            wait for something. With 1 they run in the main thread, one by one and without `env_timeout`.

        > Parameters that control generation with vLLM

        vllm_rollout_mode (`str`, *optional*):
            `"continuous"` (a branch goes on as soon as its own environment has answered) or `"lockstep"` (all branches
            go on together, round by round; the same seed then samples the same turns again). If `None`, it is
            `"continuous"` with `vllm_mode="colocate"`, and `"lockstep"` with a server, which knows no other.

        > Parameters that control logging

        log_trees (`bool`, *optional*, defaults to `False`):
            Whether to write every tree as one JSON line under `output_dir/trees/`.
        tree_log_max_megabytes (`float`, *optional*, defaults to `16.0`):
            Size at which a tree log file is closed and the next one started.
        tree_log_max_files (`int`, *optional*, defaults to `8`):
            Tree log files kept; the oldest are removed.
        show_rollout_progress (`bool`, *optional*, defaults to `True`):
            Whether rank 0 shows a progress bar inside a generation and one line per logged step. The bar stays quiet
            where there is no terminal.
    """

    # Parameters that control the rollout budget
    root_allocation: str = field(
        default="active",
        metadata={
            "help": "How bare rollouts are spent on prompts.",
            # "dapo" is uniform allocation whose groups without contrast are replaced while the pool lasts
            "choices": [*ROOT_ALLOCATORS, "dapo"],
        },
    )
    prefix_allocation: str = field(
        default="active",
        metadata={"help": "How continuations are spent on prefixes.", "choices": list(PREFIX_ALLOCATORS)},
    )
    continuations_per_root: int | None = field(
        default=None,
        metadata={
            "help": "Continuations N per bare rollout; `generation_batch_size = M * (1 + N)`. 0 turns stage 2 off. If "
            "`None`, it is 2 where `generation_batch_size` can be split that way, else the nearest that fits."
        },
    )
    candidate_pool_factor: float | None = field(
        default=None,
        metadata={
            "help": "Candidates offered to stage 1, as a multiple of `generation_batch_size / num_generations`. If "
            "`None`, it is 2.0, and 1.0 with `root_allocation='uniform'`."
        },
    )
    headroom_exponent: float = field(
        default=0.0,
        metadata={
            "help": "How much more a hard prompt is worth to stage 1 than an easy one: the chance of mixed outcomes "
            "counts `(1 - v) ** headroom_exponent` times."
        },
    )
    max_rollouts_per_root: int | None = field(
        default=None,
        metadata={"help": "Most bare rollouts of one prompt. If `None`, it is `num_generations`."},
    )
    success_threshold: float = field(
        default=0.5,
        metadata={"help": "A leaf is a success if its reward is at least this."},
    )

    # Parameters that control the advantages
    advantage_estimator: str = field(
        default="sibling",
        metadata={"help": "How leaf rewards become one advantage per turn.", "choices": list(ESTIMATORS)},
    )
    turn_weighting: str = field(
        default="once",
        metadata={
            "help": "How a turn shared by several leaves counts in the loss.",
            "choices": list(TURN_WEIGHTINGS),
        },
    )
    skip_zero_advantage_rows: bool = field(
        default=True,
        metadata={"help": "Whether the loss leaves out rows that can't move the policy. The gradient is the same."},
    )
    value_backup: str = field(
        default="leaf_mean",
        metadata={"help": "How outcomes are backed up into the predictor's targets.", "choices": list(BACKUPS)},
    )

    # Parameters that control the success predictor
    train_predictor: bool | None = field(
        default=None,
        metadata={"help": "Whether the value head is trained. If `None`, it is trained when an allocation uses it."},
    )
    predictor_certainty: bool = field(
        default=False,
        metadata={
            "help": "Whether the predictor also says how exactly it knows a value, and budgets are spent accordingly."
        },
    )
    predictor_hidden_size: int = field(
        default=256,
        metadata={"help": "Width of the value head's hidden layer. 0 makes the head linear."},
    )
    predictor_learning_rate: float = field(
        default=1e-3,
        metadata={"help": "Learning rate of the value head's own AdamW."},
    )
    predictor_weight_decay: float = field(
        default=0.01,
        metadata={"help": "Weight decay of the value head's own AdamW."},
    )
    predictor_passes: int = field(
        default=32,
        metadata={"help": "Mini-batches the value head is trained on at every optimizer step."},
    )
    predictor_batch_size: int = field(
        default=256,
        metadata={"help": "Anchors in one mini-batch of the value head, over all processes."},
    )
    predictor_forward_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens up to which a forward pass takes sequences whose hidden states the predictor reads. If "
            "`None`, 4 * per_device_train_batch_size * max_completion_length."
        },
    )
    predictor_buffer_size: int = field(
        default=4096,
        metadata={"help": "Anchors kept for training the value head, over all processes."},
    )

    # Parameters that control the environment
    max_turns: int | None = field(
        default=None,
        metadata={"help": "Most turns of an episode. If `None`, only tokens (and tool iterations) limit it."},
    )
    max_turn_length: int | None = field(
        default=None,
        metadata={"help": "Most tokens of one turn. If `None`, all that is left of `max_completion_length`."},
    )
    turn_stop_strings: list[str] | None = field(
        default=None,
        metadata={"help": "Strings that end a turn, besides the end-of-turn token. They stay part of the turn."},
    )
    env_timeout: float | None = field(
        default=60.0,
        metadata={"help": "Seconds after which an environment step, or all tool calls of a turn, are given up."},
    )
    env_max_workers: int = field(
        default=1024,
        metadata={
            "help": "Most calls of synchronous environments at once, each in a thread. With 1 they run in the main "
            "thread, one by one and without `env_timeout`."
        },
    )

    # Parameters that control generation with vLLM
    vllm_rollout_mode: str | None = field(
        default=None,
        metadata={
            "help": "When branches go on: each as soon as its own environment has answered, or all together, round by "
            "round. If `None`, it is 'continuous' with `vllm_mode='colocate'`, else 'lockstep'.",
            "choices": list(VLLM_ROLLOUT_MODES),
        },
    )

    # Parameters that control logging
    log_trees: bool = field(
        default=False,
        metadata={"help": "Whether to write every tree as one JSON line under `output_dir/trees/`."},
    )
    tree_log_max_megabytes: float = field(
        default=16.0,
        metadata={"help": "Size at which a tree log file is closed and the next one started."},
    )
    tree_log_max_files: int = field(
        default=8,
        metadata={"help": "Tree log files kept; the oldest are removed."},
    )
    show_rollout_progress: bool = field(
        default=True,
        metadata={"help": "Whether rank 0 shows a progress bar inside a generation and one line per logged step."},
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_choices()
        self._check_numbers()
        self._check_generation_kwargs()
        self._check_vllm()
        self._resolve_budget()
        # A step, and then the copy of its state, may take a timeout each before the processes meet again
        if self.world_size > 1 and self.env_timeout is not None and 2 * self.env_timeout >= self.ddp_timeout:
            logger.warning(
                f"The processes wait for each other for `ddp_timeout={self.ddp_timeout}` seconds, and an environment "
                f"may take `env_timeout={self.env_timeout:g}`, more than once: one that hangs would end the run. Set "
                "`env_timeout` to less than half."
            )

    @property
    def rollout_budget(self) -> int:
        """`M`: bare rollouts of one generation batch, over all processes."""
        return self.generation_batch_size // self._group

    @property
    def candidate_pool_size(self) -> int:
        """`B`: prompts offered to stage 1 in one generation batch, over all processes; a multiple of their number."""
        return self._pool_of(self.generation_batch_size)

    @property
    def rollouts_per_group(self) -> int:
        """Bare rollouts per prompt of the allocations that do not choose: `num_generations / (1 + N)`, at least 2."""
        return max(2, self.num_generations // self._group)

    @property
    def needs_predictor(self) -> bool:
        """Whether an allocation reads predicted values."""
        by_prefix = self._group > 1 and reads_values(PREFIX_ALLOCATORS, self.prefix_allocation)
        return reads_values(ROOT_ALLOCATORS, self.root_allocation) or by_prefix

    @property
    def value_pass_tokens(self) -> int:
        """Tokens of a forward pass that hidden states are read in: `predictor_forward_tokens`, if it is given.

        Without gradients, and with one row of logits per sequence, four times as many as in a training step take about
        as much memory.
        """
        if self.predictor_forward_tokens is not None:
            return self.predictor_forward_tokens
        return 4 * self.per_device_train_batch_size * self.max_completion_length

    def check_pool(self, pool: int) -> None:
        """Raises `ValueError` if `pool` candidates can't take the rollout budget."""
        if pool * self._most < self.rollout_budget:
            raise ValueError(
                f"M={self.rollout_budget} bare rollouts don't fit into a pool of {pool} candidates with "
                f"max_rollouts_per_root={self.max_rollouts_per_root}: raise `max_rollouts_per_root` to at least "
                f"{-(-self.rollout_budget // pool)}, raise `candidate_pool_factor` (and the number of dataset rows), "
                "or lower `generation_batch_size`."
            )

    def check_parts(self, parts: int) -> None:
        """Raises `ValueError` if the rollout budget can't be allocated in equal parts of the pool, one a process, as
        where each process makes its own tasks up."""
        budget, pool = self.rollout_budget // parts, self.candidate_pool_size // parts
        if budget < 2 or (self._most == 2 and budget % 2) or pool * self._most < budget:
            raise ValueError(
                f"Without a `train_dataset`, each of the {parts} process(es) allocates its own {budget} of the "
                f"M={self.rollout_budget} bare rollouts to its own {pool} candidate(s), at least 2 and at most "
                f"max_rollouts_per_root={self._most} to one: raise `generation_batch_size` or `max_rollouts_per_root`."
            )

    def _check_choices(self) -> None:
        for name, choices in (
            # Looked up now: a script may have added its own
            ("root_allocation", (*ROOT_ALLOCATORS, "dapo")),
            ("prefix_allocation", tuple(PREFIX_ALLOCATORS)),
            ("advantage_estimator", tuple(ESTIMATORS)),
            ("turn_weighting", TURN_WEIGHTINGS),
            ("value_backup", BACKUPS),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"`{name}` is {value!r}: set it to one of {', '.join(map(repr, choices))}.")

    def _check_generation_kwargs(self) -> None:
        """Refuses what decides where a turn ends, or what `generate` returns, without the engine's knowing."""
        kwargs = self.generation_kwargs or {}
        if self.use_vllm:
            found = {name: remedy for name, remedy in VLLM_TURN_OPTIONS.items() if name in kwargs}
        else:
            found = {
                name: remedy
                for name, (idle, remedy) in TRANSFORMERS_TURN_OPTIONS.items()
                if kwargs.get(name) not in (None, idle)
            }
            if self.use_transformers_continuous_batching:
                found.pop("return_dict_in_generate", None)  # nothing there reads it
            if self.turn_stop_strings and kwargs.get("num_beams") not in (None, 1):
                raise ValueError(
                    "`generation_kwargs` holds 'num_beams', and beams are not followed where `turn_stop_strings` end "
                    "turns: set only one of them."
                )
        for name, remedy in found.items():
            raise ValueError(f"`generation_kwargs` holds {name!r}, which every turn has of its own: {remedy}.")

    def _check_vllm(self) -> None:
        if self.vllm_rollout_mode not in (None, *VLLM_ROLLOUT_MODES):
            raise ValueError(
                f"`vllm_rollout_mode` is {self.vllm_rollout_mode!r}: set it to one of "
                f"{', '.join(map(repr, VLLM_ROLLOUT_MODES))}."
            )
        if not self.use_vllm:
            if self.vllm_rollout_mode is not None:
                raise ValueError("`vllm_rollout_mode` concerns vLLM only: set `use_vllm=True`, or remove it.")
            return
        if self.use_transformers_continuous_batching:
            raise ValueError(
                "`use_vllm` and `use_transformers_continuous_batching` are two ways to generate: set only one of them."
            )
        if self.vllm_mode not in ("colocate", "server"):
            raise ValueError(f"`vllm_mode` is {self.vllm_mode!r}: set it to 'colocate' or 'server'.")
        if self.vllm_mode == "server" and self.vllm_rollout_mode == "continuous":
            raise ValueError(
                "`vllm_rollout_mode='continuous'` needs the engine in the trainer's own processes: set "
                "`vllm_mode='colocate'`, or `vllm_rollout_mode='lockstep'`."
            )
        if not self.ds3_gather_for_generation:
            raise ValueError(
                "`ds3_gather_for_generation=False` concerns generation by the trainer's own model, not by vLLM: "
                "set `ds3_gather_for_generation=True`."
            )
        idle, remedy = SERVER_OPTIONS, "remove it, or set `vllm_mode='server'`"
        if self.vllm_mode == "server":
            idle, remedy = COLOCATE_OPTIONS, "start `vllm serve` with the option of that name"
        defaults = {field.name: field.default for field in fields(self)}
        for name in idle:
            if getattr(self, name) != defaults[name]:
                logger.warning(f"`{name}` has no effect with `vllm_mode='{self.vllm_mode}'`: {remedy}.")

    @property
    def is_continuous(self) -> bool:
        """Whether branches go on one by one, not round by round."""
        return self.use_vllm and self.vllm_mode == "colocate" and self.vllm_rollout_mode != "lockstep"

    def _check_numbers(self) -> None:
        if self.max_completion_length is None:
            raise ValueError(
                "`max_completion_length` is None, but an episode ends when its tokens are used up: set it to the most "
                "tokens of a completion, observations included."
            )
        for name, least in (
            ("max_completion_length", 1),
            ("continuations_per_root", 0),
            ("max_rollouts_per_root", 2),
            ("predictor_hidden_size", 0),
            ("predictor_passes", 1),
            ("predictor_batch_size", 1),
            ("predictor_buffer_size", 1),
            ("predictor_forward_tokens", 1),
            ("max_turns", 1),
            ("max_turn_length", 1),
            ("env_max_workers", 1),
            ("tree_log_max_files", 1),
        ):
            value = getattr(self, name)
            if value is not None and not (_is_number(value, Integral) and value >= least):
                raise ValueError(f"`{name}` is {value!r}: set it to a whole number, {least} or more.")
        for name in ("predictor_learning_rate", "env_timeout", "candidate_pool_factor", "tree_log_max_megabytes"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value, Real) and 0 < value < math.inf):
                raise ValueError(f"`{name}` is {value!r}: set it to a number above 0.")
        for name in ("predictor_weight_decay", "headroom_exponent"):
            value = getattr(self, name)
            if not (_is_number(value, Real) and 0 <= value < math.inf):
                raise ValueError(f"`{name}` is {value!r}: set it to a number, 0 or more.")
        threshold = self.success_threshold
        if not _is_number(threshold, Real) or math.isnan(threshold):
            raise ValueError(
                f"`success_threshold` is {threshold!r}: set it to the reward from which a leaf counts as a success."
            )
        if isinstance(self.turn_stop_strings, str):
            raise ValueError(
                f"`turn_stop_strings` is the string {self.turn_stop_strings!r}: pass a list of strings, here "
                f"{[self.turn_stop_strings]!r}."
            )
        if self.turn_stop_strings is not None and not all(self.turn_stop_strings):
            raise ValueError("`turn_stop_strings` holds an empty string, which would end every turn: remove it.")

    # The budget. Options that may be `None` are numbers once it is resolved.

    @property
    def _group(self) -> int:
        return 1 + (self.continuations_per_root or 0)

    @property
    def _most(self) -> int:
        return self.max_rollouts_per_root or self.num_generations

    def _pool_of(self, batch: int) -> int:
        wanted = (self.candidate_pool_factor or 1.0) * batch / self.num_generations
        return max(1, math.ceil(wanted / self.world_size - 1e-9)) * self.world_size

    def _splits(self, batch: int, continuations: int) -> bool:
        # One bare rollout can't show two outcomes
        budget, rest = divmod(batch, 1 + continuations)
        return rest == 0 and budget >= 2 and budget % self.world_size == 0

    def _fits(self, batch: int, continuations: int) -> bool:
        """Whether a batch splits, and the candidate pool takes its bare rollouts."""
        budget = batch // (1 + continuations)
        takes = budget <= self._pool_of(batch) * self._most and not (self._most == 2 and budget % 2)
        return self._splits(batch, continuations) and takes

    def _resolve_budget(self) -> None:
        if self.max_rollouts_per_root is None:
            self.max_rollouts_per_root = self.num_generations
        if self.candidate_pool_factor is None:
            self.candidate_pool_factor = 1.0 if self.root_allocation == "uniform" else 2.0
        batch = self.generation_batch_size
        nearest = sorted(range(batch), key=lambda n: (abs(n - DEFAULT_CONTINUATIONS), n))
        fitting = [n for n in nearest if self._fits(batch, n)]
        if self.continuations_per_root is None:
            self.continuations_per_root = fitting[0] if fitting else 0
            if self.continuations_per_root != DEFAULT_CONTINUATIONS:
                # Nobody has asked for a split, so this is no warning
                logger.info(
                    f"generation_batch_size={batch} can't be split into M * (1 + {DEFAULT_CONTINUATIONS}) leaves over "
                    f"{self.world_size} process(es): continuations_per_root is {self.continuations_per_root}."
                )
        if not self._splits(batch, self.continuations_per_root):
            wanted = self.continuations_per_root
            fitting = sorted(sorted(fitting, key=lambda n: abs(n - wanted))[:2])
            remedies = [
                f"`{name}` to {' or '.join(map(str, values))}"
                for name, values in (
                    ("generation_batch_size", self._valid_batches()),
                    ("continuations_per_root", fitting),
                )
                if values
            ]
            raise ValueError(
                f"generation_batch_size={batch} is not M * (1 + continuations_per_root) with "
                f"continuations_per_root={self.continuations_per_root} and M a multiple of the {self.world_size} "
                f"process(es), M >= 2: set {', or '.join(remedies) or '`max_rollouts_per_root` to a larger number'}."
            )
        self.check_pool(self.candidate_pool_size)
        if self.root_allocation == "dapo" and self.rollout_budget // self.world_size % self.rollouts_per_group:
            raise ValueError(
                f"root_allocation='dapo' replaces whole groups, but the {self.rollout_budget // self.world_size} bare "
                f"rollouts of each of the {self.world_size} process(es) are no multiple of the "
                f"{self.rollouts_per_group} of a group: set `generation_batch_size` to a multiple of "
                f"{self.rollouts_per_group * self._group * self.world_size}."
            )
        if self._most == 2 and self.rollout_budget % 2:
            raise ValueError(
                f"M={self.rollout_budget} bare rollouts can't be split into pairs with max_rollouts_per_root=2: set "
                "`max_rollouts_per_root` to 3 or more, or choose a `generation_batch_size` that makes M even."
            )

    def _valid_batches(self) -> list[int]:
        """The two generation batch sizes nearest to the present one that both TRL and the budget take."""
        batch, micro_batch = self.generation_batch_size, self.per_device_train_batch_size * self.world_size
        step = math.lcm(self._group * self.world_size, self.num_generations, micro_batch)
        around = range(max(1, batch // step - 8), batch // step + 10)
        valid = [number * step for number in around if self._fits(number * step, self._group - 1)]
        return sorted(sorted(valid, key=lambda value: abs(value - batch))[:2])
