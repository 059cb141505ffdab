"""The planner in the browser answers as the command line does, without torch; in Chromium too, where there is one."""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner_page import SOURCE, _moefold_files, build
from moefold.cli.main import main

ASKED = {"run": "olmoe_1b_7b", "gpu": "H100", "gpus": "16", "tp": "1", "cp": "1", "pp": "1", "vpp": "1", "ep": "8"}
FIXED = "tp=1,cp=1,pp=1,vpp=1,ep=8"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT = 30.0


@pytest.fixture(scope="module")
def bridge() -> Any:
    spec = importlib.util.spec_from_file_location("browser_plan", SOURCE / "browser_plan.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_seconds(plan: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in plan.items() if key != "searched"} | {
        "searched": {key: value for key, value in plan["searched"].items() if key != "seconds"}
    }


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    return without_seconds(json.loads(capsys.readouterr().out))


def test_the_page_answers_as_the_command_line_does(bridge: Any, capsys: pytest.CaptureFixture[str]) -> None:
    session = bridge.Session()
    html, data = session.answered(json.dumps(ASKED))
    own = planned(capsys, "olmoe_1b_7b", "--gpu", "H100", "--gpus", "16", "--fix", FIXED)
    assert without_seconds(json.loads(data)) == own
    assert "olmoe_1b_7b on 16 H100" in html and '<form class="ask"' in html and "<script" not in html
    # A slider: the layout stays, its prediction is another.
    moved = session.values | {"imbalance": "2"}
    assert session.same_layout(json.dumps(session.values)) == ""
    quick = session.same_layout(json.dumps(moved))
    assert "busiest rank over mean <output>2</output>" in quick and "ep8" in quick
    assert session.same_layout(json.dumps(moved | {"run": "deepseek_v3"})) == ""


def test_wrong_values_are_named_and_nothing_is_planned(bridge: Any) -> None:
    wrong = {"run": "no_such_run", "gpu": "<b>", "gpus": "-3", "nic": "7e9"}
    html, data = bridge.Session().answered(json.dumps(wrong))
    assert data == "" and "<b>" not in html
    for words in ("no_such_run", "gpus", "nic"):
        assert words in html


def test_what_the_page_loads_of_moefold_is_enough_and_has_no_torch(tmp_path: Path) -> None:
    for name, body in _moefold_files():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(body)
    code = (
        f"import sys, json; sys.path.insert(0, {str(tmp_path)!r}); import browser_plan, moefold\n"
        f"assert moefold.__file__.startswith({str(tmp_path)!r})\n"
        f"html, data = browser_plan.Session().answered({json.dumps(ASKED)!r})\n"
        "assert json.loads(data)['chosen']['layout']['ep'] == 8\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'imports what the browser does not have'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class Files(SimpleHTTPRequestHandler):
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript", ".wasm": "application/wasm"}

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("npm") is None or CHROMIUM is None:
        pytest.skip("npm and Chromium are not both installed")
    folder = tmp_path_factory.mktemp("planner")
    build(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/index.html"
    server.shutdown()


@pytest.mark.slow
@pytest.mark.timing
def test_chromium_plans_deepseek_v3_on_2048_gpus(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as engines:
        browser = engines.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 400, "height": 800})
        outside: list[str] = []
        page.on("request", lambda request: outside.append(request.url) if "127.0.0.1" not in request.url else None)
        began = time.monotonic()
        page.goto(f"{address}?run=deepseek_v3&gpu=H100&gpus=2048")
        page.wait_for_selector("body[data-answers='1'], #status.wrong", timeout=400_000)
        took = time.monotonic() - began
        assert page.locator("#status.wrong").count() == 0, page.inner_text("#status")
        for width in (400, 1000, 1600):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        with page.expect_download() as download:
            page.click("a[download]")
        found = json.loads(Path(download.value.path()).read_text("utf-8"))
        browser.close()
    assert not [url for url in outside if not url.startswith("blob:")]
    assert without_seconds(found) == planned(capsys, "deepseek_v3", "--gpu", "H100", "--gpus", "2048")
    assert took < LIMIT, f"{took:.1f} s"
