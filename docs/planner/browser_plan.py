"""The planner behind the page in the browser: values of the form in, HTML and JSON out. Runs without torch.

Python runs in a Worker; `worker.mjs` calls these functions with JSON text. A plan is what `moefold plan` gives for the
same question. A search takes seconds, so when only the cluster's numbers change, the layout of the last plan is
predicted under the new numbers first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import escape

from moefold.api.plans import Plan, answer, cluster_for
from moefold.api.runs import load_run
from moefold.errors import MoefoldError
from moefold.hardware.cluster import GPUS
from moefold.plan.report.form import form_html, question_of_form, values_of
from moefold.plan.report.plan_page import page
from moefold.plan.search.proposal import Question
from moefold.recipes.catalog import RECIPES

FIRST = {"run": "deepseek_v3", "gpu": "H100", "gpus": "2048"}
# Changes of these keep the layout worth a look before the search is done.
NUMBERS = {"nic", "imbalance", "headroom", "mtbf_hours", "domain"}


class Session:
    """The planner of one page: remembers the last plan and the values of the form that it answers."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.plan: Plan | None = None

    def answered(self, text: str, progress: Callable[[str, int, int], None] | None = None) -> tuple[str, str]:
        """The page's content and the plan as JSON text; what is wrong with a question is content too, without JSON."""
        given = json.loads(text)
        first = usual_question(given)
        try:
            question = question_of_form(given, first)
            plan = answer(question, progress)
        except MoefoldError as error:
            values = values_of(first) | given
            words = f"<h1>{escape(values['run'])} on {escape(values['gpus'])} {escape(values['gpu'])}</h1>"
            return words + form_html(values, first, str(error).split("\n")), ""
        self.values, self.plan = values_of(question), plan
        return content(page(plan.proposal, form_html(self.values, question))), json.dumps(plan.to_dict())

    def same_layout(self, text: str) -> str:
        """The last plan's layout under new numbers, or nothing where it cannot be the answer."""
        given, plan = json.loads(text), self.plan
        different = {key for key, value in given.items() if self.values.get(key) != value}
        if plan is None or not different or not different <= NUMBERS or set(self.values) - set(given):
            return ""
        try:
            question = question_of_form(given, usual_question(given))
            proposal = answer(replace(question, run=plan.run, fixed="", searching=False)).proposal
        except MoefoldError:
            return ""
        return content(page(proposal, form_html(given, question)))


def usual_question(given: Mapping[str, str]) -> Question:
    """With the GPU's usual links; names and numbers that are none are left for the form's checks to refuse."""
    name = given.get("run", FIRST["run"])
    gpu = given.get("gpu", FIRST["gpu"])
    gpus = given.get("gpus", FIRST["gpus"])
    run = load_run(name if name in RECIPES else FIRST["run"])
    count = int(gpus) if gpus.isdecimal() and 0 < int(gpus) <= 10_000_000 else int(FIRST["gpus"])
    cluster = cluster_for(gpu if gpu in GPUS else FIRST["gpu"], count)
    return Question(run=run, name=run.name, cluster=cluster, named=run)


def content(document: str) -> str:
    """What is inside <main>."""
    return document.partition("<main>")[2].rpartition("</main>")[0]
