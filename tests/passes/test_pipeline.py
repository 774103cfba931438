"""The order of the passes, and the whole back half on one rank: numbers stay those of the model."""

from __future__ import annotations

import pytest
import torch

from autopar.mesh import Mesh
from autopar.passes.pass_manager import run_passes
from autopar.passes.pipeline import back_pipeline, default_pipeline, front_pipeline
from autopar.passes.verify import verify
from autopar.piece_name import parse_piece
from autopar.plan_document import StagePlan
from autopar.stage_program import StageProgram
from tests.passes import toys


def _value(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    piece = parse_piece(name)
    if piece is None:
        return state[name]
    return state[piece.whole].narrow(piece.dim, piece.start, piece.stop - piece.start)


def test_order() -> None:
    assert [p.name for p in default_pipeline()] == [
        "simplify",
        "split-fused",
        "split-gate-and-up",
        "guard-empty-mean",
        "replace-causal-mask",
        "cut-blocks",
        "split-sequence",
        "split-experts",
        "place",
        "insert-collectives",
        "localize-shapes",
        "order-exchanges",
        "own-random",
        "cut-stages",
        "sum-statistics",
        "mark-recompute",
        "tell-loss-terms",
    ]
    assert len(front_pipeline()) + len(back_pipeline()) == len(default_pipeline())


def run(
    stages: tuple[StageProgram, ...], state: dict[str, torch.Tensor], inputs: toys.Inputs
) -> torch.Tensor:
    """Execute all stages in turn, as `autopar.stage_program` describes."""
    sent: dict[str, torch.Tensor] = {}
    for stage in stages:
        env = dict(sent)
        if stage.shared is not None:
            read = [n for n in stage.shared.graph.find_nodes(op="placeholder")]
            buffers = dict(zip(stage.shared_buffers, stage.shared_buffers, strict=True))
            by_target = {n.name: inputs.get(n.name) for n in read}
            rest = iter(buffers)
            args = [by_target[n.name] if n.name in inputs else state[next(rest)] for n in read]
            env.update(zip(stage.shared_outputs, stage.shared(*args), strict=True))
        for block in stage.blocks:
            args = [_value(state, n) for n in (*block.parameters, *block.buffers)]
            outputs = block.graph(*args, *[env[n] for n in block.inputs])
            env.update(zip(block.outputs, outputs, strict=True))
        sent = {v.name: env[v.name] for v in stage.send}
        assert [tuple(sent[v.name].shape) for v in stage.send] == [v.shape for v in stage.send]
    return env[stages[-1].loss or ""]


@pytest.mark.parametrize("name", ["mlp", "tied", "llama", "gpt2", "gemma2"])
def test_the_stages_one_after_the_other_compute_the_models_loss_and_gradients(name: str) -> None:
    from autopar.passes.rewrite.place_on_device import place_on_device

    model, inputs = toys.model(name)
    names = [b.name for b in toys.blocks(name).chain]
    cuts = (StagePlan(tuple(names[:2]), (names[0],)), StagePlan(tuple(names[2:])))
    plan = toys.plan(name, stages=cuts, mesh=Mesh(pp=2))
    parts, _ = run_passes(toys.start(name, plan), back_pipeline(), verify=verify)
    for stage in parts.stages:
        place_on_device(stage, torch.device("cpu"), {"tp": "unused"})
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    loss = run(parts.stages, state, inputs)
    found = model(**inputs)
    wanted = found if isinstance(found, torch.Tensor) else found.loss
    torch.testing.assert_close(loss, wanted)
    got = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    expected = torch.autograd.grad(wanted, list(model.parameters()), allow_unused=True)
    scale = max(float(g.norm()) for g in expected if g is not None)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert float((a - b).norm()) <= 1e-5 * scale
    assert [b.recompute for b in parts.stages[0].blocks] == [True, False]
