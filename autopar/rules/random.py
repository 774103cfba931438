"""Ops that draw random numbers: the same ones on all ranks of a whole value, own ones on shards."""

from __future__ import annotations

from dataclasses import replace

from autopar.op_call import OpCall
from autopar.rules import pointwise
from autopar.rules.dims import describe, named, shape_of
from autopar.rules.language import Rule

# One number for each element.
_NAMES_TEXT = """
bernoulli rand_like randn_like randint_like normal_ uniform_ bernoulli_ exponential_ random_
log_normal_ geometric_ cauchy_ rrelu normal uniform normal_functional exponential random log_normal
geometric cauchy poisson
"""
NAMES = _NAMES_TEXT.split()


def elementwise(op: OpCall) -> Rule:
    return replace(pointwise.rule(op), linear=(), random=True)


def dropout(op: OpCall) -> Rule:
    """Without a probability or outside training it hands its operand on. Samples are independent
    also where whole channels go together (`feature_dropout`)."""
    if not op.named("train") or op.named("p") == 0:
        return pointwise.rule(op)
    return elementwise(op)


def multinomial(op: OpCall) -> Rule:
    """weights[b*, c] -> indices[b*, n]"""
    lead = named(shape_of(op, "self")[:-1])
    return describe(op, {"self": (*lead, ("_c",))}, (*lead, ("_n",)), random=True)
