"""The order of the passes, as a list."""

from __future__ import annotations

from autopar.passes.pass_manager import Pass
from autopar.passes.rewrite.cut_blocks import CutBlocks
from autopar.passes.rewrite.cut_stages import CutStages
from autopar.passes.rewrite.guard_empty_mean import GuardEmptyMean
from autopar.passes.rewrite.insert_collectives import InsertCollectives
from autopar.passes.rewrite.localize_shapes import LocalizeShapes
from autopar.passes.rewrite.mark_recompute import MarkRecompute
from autopar.passes.rewrite.order_exchanges import OrderExchanges
from autopar.passes.rewrite.own_random import OwnRandom
from autopar.passes.rewrite.place import Place
from autopar.passes.rewrite.replace_causal_mask import ReplaceCausalMask
from autopar.passes.rewrite.simplify import Simplify
from autopar.passes.rewrite.split_experts import SplitExperts
from autopar.passes.rewrite.split_fused import SplitFused
from autopar.passes.rewrite.split_gate_and_up import SplitGateAndUp
from autopar.passes.rewrite.split_sequence import SplitSequence
from autopar.passes.rewrite.sum_statistics import SumStatistics
from autopar.passes.rewrite.tell_loss_terms import TellLossTerms


def front_pipeline() -> list[Pass]:
    """On the captured program, before the search."""
    return [
        Simplify(),
        SplitFused(),  # after simplify: copies would hide the split
        SplitGateAndUp(),
        GuardEmptyMean(),
        ReplaceCausalMask(),  # after simplify: casts would hide the mask
    ]


def back_pipeline() -> list[Pass]:
    """From the simplified program and a plan to one program per stage."""
    return [
        CutBlocks(),  # first: all later passes work on one small static graph per kind of block
        SplitSequence(),  # before place: a second axis is placed on what the first leaves
        SplitExperts(),  # after: the tokens of a rank are then known
        Place(),
        InsertCollectives(),  # needs placements, and global shapes for the sizes of what is moved
        LocalizeShapes(),  # after the collectives: they change which piece an op sees
        OrderExchanges(),  # of the graph as one rank runs it, collectives and all
        OwnRandom(),  # needs the shards' shapes, and changes none
        CutStages(),
        SumStatistics(),  # of all graphs, also of the values that stages share
        MarkRecompute(),  # marks blocks of stages
        TellLossTerms(),  # last: it adds results that no plan knows of
    ]


def default_pipeline() -> list[Pass]:
    """All passes in order; the search runs between the front and the back half."""
    return [*front_pipeline(), *back_pipeline()]
