"""
Demonstrations for the HotpotQA example, made of its bundled training rows:

    supporting facts      a search for each supporting page, a lookup where the answer was cut off, the answer
    other paragraphs      one search and the answer to a question made by a pattern ("When was X born?")
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tasks.hotpotqa import MAX_OBSERVATION_CHARS, TRAIN_FILE, build_prompt

from trace_trl.environments.loading import read_rows
from trace_trl.environments.search import ParagraphIndex, SearchEnvironment, SearchState


Messages = list[dict[str, str]]

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
    rows: Sequence[dict[str, Any]] | None = None, copies: int = 2, paragraph_questions: int = 100, seed: int = 0
) -> list[Messages]:
    """
    All demonstrations.

    Args:
        rows (`list[dict]`, *optional*):
            HotpotQA rows; the bundled training rows by default.
        copies (`int`, *optional*, defaults to `2`):
            Episodes per row; they differ in their queries and in the number of searches.
        paragraph_questions (`int`, *optional*, defaults to `100`):
            Most episodes about single paragraphs.
        seed (`int`, *optional*, defaults to `0`):
            Seed of all choices.

    Returns:
        `list[list[dict]]`: conversations, in random order.
    """
    rows = [row for _, row in read_rows(TRAIN_FILE)] if rows is None else rows
    rng = random.Random(seed)
    environment = SearchEnvironment(max_observation_chars=MAX_OBSERVATION_CHARS)
    single = paragraph_demonstrations(rows, environment, rng)
    demonstrations = rng.sample(single, min(paragraph_questions, len(single)))
    for _ in range(copies):
        played = (demonstrate(row, environment, rng) for row in rows)
        demonstrations += [messages for messages in played if messages is not None]
    rng.shuffle(demonstrations)
    return demonstrations
