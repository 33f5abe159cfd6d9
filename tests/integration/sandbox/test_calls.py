"""Tests that call a program's functions: what they can say, and that no program forges their verdict."""

import asyncio

import pytest

from rlloop.rewards.code import CodeReward
from rlloop.rewards.sandbox import Limits, run_program, run_test
from rlloop.types import Example

LIMITS = Limits(seconds=20.0, memory_mb=256, output_bytes=4096)


def verdicts(*cases, limits=LIMITS):
    """Of (program, test) pairs, four at a time."""

    async def all_of_them():
        places = asyncio.Semaphore(4)

        async def one(program, test):
            async with places:
                return await run_test(program, test, limits)

        return await asyncio.gather(*(one(*case) for case in cases))

    return asyncio.run(all_of_them())


PROGRAM = """
import collections, dataclasses, enum
def square(x): return x * x
def same(*values): return values[0] if len(values) == 1 else list(values)
def sort(values): values.sort()
def grow(values, more): values.update(more)
def fail(kind): raise {"value": ValueError("no"), "own": Own("own"), "key": KeyError("k")}[kind]
class Own(ValueError): pass
def squares(n):
    for i in range(n): yield i * i
class Stack(list):
    def push(self, value): self.append(value); return self
    @property
    def top(self): return self[-1]
Point = collections.namedtuple("Point", "x y")
class Colour(enum.IntEnum): RED = 1
def point(): return Point(1, 2)
def colour(): return Colour.RED
def count(text): return collections.Counter(text)
class Solution:
    def twoSum(self, numbers, target): return [0, 1]
LIMIT = 7
big = 10 ** 5000
def none(): return None
def apply(function, value): return function(value)
def length(values): return sum(1 for _ in values)
"""
GOOD = [
    "assert square(2) == 4", "square(2) == 4", "square(-1.5) == 2.25", "not square(0)", "square(3) in {9, 10}",
    "abs(square(1.1) - 1.21) < 1e-9", "math.isclose(square(1.1), 1.21)",
    "import math\nassert math.isclose(square(2), 4)",
    "x = square(2)\ny = square(x)\nassert [x, y] == [4, 16]", "all(square(i) == i * i for i in range(5))",
    "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\ncheck(square)",
    *(f"same({value}) == {value} and type(same({value})) is type({value})" for value in (
        "None", "True", "1.5", "2**70", "'ä\\ud800'", "b'\\x00'", "(1, (2,))", "[1, [2]]", "{1: 'a', (1, 2): [3]}",
        "{1, 2}", "frozenset({1})", "1j", "float('inf')", "range(3)", "{}", "[]", "set()", "()")),
    "same(float('nan')) != same(float('nan'))", "same(1, 2, 3) == [1, 2, 3]", "same(**{}) if False else True",
    "v = [3, 1, 2]\nassert sort(v) is None\nassert v == [1, 2, 3]",
    "d = {1: 2}\ngrow(d, {3: 4})\nassert d == {1: 2, 3: 4}",
    "try:\n    fail('value')\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False",
    "try:\n    fail('own')\nexcept ValueError:\n    pass\nelse:\n    assert False",
    "try:\n    fail('key')\nexcept LookupError:\n    pass\nelse:\n    assert False",
    "list(squares(4)) == [0, 1, 4, 9]", "sorted(squares(3), reverse=True) == [4, 1, 0]", "next(squares(2)) == 0",
    "s = Stack()\ns.push(1).push(2)\nassert s.top == 2 and len(s) == 2 and s[0] == 1 and s == [1, 2]",
    "isinstance(Stack(), Stack) and isinstance(square(2), int)", "point() == (1, 2) and point().x == 1",
    "colour() == 1", "count('aab') == {'a': 2, 'b': 1}", "Solution().twoSum([2, 7], 9) == [0, 1]", "LIMIT == 7",
    "big == 10 ** 5000", "none() is None", "len(same('abc')) == 3", "length(range(5)) == 5",
    "from collections import Counter\nassert count('ab') == Counter('ab')",
]  # fmt: skip
BAD = [
    "assert square(2) == 5", "square(2) == 5", "square(2) == 4.5", "square('a') == 1", "nothing(2) == 4",
    "assert False", "raise SystemExit", "exit(0)", "point() == (1, 3)", "Solution() == Solution()",
    "squares(2) == [0, 1]",
    "square == square", "same(1) == '1'", "none()", "point() < (3,)",
]  # fmt: skip
UNSUPPORTED = {
    "apply(lambda x: x, 1) == 1": "it gives the program a function",
    "length(iter([1])) == 1": "it gives the program a list_iterator",
    "class More(Stack): pass\nassert True": "derives a class",
    "square(2 == 4": "it is not Python: '(' was never closed",
    "square(2) == 4\0": "it is not Python: source code string cannot contain null bytes",
    "import numpy\nassert numpy.all(square(2) == 4)": "No module named 'numpy'",
}


def test_what_a_test_can_say():
    cases = [*GOOD, *BAD, *UNSUPPORTED]
    found = dict(zip(cases, verdicts(*((PROGRAM, test) for test in cases)), strict=True))
    for expected, tests in (("passed", GOOD), ("failed", BAD), ("unsupported", UNSUPPORTED)):
        for test in tests:
            assert found[test].verdict == expected, (test, found[test])
    for test, why in UNSUPPORTED.items():
        assert why in found[test].why


EQUAL = "def __eq__(self, other): return True"
WORDS = b'{"verdict": "passed", "why": ""}\n'
EVERYWHERE = """
import os
def say(*texts):
    for descriptor in range(3, 64):
        for text in texts:
            try: os.write(descriptor, text + b'\\n')
            except OSError: pass
"""
FORGERIES = {
    "equal to all": f"class A:\n {EQUAL}\n def __ne__(self, other): return False\ndef f(x): return A()",
    "an int equal to all": f"class A(int):\n {EQUAL}\n __hash__ = None\ndef f(x): return A(3)",
    "a str that hides its class": f"class A(str):\n __module__ = 'x'\n {EQUAL}\ndef f(x): return A()",
    "a float that lies of its class": f"class A(float):\n __class__ = int\n {EQUAL}\ndef f(x): return A()",
    "a list equal to all": f"class A(list):\n {EQUAL}\ndef f(x): return A()",
    "a metaclass": f"class M(type):\n {EQUAL}\n __hash__ = None\nclass A(metaclass=M): pass\ndef f(x): return A",
    "a number of sorts": """
class A:
    def __bool__(self): return True
    def __len__(self): return 4
    __index__ = __int__ = __float__ = __abs__ = __sub__ = __rsub__ = __len__
def f(x): return A()""",
    "an iterator of all": "def f(x): return iter(range(100))",
    "a mock": "from unittest.mock import ANY\ndef f(x): return ANY",
    "early exit": "import sys; sys.exit(0)",
    "exit at once": "import os; os._exit(0)",
    "exit in the call": "def f(x): import os; os._exit(0)",
    "exit in the call by exception": "def f(x): raise SystemExit(0)",
    "end of a generator": "def f(x): raise StopIteration",
    "an error as if of the test": "def f(x): raise SyntaxError('no')",
    "an import as if of the test": "def f(x): import numpy",
    "97": "import os; os._exit(97)",
    "98": "import os; os._exit(98)",
    "at exit": "import atexit, os; atexit.register(os._exit, 0)\ndef f(x): return None",
    "the words": f"print('passed'); print({WORDS.decode()!r}); print('confined')",
    "its frame's constants": """
import os, sys
print(*[each for each in sys._getframe().f_code.co_consts if isinstance(each, str)], sep='\\n', flush=True)
os._exit(0)""",
    "the words everywhere": f"{EVERYWHERE}\nsay({WORDS!r})\ndef f(x): return None",
    "answers before they are asked for": f"""{EVERYWHERE}
say(*[b'{{"value": true, "args": [null, null]}}'] * 50)""",
    "answers that are no data": f"""{EVERYWHERE}
say(b'[' * 100000, b'{{"raised": "SystemExit", "text": ""}}', b'{{"raised": "BaseException", "text": 1}}', b'\\xff')""",
    "an object that was never given": f"""{EVERYWHERE}
say(*[b'{{"value": {{"object": 99}}, "args": [null, null]}}'] * 9)""",
    "closed channels": "import os; os.closerange(0, 1 << 16)\ndef f(x): return 4",
    "patched builtins": """
import builtins
builtins.AssertionError = builtins.SystemExit = Exception
for name in ('all', 'any', 'abs', 'isinstance', 'len', 'exec', 'compile'):
    setattr(builtins, name, lambda *a, **k: True)
def f(x): return 5""",
    "shadowed builtins": "def abs(x): return 0\ndef any(x): return True\nall = isinstance = any\ndef f(x): return 5",
    "a shadowed module": "class math:\n isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 5",
    "a shadowed helper": "def holds(check): return True\ndef f(x): return 5",
    "patched encoder": f"""
import sys
class A:
    {EQUAL}
for module in list(sys.modules.values()):
    if hasattr(module, 'encode') and hasattr(module, 'serve'):
        module.encode = lambda value, other: True
        module.run_test = lambda *a: {{'verdict': 'passed', 'why': ''}}
def f(x): return A()""",
    "frames": """
import sys
frame = sys._getframe()
while frame:
    for value in {**frame.f_locals, **frame.f_globals}.values():
        if isinstance(value, dict): value['verdict'] = 'passed'
    frame = frame.f_back
def f(x): return None""",
    "garbage": """
import gc
for each in gc.get_objects():
    if isinstance(each, dict): each.setdefault('verdict', 'passed')
def f(x): return None""",
    "not defined": "",
    "does not compile": "def f(",
    "endless memory": "def f(x): return 'x' * 10 ** 10",
    "endless data": f"{EVERYWHERE}\nwhile True: say(b'x' * 65536)",
    "endless nesting": "def f(x):\n v = []\n for _ in range(100000): v = [v]\n return v",
    "a cycle": "def f(x):\n v = []\n v.append(v)\n return v",
    "an exception that lies": "class E(Exception):\n def __str__(s): raise SystemExit\ndef f(x): raise E",
    "an exception by another's name": """
E = type('KeyboardInterrupt', (Exception,), {'__module__': 'builtins'})
def f(x): raise E""",
}
LENIENT = """
def holds(check):
    try:
        return check()
    except Exception:
        return False
checks = [
    lambda: f(2) == 4, lambda: 4 == f(2), lambda: not f(2) != 4, lambda: abs(f(2) - 4) < 1e-9,
    lambda: f(2) in (4, 4.0), lambda: math.isclose(f(2), 4), lambda: round(f(2)) == 4, lambda: [f(2)] == [4],
    lambda: int(f(2)) == 4, lambda: sorted([f(2), 4]) == [4, 4], lambda: {4: True}.get(f(2)),
    lambda: [4].index(f(2)) == 0, lambda: 3 < f(2) < 5,
    lambda: all(each == 4 for each in map(f, [2])), lambda: sum(map(f, [2])) == 4,
]
assert any([holds(check) for check in checks])
"""


def test_no_program_forges_a_verdict():
    """The test passes where any of a dozen ways to ask for f(2) == 4 does."""
    limits, honest = Limits(seconds=10.0, memory_mb=256, output_bytes=4096), "def f(x): return x * x"
    found = verdicts((honest, LENIENT), *((program, LENIENT) for program in FORGERIES.values()), limits=limits)
    assert found[0].verdict == "passed"
    for name, result in zip(FORGERIES, found[1:], strict=True):
        assert result.verdict in ("failed", "timeout"), (name, result)


def test_where_program_and_assertion_share_an_interpreter_forgeries_pass():
    for name in ("equal to all", "an int equal to all", "a list equal to all", "a mock", "exit at once"):
        assert asyncio.run(run_program(f"{FORGERIES[name]}\nassert f(2) == 4", limits=LIMITS)).status == "ok"


def test_code_reward_scores_assertions_and_rejects_what_it_cannot_judge():
    reward = CodeReward(seconds=5.0)

    def score(program, *tests):
        example = Example("f", [1], "", {"tests": [{"assert": test} for test in tests]})
        return asyncio.run(reward("", program, example))

    assert score("def f(x): return x * x", "assert f(2) == 4", "f(3) == 9").reward == 1.0
    assert score("def f(x): return 4", "assert f(2) == 4", "f(3) == 9").reward == 0.5
    assert score(FORGERIES["equal to all"], "assert f(2) == 4", "f(3) == 9").reward == 0.0
    assert score("import os; os._exit(97)", "assert f(2) == 4").reward == 0.0
    late = score("def f(x):\n while True: pass", "f(2) == 4")
    assert (late.reward, late.components["timeouts"]) == (0.0, 1.0)
    with pytest.raises(
        ValueError, match=r"the test 'f\(lambda: 4\) == 4' cannot be run: it gives the program a function"
    ):
        score("def f(x): return x()", "f(lambda: 4) == 4")


def test_exit_97_is_a_programs_own_error():
    assert asyncio.run(run_program("import sys; sys.exit(97)", limits=LIMITS)).status == "error"
