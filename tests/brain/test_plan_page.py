"""The planner's page: whole, self-contained, with the right numbers; the trace; and the server's manners."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import pytest
from tests.pages import assert_whole

from moefold.cli.main import main
from moefold.cli.plan_serve import make_server
from moefold.config.loading import override
from moefold.errors import ConfigError
from moefold.hardware.cluster import cluster_of
from moefold.plan.report.form import form_html, question_of_form, values_of
from moefold.plan.report.plan_page import page
from moefold.plan.search.explain import seconds
from moefold.plan.search.proposal import Proposal, Question, propose
from moefold.plan.search.space import pinned
from moefold.plan.timing.step_timeline import step_timeline, step_trace
from moefold.recipes.catalog import recipe
from moefold.units import format_bytes

FIXED = "tp=1,cp=1,pp=2,4,vpp=1,2,ep=8,etp=1,sequences=1,replicate=1,recompute=none,experts"


def whole(html: str) -> str:
    assert_whole(html)
    assert html.startswith("<!doctype html>") and "src=" not in html
    return html


@pytest.fixture(scope="module")
def question() -> Question:
    run = override(recipe("olmoe_1b_7b"), {"data.global_batch": 256})
    return Question(run, "olmoe_1b_7b", cluster_of("H100", 16), fixed=FIXED)


@pytest.fixture(scope="module")
def proposal(question: Question) -> Proposal:
    return propose(question)


def test_the_page_is_whole_and_says_what_was_found(proposal: Proposal) -> None:
    html = whole(page(proposal))
    chosen = proposal.chosen
    for words in (
        "olmoe_1b_7b on 16 H100",
        seconds(chosen.time.step_seconds),
        format_bytes(chosen.memory.total),
        "Why this layout",
        "binds:",
        "Memory of every pipeline rank",
        "Where the time goes",
        "The order in time",
        "Time against memory",
        "the network were twice as fast",
        "Goodput under failures",
        "torchrun",
    ):
        assert words in html, words
    assert html.count('class="track"') == chosen.workload.parallel.pp
    assert max(map(len, html.split("\n"))) < 500_000 and len(html) < 1_000_000


def test_a_comparison_has_no_empty_rows_and_names_every_unit() -> None:
    """Kernels are those of moefold; a small model's interval is milliseconds at both ends."""
    small = override(recipe("debug_tiny"), {"data.global_batch": 8})
    alone = Question(
        small, "debug_tiny", cluster_of("H100", 1), framework="megatron", fixed="recompute=none,graphs=none"
    )
    made = page(propose(alone))
    assert "<td class=text>kernels</td>" not in made and "<td class=text>graphs</td>" in made
    assert re.search(r"80 %: [\d.]+ ms to [\d.]+ ms", made)


def test_a_page_without_a_search(question: Question) -> None:
    run = override(question.run, {"parallel.ep": 8})
    found = propose(Question(run, "<b>mine</b>", question.cluster, searching=False))
    html = whole(page(found))
    assert "&lt;b&gt;mine&lt;/b&gt;" in html and "Time against memory" not in html


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_overlapped", "zb_v", "dualpipe_v"])
def test_every_order_can_be_drawn(question: Question, schedule: str) -> None:
    virtual = 1 if schedule == "1f1b" else 2
    changes = {"parallel.pp": 2, "parallel.vpp": virtual, "parallel.schedule": schedule, "parallel.ep": 8}
    found = propose(Question(override(question.run, changes), "mine", question.cluster, searching=False))
    assert 'class="f"' in whole(page(found))
    step = step_timeline(found.chosen.workload)
    assert step.timeline.order.name == schedule and 0 < step.shown <= step.microbatches
    shares = [step.exposed(action) for row in step.timeline.order.actions for action in row]
    assert all(0 <= share < 1 for share in shares) and max(shares) > 0


def test_the_drawn_order_takes_about_the_predicted_time(proposal: Proposal) -> None:
    """With all microbatches, the simulated order and the closed form differ by what happens once per step."""
    workload = proposal.chosen.workload
    step = step_timeline(workload, most_boxes=10**6)
    assert step.shown == workload.microbatches
    assert step.timeline.finish == pytest.approx(proposal.chosen.time.step_seconds, rel=0.15)


def test_the_trace_is_what_was_simulated(proposal: Proposal) -> None:
    step = step_timeline(proposal.chosen.workload)
    events = json.loads(json.dumps(step_trace(step)))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and event["tid"] % 2 == 0]
    assert len(slices) == sum(map(len, step.timeline.order.actions))
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(step.timeline.finish * 1e6)
    waits = sum(event["dur"] for event in events if event["ph"] == "X" and event["tid"] % 2)
    assert waits == pytest.approx(sum(event["args"]["exposed_us"] for event in slices))


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "olmoe_1b_7b", "--gpus", "16", "--global-batch", "256", "--fix", FIXED]
    html, trace = tmp_path / "plan.html", tmp_path / "plan.json"
    assert main([*words, "--html", str(html), "--trace", str(trace)]) == 0
    whole(html.read_text())
    assert json.loads(trace.read_text())["traceEvents"]
    assert main([*words, "--html", str(tmp_path / "no" / "plan.html")]) == 2
    assert "choose another --html" in capsys.readouterr().err


# ---- the form and the server ----


def test_a_form_asks_the_question_it_shows(question: Question) -> None:
    again = question_of_form(values_of(question), question)
    assert replace(again, fixed="") == replace(question, fixed="")
    assert dict(pinned(again.fixed)) == dict(pinned(question.fixed))
    asked = question_of_form({"gpus": "32", "gpu": "GB200", "domain": "72", "nic": "100", "ep": "16"}, question)
    assert (asked.cluster.num_gpus, asked.cluster.gpu.name, asked.cluster.nic_gb_s) == (32, "GB200", 100)
    assert "ep=16" in asked.fixed and "replicate=1" in asked.fixed


def test_every_wrong_value_of_a_form_is_told(question: Question) -> None:
    wrong = {"run": "/etc/passwd", "gpu": "TPU", "gpus": "1e99", "nic": "nan", "tp": "1,ep=3", "seq": "4096.5"}
    with pytest.raises(ConfigError) as error:
        question_of_form(wrong, question)
    assert {problem.path for problem in error.value.problems} == set(wrong)
    html = form_html({"run": '"><script>', "nic": '"><script>'}, question, ["<script>"])
    assert "<script>" not in html


@pytest.fixture(scope="module")
def port(question: Question) -> Iterator[int]:
    server = make_server(question, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def ask(port: int, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.getheaders())


def test_the_server_answers_with_the_page_and_a_form(port: int) -> None:
    status, html, headers = ask(port, "/?gpus=16&ep=8")
    assert status == 200 and '<form class="ask"' in whole(html.replace(' action="/"', ""))
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    status, text, _ = ask(port, "/plan.json?gpus=32")
    assert status == 200 and json.loads(text)["gpus"] == 32


def test_the_server_refuses_what_it_should(port: int) -> None:
    assert ask(port, "/?gpus=0")[0] == 400 and "gpus: cannot be" in ask(port, "/?gpus=0")[1]
    assert ask(port, "/?ep=8&tp=8&pp=64")[0] == 400
    assert ask(port, "/", host="evil.example")[0] == 403
    assert ask(port, "/../etc/passwd")[0] == 404 and ask(port, "/" + "a" * 5000)[0] == 404
    assert ask(port, "/", method="POST")[0] == 501


def test_the_server_listens_on_this_machine_only(question: Question) -> None:
    server = make_server(question, 0)
    assert server.server_address[0] == "127.0.0.1"
    server.server_close()
    assert main(["plan", "olmoe_1b_7b", "--gpus", "16", "--serve", "99999"]) == 2
