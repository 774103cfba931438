"""From an op to its rule: one explicit table. An op that is not in it is replicated, visibly.

Recurrent layers (lstm, gru, rnn) have none on purpose: a step needs all of the last one's result.
"""

from __future__ import annotations

from autopar.experts import EXCHANGED, capacity
from autopar.op_call import OpCall
from autopar.rules import (
    attention,
    convolution,
    einsum,
    experts,
    indexing,
    lookup,
    losses,
    matmul,
    normalization,
    pointwise,
    random,
    rearrange,
    reduction,
    resampling,
    row,
    sequence,
    shape,
)
from autopar.rules.language import NoRuleError, Rule
from autopar.rules.registration import RuleFunction, registered

RULES: dict[str, RuleFunction] = {
    # Element by element.
    **dict.fromkeys(pointwise.NAMES, pointwise.rule),
    "type_as": pointwise.dtype_of_another,
    "max": reduction.extreme_or_pointwise,
    "min": reduction.extreme_or_pointwise,
    "isin": pointwise.membership,
    "bucketize": pointwise.buckets,
    "prelu": pointwise.channel_slope,
    # Random.
    **dict.fromkeys(random.NAMES, random.elementwise),
    "dropout": random.dropout,
    "alpha_dropout": random.dropout,
    "feature_dropout": random.dropout,
    "feature_alpha_dropout": random.dropout,
    "multinomial": random.multinomial,
    # Products.
    "linear": matmul.linear,
    "mm": matmul.mm,
    "addmm": matmul.addmm,
    "bmm": matmul.bmm,
    "baddbmm": matmul.baddbmm,
    "addbmm": matmul.addbmm,
    "matmul": matmul.matmul,
    "linalg_matmul": matmul.matmul,
    "mv": matmul.mv,
    "addmv": matmul.addmv,
    "dot": matmul.dot,
    "vdot": matmul.dot,
    "outer": matmul.outer,
    "ger": matmul.outer,
    "addr": matmul.addr,
    "inner": matmul.inner,
    "tensordot": matmul.tensordot,
    "bilinear": matmul.bilinear,
    "einsum": einsum.einsum,
    "scaled_dot_product_attention": attention.sdpa,
    # Convolutions.
    "conv1d": convolution.convolution,
    "conv2d": convolution.convolution,
    "conv3d": convolution.convolution,
    "conv_transpose1d": convolution.transposed,
    "conv_transpose2d": convolution.transposed,
    "conv_transpose3d": convolution.transposed,
    "im2col": convolution.patches,
    "col2im": convolution.from_patches,
    # Pooling and resampling.
    **dict.fromkeys(resampling.NAMES, resampling.spatial),
    "pixel_shuffle": resampling.pixel_shuffle,
    "pixel_unshuffle": resampling.pixel_unshuffle,
    "channel_shuffle": resampling.channel_shuffle,
    "grid_sampler": resampling.grid_sampler,
    "affine_grid_generator": resampling.affine_grid,
    # Views, and ops that rearrange.
    "view": shape.view,
    "reshape": shape.view,
    "_unsafe_view": shape.view,
    "flatten": shape.flatten,
    "ravel": shape.flatten,
    "unflatten": shape.flatten,
    "view_as": shape.as_another,
    "reshape_as": shape.as_another,
    "expand": shape.expand,
    "broadcast_to": shape.expand,
    "expand_as": rearrange.expand_as,
    "transpose": shape.transpose,
    "swapaxes": shape.transpose,
    "swapdims": shape.transpose,
    "permute": shape.transpose,
    "movedim": shape.transpose,
    "moveaxis": shape.transpose,
    "t": shape.transpose,
    "numpy_T": shape.transpose,
    "mT": shape.transpose,
    "adjoint": shape.transpose,
    "matrix_H": shape.transpose,
    "unsqueeze": shape.unsqueeze,
    "squeeze": shape.squeeze,
    "slice": shape.slice_,
    "narrow": rearrange.narrow,
    "split": shape.split,
    "split_with_sizes": shape.split,
    "tensor_split": shape.split,
    "chunk": shape.split,
    "unsafe_split": shape.split,
    "unsafe_chunk": shape.split,
    "unbind": rearrange.unbind,
    "cat": shape.cat,
    "concat": shape.cat,
    "concatenate": shape.cat,
    "stack": shape.stack,
    "select": shape.select,
    "pad": shape.pad,
    "getitem": shape.getitem,
    "repeat": rearrange.repeat,
    "tile": rearrange.repeat,
    "repeat_interleave": rearrange.repeat_interleave,
    "diagonal": rearrange.diagonal,
    "diag_embed": rearrange.diag_embed,
    "tril": rearrange.triangle,
    "triu": rearrange.triangle,
    "select_scatter": rearrange.select_scatter,
    "slice_scatter": rearrange.slice_scatter,
    "unfold": rearrange.unfold,
    "view_as_complex": rearrange.as_complex,
    "view_as_real": rearrange.as_real,
    "meshgrid": rearrange.meshgrid,
    **dict.fromkeys(rearrange.CONSTANTS, rearrange.constant),
    **dict.fromkeys(rearrange.MATRIX_FUNCTIONS, rearrange.matrix_function),
    # Reductions, and functions of whole rows.
    "sum": reduction.sum_,
    "mean": reduction.mean,
    **dict.fromkeys(reduction.NAMES, reduction.extreme),
    **dict.fromkeys(row.NAMES, row.row_wise),
    **dict.fromkeys(row.SEVERAL, row.rows_wise),
    "roll": row.roll,
    "diff": row.difference,
    "msort": row.msort,
    "rot90": row.rotate,
    "renorm": row.renorm,
    "cross": row.cross,
    "linalg_cross": row.cross,
    "cosine_similarity": row.similarity,
    "pairwise_distance": row.distance,
    "cdist": row.all_distances,
    "searchsorted": row.searchsorted,
    "layer_norm": normalization.last_dims,
    "rms_norm": normalization.last_dims,
    "group_norm": normalization.group_norm,
    "batch_norm": normalization.batch_norm,
    "instance_norm": normalization.instance_norm,
    "_weight_norm": normalization.weight_norm,
    # Indices.
    "embedding": lookup.embedding,
    "gather": indexing.gather,
    "take_along_dim": indexing.take_along_dim,
    "scatter": indexing.scatter,
    "scatter_add": indexing.scatter,
    "scatter_reduce": indexing.scatter,
    "index_select": indexing.index_select,
    "index_add": indexing.index_write,
    "index_copy": indexing.index_write,
    "index_fill": indexing.index_write,
    "index": indexing.index,
    "index_put": indexing.index_put,
    "masked_scatter": indexing.masked_scatter,
    "one_hot": indexing.one_hot,
    # Losses.
    "cross_entropy_loss": losses.cross_entropy,
    "nll_loss_nd": losses.nll,
    **dict.fromkeys(losses.ELEMENTWISE, losses.elementwise),
    "cosine_embedding_loss": losses.embedding_pairs,
    "triplet_margin_loss": losses.triplets,
    # Mixture of experts.
    "experts": experts.experts,
    EXCHANGED: experts.experts,
    capacity.OP: experts.within_capacity,
}
# Ops of our own that capture, and splitting experts over replicas, put into graphs.
_OWN = frozenset(f"autopar::{name}" for name in ("experts", EXCHANGED, capacity.OP))
# Those that splitting the sequence puts there.
SEQUENCE_RULES: dict[str, RuleFunction] = {
    **dict.fromkeys((f"autopar::{name}" for name in sequence.COLLECTIVES), sequence.collective),
    "autopar::attention_rows": sequence.attention_rows,
    "autopar::loss_share": sequence.loss_share,
}


def rule_for(op: OpCall) -> Rule | None:
    """The rule of a call, or None: then only replication is legal.

    A rule that the user registered comes first. `add_` has the rule of `add`.
    """
    function = registered(op) or _built_in(op)
    if function is None or not op.results:
        return None
    try:
        return function(op)
    except NoRuleError:
        # An unusual form of a known op: the same operand twice, operands that broadcast.
        return None


def _built_in(op: OpCall) -> RuleFunction | None:
    """Torch's ops and ours alone: another library's `linear` may be anything."""
    if op.registered_name in SEQUENCE_RULES:
        return SEQUENCE_RULES[op.registered_name]
    namespace, _, _ = op.registered_name.rpartition("::")
    if namespace not in ("", "aten") and op.registered_name not in _OWN:
        return None
    name = op.op_name
    if name not in RULES and op.writes_in_place and not name.startswith("_"):
        name = name.removesuffix("_")
    return RULES.get(name)
