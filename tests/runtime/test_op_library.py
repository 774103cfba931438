"""An op defined from a kernel, a shape and a conjugate behaves like one of torch's own."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.runtime.op_library import define, define_identity

define(
    "test_scale_rows(Tensor x, int factor) -> Tensor",
    lambda x, factor: torch.cat([x * factor] * 2),
    lambda x, factor: x.new_empty((2 * x.shape[0], *x.shape[1:])),
    lambda grad, factor: grad.chunk(2)[0] * factor + grad.chunk(2)[1] * factor,
)
define_identity("test_marked(Tensor(a) x, int factor) -> Tensor(a)", lambda g, factor: g * factor)
ops = torch.ops.autopar


def test_torch_finds_no_fault() -> None:
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(ops.test_scale_rows.default, (x, 3))
    assert torch.autograd.gradcheck(lambda y: ops.test_scale_rows(y, 3), (x,))


def test_fake_and_meta() -> None:
    assert ops.test_scale_rows(torch.empty(2, 3, device="meta"), 3).shape == (4, 3)
    with FakeTensorMode():
        assert ops.test_marked(torch.empty(2, 3), 3).shape == (2, 3)


def test_identity_is_a_view_with_a_gradient_of_its_own() -> None:
    x = torch.randn(3, requires_grad=True)
    result = ops.test_marked(x, 5)
    assert result.data_ptr() == x.data_ptr()
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0, 5.0]
