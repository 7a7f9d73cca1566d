"""A server that answers with a file of lazyinline.save: requests of many lengths, in batches.

    python examples/serve.py

It opens the file without the model's source and without a compile, and runs under waitress where
that is installed, else under Python's own server. What waits makes one batch, as long as its
longest row; a new length costs a link. What it prints:

    waitress, from a file that took 32 ms of CPU to open
    requests  median / ms  worst / ms  links
          64         52.3       123.6     26
          64         14.1        43.0     38
          64         16.2        64.0     41
    0 compiles; each answer is eager's

Times are those of one machine, others and the client at work on it.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import torch
from decoder import Decoder

import lazyinline

LONGEST, ROWS = 48, 4


class Batches:  # one thread that runs the model on the requests that wait
    def __init__(self, path: str) -> None:
        self.model = lazyinline.load(path)
        self._waiting: queue.Queue[tuple[list[int], Future[int]]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def answer(self, body: bytes) -> bytes:
        answer: Future[int] = Future()
        self._waiting.put((json.loads(body), answer))
        return json.dumps(answer.result()).encode()

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            batch = [self._waiting.get()]
            batch += [self._waiting.get() for _ in range(min(ROWS - 1, self._waiting.qsize()))]
            # The decoder is causal: what is behind the end of a row changes nothing before it.
            ids = torch.zeros(ROWS, max(len(row) for row, _ in batch), dtype=torch.long)
            for given, (row, _) in zip(ids, batch, strict=False):
                given[: len(row)] = torch.tensor(row)
            for found, (row, answer) in zip(self.model(ids).argmax(-1), batch, strict=False):
                answer.set_result(int(found[len(row) - 1]))


def serve(batches: Batches) -> tuple[str, int]:
    def app(environ: dict, start_response: Callable) -> list[bytes]:
        answer = batches.answer(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        start_response("200 OK", [("Content-Length", str(len(answer)))])
        return [answer]

    try:
        import waitress
    except ImportError:
        kind = type("Server", (ThreadingMixIn, WSGIServer), {})
        quiet = type("Quiet", (WSGIRequestHandler,), {"log_message": lambda *_: None})
        server = make_server("127.0.0.1", 0, app, kind, quiet)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return "wsgiref", server.server_port
    server = waitress.create_server(app, host="127.0.0.1", port=0, threads=2 * ROWS)
    threading.Thread(target=server.run, daemon=True).start()
    return "waitress", server.effective_port


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, example = Decoder(layers=4).eval(), torch.zeros(ROWS, 8, dtype=torch.long)
    compiled = lazyinline.compile(model, backend=options.backend, dynamic=True)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        compiled(example)
        lazyinline.save(compiled, f"{folder}/model.lz")
        start = time.process_time()
        batches = Batches(f"{folder}/model.lz")
        seconds = time.process_time() - start
    name, port = serve(batches)
    print(f"{name}, from a file that took {1000 * seconds:.0f} ms of CPU to open")

    def ask(row: list[int]) -> float:
        start, body = time.perf_counter(), json.dumps(row).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}", body, timeout=120) as reply:
            found, seconds = json.load(reply), time.perf_counter() - start
        with torch.no_grad():
            assert found == int(model(torch.tensor([row]))[0, -1].argmax())
        return 1000 * seconds

    draw = random.Random(0)
    print(f"{'requests':>8}{'median / ms':>13}{'worst / ms':>12}{'links':>7}")
    for _ in range(3):
        sizes = (draw.randint(2, LONGEST) for _ in range(options.requests))
        with ThreadPoolExecutor(ROWS) as clients:
            times = list(clients.map(ask, [draw.choices(range(128), k=size) for size in sizes]))
        middle, report = statistics.median(times), batches.model.last_report
        print(f"{len(times):>8}{middle:>13.1f}{max(times):>12.1f}{report.num_links:>7}")
    print(f"{report.num_compiles} compiles; each answer is eager's")


if __name__ == "__main__":
    main()
