"""Which blocks of ZeRO-3 keep their parameters gathered, decided with cuts and recomputation.

A block is resharded after every forward, and gathered again for its backward; or it is gathered
once a step and kept, which takes its bytes throughout and saves time in every micro-batch. Nothing
kept is plain ZeRO-3, all kept is ZeRO-2.
"""

from autopar.search.gathered.solve import least_peak, solve

__all__ = ["least_peak", "solve"]
