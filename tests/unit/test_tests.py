"""The tests' own rules."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_test_imports_from_another_test():
    """Shared test code belongs in tests/support."""
    files = list(TESTS.rglob("*.py"))
    assert len(files) > 100
    imports = re.compile(r"^\s*(?:from|import) tests\.(?!support\b)\S*", re.MULTILINE)
    found = {str(file.relative_to(TESTS)): imports.findall(file.read_text()) for file in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_test_files_have_names_of_their_own():
    names = [file.name for file in TESTS.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
