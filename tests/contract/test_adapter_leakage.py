"""The benchmark of leakage, in short: no completion has another adapter's bits, whatever runs beside it."""

from benchmarks.adapter_leakage import run


def test_no_completion_has_another_adapters_bits():
    result = run(adapters=12, switches=300, slots=4)
    assert result["completions"] >= 300
    assert result["different"] == 0
    assert result["reloads"] > 10
    assert result["swaps"] > 50
    assert result["cached_tokens"] > 100
