"""
TRACE's part of the model card: what the rollout budget was, what it bought, and how far the value head can be trusted.

TRL writes the card anew at every save, from its own template; [`complete`] adds the part to it, names the base model
where its id on the Hub is known, and gives a quick start that plays an episode. What is said is taken from the run's
log history, so a card and the logs never differ.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .seams import get_config_model_id


HEADING = "### Rollout budget and success predictor (TRACE)"
FOLLOWING = "### Framework versions"  # TRL's heading, before which the section stands

CURVE_STEPS = 10  # rows of the curve
SCORED_STEPS = 10  # latest logged steps that the predictor's scores are averaged over

# Options that an episode is sampled with
EPISODE = ("max_completion_length", "max_turns", "max_turn_length", "turn_stop_strings", "chat_template_kwargs")
QUESTION = "Which is larger, the number of days in a year or of hours in a week?"

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


def quick_start(repo: str | None, conversational: bool, settings: Mapping[str, Any]) -> str:
    """Code that loads the model and plays one episode.

    Args:
        repo (`str`, *optional*): Hub id of the model; else it is loaded from the folder that the code is run in.
        conversational (`bool`): whether prompts are messages.
        settings (`Mapping`): options that episodes were sampled with.
    """
    prompt = f'[{{"role": "user", "content": "{QUESTION}"}}]' if conversational else f'"{QUESTION}"'
    model = repo or "."
    return "\n".join(
        [
            "```python",
            "import torch",
            "from datasets import Dataset",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "from trace_trl import StepResult, TRACEConfig, TRACETrainer",
            "",
            "def env_step(state, action, messages):",
            "    # The environment: this one ends the episode after the first turn",
            "    return StepResult(done=True, reward=0.0)",
            "",
            f'rows = [{{"prompt": {prompt}}}]',
            "trainer = TRACETrainer(",
            f'    model=AutoModelForCausalLM.from_pretrained("{model}"),',
            f'    processing_class=AutoTokenizer.from_pretrained("{model}"),',
            "    args=TRACEConfig(",
            '        output_dir="quick_start",',
            "        use_cpu=not torch.cuda.is_available(),",
            "        bf16=torch.cuda.is_available(),",
            '        report_to="none",',
            *(f"        {name}={value!r}," for name, value in settings.items()),
            "    ),",
            "    train_dataset=Dataset.from_list(rows),",
            "    env_step=env_step,",
            ")",
            "(tree,) = trainer.rollout(rows)",
            "for turn in tree.leaves()[0].path():",
            "    print(turn.text)",
            "```",
        ]
    )


def insert_quick_start(card: str, code: str) -> str:
    """A card with this code as its quick start, where TRL has one."""
    before, heading, rest = card.partition("## Quick start\n")
    _, following, rest = rest.partition("## Training procedure\n")
    return f"{before}{heading}\n{code}\n\n{following}{rest}" if following else card


def insert_section(card: str, section: str) -> str:
    """A card with the section before TRL's framework versions, or at its end; one that it held already is replaced."""
    before, found, rest = card.partition(HEADING + "\n")
    if found:
        _, following, rest = rest.partition(FOLLOWING)
        card = before + following + rest
    before, following, rest = card.partition(FOLLOWING)
    return f"{before.rstrip()}\n\n{section.rstrip()}\n" + (f"\n{following}{rest}" if following else "")


def base_model_id(model: Any) -> str | None:
    """The id on the Hub of what a model was loaded from, as far as its configuration or its adapter tells it.

    A model that was loaded from a folder may say it in its configuration, as `base_model_name_or_path`.
    """
    places = [model.config, *getattr(model, "peft_config", {}).values()]
    names = [getattr(place, name, None) for place in places for name in ("_name_or_path", "base_model_name_or_path")]
    return next((model_id for model_id in map(_hub_id, names) if model_id is not None), None)


def _hub_id(name: str | None) -> str | None:
    if not name:
        return None
    cached = re.search(r"\bmodels--([^/\\]+)[/\\]snapshots[/\\]", name)
    if cached is not None:
        return cached[1].replace("--", "/")
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return None if os.path.exists(name) else name


def _name_base_model(card: ModelCard, model: Any) -> None:
    """Corrects what TRL and PEFT say of the base model: they take a path for an id, or `None` for a name."""
    base, written = base_model_id(model), card.data.base_model
    if written not in (None, get_config_model_id(model.config)):
        return
    card.data.base_model = base
    theirs, ours = f"base_model:adapter:{written}", f"base_model:adapter:{base}"
    tags = [ours if tag == theirs else tag for tag in card.data.tags or []]
    card.data.tags = [tag for tag in tags if base is not None or tag != ours]
    card.text = card.text.replace(
        f"is a fine-tuned version of {_link(written)}",
        "was fine-tuned" if base is None else f"is a fine-tuned version of {_link(base)}",
    )


def _link(model_id: str | None) -> str:
    return f"[{model_id}](https://huggingface.co/{model_id})"


def correct_base_model(path: str, model: Any) -> None:
    """Takes a local path out of the card at `path`, if there is one: PEFT writes it with every adapter."""
    if os.path.isfile(path):
        card = ModelCard.load(path)
        _name_base_model(card, model)
        card.save(path)


def complete(path: str | Path, trainer: Any) -> None:
    """Makes the card at `path`, as TRL wrote it, one of TRACE.

    Args:
        path (`str` or `Path`): where it is.
        trainer (`TRACETrainer`): gives the model, the log history and the options.
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
    card = ModelCard.load(path)
    _name_base_model(card, trainer.model)
    settings = {name: getattr(args, name) for name in EPISODE}
    card.text = insert_quick_start(
        card.text,
        quick_start(
            trainer.hub_model_id,
            conversational=True in trainer._engines,
            settings={name: value for name, value in settings.items() if value is not None},
        ),
    )
    card.text = insert_section(card.text, section)
    card.save(path)
