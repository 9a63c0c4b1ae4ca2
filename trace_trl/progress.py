"""What a person sees while training runs: a bar inside each generation, and one line per logged step."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback

from .engine import Stats


class RolloutProgress:
    """A bar of rollouts done of all, with turns and sampled tokens. Silent where there is no terminal.

    Args:
        enabled (`bool`): whether this process shows anything.
    """

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self._bar: Any = None

    def __enter__(self) -> RolloutProgress:
        # `disable=None` asks tqdm to stay quiet unless it writes to a terminal
        self._bar = tqdm(desc="rollouts", unit="rollout", leave=False, disable=None if self.enabled else True)
        return self

    def update(self, stats: Stats, done: int, wanted: int) -> None:
        if self._bar is not None:
            self._bar.total = wanted
            self._bar.n = done
            self._bar.set_postfix(turns=stats.turns, tokens=stats.sampled_tokens, refresh=False)
            self._bar.refresh()

    def __exit__(self, *exception: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


# Label, metric, format
COLUMNS = (
    ("effective", "effective_ratio", "{:.2f}"),
    ("mixed anchors", "mixed_anchor_ratio", "{:.2f}"),
    ("reward", "reward", "{:.3f}"),
    ("brier", "predictor/brier", "{:.3f}"),
    ("auroc", "predictor/auroc", "{:.2f}"),
    ("tokens", "rollout/sampled_tokens", "{:.0f}"),
    ("saved", "rollout/saved_tokens", "{:.0f}"),
)
WRONG = (
    ("failures", "rollout/environment_failures", "{:.0f}"),
    ("cut by tokens", "rollout/ended_length", "{:.0%}"),
    ("by turns", "rollout/ended_turns", "{:.0%}"),
    ("by observations", "rollout/ended_overflow", "{:.0%}"),
)
SECONDS = ("generation", "environment", "reward", "predictor")


def step_line(step: int, logs: dict[str, Any], generations: float = 1.0) -> str:
    """One line of a training step's logs; a metric that has no value is shown as a dash.

    Args:
        step: its number.
        logs: its metrics.
        generations: how many of them an optimizer step holds, less than 1 where several steps train one generation.
    """
    parts = []
    # What goes wrong is shown where it does
    wrong = [column for column in WRONG if logs.get(column[1])]
    for label, key, form in (*COLUMNS, *wrong):
        value = logs.get(key)
        parts.append(f"{label} {'-' if value is None else form.format(value)}")
    seconds = " ".join(f"{name} {logs.get(f'seconds/{name}') or 0.0:.1f}" for name in SECONDS)
    # TRL's time is the mean over optimizer steps, generations among them
    whole = logs.get("step_time")
    training = None if whole is None else max(0.0, whole - generations * (logs.get("seconds/total") or 0.0))
    return (
        f"step {step:>4}  "
        + "  ".join(parts)
        + f"  seconds: {seconds}"
        + ("" if training is None else f" training {training:.1f}")
    )


class StepLineCallback(TrainerCallback):
    """Prints [`step_line`] on the main process whenever a training step with rollouts is logged."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs and "effective_ratio" in logs:
            steps = args.steps_per_generation * args.num_iterations
            tqdm.write(step_line(state.global_step, logs, args.gradient_accumulation_steps / steps))
