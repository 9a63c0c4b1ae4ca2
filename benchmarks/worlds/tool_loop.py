"""
A world trained as users of TRL train agents: by TRL's own unmodified trainer and its tool loop.

    prompt   [{"role": "user", "content": "s04 s51 ; s04"}]     rendered: s04 s51 ; s04
    turn     a16 .                                              parsed: a call of the tool `act` with words "a16"
    result   "s51"                                              rendered: s51

A whole turn is a call, so that its observation can be a tool result; the answer of hops is a message, which ends the
episode, and so is a turn that was cut off. Chat template and response template add no word to the world's language:
token by token, episodes are those of the other methods, and so are the random draws.

One thing differs. In TRL's loop an episode ends with a turn that calls nothing; an environment can't end it. Where it
must (the last symbol of a chain, a search too many), it gives a result that doesn't fit: TRL takes such a result back,
and the turn before it is the last one. TRL renders one more result for this, and is spared one more turn.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from .base import World
from .policy import PAD, UNKNOWN


# TRL asks a template to show names and arguments of calls. The world's words for a call are its argument alone
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- for call in message.tool_calls or [] -%}
{{ call.function.name ~ ' ' if call.function.name != 'act' }}
{%- for name, value in call.function.arguments.items() -%}
{{ name ~ ' ' if name != 'words' }}{{ value ~ ' ' }}
{%- endfor -%}
{{ eos_token ~ ' ' }}
{%- endfor -%}
{{ message.content ~ ' ' if message.content }}
{%- endfor -%}"""

# Turns that end an episode whatever came before
ANSWERS = {"hops": r"answer\[ n\d+ "}


def response_template(world: World) -> dict[str, Any]:
    """Takes a whole turn for a call of `act` unless it is an answer."""
    answer = f"(?!{ANSWERS[world.policy]})" if world.policy in ANSWERS else ""
    return {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": r"\Z",  # nothing of a turn is in the prompt
        "fields": {
            "tool_calls": {
                "open_pattern": rf"\A{answer}(?P<words>.*?) ?{re.escape(world.end)}\Z",
                "repeats": True,
                "transform": {"type": "function", "function": {"name": "act", "arguments": {"words": "{words}"}}},
            },
            "content": {"content": "text"},
        },
    }


def make_chat_tokenizer(world: World, tokenizer: Any) -> Any:
    """A copy of a world's tokenizer that renders and parses conversations in the world's own words."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = response_template(world)
    return tokenizer


class WorldEnvironment:
    """What TRL's `environment_factory` makes of a world.

    Attributes:
        reward (`float`): of the episode so far.
        observed (`list[int]`): words of each observation that stands in the episode.
    """

    def __init__(self, world: World):
        self.world = world
        # One word more than an episode may hold
        self.end_of_episode = " ".join([world.words[0]] * (world.completion_tokens + 1))

    def reset(self, **row: Any) -> None:
        self.state = self.world.reset({**row, "prompt": row["prompt"][-1]["content"]})
        self.reward = 0.0
        self.observed: list[int] = []

    def act(self, words: str) -> str:
        """
        Takes a turn.

        Args:
            words: What the policy says.

        Returns:
            What it is shown next.
        """
        # As the decoding of the other methods, which leaves special tokens out
        said = " ".join(word for word in words.split() if word not in (PAD, UNKNOWN))
        result = self.world.step(self.state, said)
        self.reward = result.reward or 0.0
        if result.done:
            return self.end_of_episode
        observation = str(result.observation or "")
        self.observed.append(len(observation.split()))
        return observation


def make_tool_loop(world: World, meter: Any, common: dict[str, Any]) -> GRPOTrainer:
    """TRL's own trainer, unmodified, whose tool loop plays the world."""
    arguments = dict(common)
    objects = {name: arguments.pop(name) for name in ("model", "processing_class", "train_dataset")}
    tokenizer = make_chat_tokenizer(world, objects.pop("processing_class"))
    rows = Dataset.from_list(
        [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in objects.pop("train_dataset")]
    )

    def reward(
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        environments: list[WorldEnvironment],
        **kwargs: Any,
    ) -> list[float]:
        for completion, ids, environment in zip(completions, completion_ids, environments, strict=True):
            if not completion[-1].get("tool_calls") and ids[-1] == tokenizer.eos_token_id:
                environment.act(completion[-1]["content"])
        rewards = [environment.reward for environment in environments]
        lengths = [len(prompt[-1]["content"].split()) for prompt in prompts]
        # Contexts that turns were sampled from, as long as the prompt and all that came before
        starts = [
            turn_starts(ids, environment.observed, tokenizer.eos_token_id)
            for ids, environment in zip(completion_ids, environments, strict=True)
        ]
        size = common["num_generations"]
        groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
        mixed = sum(0 < sum(group) < len(group) for group in groups)
        meter.generation = {
            "sampled_tokens": sum(map(len, completion_ids)) - sum(sum(e.observed) for e in environments),
            "discarded_leaves": 0,
            "prefilled_tokens": sum(
                length + start for length, found in zip(lengths, starts, strict=True) for start in found
            ),
            "effective_ratio": mixed / len(groups),
            "active_prompts": len(groups),
            "mixed_anchors": mixed,
            "branched_anchors": len(groups),
            "train_success": sum(rewards) / len(rewards),
        }
        return rewards

    config = GRPOConfig(
        **arguments,
        generation_kwargs={"max_new_tokens": world.turn_tokens},  # of a turn: TRL has no option for it
    )
    return GRPOTrainer(
        **objects,
        args=config,
        processing_class=tokenizer,
        train_dataset=rows,
        reward_funcs=[reward],
        environment_factory=lambda: WorldEnvironment(world),
    )


def turn_starts(ids: list[int], observed: list[int], end: int) -> list[int]:
    """Where the turns of a completion start, whose observations are as long as `observed` says."""
    starts = [0]
    for length in observed:
        starts.append(ids.index(end, starts[-1]) + 1 + length)
    return starts
