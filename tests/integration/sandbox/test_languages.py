"""Programs in other languages than Python: the same confinement, for those whose interpreters are here."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from rlloop.errors import ConfigError
from rlloop.rewards import CodeReward
from rlloop.rewards.code import extract_code
from rlloop.rewards.sandbox import INTERPRETERS, Limits, interpreter, run_program
from rlloop.types import Example

SUMS = {
    "bash": "read a b; echo $((a + b))",
    "javascript": "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number); console.log(a + b)",
    "lua": "local a, b = io.read('n', 'n') print(a + b)",
    "perl": "my ($a, $b) = split ' ', <STDIN>; print $a + $b, \"\\n\"",
    "php": "fscanf(STDIN, '%d %d', $a, $b); echo $a + $b;",
    "ruby": "a, b = gets.split.map(&:to_i); puts a + b",
}
HERE = [language for language, (name, *_) in INTERPRETERS.items() if shutil.which(name)]


def run(source: str, stdin: str = "", **options):
    return asyncio.run(run_program(source, stdin, **{"limits": Limits(seconds=60.0), **options}))


@pytest.mark.parametrize("language", INTERPRETERS)
def test_a_program_is_judged_or_its_language_refused_by_name(language):
    if language not in HERE:
        with pytest.raises(ConfigError, match=f"{language} programs need the interpreter"):
            CodeReward(language=language)
        return
    tests = [{"input": "3 4", "output": "7"}, {"input": "1 1", "output": "3"}]
    wrapped = f"So:\n```{language}\n{SUMS[language]}\n```"
    result = asyncio.run(
        CodeReward(language=language, seconds=60.0)("", wrapped, Example("e", [], "", {"tests": tests}))
    )
    assert (result.reward, result.solved) == (0.5, False)


@pytest.mark.skipif("bash" not in HERE or "perl" not in HERE, reason="needs bash and perl")
def test_it_can_neither_write_nor_start_nor_read_nor_wait(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("here")
    assert "not permitted" in run(f"echo x > {tmp_path}/made", language="bash").stderr
    assert not (tmp_path / "made").exists()
    assert "not permitted" in run("echo $(echo started)", language="bash").stderr
    assert run('print fork() // "none"', language="perl").stdout == "none"
    opened = run('use Socket; print socket(my $s, PF_INET, SOCK_STREAM, 0) ? "open" : "none"', language="perl")
    assert opened.stdout in ("none", "")
    replaced = run(f'exec("/bin/sh", "-c", "echo y > {tmp_path}/made")', language="perl")
    assert not (tmp_path / "made").exists(), replaced  # another program in its place is bound alike
    assert run("while (1) {}", limits=Limits(seconds=0.5), language="perl").status == "timeout"
    assert run('my $x = "a" x 1e9; print length $x', language="perl").status != "ok"
    assert run('print "a" x 1e6', language="perl").status == "output"


def test_tests_in_python_are_of_python_programs():
    if "bash" in HERE:
        example = Example("e", [], "", {"tests": [{"assert": "f(1) == 2"}]})
        with pytest.raises(ValueError, match=r"is Python's, and reward.language is bash"):
            asyncio.run(CodeReward(language="bash")("", "x", example))
    with pytest.raises(ConfigError, match="no sandbox for 'rust' programs; there is one for python, bash"):
        interpreter("rust")


def test_the_block_of_the_language_counts():
    text = "```python\nprint(1)\n```\n```js\nconsole.log(1)\n```\n```text\nno\n```"
    assert extract_code(text, "javascript") == "console.log(1)\n"
    assert extract_code(text) == "print(1)\n"
    assert extract_code("puts 1", "ruby") == "puts 1"
