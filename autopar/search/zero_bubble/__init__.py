"""The search of zero-bubble pipelines: `solve`, and what bounds it."""

from autopar.search.zero_bubble.solve import family_bound, least_peak, solve

__all__ = ["family_bound", "least_peak", "solve"]
