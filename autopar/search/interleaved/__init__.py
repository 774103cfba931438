"""The search of interleaved 1F1B: `solve`, and what bounds it."""

from autopar.search.interleaved.solve import family_bound, least_peak, solve

__all__ = ["family_bound", "least_peak", "solve"]
