"""The Python blocks of README.md and docs/python.md, run as they are written, and what they leave behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import rlloop
from rlloop.audit import verify
from rlloop.recipes.custom.tiny import write_tiny

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> str:
    return "\n".join(BLOCK.findall((ROOT / page).read_text()))


def test_the_blocks_of_the_python_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks("docs/python.md"), "docs/python.md", "exec"), {"__name__": "page"})
    for name in ("grpo", "train", "own"):
        run = rlloop.Run(tmp_path / "runs" / name)
        assert run.status == "finished"
        assert {line["tokens_different"] for line in run.certificate} == {0}
    assert [check for check in verify(tmp_path / "runs" / "own") if check.problems] == []


def test_the_blocks_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny(Path("path/to/a/hugging-face-folder"), hidden_size=32, num_layers=1)
    names: dict[str, Any] = {"__name__": "page"}
    text = blocks("README.md")
    small = '{"max_tokens": 4, "num_prompts": 2}, trainer={"num_steps": 1}, eval={"num_draws": 4}'
    assert '{"max_tokens": 32}' in text
    exec(compile(text.replace('{"max_tokens": 32}', small), "README.md", "exec"), names)
    assert all(weight.grad is not None for weight in names["model"].parameters())
    assert names["run"].status == "finished"
