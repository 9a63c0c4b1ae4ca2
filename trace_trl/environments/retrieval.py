"""
What a search environment searches: one question's paragraphs, a corpus on disk, or a server.

    ParagraphIndex(context)     BM25 over the paragraphs of one row, built at its first search
    CorpusIndex.open(folder)    BM25 over one corpus for all rows, built once, memory-mapped by every process
    RetrievalServer(url)        HTTP with the requests of Search-R1's retrieval server

The last two are a [`Retriever`]: anything else with its one method may take their place. A query that is a title finds
the paragraphs of that title first, then those that BM25 ranks best; case and accents do not count.

A folder of [`CorpusIndex`]:

    index.json          format, number of paragraphs, size of each other file; written last
    paragraphs.jsonl    ["title", ["sentence", ...]], a line per paragraph
    offsets.npy         where each line begins, and where the last one ends
    titles.npy          hashes of the folded titles, sorted
    positions.npy       the paragraph that each of these hashes belongs to
    bm25/               as bm25s saves it
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import http.client
import io
import json
import math
import mmap
import os
import random
import re
import secrets
import shutil
import socket
import threading
import time
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import urlsplit


_TOKEN = r"(?u)\b\w+\b"
_TITLE_WEIGHT = 2
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[^\W_a-z])")

_FORMAT = 1
_CHUNK = 4096  # paragraphs tokenised at a time
_TITLE_SCORE = 1e6  # added to the score of a paragraph whose title is the query


class RetrievalError(RuntimeError):
    """A search failed, or an index can't be used. The message may be shown to a policy: it names no path or address
    unless it is about opening an index."""


class Page(NamedTuple):
    """
    A paragraph that was found.

    Attributes:
        title (`str`): its title; may be empty.
        sentences (`tuple[str, ...]`): its text.
    """

    title: str
    sentences: tuple[str, ...]


@runtime_checkable
class Retriever(Protocol):
    """What a [`SearchEnvironment`] asks; called from several threads at once."""

    def search(self, query: str, k: int) -> Sequence[Page]:
        """At most `k` pages, best first. Raises [`RetrievalError`] where the search could not be made."""
        ...


def fold(text: str) -> str:
    """Lower case without accents: a policy often spells "Alû" as "Alu"."""
    text = text.lower()
    if text.isascii():  # nearly all, and ten times faster
        return text
    return "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))


def clean(text: Any) -> str:
    """Collapses white space and resolves the HTML entities that HotpotQA's titles still hold."""
    return " ".join(html.unescape(str(text)).split())


def split_sentences(text: str) -> list[str]:
    """
    Splits plain text after full stops, question and exclamation marks, unless a small letter follows.

    It does not know abbreviations: a lookup then shows less than a whole sentence.
    """
    sentences, start = [], 0
    for end in _SENTENCE_END.finditer(text):
        sentences.append(text[start : end.end()].strip())
        start = end.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _tokenize(texts: list[str]) -> list[list[str]]:
    import bm25s

    return bm25s.tokenize(texts, token_pattern=_TOKEN, stopwords="en", return_ids=False, show_progress=False)


def _searched_text(page: Page) -> str:
    return fold(" ".join([page.title] * _TITLE_WEIGHT + list(page.sentences)))


class ParagraphIndex:
    """
    BM25 over the paragraphs of one question, built at the first search and read-only from then on.

    Args:
        context (`Sequence` or `Mapping`):
            Paragraphs as the HotpotQA files have them, `[[title, [sentence, ...]], ...]`, or as its Hub data set has
            them, `{"title": [...], "sentences": [[...], ...]}`.

    Raises:
        ValueError: if `context` has neither form.
    """

    def __init__(self, context: Sequence[Any] | Mapping[str, Any]):
        try:
            if isinstance(context, Mapping):
                context = list(zip(context["title"], context["sentences"], strict=True))
            self.paragraphs: list[Page] = [
                Page(clean(title), tuple(clean(sentence) for sentence in sentences)) for title, sentences in context
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "`context` must be [[title, [sentence, ...]], ...] or {'title': [...], 'sentences': [[...], ...]}."
            ) from error
        self._titles = [fold(page.title) for page in self.paragraphs]
        self._retriever: Any = None
        self._built = False
        self._lock = threading.Lock()

    def _scores(self, query: str) -> list[float]:
        nothing = [0.0] * len(self.paragraphs)
        tokens = _tokenize([query])[0]
        if not tokens:
            return nothing
        with self._lock:
            if not self._built:
                corpus = _tokenize([_searched_text(page) for page in self.paragraphs])
                # bm25s can't index a corpus without words.
                if any(corpus):
                    import bm25s

                    self._retriever = bm25s.BM25()
                    self._retriever.index(corpus, show_progress=False)
                self._built = True
        return nothing if self._retriever is None else self._retriever.get_scores(tokens).tolist()

    def search(self, query: str, k: int = 1) -> tuple[int, ...]:
        """
        Ranks paragraphs for a query.

        Args:
            query (`str`):
                Words to look for. A query that is a paragraph's title finds that paragraph first.
            k (`int`, *optional*, defaults to `1`):
                Largest number of paragraphs.

        Returns:
            `tuple[int, ...]`: positions of at most `k` paragraphs that share a word with the query, best first; equal
            scores keep the order of the context.
        """
        if not self.paragraphs:
            return ()
        query = fold(query)
        scores = self._scores(query)
        for position, title in enumerate(self._titles):
            if title == query:
                scores[position] = float("inf")
        ranked = sorted(range(len(scores)), key=lambda position: -scores[position])
        return tuple(position for position in ranked[:k] if scores[position] > 0)

    def pages(self, query: str, k: int = 1) -> list[Page]:
        """The paragraphs at the positions that [`~ParagraphIndex.search`] finds."""
        return [self.paragraphs[position] for position in self.search(query, k)]


# A corpus on disk


def _title_hash(folded: str) -> int:
    return int.from_bytes(hashlib.blake2b(folded.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def _as_page(paragraph: Any, number: int) -> Page:
    try:
        title, text = paragraph
        sentences = split_sentences(text) if isinstance(text, str) else list(text)
        if not isinstance(title, str) or not all(isinstance(sentence, str) for sentence in sentences):
            raise TypeError
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Paragraph {number} must be (title, text) or (title, [sentence, ...]), got {paragraph!r:.80}."
        ) from error
    return Page(clean(title), tuple(clean(sentence) for sentence in sentences))


class CorpusIndex:
    """
    BM25 over many paragraphs in a folder, shared by all processes that open it.

    Scores, text and titles are memory-mapped: what processes on one machine read of them is in memory once. The
    vocabulary is loaded by each. Searching is safe from several threads; a pickled index is the path of its folder.

    Example:

    ```python
    >>> CorpusIndex.build([("Dogwoman", "It was created by Magda Szubanski.")], "corpus")  # doctest: +SKIP
    >>> CorpusIndex.open("corpus").search("who created dogwoman", k=1)  # doctest: +SKIP
    [Page(title='Dogwoman', sentences=('It was created by Magda Szubanski.',))]
    ```
    """

    def __init__(self, folder: Path, offsets: Any, text: mmap.mmap, titles: Any, positions: Any, bm25: Any):
        self.folder = folder
        self._offsets = offsets
        self._text = text
        self._titles = titles
        self._positions = positions
        self._bm25 = bm25

    @classmethod
    def build(
        cls,
        paragraphs: Iterable[tuple[str, str | Sequence[str]]],
        folder: str | os.PathLike,
        show_progress: bool = True,
    ) -> CorpusIndex:
        """
        Indexes paragraphs and saves them. The folder appears when all is written: a build that was interrupted leaves
        nothing that opens. To be done by one process, before training: it takes about 0.4 milliseconds and 4 kB of
        memory for each paragraph of a hundred words.

        Args:
            paragraphs (`Iterable[tuple]`):
                Title and text, or title and list of sentences. Text is split by [`split_sentences`]. Read once, and
                not kept in memory.
            folder (`str` or `os.PathLike`):
                Folder to make.
            show_progress (`bool`, *optional*, defaults to `True`):
                Whether to show progress bars.

        Returns:
            [`CorpusIndex`]: the index, opened.

        Raises:
            FileExistsError: if there is something at `folder`.
            ValueError: if a paragraph has another form, or none has a word.
        """
        folder = Path(folder)
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise FileExistsError(f"{folder} exists: open it with CorpusIndex.open, or delete it to build it anew.")
        # Beside the folder, since only within a file system is a rename one step
        work = folder.parent / f".{folder.name}.building-{secrets.token_hex(4)}"
        work.mkdir(parents=True)
        try:
            _write_corpus(paragraphs, work, show_progress)
            try:
                work.rename(folder)
            except OSError as error:
                if not folder.exists():
                    raise
                raise FileExistsError(
                    f"{folder} was made while its index was built: open it with CorpusIndex.open."
                ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: str | os.PathLike) -> CorpusIndex:
        """
        Opens an index that was built before.

        Args:
            folder (`str` or `os.PathLike`):
                Its folder.

        Returns:
            [`CorpusIndex`]: the index.

        Raises:
            RetrievalError: if the folder holds no index, a broken one, or one of another version of this class.
        """
        import bm25s
        import numpy as np

        folder = Path(folder)
        _check_folder(folder)
        try:
            offsets = np.load(folder / "offsets.npy", mmap_mode="r")
            titles = np.load(folder / "titles.npy", mmap_mode="r")
            positions = np.load(folder / "positions.npy", mmap_mode="r")
            bm25 = bm25s.BM25.load(folder / "bm25", mmap=True, show_progress=False)
            with (folder / "paragraphs.jsonl").open("rb") as file:
                text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RetrievalError(
                f"The index in {folder} can't be read ({error}): delete it and build it anew."
            ) from error
        return cls(folder, offsets, text, titles, positions, bm25)

    def __reduce__(self) -> tuple[Callable, tuple]:
        return CorpusIndex.open, (self.folder,)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, position: int) -> Page:
        if not 0 <= position < len(self):
            raise IndexError(f"There is no paragraph {position}, the corpus has {len(self)}.")
        start, end = int(self._offsets[position]), int(self._offsets[position + 1])
        try:
            title, sentences = json.loads(self._text[start:end])
        except ValueError as error:
            raise RetrievalError(f"paragraph {position} of the corpus is damaged.") from error
        return Page(title, tuple(sentences))

    def rank(self, query: str, k: int = 1) -> list[tuple[int, float]]:
        """
        Positions and scores of the best paragraphs.

        Args:
            query (`str`):
                Words to look for.
            k (`int`, *optional*, defaults to `1`):
                Largest number of paragraphs.

        Returns:
            `list[tuple[int, float]]`: at most `k` paragraphs that share a word with the query or have it as their
            title, best first; equal scores keep the order of the corpus. The score is BM25's, raised by a million
            for a title.
        """
        import numpy as np

        if k < 1:
            return []
        query = fold(clean(query))
        tokens = [token for token in _tokenize([query])[0] if token in self._bm25.vocab_dict]
        scores = self._bm25.get_scores(tokens) if tokens else np.zeros(len(self), dtype=np.float32)
        for position in self._with_title(query):
            scores[position] += _TITLE_SCORE
        count = min(k, len(scores))
        least = np.partition(scores, -count)[-count]
        best = np.flatnonzero(scores >= least) if least > 0 else np.flatnonzero(scores)
        order = best[np.argsort(-scores[best], kind="stable")][:count]
        return [(int(position), float(scores[position])) for position in order]

    def _with_title(self, folded: str) -> list[int]:
        import numpy as np

        if not folded:
            return []
        wanted = np.uint64(_title_hash(folded))
        first, last = (int(np.searchsorted(self._titles, wanted, side)) for side in ("left", "right"))
        # Two titles may share a hash
        return [position for position in self._positions[first:last].tolist() if fold(self[position].title) == folded]

    def search(self, query: str, k: int = 1) -> list[Page]:
        """The paragraphs that [`~CorpusIndex.rank`] finds."""
        return [self[position] for position, _ in self.rank(query, k)]


def _write_corpus(paragraphs: Iterable[Any], folder: Path, show_progress: bool) -> None:
    import bm25s
    import numpy as np
    from tqdm.auto import tqdm

    vocabulary: dict[str, int] = {}
    tokens: list[array] = []  # an eighth of the memory of lists
    offsets, hashes = array("q", [0]), array("Q")

    def pages() -> Iterator[Page]:
        for number, paragraph in enumerate(paragraphs, start=1):
            yield _as_page(paragraph, number)

    stream = pages()
    with (
        (folder / "paragraphs.jsonl").open("wb") as file,
        tqdm(desc="Reading paragraphs", unit=" paragraphs", disable=not show_progress) as bar,
    ):
        while chunk := list(islice(stream, _CHUNK)):
            for page in chunk:
                # Half of a surrogate pair is no text, and would be refused by whoever reads it
                line = json.dumps(page, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
                file.write(line)
                offsets.append(offsets[-1] + len(line))
                hashes.append(_title_hash(fold(page.title)))
            for words in _tokenize([_searched_text(page) for page in chunk]):
                tokens.append(array("i", [vocabulary.setdefault(word, len(vocabulary)) for word in words]))
            bar.update(len(chunk))
    if not vocabulary:
        raise ValueError(f"There is no word in the {len(tokens)} paragraphs: nothing could be found in such a corpus.")
    bm25 = bm25s.BM25()
    bm25.index((tokens, vocabulary), show_progress=show_progress)
    bm25.save(folder / "bm25", show_progress=show_progress)
    np.save(folder / "offsets.npy", np.frombuffer(offsets, dtype=np.int64))
    titles = np.frombuffer(hashes, dtype=np.uint64)
    positions = np.argsort(titles, kind="stable")
    np.save(folder / "titles.npy", titles[positions])
    np.save(folder / "positions.npy", positions)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    meta = {
        "format": _FORMAT,
        "paragraphs": len(tokens),
        "files": {path.relative_to(folder).as_posix(): path.stat().st_size for path in files},
    }
    (folder / "index.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _check_folder(folder: Path) -> None:
    try:
        meta = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        found, files = meta["format"], dict(meta["files"])
    except FileNotFoundError as error:
        raise RetrievalError(f"There is no index in {folder}: build one with CorpusIndex.build.") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RetrievalError(f"{folder / 'index.json'} can't be read: delete the folder and build it anew.") from error
    if found != _FORMAT:
        raise RetrievalError(
            f"The index in {folder} has format {found}, this version reads {_FORMAT}: delete it and build it anew."
        )
    for name, size in files.items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise RetrievalError(f"{path} {state}: delete the folder and build it anew, or copy all of it.")


# A server


class _Retry(Exception):
    """An attempt failed in a way that may pass."""

    def __init__(self, problem: str, wait: float | None = None):
        super().__init__(problem)
        self.problem = problem
        self.wait = wait


class _TimedSocket:
    """
    A socket all of whose operations together end at a deadline.

    The timeout of a socket is for each operation: a server that sends a byte a second never meets it.
    """

    def __init__(self, connected: socket.socket):
        self.socket = connected
        self.deadline = math.inf

    def hurry(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.socket.settimeout(left)

    def sendall(self, data: bytes) -> None:
        self.hurry()
        self.socket.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self))

    def close(self) -> None:
        self.socket.close()


class _TimedReader(io.RawIOBase):
    def __init__(self, timed: _TimedSocket):
        self.timed = timed
        # A socket that is closed stays open for the files that were made of it: `http.client` counts on that
        self.file: Any = timed.socket.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.timed.hurry()
        return self.file.readinto(buffer)

    def close(self) -> None:
        self.file.close()
        super().close()


class RetrievalServer:
    """
    Searches by HTTP, with the requests of Search-R1's retrieval server.

        POST url    {"queries": ["who made it"], "topk": 3, "return_scores": true}
        answer      {"result": [[{"document": {"contents": "\\"Title\\"\\nText."}, "score": 1.0}, ...]]}

    A document may also be given without its score, and with `title` and `text` instead of `contents`. Each thread
    keeps one connection open; proxies and redirections are not followed.

    Args:
        url (`str`):
            Where to post, such as `"http://10.0.0.1:8000/retrieve"`.
        timeout (`float`, *optional*, defaults to `10.0`):
            Seconds a search may take, retries and the waits before them included. Looking up the server's name is
            not. Keep it below the trainer's `env_timeout`: the policy then reads what went wrong.
        retries (`int`, *optional*, defaults to `2`):
            How often a search is tried again after a status of 5xx or 429 or a connection that failed.
        backoff (`float`, *optional*, defaults to `0.25`):
            Seconds before the first retry, doubled for each further one and varied by half. A server's `Retry-After`
            goes before it.
        max_bytes (`int`, *optional*, defaults to `16777216`):
            Largest answer that is read.
        headers (`dict[str, str]`, *optional*):
            Sent with each request, for instance `{"Authorization": "Bearer .."}`.

    Raises:
        ValueError: if `url` is no HTTP address or a number is out of range.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 10.0,
        retries: int = 2,
        backoff: float = 0.25,
        max_bytes: int = 1 << 24,
        headers: Mapping[str, str] | None = None,
    ):
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{url!r} is no address: {error}.") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or not re.fullmatch(r"[!-~]+", url):
            raise ValueError(f"{url!r} is no address of a server: write it as http://host:port/retrieve.")
        if parts.username is not None:
            raise ValueError("The address holds a user name: pass `headers={'Authorization': ..}` instead.")
        if not (0 < timeout < math.inf) or retries < 0 or backoff < 0 or max_bytes < 1:
            raise ValueError(
                f"Needs timeout > 0, retries >= 0, backoff >= 0 and max_bytes >= 1, got {timeout}, {retries}, "
                f"{backoff} and {max_bytes}."
            )
        self.url = url
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self.max_bytes = max_bytes
        self.headers = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
        self._address = (parts.scheme, parts.hostname, port)
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._random = random.Random()  # of its own: the training's random state is not touched
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_local", "_random")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._random = random.Random()
        self._local = threading.local()

    def search(self, query: str, k: int = 1) -> list[Page]:
        """
        Asks the server.

        Args:
            query (`str`):
                Words to look for.
            k (`int`, *optional*, defaults to `1`):
                Largest number of pages.

        Returns:
            `list[Page]`: at most `k` pages in the order of the answer.

        Raises:
            RetrievalError: whatever goes wrong.
        """
        deadline = time.monotonic() + self.timeout
        # The escapes that `json` writes for what is not ASCII are legal for half of a surrogate pair, too
        body = json.dumps({"queries": [query], "topk": k, "return_scores": True}).encode()
        for attempt in range(self.retries + 1):
            try:
                return _read_answer(self._post(body, deadline))[:k]
            except _Retry as error:
                tries = "" if attempt == 0 else f" {attempt + 1} times"
                failure = RetrievalError(f"{error.problem}{tries}.")
                wait = error.wait
                if wait is None:
                    wait = self.backoff * 2**attempt * self._random.uniform(0.5, 1.5)
                if attempt == self.retries or time.monotonic() + wait >= deadline:
                    raise failure from error
                time.sleep(wait)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Closes the connection of this thread."""
        connection = getattr(self._local, "connection", None)
        self._local.connection = None
        if connection is not None:
            connection.close()

    def _connect(self, deadline: float) -> http.client.HTTPConnection:
        scheme, host, port = self._address
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        connection = kind(host, port, timeout=max(0.001, deadline - time.monotonic()))
        connection.connect()
        connection.sock = _TimedSocket(connection.sock)  # type: ignore[assignment]
        return connection

    def _post(self, body: bytes, deadline: float) -> bytes:
        # A connection must not be used by two processes: after a fork, the child makes its own
        if getattr(self._local, "process", None) != os.getpid():
            self._local.connection, self._local.process = None, os.getpid()
        kept = self._local.connection
        self._local.connection = None
        try:
            if kept is not None:
                with contextlib.suppress(ConnectionError):
                    # Servers close idle connections at any time: that is no failure
                    return self._exchange(kept, body, deadline)
            return self._exchange(self._connect(deadline), body, deadline)
        except TimeoutError as error:
            raise RetrievalError(f"the server did not answer within {self.timeout:g} seconds.") from error
        except (http.client.IncompleteRead, ConnectionResetError, BrokenPipeError) as error:
            raise _Retry("the server closed the connection before it had answered") from error
        except ConnectionRefusedError as error:
            raise _Retry("the server refused the connection") from error
        except socket.gaierror as error:
            raise _Retry("the server's name is not known") from error
        except OSError as error:
            raise _Retry(f"the server can't be reached ({error})") from error
        except (http.client.HTTPException, ValueError) as error:
            raise RetrievalError(f"the server did not answer in HTTP ({type(error).__name__}).") from error

    def _exchange(self, connection: http.client.HTTPConnection, body: bytes, deadline: float) -> bytes:
        reusable = False
        try:
            connection.sock.deadline = deadline  # type: ignore[union-attr]
            connection.request("POST", self._target, body, self.headers)
            response = connection.getresponse()
            content = response.read(self.max_bytes + 1)
            if len(content) > self.max_bytes:
                raise RetrievalError(f"the server's answer is longer than {self.max_bytes} bytes.")
            # `read` with a size does not say that the answer was cut off, nor do the headers
            if response.length or (not content and response.length is None and not response.chunked):
                raise http.client.IncompleteRead(content, response.length)
            reusable = not response.will_close
        finally:
            if reusable:
                self._local.connection = connection
            else:
                connection.close()
        status = response.status
        if status == 429 or status >= 500:
            raise _Retry(f"the server answered with status {status}", _retry_after(response))
        if 300 <= status < 400:
            raise RetrievalError(f"the server redirects to {response.headers.get('Location')}: use that address.")
        if not 200 <= status < 300:
            said = clean(content[:200].decode("utf-8", "replace"))
            raise RetrievalError(f"the server answered with status {status}: {said or response.reason}.")
        return content


def _retry_after(response: http.client.HTTPResponse) -> float | None:
    try:
        seconds = float(response.headers.get("Retry-After", ""))
    except ValueError:  # a date, or none
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _read_answer(content: bytes) -> list[Page]:
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RetrievalError("the server's answer is no valid JSON.") from error
    try:
        results = answer["result"][0]
        if not isinstance(results, list):
            raise TypeError
        return [_read_document(item) for item in results]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise RetrievalError(
            'the server\'s answer has another form than {"result": [[{"document": {"contents": ..}}, ..]]}.'
        ) from error


def _read_document(item: Any) -> Page:
    document = item["document"] if "document" in item else item
    title, text = document.get("title"), document.get("text")
    if text is None:
        # Search-R1 puts a title in quotes on a line of its own
        head, newline, rest = document["contents"].partition("\n")
        title, text = (head.strip().removeprefix('"').removesuffix('"'), rest) if newline else (title, head)
    title, text = (value.encode("utf-8", "replace").decode() for value in (title or "", text))
    return Page(clean(title), tuple(clean(sentence) for sentence in split_sentences(text)))
