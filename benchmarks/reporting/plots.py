"""Plots in greys: lines are told apart by dashes and markers, and each is named at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .numbers import SCORES, TITLES, Spread, Summary
from .runs import Run


LINES: dict[str, dict[str, Any]] = {
    "grpo_trl": {"color": "0.6", "linestyle": ":", "marker": "s"},
    "grpo": {"color": "0.3", "linestyle": "--", "marker": "o"},
    "dapo": {"color": "0.5", "linestyle": "-.", "marker": "^"},
    "pcl": {"color": "0.4", "linestyle": ":", "marker": "D"},
    "treepo": {"color": "0.65", "linestyle": "-", "marker": "v"},
    "uniform": {"color": "0.4", "linestyle": "--", "marker": "o"},
    "root_only": {"color": "0.5", "linestyle": "-.", "marker": "^"},
    "prefix_only": {"color": "0.4", "linestyle": ":", "marker": "s"},
    "trace": {"color": "0", "linestyle": "-", "linewidth": 2.2},
    "trace_oracle": {"color": "0.3", "linestyle": "--", "marker": "P"},
    "trace_constant": {"color": "0.65", "linestyle": "-", "marker": "v"},
}
PANELS = {
    "TRACE and other methods": ("grpo_trl", "grpo", "dapo", "pcl", "treepo", "trace"),
    "TRACE and its parts": ("uniform", "root_only", "prefix_only", "trace_constant", "trace_oracle", "trace"),
}


def spread_out(heights: Sequence[float], gap: float = 0.06) -> list[float]:
    """Moves rising heights apart, as much up as down."""
    up, down = list(heights), list(heights)
    for i in range(1, len(heights)):
        up[i] = max(up[i], up[i - 1] + gap)
        down[-i - 1] = min(down[-i - 1], down[-i] - gap)
    return [(a + b) / 2 for a, b in zip(up, down, strict=True)]


def draw_curves(
    figure: Any, x: np.ndarray, curves: dict[str, np.ndarray], labels: tuple[str, str], band: bool
) -> None:
    """Medians of curves, which have shape `(seeds, x)`."""
    panels = []
    for axes, (title, methods) in zip(figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True):
        ends = []
        for place, method in enumerate(filter(curves.__contains__, methods)):
            median = np.median(curves[method], axis=0)  # nan, and not drawn, where a run has ended
            axes.plot(x, median, **({"linewidth": 1.2} | LINES[method]), markersize=4, markevery=(2 * place, 12))
            if band:
                low, high = curves[method].min(axis=0), curves[method].max(axis=0)
                axes.fill_between(x, low, high, color=LINES[method]["color"], alpha=0.12, linewidth=0)
            last = np.flatnonzero(np.isfinite(median))[-1]
            ends.append((median[last], x[last], TITLES[method]))
        axes.set(title=title, xlabel=labels[0], ylabel=labels[1], xlim=(0, x[-1]))
        axes.label_outer()
        panels.append((axes, sorted(ends)))
    for axes, ends in panels:  # the panels share their limits, which are known only now
        low, high = axes.get_ylim()
        heights = spread_out([(y - low) / (high - low) for y, _, _ in ends])
        for (y, at, name), height in zip(ends, heights, strict=True):
            options = {"textcoords": "axes fraction", "va": "center", "fontsize": 8}
            arrow = {"arrowstyle": "-", "linewidth": 0.5, "color": "0.5"}
            axes.annotate(name, (at, y), (1.05, height), arrowprops=arrow, **options)


def draw_success(figure: Any, summary: Summary) -> None:
    tokens = np.linspace(0, summary.budget.tokens, 101)
    curves = {}
    for method, runs in summary.runs.items():
        ends = [run.records[-1]["tokens"] for run in runs]
        success = [np.where(tokens <= end, run.success(tokens), np.nan) for run, end in zip(runs, ends, strict=True)]
        curves[method] = np.array(success)
    labels = "sampled tokens, thousands", "chance of success on test tasks"
    draw_curves(figure, tokens / 1000, curves, labels, band=True)


def draw_effective_ratio(figure: Any, summary: Summary) -> None:
    def smooth(values: list[float]) -> np.ndarray:
        window = np.ones(5)
        return np.convolve(values, window)[2:-2] / np.convolve(np.ones(len(values)), window)[2:-2]

    steps = np.arange(1, summary.budget.steps + 1)
    curves = {
        method: np.array([smooth([r["effective_ratio"] for r in run.steps(summary.budget)]) for run in runs])
        for method, runs in summary.runs.items()
    }
    draw_curves(figure, steps, curves, ("step", "effective ratio, mean of 5 steps"), band=False)


def errors(spreads: Sequence[Spread]) -> list[list[float]]:
    return [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]


def draw_mixed_anchors(figure: Any, summary: Summary) -> None:
    spreads = [found["mixed_anchors"] for found in summary.main.values()]
    axes = figure.subplots()
    names = [TITLES.get(method, method) for method in summary.main]
    greys = ["0.5" if method == "trace" else "0.8" for method in summary.main]
    axes.barh(names, [s.median for s in spreads], xerr=errors(spreads), color=greys, capsize=3)
    axes.invert_yaxis()
    axes.set(xlabel="mixed anchors per step")


def draw_calibration(figure: Any, summary: Summary) -> None:
    found = {anchor: of for anchor, of in summary.numbers["calibration"].items() if anchor != "all"}
    for axes, name in zip(figure.subplots(1, 2), ("brier", "auroc"), strict=True):
        for half, grey in ((1, "0.75"), (2, "0.35")):
            spreads = [scores[name][half] for scores in found.values()]
            label = ("first half", "second half")[half - 1]
            places = np.arange(len(found)) + 0.4 * half - 0.6
            axes.bar(
                places, [s.median for s in spreads], 0.4, yerr=errors(spreads), color=grey, capsize=3, label=label
            )
        constant = 0.25 if name == "brier" else 0.5
        axes.axhline(constant, color="0", linestyle=":", label="0.5 for every value")
        axes.set(title=f"{SCORES[name]} by depth", xticks=range(len(found)), xticklabels=list(found))
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def branches(run: Run) -> bool:
    return any(len(record.get("budget_by_depth", {})) > 1 for record in run.records)


def draw_depths(figure: Any, summary: Summary) -> None:
    third = max(1, summary.budget.steps // 3)
    bars: dict[str, dict[str, float]] = {}
    for method, runs in summary.runs.items():
        if not any(map(branches, runs)):
            continue
        for part, chosen in {"early": slice(0, third), "late": slice(-third, None)}.items():
            counts: Counter[str] = Counter()
            for record in (record for run in runs for record in run.steps(summary.budget)[chosen]):
                counts.update(record["budget_by_depth"])
            shares = {depth: leaves / counts.total() for depth, leaves in counts.items()}
            bars[f"{TITLES.get(method, method)}, {part}"] = shares
    axes, left = figure.subplots(), np.zeros(len(bars))
    depths = sorted({depth for shares in bars.values() for depth in shares}, key=int)
    for place, depth in enumerate(depths):
        widths = np.array([shares.get(depth, 0.0) for shares in bars.values()])
        grey = f"{0.25 + 0.7 * place / len(depths):.2f}"
        hatch = ("", "///", "...")[place % 3]
        label = f"depth {depth}" if int(depth) else "root"
        axes.barh(list(bars), widths, left=left, color=grey, edgecolor="1", hatch=hatch, label=label)
        left += widths
    axes.invert_yaxis()
    axes.set(xlabel="share of leaves by the depth of the anchor they were drawn from", xlim=(0, 1))
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


FIGURES: dict[str, tuple[Callable[[Any, Summary], None], str]] = {
    "success": (draw_success, "Success against sampled tokens: median over seeds, in the band of least and most."),
    "effective_ratio": (draw_effective_ratio, "Effective ratio over steps: median over seeds."),
    "mixed_anchors": (draw_mixed_anchors, "Mixed anchors per step: median over seeds, least and most."),
    "calibration": (draw_calibration, "Predictor of TRACE by depth of the anchor: median over seeds, least and most."),
    "depths": (draw_depths, "Where leaves were drawn, in the first and the last third of the training."),
}


def plot(summary: Summary, folder: Path) -> dict[str, Path]:
    """Draws the figures of a world, as far as its runs go. Returns captions and files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    trees = any(branches(run) for runs in summary.runs.values() for run in runs)
    skipped = {"calibration": not summary.numbers["calibration"], "depths": not trees}
    found = {}
    for name, (draw, caption) in FIGURES.items():
        if summary.runs and not skipped.get(name):
            figure = Figure(figsize=(10, 4), dpi=100, layout="constrained")
            canvas = FigureCanvasAgg(figure)
            draw(figure, summary)
            canvas.draw()
            found[caption] = folder / f"{summary.world}_{name}.png"
            Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("L").save(found[caption], optimize=True)
    return found
