"""
TRACE's part of the model card: what the rollout budget was, what it bought, and how far the value head can be trusted.

TRL writes the card anew at every save, from its own template; [`insert_section`] adds the part to it. What is said is
taken from the run's log history, so a card and the logs never differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


HEADING = "### Rollout budget and success predictor (TRACE)"
FOLLOWING = "### Framework versions"  # TRL's heading, before which the section stands

CURVE_STEPS = 10  # rows of the curve
SCORED_STEPS = 10  # latest logged steps that the predictor's scores are averaged over

SCORES = {"predictor/brier": "Brier score", "predictor/ece": "ECE, 10 bins", "predictor/auroc": "AUROC"}


def _logged(log_history: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """Step and value of every entry that has a finite number under `key`, in the order of the steps.

    A run that went on from an earlier checkpoint has logged a step twice: the later entry counts.
    """
    found = {
        int(entry["step"]): float(entry[key])
        for entry in log_history
        if isinstance(entry.get(key), (int, float)) and math.isfinite(entry[key])
    }
    return sorted(found.items())


def _spread(count: int, most: int) -> list[int]:
    """At most `most` indices of `count` entries, at equal distances, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(row * (count - 1) / (most - 1)) for row in range(most)]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def _curve(log_history: Sequence[Mapping[str, Any]]) -> list[str]:
    ratios = _logged(log_history, "effective_ratio")
    if not ratios:
        return []
    anchors = dict(_logged(log_history, "mixed_anchor_ratio"))
    rows = []
    for index in _spread(len(ratios), CURVE_STEPS):
        step, ratio = ratios[index]
        rows.append([str(step), f"{ratio:.3f}", f"{anchors[step]:.3f}" if step in anchors else "-"])
    return [
        "Effective ratio: share of the prompts with rollouts whose outcomes were mixed.",
        "Mixed anchors: the same for all from which several rollouts went on, prompts and turns inside rollouts.",
        "",
        *_table(["Step", "Effective ratio", "Mixed anchors"], rows),
        "",
    ]


def _calibration(log_history: Sequence[Mapping[str, Any]]) -> list[str]:
    # Where all outcomes were of one kind, there is no AUROC, and the other scores say nothing either
    meaningful = {step for step, _ in _logged(log_history, "predictor/auroc")}
    scores = {
        name: [(step, value) for step, value in _logged(log_history, key) if step in meaningful][-SCORED_STEPS:]
        for key, name in SCORES.items()
    }
    steps = [step for values in scores.values() for step, _ in values]
    if not steps:
        return []
    cells = [f"{sum(v for _, v in values) / len(values):.3f}" if values else "-" for values in scores.values()]
    first, last = min(steps), max(steps)
    over = f"step {last}" if first == last else f"the last logged steps, {first} to {last}"
    return [
        f"Success predictor on outcomes it had not seen, mean over {over} (a constant 0.5 has a Brier score of 0.25):",
        "",
        *_table(list(scores), [cells]),
        "",
    ]


def _loading(repo: str) -> list[str]:
    return [
        "The value head gives the chance of success at the last token of a conversation, before the next turn:",
        "",
        "```python",
        "from trace_trl import SuccessPredictor",
        f'predictor = SuccessPredictor.from_pretrained("{repo}")',
        "value = predictor(model(**inputs, output_hidden_states=True).hidden_states[-1][:, -1])",
        "```",
        "",
    ]


def trace_section(
    log_history: Sequence[Mapping[str, Any]],
    *,
    bare: int,
    continuations: int,
    leaves: int,
    pool: int,
    methods: Mapping[str, str],
    has_head: bool,
    repo: str | None = None,
) -> str:
    """
    The section as markdown, from its heading on.

    Args:
        log_history (`Sequence[Mapping]`):
            What the trainer logged, `trainer.state.log_history`. Entries without a number are passed over.
        bare (`int`):
            Bare rollouts `M` of a generation.
        continuations (`int`):
            Continuations `N` per bare rollout.
        leaves (`int`):
            Rollouts of a generation, `M (1 + N)`.
        pool (`int`):
            Candidate prompts of a generation.
        methods (`Mapping[str, str]`):
            Options that say how the budget was spent, by name.
        has_head (`bool`):
            Whether a value head is saved beside the model.
        repo (`str`, *optional*):
            Hub id that the head can be loaded from.
    """
    lines = [
        HEADING,
        "",
        f"Each generation drew {bare} bare rollouts from a pool of {pool} prompts, and {continuations} continuations "
        f"per bare rollout from turn-level prefixes: {bare} x (1 + {continuations}) = {leaves} leaves "
        f"({', '.join(f'`{name}={value}`' for name, value in methods.items())}).",
        "",
        *_curve(log_history),
        *_calibration(log_history),
        *(_loading(repo or "path/to/this/folder") if has_head else []),
    ]
    return "\n".join(lines)


def insert_section(card: str, section: str) -> str:
    """A card with the section before TRL's framework versions, or at its end; one that it held already is replaced."""
    before, found, rest = card.partition(HEADING + "\n")
    if found:
        _, following, rest = rest.partition(FOLLOWING)
        card = before + following + rest
    before, following, rest = card.partition(FOLLOWING)
    return f"{before.rstrip()}\n\n{section.rstrip()}\n" + (f"\n{following}{rest}" if following else "")


def add_section(path: str | Path, trainer: Any) -> None:
    """Adds the section of a trainer to the card at `path`.

    Args:
        path (`str` or `Path`): the card as TRL wrote it.
        trainer (`TRACETrainer`): gives the log history and the options.
    """
    args = trainer.args
    section = trace_section(
        trainer.state.log_history,
        bare=args.rollout_budget,
        continuations=args.continuations_per_root,
        leaves=args.generation_batch_size,
        pool=trainer._pool_size,
        methods={
            name: getattr(args, name) for name in ("root_allocation", "prefix_allocation", "advantage_estimator")
        },
        has_head=trainer.predictor is not None,
        repo=trainer.hub_model_id,
    )
    path = Path(path)
    path.write_text(insert_section(path.read_text(encoding="utf-8"), section), encoding="utf-8")
