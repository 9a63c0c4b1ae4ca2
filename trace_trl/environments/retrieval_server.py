"""
Serves a [`CorpusIndex`] to [`RetrievalServer`], so that one machine holds the corpus for all nodes of a training.

    python -m trace_trl.environments.retrieval_server --index corpus --port 8000

It answers `POST /retrieve` in the shape of Search-R1's server, whose clients can use it, too. It knows no users and
no encryption: by default it is reached from its own machine only, and other hosts belong into a closed network.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .retrieval import CorpusIndex, RetrievalError


MAX_REQUEST = 1 << 20  # bytes
MAX_QUERIES = 1024
MAX_RESULTS = 1000


def answer(index: CorpusIndex, request: Any) -> dict[str, Any]:
    """
    The answer to one request.

    Args:
        index ([`CorpusIndex`]):
            Index to search.
        request (`Any`):
            `{"queries": [text, ...], "topk": 3, "return_scores": true}`; the last two may be left out.

    Returns:
        `dict`: `result`, with a list of documents per query.

    Raises:
        ValueError: if the request has another form.
    """
    queries, k = (request.get("queries"), request.get("topk", 3)) if isinstance(request, dict) else (None, 3)
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError("`queries` must be a list of texts")
    if type(k) is not int or not 1 <= k <= MAX_RESULTS or len(queries) > MAX_QUERIES:
        raise ValueError(f"needs 1 <= topk <= {MAX_RESULTS} and at most {MAX_QUERIES} queries")
    results = []
    for query in queries:
        found = []
        for position, score in index.rank(query, k):
            title, sentences = index[position]
            document = {"id": str(position), "contents": f'"{title}"\n{" ".join(sentences)}'}
            found.append({"document": document, "score": score} if request.get("return_scores") else document)
        results.append(found)
    return {"result": results}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept open
    timeout = 60  # seconds an idle one is kept
    wbufsize = -1  # head and body leave in one packet
    disable_nagle_algorithm = True
    server: SearchServer

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_REQUEST:
            self.close_connection = True  # the body is still in the line
            self._send(413, {"detail": f"needs a Content-Length of at most {MAX_REQUEST}"})
            return
        body = self.rfile.read(int(length))
        if self.path != "/retrieve":
            self._send(404, {"detail": "post to /retrieve"})
            return
        try:
            status, content = 200, answer(self.server.index, json.loads(body))
        except (ValueError, RecursionError) as error:
            status, content = 400, {"detail": str(error)}
        except RetrievalError as error:  # of one paragraph: the others can still be found
            status, content = 500, {"detail": str(error)}
        self._send(status, content)

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A line per search would be thousands a minute."""


class SearchServer(ThreadingHTTPServer):
    """
    Args:
        index ([`CorpusIndex`]): the index to serve.
        host (`str`), port (`int`): where to listen; port 0 takes a free one, which is in `server_address` then.
    """

    daemon_threads = True
    request_queue_size = 128  # the branches of a round come at once

    def __init__(self, index: CorpusIndex, host: str = "127.0.0.1", port: int = 0):
        self.index = index
        super().__init__((host, port), _Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves a corpus to search environments.")
    parser.add_argument("--index", required=True, help="Folder that CorpusIndex.build made.")
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on.")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    index = CorpusIndex.open(args.index)
    with SearchServer(index, args.host, args.port) as server:
        host, port = server.server_address[:2]
        print(f"{len(index)} paragraphs at http://{host!s}:{port}/retrieve", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
