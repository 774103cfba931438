"""Blocks: numbered modules, what comes before and after, kinds, and shared values."""

from __future__ import annotations

import torch
from torch import nn

from autopar.passes.analysis.blocks import analyse_blocks, local_op_names
from autopar.passes.capture import capture
from tests.passes import toys


def test_layers_are_one_kind_between_embedding_and_head() -> None:
    found = toys.blocks("mlp")
    assert [b.name for b in found.chain] == ["embed", "layers.0", "layers.1", "head"]
    assert found.kinds == {
        "embed": ("embed",),
        "layers.0": ("layers.0", "layers.1"),
        "head": ("head",),
    }
    assert [b.kind for b in found.chain] == ["embed", "layers.0", "layers.0", "head"]
    assert found.block("layers.1").parameters[0] == "p_layers_1_norm_weight"


def test_every_op_is_in_one_block_or_shared() -> None:
    for name in ("mlp", "llama", "gemma2"):
        found, program = toys.blocks(name), toys.simplified(name)
        placed = [n for b in found.chain for n in b.nodes] + found.shared
        assert len(placed) == len(set(placed))
        assert set(placed) == {n for n in program.graph.nodes if n.op == "call_function"}


def test_values_cross_from_block_to_block() -> None:
    found = toys.blocks("mlp")
    assert [[n.name for n in found.crossing(i)] for i in range(3)] == [
        ["embedding"],
        ["add"],
        ["add_1"],
    ]
    assert found.crossing(3) == []
    assert [n.name for n in found.block("layers.1").reads] == ["add"]
    assert [n.name for n in found.chain[-1].writes] == ["cross_entropy_loss"]


def test_no_stage_ends_where_values_with_and_without_gradient_pass_on() -> None:
    class Mixed(nn.Module):
        """The first block's frozen part is read again by the head."""

        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.first = nn.Linear(4, 4)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            fixed = self.frozen(x)
            y = self.first(fixed)
            for index, layer in enumerate(self.layers):
                y = layer(y)
                if index == 1:
                    y = y + fixed
            return y.square().mean()

    program = capture(Mixed(), {"x": torch.ones(4, 4)})
    found = analyse_blocks(program)
    mixed = []
    for index in range(len(found.chain)):
        kinds = {bool(n.meta["requires_grad"]) for n in found.crossing(index)}
        mixed.append(len(kinds) > 1)
    assert found.can_end_stages() == [not m for m in mixed]
    assert any(mixed) and not all(mixed)
    assert all(toys.blocks("llama").can_end_stages())


def test_parameter_free_values_that_layers_read_are_shared() -> None:
    found = toys.blocks("llama")
    shared = set(found.shared)
    layers = [b for b in found.chain if b.name.startswith("model.layers.")]
    rotary = [n for n in layers[0].reads if n in shared]
    assert len(rotary) == 2 and all(rotary == [n for n in b.reads if n in shared] for b in layers)
    assert not any(n in shared for i in range(len(found.chain)) for n in found.crossing(i))


def test_layers_that_differ_are_kinds_of_their_own() -> None:
    # Gemma 2 alternates layers with and without a sliding window.
    kinds = toys.blocks("gemma2").kinds
    assert len(toys.blocks("gemma2").chain) == 6 and sum(map(len, kinds.values())) == 6


def test_layers_are_of_a_kind_only_if_they_tie_the_same_parameters() -> None:
    model = toys.Mlp(layers=5)
    model.layers[3].up.weight = model.layers[1].up.weight
    found = analyse_blocks(capture(model, toys.batch()))
    layers = [f"layers.{i}" for i in range(5)]
    assert [found.block(n).kind for n in layers] == [layers[i] for i in (0, 1, 0, 1, 0)]
    model.layers[4].up.weight, model.head.weight = model.layers[0].up.weight, model.embed.weight
    found = analyse_blocks(capture(model, toys.batch()))
    assert [found.block(n).kind for n in layers] == [layers[i] for i in (0, 1, 2, 1, 0)]


def test_a_model_without_numbered_modules_is_cut_at_the_children() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu()).sum()

    found = analyse_blocks(capture(Two(), {"x": torch.ones(4, 4)}))
    names = [b.name for b in found.chain]
    assert "first" in names and "second" in names
    assert [n.target._opname for n in found.block("first").nodes][0] == "linear"


def test_a_skip_over_layers_crosses_all_of_them() -> None:
    class Skip(toys.Mlp):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = first = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            logits = self.head(x + first)
            return nn.functional.cross_entropy(logits.view(-1, toys.VOCABULARY), labels.view(-1))

    found = analyse_blocks(capture(Skip(), toys.batch()))
    assert [n.name for n in found.crossing(1)] == ["embedding", "add"]


def test_local_names_count_ops_of_a_block() -> None:
    nodes = toys.blocks("mlp").block("layers.1").nodes
    assert local_op_names(nodes) == ["layer_norm", "linear", "gelu", "linear.1", "add"]
    assert list(toys.blocks("mlp").block("layers.1").local_names.values()) == local_op_names(nodes)


def test_the_graph_is_not_changed() -> None:
    program = toys.captured("mlp")
    text = program.graph_module.code
    analyse_blocks(program)
    assert program.graph_module.code == text
