"""Pins: what is read, and what is refused with which words."""

from __future__ import annotations

import pytest

from autopar.errors import UsageError
from autopar.search.options import Pins, SearchOptions, check_pins, parse_pins, stage_starts
from autopar.search.reshard_pin import kept_gathered
from tests.search.synthetic import cluster

NAMES = ("embed", "layers.0", "layers.1", "layers.2", "head")


def test_reads_every_pin():
    text = (
        "tp=2,pp=2,dp=1,zero=3,microbatch=1,microbatches=8,schedule=gpipe,chunks=1,recompute=full,"
        "boundary=S(1),weights=split,cuts=layers.1"
    )
    pins = parse_pins(text)
    assert pins == Pins(2, 2, 1, 3, 1, 8, "gpipe", 1, "full", "S(1)", "split", ("layers.1",))
    assert parse_pins(str(pins)) == pins
    assert parse_pins("") == Pins()
    assert parse_pins(" tp = 4 , ") == Pins(tp=4)
    assert parse_pins("dp=8,shard=4") == Pins(dp=8, shard=4)
    for value in ("all", "none", "auto"):
        assert parse_pins(f"reshard={value}") == Pins(reshard=value)
    some = parse_pins("zero=3,reshard=layers.0+head")
    assert some.reshard == ("layers.0", "head") and parse_pins(str(some)) == some


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", None),
        ("reshard=auto", None),
        ("zero=3,reshard=auto", None),
        ("zero=3", ()),
        ("reshard=all", ()),
        ("reshard=none", NAMES),
        ("reshard=layers.0+head", ("embed", "layers.1", "layers.2")),
    ],
)
def test_which_blocks_are_kept_gathered(text, kept):
    found = kept_gathered(parse_pins(text), NAMES)
    assert found == (None if kept is None else set(kept))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpp=2", "did you mean"),
        ("colour=2", "pins are"),
        ("tp", "no value"),
        ("tp=0", "tp=0 is not a degree"),
        ("tp=two", "tp=two is not a degree"),
        ("tp=\u0662", "is not a degree"),
        pytest.param("tp=" + 5000 * "9", "tp=999999999999 is not a degree", id="long"),
        ("cuts=a+", r"cuts=a\+: an empty or repeated name"),
        ("reshard=+", r"reshard=\+: an empty or repeated name"),
        ("reshard=a+b+a", r"an empty or repeated name"),
        ("reshard=ALL", "write reshard=all"),
        ("tp=2,tp=4", "pinned twice"),
        ("zero=4", "choose one of 0, 1, 2, 3"),
        ("schedule=1fb1", "did you mean 1f1b"),
        ("recompute=ful", "choose one of none, selective, full"),
        ("boundary=foo", "boundary=foo is not known"),
        ("boundary=P", "give R, or S"),
    ],
)
def test_refuses_unreadable_pins(text, words):
    with pytest.raises(UsageError, match=words):
        parse_pins(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp=3", "tp=3 is not legal"),
        ("pp=6", "the model has 5 blocks"),
        ("tp=2,pp=2,dp=4", "is 16 ranks, the cluster has 8"),
        ("pp=3", "does not divide the 8 ranks"),
        ("dp=8", "global batch 12"),
        ("microbatch=5", "global batch 12 is not a multiple of microbatch 5"),
        ("dp=2,microbatch=2,microbatches=2", "global batch 12 is not a multiple of .* = 8"),
        ("dp=2,microbatch=2,microbatches=1", "global batch 12 is not dp 2 .* = 4"),
        ("shard=1", "shard=1"),
        ("shard=2,zero=0", "shard=2 with zero=0"),
        ("dp=4,shard=3,zero=1", "shard=3 does not divide dp x cp = 4 x 1"),
        ("cuts=layer.1", "did you mean layers.1"),
        ("reshard=layer.1", "did you mean layers.1"),
        ("reshard=none,zero=2", "only ZeRO-3 reshards"),
        ("reshard=all,dp=1", "nothing to shard over"),
        ("reshard=head,schedule=interleaved", "all resharded"),
        ("cuts=layers.2+layers.1", "not in the order"),
        ("cuts=layers.1,pp=4", "pp=4, but the cuts make 2 stages"),
    ],
)
def test_refuses_contradictions(text, words):
    with pytest.raises(UsageError, match=words):
        check_pins(parse_pins(text), cluster(8), 12, NAMES, [1, 2, 4, 8])


def test_cuts_may_name_the_first_block_or_not():
    assert stage_starts(Pins(cuts=("layers.1",)), NAMES) == (0, 2)
    assert stage_starts(Pins(cuts=("embed", "layers.1")), NAMES) == (0, 2)
    assert stage_starts(Pins(), NAMES) is None


def test_options_name_what_is_wrong():
    with pytest.raises(UsageError, match="did you mean bf16"):
        SearchOptions(8, precision="bf17")
    with pytest.raises(UsageError, match="optimizer=adam is not known"):
        SearchOptions(8, optimizer="adam")
    with pytest.raises(UsageError, match="global batch 0"):
        SearchOptions(0)


def test_limit_is_the_device_less_margin_or_what_the_user_says():
    assert SearchOptions(8, memory_limit=123).limit(cluster(8)) == 123
    assert SearchOptions(8, margin=0.25).limit(cluster(8, memory=1000)) == 750
