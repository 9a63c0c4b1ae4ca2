"""
Makes the policies in benchmarks/worlds/warm_start/: trained on demonstrations of a demonstrator who makes mistakes.

    python -m benchmarks.worlds.warm_start            # both worlds, minutes on two cores

The hidden state of a large language model tells more of its text than the next word needs; that of a tiny model
trained for the next word alone tells nothing else, and no predictor could read a task's difficulty off it. So a second
head, which is thrown away, learns to tell from the last state of each history how often each word has come up in the
episode and will still come up. It is shown no outcome.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from transformers import set_seed

from . import WORLDS
from .base import World
from .policy import RightPaths, make_model, make_tokenizer, path_of, success_chances


SIZES = {"chain": (128, 2), "hops": (128, 2)}  # hidden size, layers
BATCHES = {"chain": 1250, "hops": 1500}
BATCH_SIZE = 64
OVERVIEW = 5.0  # weight of that head's loss


def train(world: World, batches: int) -> None:
    set_seed(0)
    tokenizer = make_tokenizer(world)
    model = make_model(tokenizer, *SIZES[world.name])
    paths, test = RightPaths(world, tokenizer), world.rows(300, "warm start test")
    overview = torch.nn.Linear(model.config.hidden_size, 2 * len(tokenizer))
    optimizer = torch.optim.AdamW([*model.parameters(), *overview.parameters()], lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=batches, pct_start=0.1)
    draw, started = random.Random(f"{world.name} demonstrations"), time.perf_counter()
    for number in range(1, batches + 1):
        ids, labels, histories, words = [], [], [], []
        for _ in range(BATCH_SIZE):
            row = world.row(draw)
            path, ends, turn_ends = path_of(world, tokenizer, row, world.demonstration(row, draw))
            sampled = {i for end, stop in zip(ends, turn_ends, strict=True) for i in range(end, stop)}
            ids.append(path)
            labels.append([token if i in sampled else -100 for i, token in enumerate(path)])
            histories += [(len(ids) - 1, end - 1) for end in ends]
            words += [(path[:end], path[end:]) for end in ends]
        width = max(map(len, ids))
        batch = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids])
        targets = torch.tensor([row + [-100] * (width - len(row)) for row in labels])
        output = model(input_ids=batch, labels=targets, output_hidden_states=True)
        counts = torch.stack(
            [
                torch.stack([torch.bincount(torch.tensor(part), minlength=len(tokenizer)) for part in parts])
                for parts in words
            ]
        )
        states = output.hidden_states[-1][tuple(torch.tensor(histories).T)]
        told = torch.nn.functional.mse_loss(overview(states), counts.flatten(1).float())
        optimizer.zero_grad()
        (output.loss + OVERVIEW * told).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if number % 250 == 0 or number == batches:
            by_level: dict[int, list[float]] = {}
            for row, chances in zip(test, success_chances(model, paths, test), strict=True):
                by_level.setdefault(world.level(row), []).append(chances[0])
            levels = " ".join(f"{level}: {sum(c) / len(c):.3f}" for level, c in sorted(by_level.items()))
            losses = f"{output.loss.item():.3f} {told.item():.3f}"
            seconds = time.perf_counter() - started
            print(f"{world.name} {number:5d}  loss {losses}  success {levels}  {seconds:.0f} s", flush=True)
    model.save_pretrained(world.warm_start)
    tokenizer.save_pretrained(world.warm_start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=sorted(SIZES), default=sorted(SIZES))
    parser.add_argument("--batches", type=int, help="instead of each world's own number")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more are slower on models as small as these
    for name in options.worlds:
        train(WORLDS[name](), options.batches or BATCHES[name])


if __name__ == "__main__":
    main()
