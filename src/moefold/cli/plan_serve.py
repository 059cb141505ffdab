"""`moefold plan --serve`: the plan's page with a form, on this machine only.

One request at a time, GET only. It listens on the loopback address and answers only requests whose Host header names
it, so that no other site can reach it by DNS rebinding. Nothing is fetched, stored or executed; `plan/report/form.py`
checks values before the planner gets them.
"""

from __future__ import annotations

import json
from contextlib import suppress
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qsl, urlsplit

from moefold.errors import MoefoldError
from moefold.html.document import document
from moefold.plan.report.form import SCRIPT, form_html, question_of_form, values_of
from moefold.plan.report.plan_page import CSS, page
from moefold.plan.report.proposal_report import proposal_data
from moefold.plan.search.proposal import Proposal, Question, propose

HOST = "127.0.0.1"
_LONGEST_PATH, _MOST_KEPT = 4000, 64
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; form-action 'self'; base-uri 'none'"
)


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

    return HTTPServer((HOST, port), Handler)


class PlanHandler(BaseHTTPRequestHandler):
    first: Question
    # Proposals by the query that asked for them.
    kept: dict[str, Proposal]
    server_version, sys_version = "moefold", ""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        port = self.server.server_port if isinstance(self.server, HTTPServer) else 0
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._send(HTTPStatus.FORBIDDEN, "this server answers to its loopback name only", "text/plain")
        elif url.path not in ("/", "/plan.json") or len(self.path) > _LONGEST_PATH:
            self._send(HTTPStatus.NOT_FOUND, "there is only one page: /", "text/plain")
        else:
            self._plan(url.query, url.path == "/plan.json")

    def _plan(self, query: str, as_json: bool) -> None:
        values = values_of(self.first) | dict(parse_qsl(query, max_num_fields=64))
        try:
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
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""
