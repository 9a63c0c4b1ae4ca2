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
        --dtype bfloat16 --max_turns 6 --max_turn_length 4096 --max_completion_length 8192
    python examples/evaluate_model.py --task bfcl --model Qwen/Qwen3-8B --dtype bfloat16 --call_format json \
        --chat_template_kwargs '{"enable_thinking": false}' \
        --max_turns 40 --max_turn_length 2048 --max_completion_length 16384

`--model` takes a full model or a folder with a LoRA adapter, as the training scripts save it. For the small default
model the settings of its training apply; any other model needs its limits by argument.

An episode is a success if its reward is at least `--success_threshold`. `pass@k` is the unbiased estimate
1 - C(n - c, k) / C(n, k) for c successes among n samples (Chen et al. 2021).

Every finished episode is a line of `episodes.jsonl` in the output folder; a run that was stopped goes on where it was.
The table is printed and written to `results.json`. On several GPUs: `accelerate launch --num_processes 8`, each
process with a whole model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from peft import PeftConfig, PeftModel
from smollm2 import MODEL_ID, resolve_model
from tasks import Row, Task
from tasks.bfcl import SMALL, BFCLTask
from tasks.hotpotqa import MAX_TURNS, SearchTask, make_retriever
from tasks.math import MathTask
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_trl import TRACEConfig, TRACETrainer
from trace_trl.environments.bfcl_calls import CALL_FORMATS
from trace_trl.environments.bfcl_tasks import DOCS
from trace_trl.tree import RolloutTree


# How the small default model is trained
SMALL_SETTINGS: dict[str, dict[str, Any]] = {
    "hotpotqa": {"max_turns": MAX_TURNS, "max_turn_length": 48, "max_completion_length": 320},
    "math": {"max_turns": 3, "max_turn_length": 112, "max_completion_length": 256},
    "bfcl": {"max_turns": 6, "max_turn_length": 64, "max_completion_length": 512, **SMALL},
}
LIMITS = ("max_turns", "max_turn_length", "max_completion_length")
# Arguments that belong to one task, with what they are if they are not given
OF_TASK: dict[str, dict[str, Any]] = {
    "hotpotqa": {"search_k": 1, "corpus": None, "retrieval_url": None, "aliases": None},
    "math": {"isolation": "strict"},
    "bfcl": {"call_format": "python", "docs": "json", "max_user_turns": None},
}


def make_task(args: argparse.Namespace) -> Task:
    if args.task == "math":
        return MathTask(isolation=args.isolation)
    if args.task == "bfcl":
        return BFCLTask(
            call_format=args.call_format,
            docs=args.docs,
            max_user_turns=args.max_user_turns or None,
            max_observation_chars=args.max_observation_chars or None,
        )
    kwargs = {} if args.max_observation_chars is None else {"max_observation_chars": args.max_observation_chars}
    return SearchTask(k=args.search_k, retriever=make_retriever(args.corpus, args.retrieval_url), **kwargs)


def choose_rows(task: Task, args: argparse.Namespace) -> list[Row]:
    """The rows to evaluate on."""
    kwargs = {"aliases": args.aliases} if args.task == "hotpotqa" else {}
    rows = task.test_rows(args.data, config=args.data_config, split=args.data_split, **kwargs)
    kept = [row for row in rows if args.subset in (None, row["subset"])]
    if not kept:
        kinds = ", ".join(sorted({row["subset"] for row in rows}))
        raise SystemExit(f"No row has the subset {args.subset!r}: there are {kinds}.")
    return kept[: args.rows or None]


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    name, adapter = args.model, args.adapter
    if (Path(name) / "adapter_config.json").is_file():
        if adapter is not None:
            raise SystemExit(f"{name} is an adapter itself: drop --adapter.")
        name, adapter = PeftConfig.from_pretrained(name).base_model_name_or_path, name
    path = resolve_model(name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=args.dtype)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model, tokenizer


def make_trainer(task: Task, rows: list[Row], args: argparse.Namespace) -> TRACETrainer:
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
        # Greedy decoding has no temperature
        temperature=args.temperature or 1.0,
        generation_kwargs=None if args.temperature else {"do_sample": False},
        chat_template_kwargs=args.chat_template_kwargs,
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


def describe(tree: RolloutTree, row: Row, sample: int, task: Task) -> dict[str, Any]:
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


def summarise(episodes: Sequence[dict[str, Any]], task: Task) -> dict[str, dict[str, float]]:
    """Results per subset, and of all episodes under `"all"`."""
    groups: dict[str, list[dict]] = defaultdict(list)
    for episode in episodes:
        groups["all"].append(episode)
        if episode["subset"]:
            groups[episode["subset"]].append(episode)
    return {name: _summarise(group, task) for name, group in sorted(groups.items(), key=lambda item: item[0] != "all")}


def _summarise(episodes: list[dict[str, Any]], task: Task) -> dict[str, float]:
    rows: dict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        rows[episode["id"]].append(bool(episode["success"]))
    samples = min(map(len, rows.values()))
    results: dict[str, float] = {"rows": len(rows), "samples": samples}
    for k in sorted({samples, *(2**n for n in range(samples.bit_length()))}):
        results[f"pass@{k}"] = _mean([pass_at_k(sum(hits), len(hits), k) for hits in rows.values()])
    results[task.reward_name] = _mean([episode["reward"] for episode in episodes])
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
    """
    The episodes of a run that was stopped. A last line that is not whole is taken off the file. Without a file, begins
    one.

    Raises:
        SystemExit: if they are of another setting, or if a line among them can't be read.
    """
    if not path.is_file():
        path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    read = []
    for number, line in enumerate(lines, start=1):
        try:
            read.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise SystemExit(f"{path}, line {number} can't be read: repair it, or take it out.") from None
    if read and read[0].get("settings") != settings:
        raise SystemExit(f"{path} holds episodes of another setting: choose another --output_dir, or remove it.")
    text = "".join(json.dumps(episode) + "\n" for episode in read)
    if text != path.read_text(encoding="utf-8"):
        whole = path.with_suffix(".tmp")
        whole.write_text(text, encoding="utf-8")
        os.replace(whole, path)
    return read[1:]


def main() -> None:
    args = parse_arguments()
    task = make_task(args)
    rows = choose_rows(task, args)
    if len(rows) < int(os.environ.get("WORLD_SIZE", 1)):
        raise SystemExit(f"There are {len(rows)} rows for {os.environ['WORLD_SIZE']} processes: start fewer of them.")
    trainer = make_trainer(task, rows, args)
    accelerator = trainer.accelerator
    main_process = accelerator.is_main_process
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "episodes.jsonl"
    free = ("output_dir", "batch_size", "rows", "samples")  # may be others when a run goes on
    settings = {key: value for key, value in vars(args).items() if key not in free}
    shared: list[Any] = [read_episodes(path, settings) if main_process else None]
    (episodes,) = broadcast_object_list(shared)
    chosen = {row["id"] for row in rows}
    episodes = [episode for episode in episodes if episode["id"] in chosen and episode["sample"] < args.samples]
    done = {(episode["id"], episode["sample"]) for episode in episodes}
    left = [(row, sample) for row in rows for sample in range(args.samples) if (row["id"], sample) not in done]
    processes, process = accelerator.num_processes, accelerator.process_index
    # Other random numbers on every process, and than those of the part that is done
    seed = hashlib.sha256(f"{args.seed} {process} {len(done)}".encode()).digest()[:8]
    torch.manual_seed(int.from_bytes(seed, "big"))
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
        (folder / "results.json").write_text(json.dumps({"settings": vars(args), "results": results}, indent=2) + "\n")
        print(f"\n{table(results)}\n")
        print(f"success  {task.reward_name} of at least {args.success_threshold:g}")
        print(f"results  {folder / 'results.json'}")
        print(f"took     {time.perf_counter() - started:.0f} s")
    trainer.end()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Evaluates a checkpoint on one of the tasks.")
    parser.add_argument("--task", choices=tuple(OF_TASK), required=True)
    parser.add_argument("--model", default=MODEL_ID, help="Id on the Hub or local folder of a model or an adapter.")
    parser.add_argument("--adapter", help="LoRA adapter on top of it.")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chat_template_kwargs", type=json.loads, help='JSON, as {"enable_thinking": false}.')
    parser.add_argument("--output_dir", help="Defaults to runs/evaluation/TASK.")
    parser.add_argument("--data", help="Rows: a file, a folder or an id on the Hub. Defaults to the bundled ones.")
    parser.add_argument("--data_config", help="Configuration of a data set on the Hub.")
    parser.add_argument("--data_split", default="test", help="Split of a data set on the Hub.")
    parser.add_argument("--subset", help="Only rows of this kind.")
    parser.add_argument("--rows", type=int, default=0, help="The first rows only; 0 for all.")
    parser.add_argument("--samples", type=int, default=1, help="Episodes per row.")
    parser.add_argument("--batch_size", type=int, default=32, help="Episodes at a time on each process.")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 for greedy decoding.")
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_turns", type=int)
    parser.add_argument("--max_turn_length", type=int, help="Tokens of a turn.")
    parser.add_argument("--max_completion_length", type=int, help="Tokens of an episode, observations included.")
    parser.add_argument("--success_threshold", type=float, default=1.0, help="Reward that is a success.")
    parser.add_argument("--max_observation_chars", type=int, help="hotpotqa, bfcl: length of a result; 0 for all.")
    parser.add_argument("--search_k", type=int, help="hotpotqa: pages shown by one search.")
    parser.add_argument("--corpus", help="hotpotqa: folder of an index to search in.")
    parser.add_argument("--retrieval_url", help="hotpotqa: retrieval server to search with.")
    parser.add_argument("--aliases", help="hotpotqa: file of aliases of 2WikiMultiHopQA's answers.")
    parser.add_argument("--isolation", choices=("strict", "limits"), help="math: how programs are run.")
    parser.add_argument("--call_format", choices=CALL_FORMATS, help="bfcl: how calls are written.")
    parser.add_argument("--docs", choices=DOCS, help="bfcl: how functions are described.")
    parser.add_argument("--max_user_turns", type=int, help="bfcl: the first user turns only; 0 for all.")
    args = parser.parse_args()
    if args.task == "math" and args.max_observation_chars is not None:
        parser.error("--max_observation_chars is for --task hotpotqa and --task bfcl.")
    for task, options in OF_TASK.items():
        for name in options:
            if task != args.task and getattr(args, name) is not None:
                parser.error(f"--{name} is for --task {task}.")
    if args.samples < 1 or args.rows < 0 or args.batch_size < 1:
        parser.error("--samples and --batch_size must be at least 1, and --rows not negative.")
    # The small model, with or without an adapter, is asked for what it has been trained for
    settings = SMALL_SETTINGS[args.task] if _is_small(args.model) else {}
    for name, value in {**OF_TASK[args.task], **settings}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    missing = [f"--{name}" for name in LIMITS if getattr(args, name) is None]
    if missing:
        parser.error(f"Give the limits of an episode for this model: {', '.join(missing)}.")
    args.output_dir = args.output_dir or f"runs/evaluation/{args.task}"
    return args


def _is_small(model: str) -> bool:
    if (Path(model) / "adapter_config.json").is_file():
        model = PeftConfig.from_pretrained(model).base_model_name_or_path
    return Path(model).name == Path(MODEL_ID).name


if __name__ == "__main__":
    main()
