"""Conversations: masks equal to transformers' own, by templates that mark nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.chat_templates import CHATML, TEMPLATES, WITHOUT_TOOLS, chat_folder, conversation, plain

from moefold.cli.main import main
from moefold.data.chat import ChatTokenizer, Conversation
from moefold.data.token_files import MegatronFile
from moefold.errors import DataError

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """200 conversations by each template: ours without {% generation %} against transformers' with it."""
    marked = transformers.AutoTokenizer.from_pretrained(chat_folder(tmp_path / "marked", TEMPLATES[name]))
    ours = ChatTokenizer(chat_folder(tmp_path / "plain", plain(TEMPLATES[name])))
    theirs = ChatTokenizer(str(tmp_path / "marked"))
    rng, counted = random.Random(3), 0
    for number in range(200):
        row = conversation(rng, tools=number % 2 == 0 and name not in WITHOUT_TOOLS)
        expected = marked.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        for tokenizer in (ours, theirs):
            found = tokenizer.encode_chat(Conversation(**row))
            assert found.ids.tolist() == expected["input_ids"]
            assert found.loss_mask.astype(int).tolist() == expected["assistant_masks"], row
        counted += sum(expected["assistant_masks"])
        assert 0 < sum(expected["assistant_masks"]) < len(expected["input_ids"])
    print(f"{name}: 200 conversations, {counted:,} tokens count")


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def decoded(folder: Path, prefix: Path, wanted: bool = True) -> list[str]:
    """Of every document the text of the tokens that count, or of those that do not."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    file, found = MegatronFile(str(prefix)), []
    for number in range(file.num_documents):
        start, end = file.document_span(number)
        ids, mask = file.window(start, end - start), file.loss_mask(start, end - start)
        found.append(tokenizer.decode(ids[mask == wanted]))
    return found


ROWS = [
    {
        "messages": [
            {"role": "user", "content": "What is the weather?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]},
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "It rains."},
            {"role": "user", "content": "Thanks"},
            {"role": "assistant", "content": "Bye."},
        ]
    },
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": None},
]


def test_chat_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(chat_folder(tmp_path / "model", plain(CHATML)))
    rows = write(tmp_path / "chat.jsonl", ROWS)
    words = ["tokenize", rows, "--chat", "--tokenizer", str(folder), "--json"]
    assert main([*words, "-o", str(tmp_path / "chat")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["documents"] == 2 and facts["kind"] == "chat"
    call = '\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>'
    end = "<think>\n\n</think>\n\nBye.<|im_end|>"
    # The first answer comes after the last question no more, so it has no reasoning.
    assert decoded(folder, tmp_path / "chat") == [
        f"{call}It rains.<|im_end|>{end}",
        "<think>\n\n</think>\n\nHello<|im_end|>",
    ]
    origin = json.loads((tmp_path / "chat.origin.json").read_text())
    assert (origin["kind"], origin["loss_on"], origin["has_loss_mask"]) == ("chat", ["assistant"], True)
    assert main([*words, "-o", str(tmp_path / "both"), "--loss-on", "assistant,tool"]) == 0
    assert decoded(folder, tmp_path / "both")[0] == f"{call}rainIt rains.<|im_end|>{end}"
    assert main([*words, "-o", str(tmp_path / "user"), "--loss-on", "user"]) == 0
    assert decoded(folder, tmp_path / "user") == ["What is the weather?<|im_end|>Thanks<|im_end|>", "Hi<|im_end|>"]


@pytest.mark.slow
def test_the_number_of_workers_changes_no_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefold.data.input_rows.TASK_BYTES", 5000)
    folder = chat_folder(tmp_path / "model", plain(CHATML))
    rng = random.Random(0)
    rows = write(tmp_path / "chat.jsonl", [conversation(rng, tools=True) for _ in range(60)])
    for workers in ("1", "2"):
        words = ["tokenize", rows, "--chat", "--tokenizer", folder, "--workers", workers]
        assert main([*words, "-o", str(tmp_path / workers)]) == 0
    for ending in (".bin", ".idx", ".loss_mask.bin", ".origin.json"):
        assert (tmp_path / f"1{ending}").read_bytes() == (tmp_path / f"2{ending}").read_bytes()


USER = {"role": "user", "content": "Hi"}
BAD_ROWS = {
    "nothing counts": ({"messages": [USER]}, "no token counts in the loss: the conversation has user"),
    "no messages": ({"text": "x"}, "has no key 'messages'; it has 'text'"),
    "no list": ({"messages": "x"}, "is text, and not JSON"),
    "no role": ({"messages": [{"content": "x"}]}, "message 0 has no role"),
    "no question": ({"messages": [{"role": "assistant", "content": "x"}]}, "message 0 is the assistant's"),
    "no tools": ({"messages": [USER], "tools": "{"}, "'tools' is text, and not JSON"),
    "template": (
        {"messages": [USER, {"role": "judge", "content": "x"}]},
        "the chat template refuses 2 messages: unknown",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    row, expected = BAD_ROWS[name]
    folder = chat_folder(tmp_path / "model", plain(TEMPLATES["mistral"]))
    rows = write(tmp_path / "chat.jsonl", [ROWS[1], row])
    assert main(["tokenize", rows, "--chat", "--tokenizer", folder, "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "chat.jsonl: line 2: " in said and expected in said
    assert not list(tmp_path.glob("out*"))


def test_a_template_whose_turns_cannot_be_found_is_refused(tmp_path: Path) -> None:
    """Mistral's own puts tools before the last question: the beginning changes with the number of messages."""
    shown = "{% for m in messages %}{% if loop.last %}{{ '[AVAILABLE_TOOLS]' }}{% endif %}{{ m.content }}{% endfor %}"
    tokenizer = ChatTokenizer(chat_folder(tmp_path / "model", shown))
    with pytest.raises(DataError, match="message 1: which tokens are its own cannot be told exactly"):
        tokenizer.encode_chat(Conversation(ROWS[0]["messages"]))
    numbered = "{% for m in messages %}{{ messages | length }}{{ m.content }}{{ '</s>' }}{% endfor %}"
    tokenizer = ChatTokenizer(chat_folder(tmp_path / "model", numbered))
    with pytest.raises(DataError, match="cannot be told exactly"):
        tokenizer.encode_chat(Conversation(ROWS[0]["messages"]))


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = chat_folder(tmp_path / "model", "")
    rows, out = write(tmp_path / "chat.jsonl", ROWS), ["-o", str(tmp_path / "out")]
    assert main(["tokenize", rows, "--chat", "--tokenizer", folder, *out]) == 2
    assert "no chat template; give one with --chat-template" in capsys.readouterr().err
    (tmp_path / "given.jinja").write_text(plain(CHATML))
    given = ["--chat-template", str(tmp_path / "given.jinja")]
    assert main(["tokenize", rows, "--chat", "--tokenizer", folder, *given, *out]) == 0
    assert main(["tokenize", rows, "--chat", *out]) == 2
    assert "needs --tokenizer FOLDER" in capsys.readouterr().err


PAIRS = [
    {
        "prompt": [USER],
        "chosen": [{"role": "assistant", "content": "good"}],
        "rejected": [{"role": "assistant", "content": "bad"}],
    },
    {
        "chosen": [USER, {"role": "assistant", "content": "shared"}, USER, {"role": "assistant", "content": "yes"}],
        "rejected": [USER, {"role": "assistant", "content": "shared"}, USER, {"role": "assistant", "content": "no"}],
    },
    {"prompt": "two and two", "chosen": " is four", "rejected": " is five"},
]


def test_preference_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(chat_folder(tmp_path / "model", plain(TEMPLATES["llama"])))
    words = ["tokenize", "--preference", "--tokenizer", str(folder), "-o", str(tmp_path / "out")]
    assert main([*words, write(tmp_path / "pairs.jsonl", PAIRS)]) == 0
    assert "6 documents (3 pairs)" in capsys.readouterr().out
    counting = ["good<|eot_id|>", "bad<|eot_id|>", "yes<|eot_id|>", "no<|eot_id|>"]
    assert decoded(folder, tmp_path / "out") == [*counting, " is four<|endoftext|>", " is five<|endoftext|>"]
    # The prompt is the same to the token.
    prompts = decoded(folder, tmp_path / "out", wanted=False)
    assert prompts[::2] == prompts[1::2] and "shared<|eot_id|>" in prompts[2]
    assert json.loads((tmp_path / "out.origin.json").read_text())["kind"] == "preference"
    mask = np.fromfile(tmp_path / "out.loss_mask.bin", np.uint8)
    assert len(mask) == MegatronFile(str(tmp_path / "out")).num_tokens
    for row, expected in (
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "'chosen' and 'rejected' are the same"),
        ({"prompt": "x", "chosen": "a"}, "has no key 'rejected'"),
        ({"chosen": [USER], "rejected": [USER, USER]}, "'chosen': no token counts"),
        ({"prompt": "x", "chosen": "", "rejected": "a"}, "'chosen': no token counts"),
    ):
        assert main([*words, write(tmp_path / "bad.jsonl", [PAIRS[0], row]), "--overwrite"]) == 2
        said = capsys.readouterr().err
        assert "bad.jsonl: line 2: " in said and expected in said
