"""
Two processes play random forests with a model whose turn names its own context, behind vLLM's interfaces.

    echo_worker.py OUT BACKEND SEED FORESTS

BACKEND is `server`, `rounds` or `continuous`; in the last two, the processes hold one engine between them. Each
process writes what it found wrong, and what it had to do, into OUT.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs


sys.path.insert(0, str(Path(__file__).parents[1]))

import fake_vllm  # noqa: E402
from toys import coin, make_engine, make_plan, make_tokenizer, usual  # noqa: E402
from trace_trl import StepResult  # noqa: E402
from trace_trl.continuous import ContinuousRun  # noqa: E402
from trace_trl.engine import Limits  # noqa: E402
from trace_trl.environments.callback import CallbackEnvironment  # noqa: E402
from trace_trl.generation import make_backend  # noqa: E402
from trace_trl.processes import AcceleratorSync  # noqa: E402


QUESTIONS = ["what is red", "left or right"]  # few: processes and siblings have the same prompts


def main() -> None:
    out, backend, seed, forests = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    fake_vllm.install()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    rank = accelerator.process_index
    tokenizer = make_tokenizer()
    words = sorted({token for word in "red green blue yes no left right".split() for token in usual(tokenizer, word)})
    echo = fake_vllm.Echo(words, tokenizer.eos_token_id)
    options = {} if backend == "server" else {"tensor_parallel_size": 2, "tp_group": torch.distributed.group.WORLD}
    mode = "server" if backend == "server" else "colocate"
    trainer = fake_vllm.make_trainer(echo, tokenizer.eos_token_id, accelerator, tokenizer, mode, **options)
    generate = make_backend(trainer)

    def env_step(state, action, messages):
        state["left"] -= 1
        # Of what siblings were answered, some is equal and some is not
        return StepResult(observation=f"{state['left'] % 2} {len(action) % 3}", done=state["left"] <= 0)

    def env_reset(example):
        draw = random.Random(example["seed"])
        return {"left": draw.randint(1, 4)}

    found = {"wrong": [], "turns": 0, "forests": 0, "idle": 0, "uneven": 0, "repeated": 0}
    for forest in range(forests):
        draw = random.Random(f"{seed} {forest}")
        counts = [draw.randint(0, 3), draw.randint(0, 3)]
        draws = [random.Random(f"{seed} {forest} {process}") for process in range(2)]
        engine = make_engine(
            generate,
            CallbackEnvironment(env_step, env_reset),
            tokenizer,
            limits=Limits(completion=80, turn=draw.choice([4, 7, 20])),
            sync=AcceleratorSync(accelerator),
            score=coin,
            schedule=ContinuousRun if backend == "continuous" else None,
            generating=generate.session,
        )
        plans = [
            make_plan(
                engine,
                prompt=draws[rank].choice(QUESTIONS),
                bare=draws[rank].randint(1, 3),
                continuations=draws[rank].randint(0, 4),
                index=number,
                tokenizer=tokenizer,
                seed=draws[rank].random(),
            )
            for number in range(counts[rank])
        ]
        engine.run(plans, seed=forest)
        found["forests"] += 1
        found["idle"] += not plans
        found["uneven"] += counts[0] != counts[1]
        seen = set()
        for plan in plans:
            for turn in plan.tree.turns():
                context = turn.parent.history_ids()
                found["turns"] += 1
                found["repeated"] += tuple(context) in seen
                seen.add(tuple(context))
                if turn.token_ids != fake_vllm.name_of(context, words, echo.length)[: len(turn.token_ids)] + [
                    tokenizer.eos_token_id
                ] * (len(turn.token_ids) > echo.length):
                    found["wrong"].append([forest, turn.token_ids])
            wanted = plan.bare + plan.continuations
            assert len(plan.tree.leaves()) == wanted, (len(plan.tree.leaves()), wanted)
        assert not trainer.vllm_generation.llm.llm_engine.waiting
    (out / f"echo.{rank}.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
