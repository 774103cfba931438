"""The search of interleaved 1F1B: `solve`, what bounds it, and which cuts it looks at."""

from autopar.search.interleaved.candidates import all_are_searched
from autopar.search.interleaved.solve import family_bound, least_peak, solve

__all__ = ["all_are_searched", "family_bound", "least_peak", "solve"]
