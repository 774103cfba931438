"""The whole zoo, by name."""

from __future__ import annotations

from benchmarks.zoo.architecture import Architecture
from benchmarks.zoo.causal_lms import CAUSAL_LMS
from benchmarks.zoo.encoders import ENCODERS
from benchmarks.zoo.plain import PLAIN
from benchmarks.zoo.vision import VISION

ARCHITECTURES: dict[str, Architecture] = {
    a.name: a for a in (*CAUSAL_LMS, *ENCODERS, *VISION, *PLAIN)
}
