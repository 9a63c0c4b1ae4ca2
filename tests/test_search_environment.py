"""Search environment: what a policy may write, what it reads, and that branches never see each other's state."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest

from trace_trl.environments.search import ParagraphIndex, SearchEnvironment, SearchState, parse_action, search_env


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
