"""The plain recipes are what their names say, and say why they do not fit."""

from __future__ import annotations

import pytest

from autopar.search.enumerate import search
from autopar.search.options import SearchOptions
from tests.search.synthetic import Provider, cluster


def scored(provider: Provider, **options):
    result = search(provider, provider.on, SearchOptions(**options))
    return result, {r.name.split(" ")[0]: r for r in result.recipes}


def test_the_three_recipes():
    result, found = scored(Provider(cluster(16)), global_batch=64)
    assert found["data"].choice.mesh.dp == 16 and found["data"].choice.zero == 0
    assert found["FSDP"].choice.mesh.dp == 16 and found["FSDP"].choice.zero == 3
    megatron = found["Megatron"].choice
    assert (megatron.mesh.tp, megatron.mesh.pp, megatron.zero) == (8, 1, 1)
    for recipe in found.values():
        assert recipe.fits and recipe.choice.step_seconds >= result.step_seconds * (1 - 1e-9)


def test_megatron_takes_the_fewest_stages_that_fit():
    provider = Provider(cluster(16), layers=22, width=2048, heads=2)
    limit = int(2.8 * 2**30)
    _, found = scored(provider, global_batch=32, memory_limit=limit)
    megatron = found["Megatron"].choice
    assert megatron.mesh.tp == 2 and megatron.mesh.pp > 1 and max(megatron.peaks) <= limit
    sizes = [len(s.blocks) for s in megatron.stages]
    assert max(sizes) - min(sizes) <= 1 and sum(sizes) == 24


def test_a_recipe_that_does_not_fit_says_how_much_it_needs():
    _, found = scored(Provider(cluster(8), layers=20), global_batch=32, memory_limit=2 * 2**30)
    assert not found["data"].fits and "needs at least" in found["data"].reason
    assert found["data"].to_dict() == {
        "name": "data parallel (ZeRO-0)",
        "fits": False,
        "why": found["data"].reason,
    }


def test_a_batch_that_does_not_divide_is_said():
    _, found = scored(Provider(cluster(8)), global_batch=4)
    assert "does not divide" in found["FSDP"].reason
    assert found["FSDP"].fits is None and "fits" not in found["FSDP"].to_dict()


@pytest.mark.parametrize("batch", [7, 32])
def test_a_fixed_batch_is_kept(batch):
    provider = Provider(cluster(1), fixed_batch=batch)
    _, found = scored(provider, global_batch=batch * 4)
    assert found["data"].choice.microbatch == batch
