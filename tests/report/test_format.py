from __future__ import annotations

from autopar.report.format import count_text, flops_text, percent_text, plural


def test_numbers_read_well() -> None:
    assert percent_text(0.1234) == "12.3 %"
    assert percent_text(0.0001) == "<0.1 %"
    assert percent_text(0.0) == "0 %"
    assert count_text(12345.6) == "12,346"
    assert count_text(0.01234) == "0.0123"
    assert flops_text(2.5e12) == "2.50 TFLOP"
    assert plural(1, "rank") == "1 rank" and plural(1024, "rank") == "1,024 ranks"
    assert plural(2, "micro-batch", "micro-batches") == "2 micro-batches"
