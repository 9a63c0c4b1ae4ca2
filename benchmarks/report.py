"""
Tables and plots of the runs that equal_cost.py has written.

    python benchmarks/report.py runs/equal_cost                       # writes docs/results.md and docs/results/
    python benchmarks/report.py runs/equal_cost --sweep runs/sweep    # learning rates chosen by runs of their own
    python benchmarks/report.py runs/equal_cost --speed runs/step_speed.json    # with the seconds of step_speed.py
    python benchmarks/report.py runs/equal_cost --check               # prints what the claims come to
    python benchmarks/report.py runs/again --compare runs/equal_cost  # prints what lies within the other's spread
    python benchmarks/report.py runs/quick --compare docs/results/quick.json    # within the published spread

Runs of a world are compared at two points: at equal leaves, after the budget's steps, and at equal tokens, where they
have sampled as many, those of discarded rollouts included. A run goes on until it has passed both. Between two steps
success is a straight line in tokens. Numbers are medians over seeds, with the least and the most in brackets.

A method is shown at its best learning rate: that with the highest median of the mean success over the budget's tokens,
in the runs of `--sweep` where those have the method.
Where runs that are compared have different budgets, the longer ones are cut to the smaller budget. As the learning
rate is constant, that changes nothing before the cut.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reporting.claims import CLAIMS, compare, judge_oracle, published, verdicts
from reporting.numbers import Spread, Summary, summarise
from reporting.plots import plot
from reporting.runs import Budget, load
from reporting.tables import (
    ablation_table,
    calibration_table,
    chances_table,
    levels_table,
    main_table,
    markdown,
    rates_table,
    seconds_table,
    tokens_table,
)


ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- begin: tables -->", "<!-- end: tables -->"


def shown(path: Path) -> str:
    return os.path.relpath(path, ROOT) if path.resolve().is_relative_to(ROOT) else str(path)


def made_by(commands: Iterable[str], command: str) -> str:
    return f"Made by {', '.join(f'`{made}`' for made in commands)}, then `{command}`."


def render(summaries: dict[str, Summary], figures: dict[str, dict[str, str]], command: str, read: str) -> str:
    """The generated part of the page. `figures` are links by caption, of each world."""
    parts = ["## Claims", read, "\n".join(f"- {claim}: {text}" for claim, (text, _, _) in CLAIMS.items())]
    words = [(claim, w, word, text) for w, of in summaries.items() for claim, word, text in verdicts(of)]
    parts += [markdown(["Claim", "World", "Verdict", "Medians"], sorted(words))]

    def commands(summary: Summary, table: Callable[[Summary], str]) -> list[str]:
        if table is seconds_table:
            return [summary.numbers["speed"]["command"]]
        return summary.commands if table is rates_table else summary.shown_commands

    def section(heading: str, text: str, table: Callable[[Summary], str], needs: str = "") -> None:
        chosen = [summary for summary in summaries.values() if summary.numbers.get(needs, not needs)]
        parts.extend([f"## {heading}", text] if chosen else [])
        for summary in chosen:
            made = made_by(commands(summary, table), command)
            parts.extend([f"### {heading}, {summary.world}", table(summary), made])

    section(
        "Methods at equal cost",
        "Medians over seeds, with the least and the most in brackets. Effective ratio and mixed anchors are means "
        "over the steps. Tokens of discarded rollouts count.",
        lambda summary: "\n\n".join([f"{summary.budget}.", main_table(summary), *summary.notes]),
    )
    parts.extend(["## Plots"] if any(figures.values()) else [])
    for world, links in figures.items():
        made = made_by(summaries[world].shown_commands, command)
        for caption, link in links.items():
            parts.extend([f"![{world}: {caption}]({link})", f"{world}: {caption} {made}"])
    section(
        "Learning rates",
        "Mean success over the budget's tokens, median over seeds, and the number of seeds. The best is bold; `edge!` "
        "says that it is the lowest or the highest of those that were run.",
        rates_table,
    )
    section(
        "Tokens to GRPO's success",
        "Sampled tokens until a share of GRPO's final success is first reached (GRPO's median at equal leaves), and "
        "how many seeds reach it; then the tokens in units of GRPO's median. `never` counts as infinity in medians.",
        tokens_table,
        "tokens_to",
    )
    section(
        "Calibration of TRACE's predictor",
        "Over all predictions of the whole training, and of its first and second half.",
        lambda summary: "\n\n".join([calibration_table(summary), gap_text(summary)]),
        "calibration",
    )
    section(
        "Seconds of an optimizer step",
        "Of runs that took turns in one process, with the least and the most of them. A generation is part of a step.",
        seconds_table,
        "speed",
    )
    section(
        "Budget by chance of success",
        "Share of the trained leaves by the exact chance of success that their prompt had before the step.",
        chances_table,
        "budget_by_chance",
    )
    section("Success by level", "At equal leaves.", levels_table, "success_by_level")
    parts.extend(["## Ablations"] if any(summary.numbers["ablations"] for summary in summaries.values()) else [])
    for world, summary in summaries.items():
        for names, ablation in summary.numbers["ablations"].items():
            made = made_by(ablation["commands"], command)
            parts.extend([f"### {names}, {world}", f"{ablation['budget']}.", ablation_table(ablation), made])
    return "\n\n".join(parts)


def gap_text(summary: Summary) -> str:
    if "gap_closed" not in summary.numbers:
        return "No runs to compare the predictor with exact values."
    return f"Effective ratio, (TRACE - uniform) / (exact values - uniform): {judge_oracle(summary)[1]}."


def add_speed(summaries: dict[str, Summary], found: dict[str, Any]) -> None:
    """Adds what step_speed.py has written to the numbers of the worlds.

    Raises:
        ValueError: if its steps have other numbers of leaves.
    """
    for world, summary in summaries.items():
        speed = found["summary"].get(world)
        if speed is None:
            continue
        if speed["leaves"] != summary.budget.leaves:
            raise ValueError(
                f"The seconds of {world} are those of {speed['leaves']} leaves a step, its runs have "
                f"{summary.budget.leaves}: measure them with `--leaves {summary.budget.leaves}`."
            )
        summary.numbers["speed"] = {**speed, "command": found["command"]}


def write_page(path: Path, content: str) -> None:
    """Writes the generated part of a page. Text around its markers stays.

    Raises:
        ValueError: if there is such a page without them.
    """
    text = path.read_text() if path.exists() else f"# Results\n\n{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} lacks the lines {BEGIN} and {END}, between which tables are written.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{before}{BEGIN}\n\n{content}\n\n{END}{after}")


def as_json(value: Any) -> Any:
    """`"never"` stands for infinity, `null` for what is undefined."""
    if isinstance(value, Spread):
        return as_json({"median": value.median, "min": value.low, "max": value.high, "by_seed": dict(value)})
    if isinstance(value, dict):
        return {str(key): as_json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [as_json(entry) for entry in value]
    if isinstance(value, Summary):
        rates = {c.title: {"scores": c.scores, "best": c.best, "edge": c.edge} for c in value.choices}
        shown = {"budget": value.budget, "learning_rates": rates, "rates": value.rates, "main": value.main}
        shown["notes"] = value.notes
        claims = {claim: {"verdict": word, "numbers": text} for claim, word, text in verdicts(value)}
        return as_json(shown | value.numbers | {"claims": claims})
    if isinstance(value, Budget):
        return asdict(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "never"
    return value if isinstance(value, (str, int, float)) else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tables and plots of the runs of equal_cost.py.")
    parser.add_argument("folders", nargs="+", type=Path, help="Directories of runs.")
    parser.add_argument("--sweep", nargs="+", type=Path, default=[], help="Directories that learning rates come from.")
    parser.add_argument("--speed", type=Path, help="File of step_speed.py, for the seconds of a step.")
    parser.add_argument("--page", type=Path, help="docs/results.md by default, none with --check or --compare.")
    parser.add_argument("--plots", type=Path, help="Directory; by default beside the page, with its name.")
    parser.add_argument("--check", action="store_true", help="Print what the claims come to.")
    parser.add_argument(
        "--compare",
        nargs="+",
        type=Path,
        help="Directories, or a file of --json, whose spread the numbers should keep.",
    )
    parser.add_argument("--json", type=Path, help="File for all numbers.")
    args = parser.parse_args(arguments)
    runs, incomplete = load(args.folders)
    read = f"Complete runs: {len(runs)}. Incomplete files, left out: {len(incomplete)}."
    print(read)
    if not runs:
        parser.error("No complete runs.")
    swept, _ = load(args.sweep)
    if args.sweep:
        print(f"Of the sweep: {len(swept)}.")
    summaries = summarise(runs, swept)
    if args.speed:
        try:
            add_speed(summaries, json.loads(args.speed.read_text()))
        except ValueError as error:
            parser.error(str(error))
    for world, summary in summaries.items():
        lines = [f"{world}: {note}" for note in summary.notes]
        if args.check:
            lines += [f"{claim} {world}: {word}: {text}" for claim, word, text in verdicts(summary)]
        for line in lines:
            print(line)
    if args.compare:
        is_file = args.compare[0].is_file()
        others = published(args.compare[0]) if is_file else summarise(load(args.compare)[0])
        print(*compare(summaries, others), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(as_json(summaries), indent=1) + "\n")
    page = args.page or (None if args.check or args.compare else ROOT / "docs" / "results.md")
    if page is None:
        return
    command = [
        "python benchmarks/report.py",
        *map(shown, args.folders),
        *(["--sweep", *map(shown, args.sweep)] if args.sweep else []),
        *(["--speed", shown(args.speed)] if args.speed else []),
        *(["--page", shown(page)] if args.page else []),
    ]
    plots = args.plots or page.with_suffix("")
    figures = {
        world: {caption: os.path.relpath(path, page.parent) for caption, path in plot(summary, plots).items()}
        for world, summary in summaries.items()
    }
    try:
        write_page(page, render(summaries, figures, " ".join(command), read))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
