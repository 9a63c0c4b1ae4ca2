# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "trace-trl[peft,examples]",
# ]
# ///

"""
Evaluates a checkpoint on one of the tasks: pass@1, pass@k, the task's own metrics, turns and tokens, per subset.

    python examples/evaluate_model.py --task hotpotqa --rows 40 --samples 4 --adapter examples/warm_start/hotpotqa
    python examples/evaluate_model.py --task hotpotqa --data examples/data/2wikimultihopqa_dev_164.jsonl.gz
    python examples/evaluate_model.py --task math --data examples/data/math500.jsonl.gz --model Qwen/Qwen3-8B \
        --dtype bfloat16 --max_completion_length 8192 --max_turn_length 4096 --batch_size 64
    python examples/evaluate_model.py --task bfcl --subset miss_func --model runs/bfcl --call_format json

Every finished episode is a line of `episodes.jsonl` in the output folder; a run that was stopped goes on where it was.
The table is printed and written to `results.json`. On several GPUs: `accelerate launch --num_processes 8`, each
process with a whole model.

`pass@k` is the unbiased estimate 1 - C(n - c, k) / C(n, k) for c successes among n samples (Chen et al. 2021).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from bfcl import BFCLTask
from datasets import Dataset
from hotpotqa import SearchTask
from mathematics import MathTask
from peft import PeftModel
from smollm2 import MODEL_ID, resolve_model
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_trl import TRACEConfig, TRACETrainer
from trace_trl.environments.bfcl_calls import CALL_FORMATS
from trace_trl.environments.bfcl_tasks import DOCS
from trace_trl.environments.retrieval import CorpusIndex, RetrievalServer
from trace_trl.tree import RolloutTree


# Limits of an episode of the small default model, as it is trained; larger models need more
LIMITS = {
    "hotpotqa": {"max_turns": 4, "max_turn_length": 48, "max_completion_length": 320, "success_threshold": 0.3},
    "math": {"max_turns": 3, "max_turn_length": 112, "max_completion_length": 256, "success_threshold": 0.5},
    "bfcl": {"max_turns": 8, "max_turn_length": 64, "max_completion_length": 512, "success_threshold": 0.5},
}


def make_task(args: argparse.Namespace) -> Any:
    if args.task == "math":
        return MathTask()
    if args.task == "bfcl":
        return BFCLTask(call_format=args.call_format, docs=args.docs, max_user_turns=args.max_user_turns)
    retriever = None
    if args.retrieval_url is not None:
        retriever = RetrievalServer(args.retrieval_url)
    elif args.corpus is not None:
        retriever = CorpusIndex.open(args.corpus)
    return SearchTask(k=args.search_k, max_observation_chars=args.max_observation_chars, retriever=retriever)


def load_rows(task: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows to evaluate on, each with an `id` and a `subset`."""
    if args.task == "bfcl":
        rows = task.test_rows(args.subset)
    else:
        rows = task.test_rows(args.data, config=args.data_config, split=args.data_split)
        rows = [row for row in rows if args.subset in (None, row["subset"])]
    if not rows:
        raise SystemExit(f"No row has the subset {args.subset!r}.")
    return rows[: args.rows or None]


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    path = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=args.dtype)
    if args.adapter is not None:
        model = PeftModel.from_pretrained(model, args.adapter).merge_and_unload()
    return model, tokenizer


def make_trainer(task: Any, rows: list[dict], args: argparse.Namespace) -> TRACETrainer:
    """A trainer that only rolls out."""
    model, tokenizer = load_model(args)
    config = TRACEConfig(
        output_dir=args.output_dir,
        use_cpu=not torch.cuda.is_available(),
        bf16=args.dtype == "bfloat16" and torch.cuda.is_available(),
        per_device_train_batch_size=2,
        num_generations=2,
        continuations_per_root=0,
        root_allocation="uniform",
        train_predictor=False,
        temperature=args.temperature,
        top_p=args.top_p,
        max_turns=args.max_turns,
        max_turn_length=args.max_turn_length,
        max_completion_length=args.max_completion_length,
        success_threshold=args.success_threshold,
        show_rollout_progress=False,
        seed=args.seed,
        report_to="none",
    )
    return TRACETrainer(
        model=model,
        reward_funcs=task.reward_funcs or None,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        env_reset=task.env_reset,
        env_step=task.env_step,
    )


def describe(tree: RolloutTree, row: dict[str, Any], sample: int, task: Any) -> dict[str, Any]:
    """One finished episode as a line of the file."""
    end = tree.leaves()[0]
    leaf, turns = end.leaf, end.path()
    measured = {**leaf.info, **leaf.extras}
    return {
        "id": row["id"],
        "sample": sample,
        "subset": row["subset"],
        "reward": leaf.reward,
        "success": leaf.success,
        "end": leaf.reason,
        "turns": len(turns),
        "tokens": sum(len(turn.token_ids) for turn in turns),
        # What an environment counts is 0 in an episode that was cut before it
        **{key: measured.get(key, 0.0) for key in task.metrics},
        "text": [turn.text for turn in turns],
    }


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """Chance that at least one of `k` of the samples, drawn without replacement, is a success."""
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def summarise(episodes: Sequence[dict[str, Any]], task: Any) -> dict[str, dict[str, float]]:
    """Results per subset, and of all episodes under `"all"`."""
    groups: dict[str, list[dict]] = defaultdict(list)
    for episode in episodes:
        groups["all"].append(episode)
        if episode["subset"]:
            groups[episode["subset"]].append(episode)
    return {name: _summarise(group, task) for name, group in sorted(groups.items(), key=lambda item: item[0] != "all")}


def _summarise(episodes: list[dict[str, Any]], task: Any) -> dict[str, float]:
    rows: dict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        rows[episode["id"]].append(bool(episode["success"]))
    samples = min(map(len, rows.values()))
    results: dict[str, float] = {"rows": len(rows), "samples": samples}
    for k in sorted({1, samples}):
        results[f"pass@{k}"] = _mean([pass_at_k(sum(hits), len(hits), k) for hits in rows.values()])
    results["reward"] = _mean([episode["reward"] for episode in episodes])
    for key, name in task.metrics.items():
        results[name] = _mean([episode[key] for episode in episodes])
    results["turns"] = _mean([episode["turns"] for episode in episodes])
    results["tokens"] = _mean([episode["tokens"] for episode in episodes])
    results["cut by a limit"] = _mean([episode["end"] != "final" for episode in episodes])
    return results


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table(results: dict[str, dict[str, float]]) -> str:
    width = max(12, *map(len, results)) + 2
    lines = [" " * 20 + "".join(name.rjust(width) for name in results)]
    for key in results["all"]:
        cells = [
            f"{group[key]:.0f}" if key in ("rows", "samples") else f"{group[key]:.3f}" for group in results.values()
        ]
        lines.append(key.ljust(20) + "".join(cell.rjust(width) for cell in cells))
    return "\n".join(lines)


def read_episodes(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The episodes of a run that was stopped; a last line that is not whole is dropped.

    Raises:
        SystemExit: if they are of another setting.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    episodes = []
    for line in lines:
        try:
            episodes.append(json.loads(line))
        except ValueError:
            break
    if episodes and episodes[0].get("settings") != settings:
        raise SystemExit(f"{path} holds episodes of another setting: choose another --output_dir, or remove it.")
    path.write_text("".join(json.dumps(episode) + "\n" for episode in episodes), encoding="utf-8")
    return episodes[1:]


def main() -> None:
    args = parse_arguments()
    task = make_task(args)
    rows = load_rows(task, args)
    trainer = make_trainer(task, rows, args)
    accelerator = trainer.accelerator
    main_process = accelerator.is_main_process
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "episodes.jsonl"
    settings = {key: value for key, value in vars(args).items() if key not in ("output_dir", "batch_size")}
    episodes = read_episodes(path, settings) if main_process else []
    done = {(episode["id"], episode["sample"]) for episode in gather_object(episodes)}
    left = [(row, sample) for row in rows for sample in range(args.samples) if (row["id"], sample) not in done]
    if main_process and not done:
        path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
    # Other numbers than those of the part that is done
    torch.manual_seed(args.seed + len(done) * accelerator.num_processes + accelerator.process_index)

    processes, process = accelerator.num_processes, accelerator.process_index
    started = time.perf_counter()
    progress = tqdm(total=len(rows) * args.samples, initial=len(done), unit="episode", disable=not main_process)
    for start in range(0, len(left), args.batch_size * processes):
        batch = left[start : start + args.batch_size * processes]
        # A process that has none left plays one that is not counted: all of them generate together
        own = batch[process::processes] or batch[:1]
        counted = len(batch[process::processes])
        trees = trainer.rollout([row for row, _ in own])
        finished = [describe(tree, *pair, task) for tree, pair in zip(trees, own, strict=True)][:counted]
        finished = gather_object(finished)
        if main_process:
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(episode) + "\n" for episode in finished)
            episodes += finished
            progress.update(len(finished))
            progress.set_postfix(success=f"{_mean([bool(e['success']) for e in episodes]):.3f}")
    progress.close()
    if main_process:
        results = summarise(episodes, task)
        (folder / "results.json").write_text(json.dumps({"settings": settings, "results": results}, indent=2) + "\n")
        print(
            f"\n{table(results)}\n\nresults  {folder / 'results.json'}\ntook     {time.perf_counter() - started:.0f} s"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Evaluates a checkpoint on one of the tasks.")
    parser.add_argument("--task", choices=tuple(LIMITS), required=True)
    parser.add_argument("--model", default=MODEL_ID, help="Model id on the Hub, or a local folder.")
    parser.add_argument("--adapter", help="LoRA adapter on top of it.")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output_dir", help="Defaults to runs/evaluation/TASK.")
    parser.add_argument("--data", help="Rows: a file, a folder or an id on the Hub. Defaults to the bundled ones.")
    parser.add_argument("--data_config", help="Configuration of a data set on the Hub.")
    parser.add_argument("--data_split", default="test", help="Split of a data set on the Hub.")
    parser.add_argument("--subset", help="Only rows of this kind.")
    parser.add_argument("--rows", type=int, default=0, help="The first rows only; 0 for all.")
    parser.add_argument("--samples", type=int, default=1, help="Episodes per row.")
    parser.add_argument("--batch_size", type=int, default=32, help="Episodes at a time on each process.")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_turns", type=int)
    parser.add_argument("--max_turn_length", type=int, help="Tokens of a turn.")
    parser.add_argument("--max_completion_length", type=int, help="Tokens of an episode, observations included.")
    parser.add_argument("--success_threshold", type=float, help="Reward from which an episode is a success.")
    parser.add_argument("--search_k", type=int, default=1, help="hotpotqa: pages shown by one search.")
    parser.add_argument(
        "--max_observation_chars", type=int, default=320, help="hotpotqa: length of what a search shows."
    )
    parser.add_argument("--corpus", help="hotpotqa: folder of an index to search in.")
    parser.add_argument("--retrieval_url", help="hotpotqa: retrieval server to search with.")
    parser.add_argument("--call_format", default="python", choices=CALL_FORMATS, help="bfcl: how calls are written.")
    parser.add_argument("--docs", default="json", choices=DOCS, help="bfcl: how functions are described.")
    parser.add_argument("--max_user_turns", type=int, help="bfcl: the first user turns only.")
    args = parser.parse_args()
    for name, limit in LIMITS[args.task].items():
        if getattr(args, name) is None:
            setattr(args, name, limit)
    args.output_dir = args.output_dir or f"runs/evaluation/{args.task}"
    if args.samples < 1 or args.rows < 0 or args.batch_size < 1:
        parser.error("--samples and --batch_size must be at least 1, and --rows not negative.")
    return args


if __name__ == "__main__":
    main()
