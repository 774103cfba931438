"""Refusals name the module, the line and a remedy that fits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from autopar.errors import CaptureError
from autopar.passes.capture import capture

X = torch.ones(4, 4)


class Step(nn.Module):
    """One of several modules of the class: only its path tells it apart."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Model(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        middle = function if isinstance(function, nn.Module) else Step(function)
        self.steps = nn.Sequential(Step(torch.relu), middle, Step(torch.relu))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps(self.inner(x)).sum()


def conditional(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # type: ignore[no-any-return]


def loops(x: torch.Tensor) -> torch.Tensor:
    return while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z.tanh()), (x.new_zeros(()), x))[1]


def formats(x: torch.Tensor) -> torch.Tensor:
    return x * len(f"{x.mean():.3f}")


def packs(x: torch.Tensor) -> torch.Tensor:
    return pack_padded_sequence(x[..., None], torch.full((4,), 4), batch_first=True).data


def makes_a_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * torch.nn.functional.ctc_loss(x[:, None].log_softmax(-1), x[:1].long(), (4,), (1,))


def branches(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def reads_a_value(x: torch.Tensor) -> torch.Tensor:
    return x * x.max().item()


def picks(x: torch.Tensor) -> torch.Tensor:
    return x[torch.nonzero(x > 0)[:, 0]]


def leaves_torch(x: torch.Tensor) -> torch.Tensor:
    return x * torch.as_tensor(x.detach().numpy().mean())


def mixes_devices(x: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(4.0, device="cpu")


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (branches, "torch.where"),
        (formats, "print shapes"),
        (packs, "padded sequences and a mask"),
        (makes_a_tensor, "custom_op"),
        (mixes_devices, "device=x.device"),
    ],
)
def test_module_line_and_remedy(
    function: Callable[[torch.Tensor], torch.Tensor], remedy: str
) -> None:
    with pytest.raises(CaptureError) as info:
        capture(Model(function), {"x": X})
    line = function.__code__.co_firstlineno + 1
    assert "module 'steps.1'" in info.value.message
    assert f"{__file__}:{line}" in info.value.message
    assert remedy in info.value.next_step


def test_a_forward_that_calls_its_module_otherwise() -> None:
    class Short(nn.Module):
        def forward(s, x: torch.Tensor) -> torch.Tensor:  # noqa: N805
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match="module 'steps.1'"):
        capture(Model(Short()), {"x": X})


def test_a_number_read_off_a_tensor() -> None:
    with pytest.raises(CaptureError) as info:
        capture(Model(reads_a_value), {"x": X})
    assert "module 'steps.1'" in info.value.message and __file__ in info.value.message
    assert ".item()" in info.value.next_step


def test_an_embedding_that_shortens_its_rows() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(4, 4, max_norm=1.0)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.rows(ids).sum()  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"rows\.weight") as info:
        capture(Table(), {"ids": torch.zeros(4, dtype=torch.long)})
    assert "renorm_" in info.value.next_step


@pytest.mark.parametrize(
    ("function", "remedy"), [(conditional, "torch.where"), (loops, "without while_loop")]
)
def test_the_line_of_a_region_is_not_that_of_generated_code(
    function: Callable[[torch.Tensor], torch.Tensor], remedy: str
) -> None:
    with pytest.raises(CaptureError) as info:
        capture(Model(function), {"x": X})
    assert "module 'steps.1'" in info.value.message and __file__ in info.value.message
    assert "<eval" not in info.value.message and remedy in info.value.next_step


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_an_error_without_a_line_of_the_user_names_none() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(CaptureError) as info:
        capture(Model(scripted), {"x": X})
    assert "capture_export" not in info.value.message
    assert "torch.jit" in info.value.next_step


def test_numpy_in_the_forward() -> None:
    with pytest.raises(CaptureError) as info:
        capture(Model(leaves_torch), {"x": X})
    assert "steps.1" in info.value.message
    assert info.value.next_step


def test_a_result_whose_size_depends_on_values() -> None:
    with pytest.raises(CaptureError) as info:
        capture(Model(picks), {"x": X})
    assert "size" in info.value.next_step or "torch.where" in info.value.next_step


def test_a_forward_that_does_not_take_the_inputs() -> None:
    with pytest.raises(CaptureError) as info:
        capture(Model(torch.relu), {"y": X})
    assert "forward does not take them" in info.value.next_step


def test_checkpoint_in_the_forward_runs_or_is_refused_by_name() -> None:
    def recomputed(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(torch.tanh, x, use_reentrant=False)
        return result

    try:
        program = capture(Model(recomputed), {"x": X})
    except CaptureError as error:
        assert "checkpoint" in error.next_step
    else:
        assert "tanh" in [
            str(n.target).split(".")[1] for n in program.graph.nodes if "." in str(n.target)
        ]


def test_a_region_is_named_by_the_line_inside_it() -> None:
    def narrow(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.mm(x, x.t()).float()

    with pytest.raises(CaptureError) as info:
        capture(Model(narrow), {"x": X})
    assert "module 'steps.1'" in info.value.message and __file__ in info.value.message
    assert "precision=" in info.value.next_step and "checkpoint" not in info.value.next_step
