"""Search environment: what a policy may write, what it reads, and that branches never see each other's state."""

import copy
import inspect
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from trace_trl.environments.base import Action
from trace_trl.environments.callback import CallbackEnvironment
from trace_trl.environments.retrieval import CorpusIndex, Page, RetrievalError
from trace_trl.environments.search import (
    ParagraphIndex,
    SearchEnvironment,
    SearchState,
    SearchTools,
    parse_action,
    search_env,
)
from trace_trl.environments.tools import ToolEnvironment, environment_tools


CONTEXT = [
    ["Dogwoman", ["Dogwoman is a series of telemovies.", " It was created by Magda Szubanski.", " Dogs like her."]],
    ["Magda Szubanski", ["Magda Szubanski (born 12 April 1961) is an actress.", " She was born in Liverpool."]],
    ["Alû", ["In Akkadian mythology, Alû is a demon."]],
    ["Simon &amp; Simon", ["Simon & Simon is a television series."]],
    ["It (film)", ["It is a horror film about a clown."]],
]


def environment(**kwargs):
    return SearchEnvironment(**kwargs)


def started(context=None, **kwargs):
    env = environment(**kwargs)
    return env, env.reset({"question": "?", "context": CONTEXT if context is None else context})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Thought: who made it?\nAction: search[Dogwoman]", ("search", "Dogwoman")),
        ("action:SEARCH [ Dogwoman ]", ("search", "Dogwoman")),
        ("Action 2: Lookup[born]", ("lookup", "born")),
        ("**Action:** finish[1961]", ("finish", "1961")),
        ("Action: `search[Dogwoman]`", ("search", "Dogwoman")),
        ("Action: search[Alien [film] (1979)] and more]", ("search", "Alien [film] (1979)")),
        ("Action: search[a]\nObservation: b\nAction: finish[c]", ("finish", "c")),
        ("Action: search[ two\t words ]", ("search", "two words")),
        ("Action: search[]", ("search", "")),
        ("Action: fly[away]", ("fly", "away")),
        ("Interaction: search[a]", (None, "No action found")),
        ("search[Dogwoman]", (None, "No action found")),
        ("", (None, "No action found")),
        ("Action: search for Dogwoman", (None, "could not be read")),
        ("Action:", (None, "could not be read")),
        ("Action: search[Dogwoman", (None, "Write Action: search[...]")),
        ("Action: search[Dogwoman\nThought: done]", (None, "closing bracket is missing")),
        ("Action: finish[a [b]", (None, "Write Action: finish[...]")),
        ("<think>Action: finish[1961]?</think>Action: search[Dogwoman]", ("search", "Dogwoman")),
        ("Action: finish[1961]?</think>Action: search[Dogwoman]", ("search", "Dogwoman")),
        ("<think>I will do Action: finish[1961] but", (None, "No action found")),
    ],
)
def test_parse_action(text, expected):
    name, argument = parse_action(text)
    assert name == expected[0]
    assert argument == expected[1] if name else expected[1] in argument


@pytest.mark.parametrize(
    ("query", "title"),
    [
        ("Magda Szubanski", "Magda Szubanski"),
        ("magda szubanski", "Magda Szubanski"),
        ("Who created the telemovies of Dogwoman?", "Dogwoman"),
        ("alu", "Alû"),
        ("ALÛ", "Alû"),
        ("Simon & Simon", "Simon & Simon"),
        ("clown", "It (film)"),
        # All of its words are stop words: only the title can match.
        ("it (film)", "It (film)"),
    ],
)
def test_search_finds(query, title):
    env, state = started()
    result = env.step(state, f"Action: search[{query}]", [])
    assert result.observation.startswith(f"Observation: {title}: ")
    assert not result.done and result.reward is None and result.state is None


def test_search_without_result_keeps_the_page():
    env, state = started()
    env.step(state, "Action: search[Dogwoman]")
    for query in ("zebra", "the", "?!"):
        assert env.step(state, f"Action: search[{query}]").observation.startswith("Observation: Nothing found for")
    assert "Magda" in env.step(state, "Action: lookup[created]").observation


def test_search_shows_k_paragraphs_in_the_order_of_their_scores():
    env, state = started(k=2, max_observation_chars=120)
    lines = env.step(state, "Action: search[Magda Szubanski]").observation.split("\n")
    assert [line.removeprefix("Observation: ").split(":")[0] for line in lines] == ["Magda Szubanski", "Dogwoman"]
    # Two results share the length, and lookup reads both.
    assert all(len(line.split(": ", 1)[1]) <= 60 + len(" ...") + len("Magda Szubanski: ") for line in lines)
    assert "(Result 1 / 2) Magda" in env.step(state, "Action: lookup[Magda]").observation
    assert "(Result 2 / 2) It was" in env.step(state, "Action: lookup[magda]").observation


def test_long_text_is_cut_between_words():
    env, state = started(max_observation_chars=20)
    assert env.step(state, "Action: search[Dogwoman]").observation == "Observation: Dogwoman: Dogwoman is a series ..."
    env, state = started(max_observation_chars=22)
    assert env.step(state, "Action: search[Dogwoman]").observation.endswith(" a series ...")
    env, state = started([["A", ["x" * 50]]], max_observation_chars=20)
    assert env.step(state, "Action: search[A]").observation == "Observation: A: " + "x" * 20 + " ..."


def test_lookup_walks_through_the_sentences_of_the_last_page():
    env, state = started()
    assert "Search first" in env.step(state, "Action: lookup[born]").observation
    env.step(state, "Action: search[Magda Szubanski]")
    observations = [env.step(state, f"Action: lookup[{term}]").observation for term in ("born", "Born", "born", "she")]
    assert observations == [
        "Observation: (Result 1 / 2) Magda Szubanski (born 12 April 1961) is an actress.",
        "Observation: (Result 2 / 2) She was born in Liverpool.",
        "Observation: No more results.",
        "Observation: (Result 1 / 1) She was born in Liverpool.",
    ]
    # A new search starts again.
    env.step(state, "Action: search[Magda Szubanski]")
    assert "(Result 1 / 2)" in env.step(state, "Action: lookup[born]").observation
    env.step(state, "Action: search[Dogwoman]")
    assert "No more results" in env.step(state, "Action: lookup[Liverpool]").observation


def test_finish_ends_the_episode():
    env, state = started()
    env.step(state, "Action: search[Dogwoman]")
    result = env.step(state, "Thought: so\nAction: Finish[Magda Szubanski]")
    assert result.done and result.observation is None and result.reward is None
    assert state.answer == "Magda Szubanski"
    assert result.info == {"searches": 1, "lookups": 0, "invalid_actions": 0}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("I give up.", "search[query]"),
        ("Action: search[Dogwoman", "search[...]"),
        ("Action: finish[]", "finish[...]"),
        ("Action: fly[away]", "There is no action fly"),
        ("Action: __class__[x]", "There is no action __class__"),
    ],
)
def test_what_cannot_be_read_is_explained(text, hint):
    env, state = started()
    result = env.step(state, text)
    assert result.observation.startswith("Observation: ") and hint in result.observation
    assert not result.done and state.answer is None and state.invalid == 1 and state.searches == 0


def test_forks_are_independent_and_share_the_index():
    env, state = started()
    env.step(state, "Action: search[Magda Szubanski]")
    env.step(state, "Action: lookup[born]")
    before = copy.copy(state)
    forks = [state.fork() for _ in range(3)]
    assert all(fork.index is state.index for fork in forks)
    assert "(Result 2 / 2)" in env.step(forks[0], "Action: lookup[born]").observation
    env.step(forks[1], "Action: search[Dogwoman]")
    env.step(forks[2], "Action: finish[1961]")
    assert state == before
    assert "(Result 2 / 2)" in env.step(state, "Action: lookup[born]").observation
    assert (forks[0].answer, forks[1].answer, forks[2].answer) == (None, None, "1961")
    assert forks[1].pages != forks[0].pages


def test_reset_takes_both_forms_of_a_context_and_leaves_the_row_alone():
    columns = {"title": [title for title, _ in CONTEXT], "sentences": [sentences for _, sentences in CONTEXT]}
    row = {"context": columns}
    before = copy.deepcopy(row)
    env_reset, env_step = search_env(k=1, max_observation_chars=100)
    first, second = env_reset(row), env_reset({"context": CONTEXT})
    assert isinstance(first, SearchState)
    assert env_step(first, "Action: search[alu]", []) == env_step(second, "Action: search[alu]", [])
    assert row == before


@pytest.mark.parametrize("context", [None, 3, [["title"]], {"title": ["a"]}, {"title": ["a"], "sentences": []}])
def test_a_context_of_another_form_is_refused(context):
    with pytest.raises(ValueError, match="`context` must be"):
        environment().reset({"context": context})


def test_a_row_without_context_is_refused():
    with pytest.raises(ValueError, match="no `context` column, only: question, answer"):
        environment().reset({"question": "?", "answer": "!"})


@pytest.mark.parametrize("kwargs", [{"k": 0}, {"k": 3, "max_observation_chars": 2}])
def test_settings_out_of_range_are_refused(kwargs):
    with pytest.raises(ValueError, match="1 <= k"):
        environment(**kwargs)


def test_an_empty_context_finds_nothing():
    env, state = started([])
    assert "Nothing found" in env.step(state, "Action: search[a]").observation
    env, state = started([["", [""]]])
    assert "Nothing found" in env.step(state, "Action: search[a]").observation


def test_the_index_is_built_once_under_threads(monkeypatch):
    import bm25s

    built = []

    class Counting(bm25s.BM25):
        def index(self, *args, **kwargs):
            built.append(1)
            return super().index(*args, **kwargs)

    monkeypatch.setattr(bm25s, "BM25", Counting)
    index = ParagraphIndex(CONTEXT)
    assert not built
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(index.search, ["clown", "demon"] * 20))
    assert len(built) == 1
    assert results == [(4,), (2,)] * 20


# With a retriever


class Scripted:
    """A retriever that gives one thing after the other, the last one forever; exceptions are raised."""

    url = "http://10.0.0.1:8000/retrieve"

    def __init__(self, *results):
        self.results = list(results)
        self.asked = []

    def search(self, query, k):
        self.asked.append((query, k))
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, BaseException):
            raise result
        return result


PAGES = [Page("Dogwoman", ("It was created by Magda Szubanski.", "Dogs like her.")), Page("Alû", ("Alû is a demon.",))]


def test_a_retriever_searches_for_all_rows():
    retriever = Scripted(PAGES)
    env_reset, env_step = search_env(k=2, max_observation_chars=100, retriever=retriever)
    state = env_reset({"question": "?", "context": 3})
    assert state.index is None
    result = env_step(state, "Action: search[Who made it?]", [])
    assert result.observation == (
        "Observation: Dogwoman: It was created by Magda Szubanski. Dogs like her.\nAlû: Alû is a demon."
    )
    assert retriever.asked == [("Who made it?", 2)]
    assert "(Result 1 / 1) Dogs like her." in env_step(state, "Action: lookup[dogs]", []).observation
    assert env_step(state, "Action: finish[her]", []).done and state.answer == "her"
    assert result.info == {"searches": 1, "lookups": 0, "invalid_actions": 0, "failed_searches": 0}


def test_a_corpus_shows_what_the_row_s_own_paragraphs_show(tmp_path):
    corpus = CorpusIndex.build(CONTEXT, tmp_path / "corpus", show_progress=False)
    env, state = started(k=2)
    other = environment(k=2, retriever=corpus)
    second = other.reset({"question": "?"})
    for action in ("search[Magda Szubanski]", "lookup[born]", "lookup[born]", "search[zebra]", "search[the]", "x[y]"):
        first_answer, second_answer = env.step(state, f"Action: {action}"), other.step(second, f"Action: {action}")
        assert first_answer.observation == second_answer.observation
    assert state.pages == second.pages


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        (
            RetrievalError("the server answered with status 500 3 times."),
            "the server answered with status 500 3 times.",
        ),
        (RetrievalError(), "RetrievalError"),
        (KeyError("result"), "KeyError: 'result'"),
        (ZeroDivisionError(), "ZeroDivisionError: ZeroDivisionError"),
        (RetrievalError("x" * 999), "x" * 400 + " ..."),
        # Not a list of pages
        (None, "TypeError: "),
        ([3], "TypeError: "),
        ([("a", "b", "c")], "ValueError: "),
        ([("a", None)], "TypeError: "),
    ],
)
def test_a_search_that_fails_is_an_observation(fault, shown):
    env = environment(retriever=Scripted(PAGES[:1], fault, fault, PAGES[1:]))
    state = env.reset({})
    env.step(state, "Action: search[dogs]")
    for count in (1, 2):
        result = env.step(state, "Action: search[again]")
        assert result.observation.startswith(f"Observation: The search failed: {shown}")
        assert not result.done and result.info["failed_searches"] == state.failed == count
    # The page is kept, and the next search works
    assert "(Result 1 / 1) Dogs like her." in env.step(state, "Action: lookup[dogs]").observation
    assert env.step(state, "Action: search[demon]").observation == "Observation: Alû: Alû is a demon."
    assert (state.searches, state.failed, state.invalid) == (4, 2, 0)


def test_the_first_failure_is_logged_with_the_address(caplog):
    env = environment(retriever=Scripted(RetrievalError("the server is away.")))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert "10.0.0.1" not in env.step(env.reset({}), "Action: search[a]").observation
    (record,) = caplog.records
    assert "Scripted at http://10.0.0.1:8000/retrieve failed: the server is away." in record.getMessage()


def test_a_retriever_may_be_anything_with_the_method():
    with pytest.raises(TypeError, match=r"search\(query, k\), str has none"):
        environment(retriever="http://10.0.0.1")
    # Plain tuples do, and more than was asked for is not shown
    env = environment(k=1, retriever=Scripted([("A", ["a."]), ("B", ["b."])]))
    state = env.reset({})
    assert env.step(state, "Action: search[a]").observation == "Observation: A: a."
    assert state.pages == (Page("A", ("a.",)),)


def test_forks_keep_the_pages_a_retriever_found():
    env = environment(retriever=Scripted(PAGES[:1], PAGES[1:]))
    episodes = CallbackEnvironment(env.step, env.reset)
    episode = episodes.reset({"question": "?"}, "?")

    def act(episode, text):
        return episode.step(Action(text, {"role": "assistant", "content": text}, [])).messages[0]["content"]

    act(episode, "Action: search[dogs]")
    fork = episode.fork()
    assert fork.environment == episode.environment and fork.environment is not episode.environment
    act(fork, "Action: search[demon]")
    assert "Dogs like her" in act(episode, "Action: lookup[dogs]")
    assert "Alû is a demon" in act(fork, "Action: lookup[demon]")
    assert episode.environment.pages == (PAGES[0],) and fork.environment.pages == (PAGES[1],)


# As tools


def test_tools_have_schemas():
    from transformers.utils import get_json_schema

    tools = environment_tools(SearchTools())
    assert [tool.__name__ for tool in tools] == ["lookup", "search"]
    for tool, argument in zip(tools, ("term", "query"), strict=True):
        function = get_json_schema(tool)["function"]
        assert function["parameters"]["required"] == [argument]
        assert function["parameters"]["properties"][argument]["description"]


def call(episode, name, **arguments):
    message = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }
    reply = episode.step(Action("", message, []))
    reply = reply if not inspect.iscoroutine(reply) else pytest.fail("a coroutine")
    return reply.messages[0]["content"]


def test_tools_show_what_actions_show():
    episodes = ToolEnvironment(factories={None: lambda: SearchTools(environment(k=1))})
    prompt = [{"role": "user", "content": "?"}]
    episode = episodes.reset({"question": "?", "context": CONTEXT, "prompt": prompt}, prompt)
    assert episode.prompt == prompt
    env, state = started()
    for name, argument, value in (
        ("lookup", "term", "born"),
        ("search", "query", " Magda\nSzubanski "),
        ("lookup", "term", "born"),
        ("search", "query", "zebra"),
    ):
        expected = env.step(state, f"Action: {name}[{' '.join(value.split())}]").observation
        assert call(episode, name, **{argument: value}) == expected.removeprefix("Observation: ")
    fork = episode.fork()
    assert "(Result 2 / 2)" in call(fork, "lookup", term="born")
    assert "(Result 2 / 2)" in call(episode, "lookup", term="born")
    assert fork.environment.state.index is episode.environment.state.index
    for value in ("", " ", "\n"):
        assert "empty" in call(episode, "search", query=value)
    assert call(episode, "search", query=1961).startswith("Magda Szubanski: ")
    assert episode.environment.state.invalid == 3
    # An instance is used again for other rows
    assert environment_tools(episode.environment)
    episode.environment.reset(context=[["B", ["b."]]])
    assert call(episode, "lookup", term="born").startswith("There is no page")


def test_tools_show_failures():
    tools = SearchTools(environment(retriever=Scripted(RetrievalError("the server is away."))))
    tools.reset(question="?")
    assert tools.search("a") == "The search failed: the server is away."
    assert tools.state.failed == 1
