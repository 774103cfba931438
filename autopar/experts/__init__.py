"""Mixture of experts: the computation of a layer's experts as one op of the graph."""

# Names of the op, and of its forms in which each rank has experts of its own.
EXCHANGED = "exchanged_experts"
EXPERTS = frozenset(["experts", "own_experts", EXCHANGED])

# On a node: the name of the call beside whose exchange it runs, and on which way: before the host
# knows the numbers of rows, while rows travel to their experts, or while they travel back.
BESIDE = "beside"
QUEUED, WAY_THERE, WAY_BACK = "queued", "there", "back"
