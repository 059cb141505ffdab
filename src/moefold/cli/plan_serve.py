"""`moefold plan --serve`: the plan's page with a form, on this machine only.

GET only. It listens on the loopback address and answers only requests whose Host header names it, so that no other site
can reach it by DNS rebinding, and no request that another site's page makes. Nothing is fetched, stored or executed;
`plan/report/form.py` checks values before the planner gets them.

Each connection has a thread, and a few seconds in all to send its request: one that is opened and never finished, or
fed byte by byte, delays nobody. Connections beyond a few are closed. The planner works on one question at a time.
"""

from __future__ import annotations

import io
import json
import socket
import time
from contextlib import suppress
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from threading import BoundedSemaphore, Lock
from urllib.parse import parse_qsl, urlsplit

from moefold.errors import MoefoldError
from moefold.html.document import DOWNLOAD, content_policy, document
from moefold.plan.report.form import SCRIPT, form_html, question_of_form, values_of
from moefold.plan.report.plan_page import CSS, page
from moefold.plan.report.proposal_report import proposal_data
from moefold.plan.search.proposal import Proposal, Question, propose

HOST = "127.0.0.1"
_LONGEST_PATH, _MOST_KEPT = 4000, 64
MAX_CONNECTIONS, REQUEST_SECONDS = 16, 5.0
_HEADERS = {
    "Content-Security-Policy": f"{content_policy(SCRIPT, DOWNLOAD)}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def serve(question: Question, port: int) -> int:
    """Serves until interrupted."""
    if not 0 <= port <= 65535:
        raise MoefoldError(f"no port {port}; use a number from 1024 to 65535")
    try:
        server = make_server(question, port)
    except OSError as error:
        raise MoefoldError(f"port {port} of {HOST}: {error.strerror}; choose another: --serve PORT") from error
    with server:
        print(f"http://{HOST}:{server.server_port}/   serving until Ctrl-C; the page takes seconds to plan", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def make_server(question: Question, port: int) -> HTTPServer:
    """A server that is bound to the port; 0 takes a free one."""

    class Handler(PlanHandler):
        first = question
        kept: dict[str, Proposal] = {}  # noqa: RUF012 - one per server, on purpose
        planning = Lock()

    return PlanServer((HOST, port), Handler)


class PlanServer(ThreadingHTTPServer):
    """At most ``MAX_CONNECTIONS`` at a time."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """A client that went away is no event."""


class _InTime(io.RawIOBase):
    """Reads a socket until a moment, however the bytes are spread over the time before it."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.connection, self.ends = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        left = self.ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request did not come in time")
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


class PlanHandler(BaseHTTPRequestHandler):
    first: Question
    # Proposals by the query that asked for them.
    kept: dict[str, Proposal]
    planning: Lock
    server_version, sys_version = "moefold", ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_InTime(self.connection, REQUEST_SECONDS))

    def do_GET(self) -> None:
        self.connection.settimeout(REQUEST_SECONDS)
        url = urlsplit(self.path)
        port = self.server.server_port if isinstance(self.server, HTTPServer) else 0
        if self.headers.get_all("Host") not in ([f"{HOST}:{port}"], [f"localhost:{port}"]):
            self._send(HTTPStatus.FORBIDDEN, "this server answers to its loopback name only", "text/plain")
        elif self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            self._send(HTTPStatus.FORBIDDEN, "another site's page asked for this", "text/plain")
        elif url.path not in ("/", "/plan.json") or len(self.path) > _LONGEST_PATH:
            self._send(HTTPStatus.NOT_FOUND, "there is only one page: /", "text/plain")
        else:
            self._plan(url.query, url.path == "/plan.json")

    def _plan(self, query: str, as_json: bool) -> None:
        try:
            asked = dict(parse_qsl(query, max_num_fields=64))
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, "more than 64 values", "text/plain")
            return
        values = values_of(self.first) | asked
        try:
            with self.planning:
                proposal = self._propose(query, values)
        except MoefoldError as error:
            self._refuse(values, error, as_json)
            return
        if as_json:
            self._send(HTTPStatus.OK, json.dumps(proposal_data(proposal)), "application/json")
        else:
            self._send(HTTPStatus.OK, page(proposal, form_html(values, self.first), SCRIPT), "text/html")

    def _propose(self, query: str, values: dict[str, str]) -> Proposal:
        if query not in self.kept:
            if len(self.kept) >= _MOST_KEPT:
                self.kept.pop(next(iter(self.kept)))
            self.kept[query] = propose(question_of_form(values, self.first))
        return self.kept[query]

    def _refuse(self, values: dict[str, str], error: MoefoldError, as_json: bool) -> None:
        problems = str(error).split("\n")
        if as_json:
            self._send(HTTPStatus.BAD_REQUEST, json.dumps({"problems": problems}), "application/json")
            return
        sections = [f"<h1>{escape(values['run'])}</h1>", form_html(values, self.first, problems)]
        self._send(HTTPStatus.BAD_REQUEST, document("moefold plan", sections, CSS, SCRIPT), "text/html")

    def _send(self, status: HTTPStatus, text: str, kind: str) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        """Of every answer, also of errors that the library finds in a request."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""
