"""
Environment episodes per second, and whether memory grows with them.

    python benchmarks/env_throughput.py

1,000 episodes of each environment, 64 at a time, are stepped together as the engine steps them: one call per live
episode and round. Every episode is forked after its first turn, and the fork is played to its end among the others.
What the policy says is written here: it costs no time. An episode that ends makes room for the next.

    hotpotqa    search for the two supporting pages, finish; over the row's paragraphs
    corpus      the same over one index of all development paragraphs
    server      the same over HTTP, against a retrieval server on this machine
    bfcl        the ground truth of all user turns
    python      two programs that share a variable, then the answer, which math-verify checks

Memory is that of this process and its children, without pages that are shared between them (USS): the mean of ten
looks while the 200th to 300th episodes end, and of ten while the last hundred do. Single looks differ with what the
episodes hold that are just being played. `blocks` is the growth of the objects in use in this process, without gaps
between them: what a leak would show in.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from trace_trl.environments.base import Action, Environment, Episode, Reply
from trace_trl.environments.callback import CallbackEnvironment
from trace_trl.environments.runner import ConcurrentRunner


ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "examples" / "data"

Turns = Callable[[dict[str, Any]], list[str]]


def unique_memory() -> float:
    """MB of this process and its descendants that would be free without them."""
    total, waiting = 0, ["self"]
    while waiting:
        pid = waiting.pop()
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith("Private_"))
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += (task / "children").read_text().split()
        except OSError:
            continue  # it has ended meanwhile
    return total / 1024


def search_turns(row: dict[str, Any]) -> list[str]:
    searches = [f"Thought: next\nAction: search[{title}]" for title in row["supporting_titles"]]
    return [*searches, f"Thought: done\nAction: finish[{row['answer']}]"]


def hotpotqa(folder: Path) -> tuple[Environment, list[dict], Turns]:
    from trace_trl.environments.qa_data import load_questions
    from trace_trl.environments.search import search_env

    env_reset, env_step = search_env()
    rows = load_questions(DATA / "hotpotqa_dev_distractor_500.jsonl.gz")
    return CallbackEnvironment(env_step, env_reset), rows, search_turns


def corpus(folder: Path) -> tuple[Environment, list[dict], Turns]:
    from trace_trl.environments.qa_data import load_questions, unique_paragraphs
    from trace_trl.environments.retrieval import CorpusIndex
    from trace_trl.environments.search import search_env

    rows = load_questions(DATA / "hotpotqa_dev_distractor_500.jsonl.gz")
    CorpusIndex.build(unique_paragraphs(rows), folder / "corpus", show_progress=False)
    env_reset, env_step = search_env(retriever=CorpusIndex.open(folder / "corpus"))
    return CallbackEnvironment(env_step, env_reset), rows, search_turns


def server(folder: Path) -> tuple[Environment, list[dict], Turns]:
    from trace_trl.environments.retrieval import CorpusIndex, RetrievalServer
    from trace_trl.environments.retrieval_server import SearchServer
    from trace_trl.environments.search import search_env

    _, rows, _ = corpus(folder)
    served = SearchServer(CorpusIndex.open(folder / "corpus"), "127.0.0.1", 0)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    retriever = RetrievalServer(f"http://127.0.0.1:{served.server_address[1]}/retrieve")
    env_reset, env_step = search_env(retriever=retriever)
    return CallbackEnvironment(env_step, env_reset), rows, search_turns


def bfcl(folder: Path) -> tuple[Environment, list[dict], Turns]:
    from trace_trl.environments.bfcl import BFCLEnvironment
    from trace_trl.environments.bfcl_calls import format_calls

    environment = BFCLEnvironment(docs="brief")

    def turns(row: dict[str, Any]) -> list[str]:
        calls = [format_calls(calls, "python") if calls else "" for calls in environment.ground_truth(row)]
        return [turn for text in calls for turn in ([text, "Done."] if text else ["Done."])]

    return CallbackEnvironment(environment.step, environment.reset), environment.rows(), turns


def python(folder: Path) -> tuple[Environment, list[dict], Turns]:
    from trace_trl.environments.math_answers import math_accuracy
    from trace_trl.environments.math_data import load_problems
    from trace_trl.environments.python import PythonEnvironment

    environment = PythonEnvironment()
    answers: dict[str, str] = {}

    def step(state: Any, action: str, messages: Any) -> Any:
        result = environment.step(state, action, messages)
        if result.done:
            result.reward = math_accuracy([action], [answers[action]])[0]
        return result

    def turns(row: dict[str, Any]) -> list[str]:
        answers[f"The answer is \\boxed{{{row['answer']}}}."] = row["answer"]
        return [
            f"```python\nimport math\nx = math.sqrt(float({len(row['problem'])}))\nprint(x)\n```",
            "```python\nprint([n for n in range(2000) if n % 7 == 3][-1], round(x ** 2))\n```",
            f"The answer is \\boxed{{{row['answer']}}}.",
        ]

    return CallbackEnvironment(environment.step, environment.reset), load_problems(DATA / "gsm8k_test.jsonl.gz"), turns


ENVIRONMENTS = {function.__name__: function for function in (hotpotqa, corpus, server, bfcl, python)}


class Played:
    """An episode and what is still to be said in it."""

    def __init__(self, episode: Episode, turns: list[str], number: int = 0, forked: bool = False):
        self.episode = episode
        self.turns = turns
        self.number = number
        self.forked = forked

    def step(self) -> Reply:
        text = self.turns[self.number]
        message = {"role": "assistant", "content": text}
        reply = self.episode.step(Action(text, message, [message]))
        self.number += 1
        return reply

    def fork(self) -> Played:
        return Played(self.episode.fork(), self.turns, self.number, forked=True)


def measure(name: str, episodes: int, at_once: int, folder: Path) -> dict[str, Any]:
    environment, rows, turns = ENVIRONMENTS[name](folder)
    rng = random.Random(0)
    tasks: Iterator[dict] = itertools.cycle(rng.sample(rows, len(rows)))
    runner = ConcurrentRunner()
    live: list[Played] = []
    ended = steps = forks = rewarded = 0
    looks = episodes // 100  # one every 10 episodes of 1,000
    windows = range(episodes // 5, 3 * episodes // 10), range(9 * episodes // 10, episodes)
    memory: list[dict[int, float]] = [{}, {}]
    blocks: list[list[int]] = [[], []]
    started = time.perf_counter()

    def together(calls: list[Callable]) -> list[Any]:
        results = runner.run(calls, 60.0)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    while ended < episodes:
        new = list(itertools.islice(tasks, max(0, at_once - sum(not played.forked for played in live))))
        live += [
            Played(episode, turns(row))
            for episode, row in zip(together([partial(environment.reset, row, None) for row in new]), new, strict=True)
        ]
        replies = together([played.step for played in live])
        steps += len(replies)
        going_on = []
        for played, reply in zip(live, replies, strict=True):
            if reply.done:
                played.episode.close()
                rewarded += reply.reward == 1.0
                forks += played.forked
                ended += not played.forked
                for window, looked, counted in zip(windows, memory, blocks, strict=True):
                    if ended in window and ended // looks not in looked:
                        looked[ended // looks] = unique_memory()
                        counted.append(sys.getallocatedblocks())
                continue
            going_on.append(played)
            if played.number == 1 and not played.forked:
                going_on.append(played.fork())
        live = going_on
    seconds = time.perf_counter() - started
    for played in live:
        played.episode.close()
    runner.close()
    early, late = (sum(looked.values()) / len(looked) for looked in memory)
    objects = [sum(counted) / len(counted) for counted in blocks]
    return {
        "environment": name,
        "episodes": ended,
        "forks": forks,
        "steps": steps,
        "seconds": round(seconds, 2),
        "episodes_per_second": round((ended + forks) / seconds, 1),
        "steps_per_second": round(steps / seconds, 1),
        "memory_mb": [round(early, 1), round(late, 1)],
        "growth": round(late / early - 1, 4),
        "blocks": round(objects[1] / objects[0] - 1, 4),
        "rewarded": rewarded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Environment episodes per second.")
    parser.add_argument("--environments", nargs="+", default=list(ENVIRONMENTS), choices=list(ENVIRONMENTS))
    parser.add_argument("--episodes", type=int, default=1000, help="At least 100.")
    parser.add_argument("--at_once", type=int, default=64)
    parser.add_argument("--json", help="File for the results, one line each.")
    args = parser.parse_args()
    if args.episodes < 100:
        parser.error("--episodes must be at least 100.")
    columns = "episodes forks steps seconds episodes/s steps/s memory_MB growth blocks".split()
    print(f"{'':<10}" + "".join(name.rjust(18 if name == "memory_MB" else 11) for name in columns))
    for name in args.environments:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(name, args.episodes, args.at_once, Path(folder))
        memory = " to ".join(map(str, result["memory_mb"]))
        print(
            f"{name:<10}{result['episodes']:>11}{result['forks']:>11}{result['steps']:>11}{result['seconds']:>11}"
            f"{result['episodes_per_second']:>11}{result['steps_per_second']:>11}{memory:>18}{result['growth']:>11.1%}"
            f"{result['blocks']:>11.1%}",
            flush=True,
        )
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    sys.exit(main())
