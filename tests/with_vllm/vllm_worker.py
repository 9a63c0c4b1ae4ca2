"""
What the processes of a test with vLLM run: the chain world, trained with vLLM on a CPU.

    vllm_worker.py OUT JOBS

JOBS is a JSON list; each job names a task below, and its arguments. Each writes what the test looks at into the folder
OUT, one file per process.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import gloo_weights
import on_cpu
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import PrinterCallback, set_seed


sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
torch.set_num_threads(1)

from worlds import WORLDS  # noqa: E402
from worlds.policy import load  # noqa: E402

from trace_trl import TRACEConfig, TRACETrainer  # noqa: E402


class RecordingTrainer(TRACETrainer):
    """Keeps the trees and the batch of every generation; plays `forests` instead of sampling where it has some."""

    def __init__(self, *args, forests=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.given = None if forests is None else [pickle.loads(forest) for forest in forests]
        self.forests: list[bytes] = []
        self.batches: list[dict[str, Any]] = []

    def _roll_out_training(self, inputs):
        if self.given is not None:
            return self.given.pop(0)
        trees, stats = super()._roll_out_training(inputs)
        self.forests.append(pickle.dumps((trees, stats)))
        return trees, stats

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.batches.append(copy.deepcopy(output))
        return output


def make_trainer(
    out: Path, name: str, use_vllm: bool = True, forests=None, env_step=None, **options: Any
) -> RecordingTrainer:
    world = WORLDS["chain"]()
    processes = int(os.environ.get("WORLD_SIZE", 1))
    defaults = {
        "output_dir": str(out / name),
        "seed": 5,
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 24 // processes,
        "num_generations": 4,
        "continuations_per_root": 2,
        "max_completion_length": world.completion_tokens,
        "max_turn_length": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_steps": 20,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "show_rollout_progress": False,
        "use_vllm": use_vllm,
    }
    if processes > 1:
        defaults["ddp_backend"] = "gloo"
    if options.get("vllm_mode") == "server":
        on_cpu.vllm_generation.VLLMClient = gloo_weights.Client
    args = TRACEConfig(**(defaults | options))
    set_seed(args.seed)
    model, tokenizer = load(world)
    trainer = RecordingTrainer(
        model=model,
        args=args,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(world.rows(512, "vllm")),
        env_step=env_step or world.step,
        env_reset=world.reset,
        forests=forests,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(out: Path, name: str, **options: Any) -> None:
    """Trains with vLLM, then once more on the same trees without it."""
    trainer = make_trainer(out, name, **options)
    trainer.train()
    for name_of_option in [option for option in options if "vllm" in option]:
        options.pop(name_of_option)
    again = make_trainer(out, f"{name}-again", use_vllm=False, forests=trainer.forests, **options)
    again.train()
    differences = []
    for own, other in zip(trainer.batches, again.batches, strict=True):
        assert torch.equal(own["completion_ids"], other["completion_ids"])
        differences.append((own["advantages"] - other["advantages"]).abs().max().item())
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    other_logs = [entry for entry in again.state.log_history if "loss" in entry]
    result = {
        "logs": logs,
        "advantages": differences,
        "losses": [[a["loss"], b["loss"]] for a, b in zip(logs, other_logs, strict=True)],
    }
    if trainer.vllm_mode == "colocate":
        result["unfinished"] = trainer.vllm_generation.llm.llm_engine.get_num_unfinished_requests()
    (out / f"{name}.{trainer.args.process_index}.json").write_text(json.dumps(result))


TASKS = {function.__name__: function for function in (train,)}


def main() -> None:
    out = Path(sys.argv[1])
    for job in json.loads(sys.argv[2]):
        TASKS[job.pop("task")](out, **job)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
