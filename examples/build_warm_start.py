# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "trace-trl[peft,examples]",
# ]
# ///

"""
Builds the warm start of `train_hotpotqa.py`: demonstrations, and a LoRA adapter trained on them.

SmolLM2-135M-Instruct does not know the search tool: it ends every episode at once and is never right, so no prompt has
mixed outcomes and there is nothing to learn from. Here it is shown episodes made of the bundled training rows only:

    supporting facts      a search for each supporting page, a lookup where the answer was cut off, the answer
    other paragraphs      one search and the answer to a question made by a pattern ("When was X born?")

    python examples/build_warm_start.py                               # about 10 minutes on two cores
    python examples/build_warm_start.py --measure --rows 60           # success of the adapter at temperature 1

The loss is taken on what the assistant says and at a temperature above 1: the model then learns a sharper distribution
than that of the demonstrations, which at this size it needs in order to get through an episode of a hundred tokens,
sampled at temperature 1, without a slip.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from hotpotqa import (
    DEV_FILE,
    MAX_OBSERVATION_CHARS,
    MAX_TURNS,
    TRAIN_FILE,
    WARM_START,
    build_prompt,
    load_rows,
)
from smollm2 import resolve_model

from trace_trl.environments.qa_metrics import exact_match, f1_score
from trace_trl.environments.search import ParagraphIndex, SearchEnvironment, SearchState


Messages = list[dict[str, str]]

IGNORED = -100  # label of a token that carries no loss
MAX_TURN_LENGTH = 64
SUCCESS = 0.3

STOP_WORDS = frozenset(
    "a an and are as at be been by did do does for from had has have her his how in is it its of on or she that the "
    "their them they this to was were what when where which who whom whose why will with".split()
)

# A question about a title, and a pattern that finds its answer in the title's paragraph
_NAME = r"((?:[A-Z][\w.'-]+ ?){2,3})"
_PLACE = r"((?:[A-Z][\w.'-]+,? ?){1,3})"
_DAY = r"(?:\d{1,2} )?[A-Z][a-z]+(?: \d{1,2},)?"
_KINDS = (
    "film|band|actress|actor|singer|album|song|footballer|politician|company|village|town|city|magazine|novel|series|"
    "airport|university|school|director|writer|player|game"
)
QUESTIONS = (
    (rf"\(\s*(?:[^()]*?[;,] )?born ({_DAY} \d{{4}})", ("When was {} born?", "What is the date of birth of {}?")),
    (rf"\(\s*(?:[^()]*?[;,] )?born (?:{_DAY} )?(\d{{4}})", ("In what year was {} born?",)),
    (r"is an? ([A-Z][a-z]+(?:-[A-Z][a-z]+)?) (?:\w+ )?(?:" + _KINDS + ")", ("What is the nationality of {}?",)),
    (rf"(?:is|was) an? ((?:\w+[ -]){{1,5}}?(?:{_KINDS}))\b", ("What kind of thing is {}?", "{} is what?")),
    (rf"directed by {_NAME}", ("Who directed {}?", "{} was directed by whom?")),
    (rf"written by {_NAME}", ("Who wrote {}?", "{} was written by whom?")),
    (rf"produced by {_NAME}", ("Who produced {}?",)),
    (rf"starring {_NAME}", ("Who starred in {}?", "What actor stars in {}?")),
    (rf"(?:located|based) in {_PLACE}", ("Where is {} located?", "{} is in what place?")),
    (rf"published by {_PLACE}", ("Who published {}?",)),
    (r"(?:founded|established|formed) in (\d{4})", ("When was {} founded?", "{} was founded in what year?")),
    (r"(?:released|published) (?:in|on) ((?:[A-Z][a-z]+ )?(?:\d{1,2}, )?\d{4})", ("When was {} released?",)),
    (r"population (?:of|was) ([\d,]+)", ("What is the population of {}?",)),
)


# Demonstrations


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def content_words(text: str) -> list[str]:
    return [word for word in words_of(text) if word not in STOP_WORDS]


def bare_title(title: str) -> str:
    """A title as a question says it: "Mark King (musician)" is "Mark King"."""
    return re.sub(r"\s*\([^)]*\)$", "", title) or title


def find_answer(text: str, answer: str) -> bool:
    """Whether `answer` stands in `text` as whole words."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


def mention(title: str, text: str) -> float:
    """Share of the title's words that `text` holds."""
    wanted = content_words(bare_title(title)) or words_of(title)
    return len(set(wanted) & set(words_of(text))) / max(1, len(set(wanted)))


def shared_words(question: str, page: str, longest: int = 8) -> str:
    """The stretch of the question that shares the most words with the page, and has no others but stop words."""
    have = set(words_of(page)) | STOP_WORDS
    words = question.rstrip("? ").split()
    best: tuple[int, str] = (0, "")
    for start in range(len(words)):
        for end in range(start + 1, min(start + longest, len(words)) + 1):
            stretch = " ".join(words[start:end])
            if not have.issuperset(words_of(stretch)):
                break
            edges = words_of(words[start])[:1] + words_of(words[end - 1])[-1:]
            count = len(content_words(stretch))
            if count > best[0] and not STOP_WORDS.intersection(edges):
                best = count, stretch.strip(".,;:\"'")
    return best[1] if best[0] > 1 else ""


class Demonstration:
    """An episode played in the real environment, so that its observations are those of training."""

    def __init__(self, environment: SearchEnvironment, state: SearchState, question: str):
        self.environment = environment
        self.state = state
        self.messages = build_prompt(question)

    @property
    def index(self) -> ParagraphIndex:
        return self.state.index

    @property
    def observations(self) -> list[str]:
        return [message["content"] for message in self.messages[2:] if message["role"] == "user"]

    def take(self, thought: str, action: str) -> None:
        turn = f"Thought: {thought}\nAction: {action}"
        self.messages.append({"role": "assistant", "content": turn})
        result = self.environment.step(self.state, turn)
        if not result.done:
            self.messages.append({"role": "user", "content": str(result.observation)})

    def search(self, query: str) -> None:
        thought = f"Now I need {query}." if self.observations else f"I need to look up {query}."
        self.take(thought, f"search[{query}]")

    def finish(self, answer: str) -> Messages:
        self.take(f"The answer is {answer}.", f"finish[{answer}]")
        return self.messages

    def finds(self, query: str, title: str) -> bool:
        pages = self.index.search(query, k=1)
        return bool(pages) and self.index.paragraphs[pages[0]][0] == title

    def query_for(self, title: str, known: str, question: str, rng: random.Random) -> str | None:
        """A query that finds the page, and that can be written by someone who has read `known` only."""
        page = next(" ".join((name, *sentences)) for name, sentences in self.index.paragraphs if name == title)
        queries = [bare_title(title)] if mention(title, known) >= 0.6 else []
        queries.append(shared_words(question, page))
        if rng.random() < 0.2:
            queries.reverse()
        return next((query for query in queries if query and self.finds(query, title)), None)


def demonstrate(row: dict[str, Any], environment: SearchEnvironment, rng: random.Random) -> Messages | None:
    """
    An episode that answers a row by its supporting facts.

    Args:
        row (`dict`):
            HotpotQA row.
        environment ([`SearchEnvironment`]):
            Environment to play in.
        rng (`random.Random`):
            Chooses between queries, and between one search and two where one is enough.

    Returns:
        `list[dict] | None`: messages, or `None` where no query leads to the answer.
    """
    demo = Demonstration(environment, environment.reset(row), row["question"])
    question, answer = row["question"].strip(), row["answer"]
    pages = {title: " ".join(sentences) for title, sentences in demo.index.paragraphs}
    # As the index spells them, HTML entities resolved
    titles = list(
        dict.fromkeys(ParagraphIndex([[title, []]]).paragraphs[0][0] for title, _ in row["supporting_facts"])
    )
    compares = row["type"] == "comparison"
    if compares:
        titles.sort(key=lambda title: question.find(bare_title(title).split()[0]))
    else:
        titles.sort(key=lambda title: -mention(title, question))
        if len(titles) == 2 and abs(mention(titles[0], question) - mention(titles[1], question)) < 0.2:
            # The page that names the other one comes first.
            first, second = titles
            if mention(first, pages[second]) > mention(second, pages[first]):
                titles.reverse()
        holding = [title for title in titles if find_answer(pages[title], answer)]
        direct = [title for title in holding if demo.query_for(title, question, question, rng)]
        if direct and rng.random() < 0.5:
            titles = direct[:1]
    for title in titles:
        known = " ".join([question, *demo.observations])
        query = demo.query_for(title, known, question, rng)
        if query is None:
            return None
        demo.search(query)
    if compares or any(find_answer(text, answer) for text in demo.observations):
        return demo.finish(answer)
    # The page was cut off before the answer.
    for term in rng.sample(terms := sorted(set(content_words(question))), len(terms)):
        result = environment.step(demo.state.fork(), f"Action: lookup[{term}]")
        if len(term) > 3 and find_answer(str(result.observation), answer):
            demo.take(f"I look for {term} on this page.", f"lookup[{term}]")
            return demo.finish(answer)
    return None


def paragraph_demonstrations(
    rows: Iterable[dict[str, Any]], environment: SearchEnvironment, rng: random.Random
) -> list[Messages]:
    """Episodes of one search, for questions that `QUESTIONS` makes of single paragraphs."""
    demonstrations = []
    for row in rows:
        start = environment.reset(row)
        for title, sentences in start.index.paragraphs:
            text, name = " ".join(sentences), bare_title(title)
            for pattern, questions in QUESTIONS:
                match = re.search(pattern, text)
                answer = match.group(match.lastindex).strip(" ,.") if match and match.lastindex else ""
                if not answer or answer in title:
                    continue
                demo = Demonstration(environment, start.fork(), rng.choice(questions).format(name))
                if not demo.finds(name, title):
                    continue
                demo.search(name)
                if find_answer(demo.observations[0], answer):
                    demonstrations.append(demo.finish(answer))
    return demonstrations


def build_demonstrations(
    rows: Sequence[dict[str, Any]], copies: int = 2, paragraph_questions: int = 100, seed: int = 0
) -> list[Messages]:
    """
    All demonstrations.

    Args:
        rows (`list[dict]`):
            HotpotQA rows.
        copies (`int`, *optional*, defaults to `2`):
            Episodes per row; they differ in their queries and in the number of searches.
        paragraph_questions (`int`, *optional*, defaults to `100`):
            Most episodes about single paragraphs.
        seed (`int`, *optional*, defaults to `0`):
            Seed of all choices.

    Returns:
        `list[list[dict]]`: conversations, in random order.
    """
    rng = random.Random(seed)
    environment = SearchEnvironment(max_observation_chars=MAX_OBSERVATION_CHARS)
    single = paragraph_demonstrations(rows, environment, rng)
    demonstrations = rng.sample(single, min(paragraph_questions, len(single)))
    for _ in range(copies):
        played = (demonstrate(row, environment, rng) for row in rows)
        demonstrations += [messages for messages in played if messages is not None]
    rng.shuffle(demonstrations)
    return demonstrations


def encode(messages: Messages, tokenizer: Any) -> tuple[list[int], list[int]]:
    """
    A conversation as token ids and labels.

    The ids are those of the chat template over all messages, which are also those of a rollout: the prompt, then turn
    by turn what was sampled up to the end-of-turn token, and the observation as the template renders it behind that.

    Args:
        messages (`list[dict]`):
            Conversation that ends with an assistant message.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer with a chat template.

    Returns:
        `tuple[list[int], list[int]]`: ids and labels, equally long; labels are `-100` but for what the assistant says,
        its end-of-turn tokens included.
    """

    def render(count: int, **kwargs: Any) -> list[int]:
        return tokenizer.apply_chat_template(messages[:count], return_dict=False, **kwargs)

    ids = render(len(messages))
    labels = [IGNORED] * len(ids)
    for position, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(render(position, add_generation_prompt=True))
            end = ids.index(tokenizer.eos_token_id, start) + 1
            labels[start:end] = ids[start:end]
    return ids, labels


# Training


def make_batches(lengths: Sequence[int], batch_size: int, rng: random.Random) -> list[list[int]]:
    """Positions in random batches of similar length, so that little is padded."""
    order = rng.sample(range(len(lengths)), len(lengths))
    batches = []
    for start in range(0, len(order), 8 * batch_size):
        group = sorted(order[start : start + 8 * batch_size], key=lengths.__getitem__)
        batches += [group[first : first + batch_size] for first in range(0, len(group), batch_size)]
    rng.shuffle(batches)
    return batches


def train(args: argparse.Namespace) -> None:
    """Trains the adapter and saves it."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    path = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    demonstrations = build_demonstrations(load_rows(TRAIN_FILE), args.copies, args.paragraph_questions, args.seed)
    examples = [encode(messages, tokenizer) for messages in demonstrations]
    batches = make_batches([len(ids) for ids, _ in examples], args.batch_size, rng)
    tokens = sum(len(ids) for ids, _ in examples)
    print(f"{len(examples)} demonstrations, {tokens} tokens, {len(batches)} steps", flush=True)

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, target_modules=args.target_modules.split(","), task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, config)
    inner = model.get_base_model()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=0.0)
    warmup = 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warmup) * (0.525 + 0.475 * math.cos(math.pi * step / len(batches))),
    )
    model.train()
    started = time.perf_counter()
    for step, batch in enumerate(batches, start=1):
        longest = max(len(examples[position][0]) for position in batch)
        padded = [
            [row + [fill] * (longest - len(row)) for row, fill in zip(examples[position], (0, IGNORED), strict=True)]
            for position in batch
        ]
        ids = torch.tensor([row[0] for row in padded])
        labels = torch.tensor([row[1] for row in padded])[:, 1:]
        attention = torch.tensor([[int(i < len(examples[p][0])) for i in range(longest)] for p in batch])
        said = labels != IGNORED
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            hidden = inner.model(input_ids=ids, attention_mask=attention).last_hidden_state[:, :-1]
            # Logits of the assistant's tokens only: those of all would take a fifth of the time.
            logits = inner.lm_head(hidden[said]).float()
        loss = torch.nn.functional.cross_entropy(logits / args.loss_temperature, labels[said])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 0 or step == len(batches):
            print(f"step {step:4d}  loss {loss.item():.3f}  {time.perf_counter() - started:.0f} s", flush=True)

    # A run that started from a local copy would leave its path here.
    model.peft_config["default"].base_model_name_or_path = args.model
    readme = Path(args.output_dir) / "README.md"
    card = readme.read_text(encoding="utf-8") if readme.is_file() else None
    model.save_pretrained(args.output_dir)
    if card is not None:
        # PEFT adds its own lines to a model card that is there.
        readme.write_text(card, encoding="utf-8")
    weights = Path(args.output_dir) / "adapter_model.safetensors"
    halved = {name: tensor.to(torch.float16) for name, tensor in load_file(weights).items()}
    save_file(halved, weights, metadata={"format": "pt"})
    print(f"{args.output_dir}: {weights.stat().st_size / 1e6:.1f} MB")


# Measuring


@torch.inference_mode()
def play(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], samples: int, batch_size: int = 32) -> list:
    """`samples` episodes per row at temperature 1; returns their final states, row by row."""
    environment = SearchEnvironment(max_observation_chars=MAX_OBSERVATION_CHARS)
    states, conversations = [], []
    for row in rows:
        for _ in range(samples):
            states.append(environment.reset(row))
            conversations.append(build_prompt(row["question"]))
    live = list(range(len(states)))
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    for _ in range(MAX_TURNS):
        going_on = []
        for start in range(0, len(live), batch_size):
            batch = live[start : start + batch_size]
            contexts = [
                tokenizer.apply_chat_template(conversations[i], add_generation_prompt=True, return_dict=False)
                for i in batch
            ]
            longest = max(map(len, contexts))
            output = model.generate(
                input_ids=torch.tensor([[pad] * (longest - len(ids)) + ids for ids in contexts]),
                attention_mask=torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in contexts]),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=MAX_TURN_LENGTH,
                pad_token_id=pad,
                eos_token_id=end,
            )
            for i, ids in zip(batch, output[:, longest:].tolist(), strict=True):
                turn = tokenizer.decode(ids, skip_special_tokens=True)
                result = environment.step(states[i], turn)
                if not result.done and end in ids:
                    conversations[i].append({"role": "assistant", "content": turn})
                    conversations[i].append({"role": "user", "content": result.observation})
                    going_on.append(i)
        live = going_on
    return states


def measure(args: argparse.Namespace) -> None:
    """Prints how often the adapter is right, on development and on training rows."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(args.seed)
    path = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, args.output_dir).merge_and_unload().eval()
    if args.bf16:
        model = model.to(torch.bfloat16)
    for name, file in (("development", DEV_FILE), ("training", TRAIN_FILE)):
        rows = load_rows(file)[: args.rows]
        started = time.perf_counter()
        states = play(model, tokenizer, rows, args.samples)
        answers = [row["answer"] for row in rows for _ in range(args.samples)]
        f1 = [f1_score(state.answer or "", answer) for state, answer in zip(states, answers, strict=True)]
        em = [exact_match(state.answer or "", answer) for state, answer in zip(states, answers, strict=True)]
        groups = [sum(score >= SUCCESS for score in f1[i : i + args.samples]) for i in range(0, len(f1), args.samples)]
        print(
            f"{name} rows: {len(rows)} x {args.samples} episodes at temperature 1, "
            f"success (F1 >= {SUCCESS}) {sum(groups) / len(f1):.3f}, F1 {sum(f1) / len(f1):.3f}, "
            f"exact match {sum(em) / len(em):.3f}, "
            f"rows with both outcomes {sum(0 < count < args.samples for count in groups) / len(groups):.3f}, "
            f"answered {sum(state.answer is not None for state in states) / len(states):.3f}, "
            f"searches {sum(state.searches for state in states) / len(states):.2f}, "
            f"{time.perf_counter() - started:.0f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds or measures the warm start of train_hotpotqa.py.")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="Base model.")
    parser.add_argument("--output_dir", default=str(WARM_START), help="Folder of the adapter.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--copies", type=int, default=2, help="Demonstrations per row.")
    parser.add_argument("--paragraph_questions", type=int, default=100, help="Demonstrations of single paragraphs.")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--target_modules", default="q_proj,k_proj,v_proj,o_proj")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--loss_temperature", type=float, default=1.5)
    parser.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=torch.backends.mkldnn.is_available() and torch.cpu._is_amx_tile_supported(),
        help="Compute in bfloat16, which pays on CPUs with AMX.",
    )
    parser.add_argument("--measure", action="store_true", help="Measure the adapter in --output_dir instead.")
    parser.add_argument("--rows", type=int, default=60, help="Rows of each file to measure on.")
    parser.add_argument("--samples", type=int, default=3, help="Episodes per row to measure with.")
    args = parser.parse_args()
    (measure if args.measure else train)(args)


if __name__ == "__main__":
    main()
