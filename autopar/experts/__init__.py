"""Mixture of experts: the computation of a layer's experts as one op of the graph."""

# Names of the op, and of its forms in which each rank has experts of its own.
EXCHANGED = "exchanged_experts"
EXPERTS = frozenset(["experts", "own_experts", EXCHANGED])
