"""Search over a corpus on disk and over HTTP: what is found, and that every fault is a sentence in bounded time.

Time passes as the tests say: where a limit is on many waits together the client looks at a clock of theirs. One wait
alone ends by the real one.
"""

import json
import os
import pickle
import random
import socket
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trace_trl.environments import retrieval
from trace_trl.environments.qa_data import load_questions, unique_paragraphs
from trace_trl.environments.retrieval import (
    CorpusIndex,
    Page,
    ParagraphIndex,
    RetrievalError,
    RetrievalServer,
    Retriever,
    clean,
    split_sentences,
)
from trace_trl.environments.retrieval_server import MAX_REQUEST, SearchServer
from waiting import LIMIT, until


DEV_FILE = Path(__file__).resolve().parents[1] / "examples" / "data" / "hotpotqa_dev_distractor_500.jsonl.gz"

PARAGRAPHS = [
    ("Dogwoman", ["Dogwoman is a series of telemovies.", "It was created by Magda Szubanski.", "Dogs like her."]),
    ("Magda Szubanski", "Magda Szubanski (born 12 April 1961) is an actress. She was born in Liverpool."),
    ("Alû", ["In Akkadian mythology, Alû is a demon."]),
    ("Simon &amp; Simon", ["Simon & Simon is a  television series."]),
    ("It (film)", ["It is a horror film about a clown."]),
    ("Green", ["Green is an album."]),
    ("Green", ["Green is a colour of\u2028grass."]),
    ("", ["A paragraph without a title, about zebras."]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora") / "corpus"
    CorpusIndex.build(iter(PARAGRAPHS), folder, show_progress=False)
    return folder


@pytest.fixture(scope="module")
def corpus(folder):
    return CorpusIndex.open(folder)


def run_alone(script, *args):
    """What a script prints, as JSON. It may fork: no thread of another test holds a lock in its process."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# A question's paragraphs and a corpus


@pytest.mark.parametrize(
    ("query", "titles"),
    [
        ("Magda Szubanski", ["Magda Szubanski", "Dogwoman"]),
        ("  MAGDA  szubanski ", ["Magda Szubanski", "Dogwoman"]),
        ("who created the telemovies", ["Dogwoman"]),
        ("alu", ["Alû"]),
        ("Simon &amp; Simon", ["Simon & Simon"]),
        # All of its words are stop words: only the title can match.
        ("it (film)", ["It (film)"]),
        ("green", ["Green", "Green"]),
        ("zebras", [""]),
        ("unheard of words", []),
        ("the", []),
        ("?!", []),
        ("", []),
        ("\ud83d", []),
    ],
)
def test_corpus_finds(corpus, query, titles):
    pages = corpus.search(query, 3)
    assert [page.title for page in pages[: len(titles)]] == titles
    assert bool(pages) == bool(titles)


def test_corpus_keeps_its_paragraphs(corpus):
    assert len(corpus) == len(PARAGRAPHS)
    assert corpus[1] == (
        "Magda Szubanski",
        ("Magda Szubanski (born 12 April 1961) is an actress.", "She was born in Liverpool."),
    )
    assert corpus[3] == Page("Simon & Simon", ("Simon & Simon is a television series.",))
    assert corpus.search("green", 9) == [corpus[5], corpus[6]]
    assert corpus.search("green", 0) == []
    for position in (-1, len(PARAGRAPHS)):
        with pytest.raises(IndexError):
            corpus[position]
    assert isinstance(corpus, Retriever)


def test_corpus_ranks_as_paragraphs_are_ranked(tmp_path):
    rows = load_questions(DEV_FILE, limit=30)
    for row in rows[:5]:
        context = row["context"]
        corpus = CorpusIndex.build(
            zip(context["title"], context["sentences"], strict=True), tmp_path / row["id"], show_progress=False
        )
        index = ParagraphIndex(context)
        for query in [row["question"] for row in rows] + context["title"]:
            assert corpus.search(query, 4) == index.pages(query, 4)


def test_gold_titles_are_found(tmp_path, capsys):
    rows = load_questions(DEV_FILE)
    corpus = CorpusIndex.build(unique_paragraphs(rows), tmp_path / "corpus", show_progress=False)
    found = {"own paragraphs": 0, "one corpus": 0}
    for row in rows:
        index = ParagraphIndex(row["context"])
        searches = {"own paragraphs": index.pages, "one corpus": corpus.search}
        for name, search in searches.items():
            found[name] += all(
                title in [page.title for page in search(title, 3)] for title in row["supporting_titles"]
            )
    with capsys.disabled():
        print(f"\nrows of {len(rows)} whose gold titles are found (corpus of {len(corpus)} paragraphs): {found}")
    assert len(rows) == 500 and len(corpus) > 4900
    assert min(found.values()) >= 0.98 * len(rows)


def test_equal_scores_keep_the_order(tmp_path):
    paragraphs = [(f"Page {number}", ["the same words here"]) for number in range(300)]
    corpus = CorpusIndex.build(paragraphs, tmp_path / "corpus", show_progress=False)
    assert [position for position, _ in corpus.rank("same words", 5)] == [0, 1, 2, 3, 4]
    assert [position for position, _ in corpus.rank("page 123", 3)][:1] == [123]


def test_a_corpus_is_used_by_threads_and_processes(corpus, folder):
    queries = ["clown", "demon", "green", "Magda Szubanski"] * 10
    expected = [corpus.search(query, 2) for query in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(corpus.search, queries, [2] * len(queries))) == expected
    copied = pickle.loads(pickle.dumps(corpus))
    assert [copied.search(query, 2) for query in queries] == expected
    script = """
    import json, multiprocessing, sys
    from trace_trl.environments.retrieval import CorpusIndex
    corpus = CorpusIndex.open(sys.argv[1])
    queries = json.loads(sys.argv[2])
    corpus.search(queries[0], 2)
    with multiprocessing.get_context("fork").Pool(2) as processes:
        print(json.dumps(processes.starmap(corpus.search, [(query, 2) for query in queries])))
    """
    found = run_alone(script, folder, json.dumps(queries))
    assert found == json.loads(json.dumps(expected)) and any(found)


def test_an_interrupted_build_leaves_nothing_that_opens(tmp_path):
    def interrupted():
        yield from PARAGRAPHS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CorpusIndex.build(interrupted(), tmp_path / "corpus", show_progress=False)
    assert list(tmp_path.iterdir()) == []

    # Killed: nothing cleans up, and the next build does not mind
    script = (
        "import os, sys\n"
        "from trace_trl.environments.retrieval import CorpusIndex\n"
        "def paragraphs():\n"
        "    yield from [('A', 'text')] * 9000\n"
        "    os._exit(9)\n"
        "CorpusIndex.build(paragraphs(), sys.argv[1], show_progress=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "corpus")], timeout=240)
    assert done.returncode == 9
    (left,) = tmp_path.iterdir()
    with pytest.raises(RetrievalError, match="no index"):
        CorpusIndex.open(left)
    assert len(CorpusIndex.build(PARAGRAPHS, tmp_path / "corpus", show_progress=False)) == len(PARAGRAPHS)


def test_building_over_something_is_refused(tmp_path, folder):
    with pytest.raises(FileExistsError, match="open it with CorpusIndex.open, or delete it"):
        CorpusIndex.build(PARAGRAPHS, folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        CorpusIndex.build(PARAGRAPHS, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    CorpusIndex.build(PARAGRAPHS, tmp_path / "empty", show_progress=False)

    def overtaken():
        yield from PARAGRAPHS
        CorpusIndex.build(PARAGRAPHS, tmp_path / "corpus", show_progress=False)

    with pytest.raises(FileExistsError, match="while its index was built"):
        CorpusIndex.build(overtaken(), tmp_path / "corpus", show_progress=False)
    assert len(CorpusIndex.open(tmp_path / "corpus")) == len(PARAGRAPHS)


def test_building_shows_progress(tmp_path, capfd):
    CorpusIndex.build(PARAGRAPHS, tmp_path / "corpus")
    assert "Reading paragraphs: 8 paragraphs" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("paragraphs", "message"),
    [
        ([("A", "text"), ("B",)], r"Paragraph 2 must be \(title, text\)"),
        ([("A", None)], "Paragraph 1 must be"),
        ([(None, "text")], "Paragraph 1 must be"),
        ([("A", [1])], "Paragraph 1 must be"),
        ([7], "Paragraph 1 must be"),
        ([("the", "?!")], "no word in the 1 paragraphs"),
        ([], "no word in the 0 paragraphs"),
    ],
)
def test_paragraphs_of_another_form_are_refused(tmp_path, paragraphs, message):
    with pytest.raises(ValueError, match=message):
        CorpusIndex.build(paragraphs, tmp_path / "corpus", show_progress=False)
    assert list(tmp_path.iterdir()) == []


def test_broken_and_old_folders_are_refused(tmp_path):
    def rebuilt():
        path = tmp_path / str(random.randrange(10**9))
        CorpusIndex.build(PARAGRAPHS, path, show_progress=False)
        return path

    def refused(path, message):
        with pytest.raises(RetrievalError, match=message) as caught:
            CorpusIndex.open(path)
        assert str(path) in str(caught.value)

    refused(tmp_path / "absent", "There is no index in .*: build one")
    for name in ("paragraphs.jsonl", "titles.npy", "bm25/data.csc.index.npy"):
        path = rebuilt()
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[:-1])
        refused(path, "has .* bytes instead of .*: delete the folder and build it anew")
        (path / name).write_bytes(b"\0" * len(whole))
        if name == "paragraphs.jsonl":  # too much to read at the start
            with pytest.raises(RetrievalError, match="paragraph 4 of the corpus is damaged"):
                CorpusIndex.open(path).search("clown", 1)
        else:
            refused(path, "can't be read .*: delete it and build it anew")
        (path / name).unlink()
        refused(path, "is missing")
    path = rebuilt()
    meta = json.loads((path / "index.json").read_text())
    (path / "index.json").write_text(json.dumps({**meta, "format": 0}))
    refused(path, "has format 0, this version reads 1")
    for content in ("", "[]", "{}", '{"format": 1, "files": 3}'):
        (path / "index.json").write_text(content)
        refused(path, "can't be read: delete the folder")


def test_split_sentences():
    text = 'He came. "Really?" she said. It is 3.5 m high, i.e. small! (Yes.) Ende'
    assert split_sentences(text) == [
        "He came.",
        '"Really?" she said.',
        "It is 3.5 m high, i.e. small!",
        "(Yes.)",
        "Ende",
    ]
    assert split_sentences(" \n ") == []
    assert " ".join(split_sentences("A b.\nC  d")) == "A b. C  d"
    assert clean(" AT&amp;T\n x ") == "AT&T x"


# A server

PAGE = {"document": {"id": "1", "contents": '"Alû"\nIn Akkadian mythology, Alû is a demon.'}, "score": 1.5}
FOUND = [Page("Alû", ("In Akkadian mythology, Alû is a demon.",))]


class Script:
    """
    A server on the loopback that does to one request after the other what the test says, the last thing forever.

    Attributes:
        requests (`list`): path, headers and content of each.
        connections (`set`): the connections that requests came by.
        hung_up (`Semaphore`): released for every connection that the server has closed.
        over (`Event`): set when the test is over.
    """

    def __init__(self, *steps):
        self.steps = list(steps)
        self.requests = []
        self.connections = set()
        self.hung_up = threading.Semaphore(0)
        self.over = threading.Event()
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1
            over = script.over

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                script.requests.append((self.path, dict(self.headers), json.loads(body)))
                script.connections.add(self)  # not the address: a later connection may have the same
                step = script.steps.pop(0) if len(script.steps) > 1 else script.steps[0]
                step(self)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            def shutdown_request(self, request):
                super().shutdown_request(request)
                script.hung_up.release()

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *args: None  # clients that hang up are what is tested
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/retrieve"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.over.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve():
    scripts = []

    def start(*steps):
        scripts.append(Script(*steps))
        return scripts[-1]

    yield start
    for script in scripts:
        script.close()


def say(content, status=200, **headers):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()

    def step(handler):
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return step


def send_raw(*parts):
    """Bytes as they are, and then a closed connection."""

    def step(handler):
        handler.close_connection = True
        for part in parts:
            handler.connection.sendall(part)

    return step


def hang(handler):
    handler.over.wait(LIMIT)
    handler.close_connection = True


GOOD = say({"result": [[PAGE]]})


class Clock:
    """
    Stands in for the `time` of the client's module.

    Args:
        pace (`float`): seconds that pass from one look at it to the next. Otherwise it stands where `now` was put.
    """

    def __init__(self, pace=0.0):
        self.now, self.pace = 0.0, pace
        self.slept = []
        self.looks = threading.Semaphore(0)

    def monotonic(self):
        self.now += self.pace
        self.looks.release()
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(retrieval, "time", clock)
    return clock


def failure(script, **kwargs):
    client = RetrievalServer(script.url, **{"timeout": LIMIT, "backoff": 0.01, **kwargs})
    with pytest.raises(RetrievalError) as caught:
        client.search("alu", 3)
    message = str(caught.value)
    assert message.startswith("the server") and message.endswith(".") and script.url not in message
    return message


def test_the_request_is_that_of_search_r1(serve):
    script = serve(GOOD)
    client = RetrievalServer(script.url + "?corpus=1", headers={"Authorization": "Bearer secret"})
    assert client.search("alû \ud83d", 3) == FOUND
    ((path, headers, body),) = script.requests
    assert path == "/retrieve?corpus=1"
    assert headers["Content-Type"] == "application/json" and headers["Authorization"] == "Bearer secret"
    assert body == {"queries": ["alû \ud83d"], "topk": 3, "return_scores": True}
    assert isinstance(client, Retriever)


@pytest.mark.parametrize(
    ("item", "page"),
    [
        (PAGE, FOUND[0]),
        (PAGE["document"], FOUND[0]),
        ({"title": "A &amp; B", "text": "One. Two."}, Page("A & B", ("One.", "Two."))),
        ({"document": {"title": None, "text": "One."}, "score": None}, Page("", ("One.",))),
        ({"contents": "One line."}, Page("", ("One line.",))),
        ({"contents": "One line.", "title": "A"}, Page("A", ("One line.",))),
        ({"contents": "A title\nOne.\nTwo."}, Page("A title", ("One.", "Two."))),
        ({"contents": ""}, Page("", ())),
        ({"contents": "half \ud83d"}, Page("", ("half ?",))),
    ],
)
def test_forms_of_a_document(serve, item, page):
    script = serve(say({"result": [[item] * 3]}))
    assert RetrievalServer(script.url).search("alu", 2) == [page] * 2


def test_nothing_found(serve):
    assert RetrievalServer(serve(say({"result": [[]]})).url).search("alu", 2) == []


def test_failures_that_pass_are_tried_again(serve):
    for step in (say({}, 500), say(b"busy", 429), say({}, 503), send_raw(), send_raw(b"HTTP/1.1 200 OK\r\n")):
        script = serve(step, step, GOOD)
        assert RetrievalServer(script.url, retries=2, backoff=0.01).search("alu") == FOUND
        assert len(script.requests) == 3


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (say({}, 500), "status 500 3 times"),
        (say({}, 429), "status 429 3 times"),
        (send_raw(), "closed the connection before it had answered 3 times"),
        (send_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"), "closed the connection"),
        (send_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"), "closed the connection"),
        (send_raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"), "closed the connection"),
    ],
)
def test_failures_that_last_are_given_up(serve, step, message):
    script = serve(step)
    assert message in failure(script)
    assert len(script.requests) == 3
    script = serve(step)
    assert " times" not in failure(script, retries=0)
    assert len(script.requests) == 1


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (say({"detail": "topk is too large"}, 422), 'status 422: {"detail": "topk is too large"}'),
        (say(b"", 404), "status 404: Not Found"),
        (say(b"\xff" * 9999, 400), "status 400"),
        (say(b"", 307, Location="http://elsewhere/retrieve/"), "redirects to http://elsewhere/retrieve/"),
        (say(b'{"result": [['), "no valid JSON"),
        (say(b""), "no valid JSON"),
        (say(b"\xff\xfe"), "no valid JSON"),
        (say(b"[" * 200_000), "no valid JSON"),
        (say([]), "another form"),
        (say(None), "another form"),
        (say({"results": []}), "another form"),
        (say({"result": []}), "another form"),
        (say({"result": {}}), "another form"),
        (say({"result": [{}]}), "another form"),
        (say({"result": ["text"]}), "another form"),
        (say({"result": [["text"]]}), "another form"),
        (say({"result": [[None]]}), "another form"),
        (say({"result": [[{"document": "document"}]]}), "another form"),
        (say({"result": [[{"document": None}]]}), "another form"),
        (say({"result": [[{"contents": 7}]]}), "another form"),
        (say({"result": [[{"title": 7, "text": "x"}]]}), "another form"),
        (say({"result": [[{"text": ["x"]}]]}), "another form"),
        (send_raw(b"SSH-2.0-OpenSSH\r\n"), "did not answer in HTTP"),
        (send_raw(b"HTTP/1.1 two hundred\r\n\r\n"), "did not answer in HTTP"),
        (send_raw(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 99_999), "did not answer in HTTP"),
    ],
)
def test_wrong_answers_are_not_asked_for_again(serve, step, message):
    script = serve(step)
    assert message in failure(script)
    assert len(script.requests) == 1


def test_answers_that_are_too_long(serve):
    huge = say({"result": [[{"contents": "x" * 5000}]]})
    endless = send_raw(b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 1000] * 100)
    for step in (huge, endless):
        assert "longer than 4096 bytes" in failure(serve(step), max_bytes=4096)


def test_an_answer_that_does_not_come_ends_at_the_limit(serve):
    assert failure(serve(hang), timeout=0.5) == "the server did not answer within 0.5 seconds."


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (b"", b" "),
        (b"HTTP/1.1 200 OK\r\n", b"X"),
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    ],
)
def test_slow_answers_end_at_the_limit(serve, clock, head, part):
    """A byte now and then: no single read is slow."""
    clock.pace, sent = 30.0, []

    def trickle(handler):
        handler.close_connection = True
        for piece in (head, *[part] * 60):
            # One each time the client asks how late it is
            until(lambda: clock.looks.acquire(timeout=0.1) or handler.over.is_set())
            sent.append(piece)
            handler.connection.sendall(piece)

    assert failure(serve(trickle), timeout=300.0) == "the server did not answer within 300 seconds."
    assert len(sent) <= 12


def test_the_limit_holds_for_all_tries_together(serve, clock):
    def slow_failure(handler):
        clock.now += 250.0
        say({}, 500)(handler)

    script = serve(slow_failure)
    failure(script, timeout=600.0, retries=50)
    assert len(script.requests) == 3 and len(clock.slept) == 2
    clock.slept.clear()
    # Not waited for where the wait would end after the limit
    script = serve(say({}, 503, Retry_After="600"))
    assert "status 503" in failure(script, timeout=300.0)
    assert len(script.requests) == 1 and clock.slept == []
    script = serve(say({}, 429, Retry_After="100"), GOOD)
    assert RetrievalServer(script.url, timeout=300.0).search("alu") == FOUND
    assert len(script.requests) == 2 and clock.slept == [100.0]
    clock.slept.clear()
    # A date says nothing: the waits are the client's own
    assert "status 503 3 times" in failure(serve(say({}, 503, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT")))
    first, second = clock.slept
    assert 0.005 <= first <= 0.015 and 0.01 <= second <= 0.03


def test_a_server_that_is_not_there(monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(RetrievalError, match="refused the connection 3 times"):
            RetrievalServer(url, backoff=0.01, timeout=LIMIT).search("alu")
        # Listens, and never accepts: the handshake is the kernel's, an answer never comes
        unused.listen(0)
        with pytest.raises(RetrievalError, match="within 0.3 seconds"):
            RetrievalServer(url, timeout=0.3).search("alu")
        with pytest.raises(RetrievalError, match="within 0.3 seconds|can't be reached"):
            RetrievalServer(url.replace("http:", "https:"), timeout=0.3).search("alu")

    def unknown(*args, **kwargs):  # how long a real resolver looks for it depends on the network
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(RetrievalError, match="name is not known"):
        RetrievalServer("http://no-such-host.invalid/", retries=0).search("alu")


def test_connections_are_kept_and_made_again(serve):
    def good_then_close(handler):
        GOOD(handler)
        handler.close_connection = True  # without saying so: the client finds out at its next request

    script = serve(GOOD)
    client = RetrievalServer(script.url, retries=0)
    for _ in range(3):
        assert client.search("alu") == FOUND
    assert len(script.connections) == 1
    client.close()
    client.close()
    assert client.search("alu") == FOUND and len(script.connections) == 2

    script = serve(good_then_close)
    client = RetrievalServer(script.url, retries=0)
    for _ in range(3):
        assert client.search("alu") == FOUND
        assert script.hung_up.acquire(timeout=LIMIT)
    assert len(script.connections) == 3

    # After an error status the connection is kept, after a broken answer it is not
    script = serve(say({}, 500), GOOD)
    assert RetrievalServer(script.url, backoff=0.01).search("alu") == FOUND and len(script.connections) == 1
    script = serve(send_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"), GOOD)
    assert RetrievalServer(script.url, backoff=0.01).search("alu") == FOUND and len(script.connections) == 2


def test_threads_and_processes_have_their_own_connections(serve):
    script = serve(GOOD)
    client = RetrievalServer(script.url)
    barrier = threading.Barrier(6, timeout=LIMIT)

    def searching():
        barrier.wait()
        return [client.search("alu") for _ in range(5)]

    with ThreadPoolExecutor(6) as pool:
        assert [job.result() for job in [pool.submit(searching) for _ in range(6)]] == [[FOUND] * 5] * 6
    assert len(script.connections) == 6
    # A process, its child, and the process once more, by the connection it had before
    forking = """
    import json, multiprocessing, sys
    from trace_trl.environments.retrieval import RetrievalServer
    client = RetrievalServer(sys.argv[1])
    def ask(results):
        results.send(client.search("alu"))
    found = [client.search("alu")]
    context = multiprocessing.get_context("fork")
    receiver, results = context.Pipe(duplex=False)
    process = context.Process(target=ask, args=(results,), daemon=True)
    process.start()
    assert receiver.poll(60)
    found.append(receiver.recv())
    process.join(60)
    assert process.exitcode == 0
    found.append(client.search("alu"))
    print(json.dumps(found))
    """
    assert run_alone(forking, script.url) == json.loads(json.dumps([FOUND] * 3))
    assert len(script.connections) == 8
    copied = pickle.loads(pickle.dumps(client))
    assert copied.search("alu") == FOUND and copied.timeout == client.timeout


def test_the_random_state_is_left_alone(serve):
    state = random.getstate()
    RetrievalServer(serve(say({}, 500), GOOD).url, backoff=0.01).search("alu")
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("url", "kwargs", "message"),
    [
        ("127.0.0.1:8000", {}, "write it as http://"),
        ("ftp://host/", {}, "write it as http://"),
        ("http:///retrieve", {}, "write it as http://"),
        ("http://host/a b", {}, "write it as http://"),
        ("http://host:port/", {}, "no address"),
        ("http://host:99999/", {}, "no address"),
        ("http://me:secret@host/", {}, "Authorization"),
        ("http://host/", {"timeout": 0}, "timeout > 0"),
        ("http://host/", {"timeout": float("inf")}, "timeout > 0"),
        ("http://host/", {"retries": -1}, "retries >= 0"),
        ("http://host/", {"max_bytes": 0}, "max_bytes >= 1"),
    ],
)
def test_settings_out_of_range_are_refused(url, kwargs, message):
    with pytest.raises(ValueError, match=message):
        RetrievalServer(url, **kwargs)


# The server that comes with the package


@pytest.fixture
def own(corpus):
    server = SearchServer(corpus)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_own_server_finds_what_the_index_finds(corpus, own):
    client = RetrievalServer(own + "/retrieve")
    for query in ("green", "who created dogwoman", "alu", "zebras", "nothing of it", "\ud83d"):
        assert client.search(query, 3) == corpus.search(query, 3)


def post(url, body, headers=None):
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **(headers or {})})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=LIMIT) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_own_server_answers_as_search_r1_does(own):
    request = {"queries": ["green", "clown"], "topk": 1, "return_scores": True}
    status, content = post(own + "/retrieve", json.dumps(request).encode())
    assert status == 200
    (first,), (second,) = content["result"]
    assert first["document"] == {"id": "5", "contents": '"Green"\nGreen is an album.'} and first["score"] > 0
    assert second["document"]["contents"].startswith('"It (film)"\n')
    status, content = post(own + "/retrieve", b'{"queries": ["green"]}')
    assert [document["id"] for document in content["result"][0]] == ["5", "6"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/retrieve", b"{broken", 400),
        ("/retrieve", b"[]", 400),
        ("/retrieve", b'{"queries": "green"}', 400),
        ("/retrieve", b'{"queries": [3]}', 400),
        ("/retrieve", b'{"queries": ["green"], "topk": 0}', 400),
        ("/retrieve", b'{"queries": ["green"], "topk": true}', 400),
        ("/retrieve", b'{"queries": ["green"], "topk": 1000000}', 400),
        ("/retrieve", b"\xff", 400),
        ("/retrieve", b"[" * 200_000, 400),
        ("/elsewhere", b'{"queries": ["green"]}', 404),
    ],
)
def test_own_server_refuses(own, path, body, status):
    found, content = post(own + path, body)
    assert found == status and content["detail"]


def test_own_server_reads_no_endless_request(own):
    host, port = own.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT) as raw:
        raw.sendall(f"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_REQUEST + 1}\r\n\r\n".encode())
        assert raw.recv(99).startswith(b"HTTP/1.1 413")


def test_own_server_is_run_as_a_module(folder):
    command = [sys.executable, "-m", "trace_trl.environments.retrieval_server", "--index", str(folder), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as run:
        try:
            line = run.stdout.readline()
            assert line.startswith("8 paragraphs at http://127.0.0.1:")
            assert RetrievalServer(line.split()[-1]).search("clown")[0].title == "It (film)"
        finally:
            run.kill()
