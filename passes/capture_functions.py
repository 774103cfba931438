"""A `torch.autograd.Function` of the model as one op of the graph, with the backward it states.

torch.export looks through `apply`: it would keep the ops of the forward, and autograd would make a
backward of its own for them. Here every such function becomes an op in the library
`autopar_functions`, whose autograd is the function itself. Where its forward and its backward are
made of pointwise ops alone, so is the op; else it is replicated, as any op without a rule.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

from autopar.rules.registration import register_rule

Tensor = torch.Tensor
NAMESPACE = "autopar_functions"
_LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_FIXED = (type(None), bool, int, float, complex, str, torch.dtype)
# Ops without the tag that are as good as pointwise: each element of the result is its own.
_AS_GOOD = frozenset(
    ["detach", "clone", "alias", "empty_like", "zeros_like", "ones_like", "full_like", "_to_copy",
     "copy_", "zero_", "fill_", "lift_fresh_copy"]
)  # fmt: skip
_ops: dict[tuple[str, ...], Any] = {}
_MARK = "_autopar_op"
_TENSOR = object()  # the place of a tensor among fixed arguments


class OwnBackward(RuntimeError):
    """A `torch.autograd.Function` of the model that can't be an op; says why."""

    def __init__(self, function: type, why: str) -> None:
        super().__init__(f"the torch.autograd.Function {function.__qualname__} {why}")


@contextmanager
def functions_as_ops() -> Iterator[None]:
    """While active, `apply` of a function that is not torch's calls its op."""
    function: Any = torch.autograd.Function
    before = function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction and torch.is_grad_enabled():
            return _not_again(*args)
        if _is_torchs(cls) or not torch.is_grad_enabled():
            return before.__func__(cls, *args, **kwargs)
        if kwargs:
            raise OwnBackward(cls, f"is given {sorted(kwargs)} by name")
        return _op_of(cls, before.__func__, args)(*(a for a in args if isinstance(a, Tensor)))

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = before


def _not_again(function: Callable[..., Any], _keep_random_state: bool, *args: Any) -> Any:
    """What a reentrant checkpoint returns, with the ops of its function in the graph: it would run
    them without gradient, and again in the backward. As there, the gradient of what the function
    holds is lost where no argument has one."""
    reached = any(isinstance(a, Tensor) and a.requires_grad for a in args)
    with torch.set_grad_enabled(reached):
        return function(*args)


def refuse_hidden_functions(loss: Tensor) -> None:
    """Raise `OwnBackward` when the gradient of `loss` runs through a function that is no op: an
    `apply` that the model kept as a value before it was captured."""
    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        step = stack.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        function = getattr(type(step), "_forward_cls", None)
        if function is not None and not _is_torchs(function) and not hasattr(step, _MARK):
            raise OwnBackward(function, "is applied through a name that holds its apply")
        stack += [after for after, _ in step.next_functions]


def _is_torchs(function: type) -> bool:
    """torch's own compute what autograd would (checkpoint, for one); ours stand inside an op, which
    the graph keeps whole."""
    return function.__module__.partition(".")[0] in ("torch", "autopar")


def _op_of(cls: Any, apply: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The op of a function for these fixed arguments; made when it is first asked for."""
    for value in args:
        if not isinstance(value, (Tensor, *_FIXED)) or isinstance(value, torch.SymInt):
            raise OwnBackward(cls, f"is given a {type(value).__name__}")
    fixed = tuple("" if isinstance(a, Tensor) else repr(a) for a in args)
    key = (cls.__module__, cls.__qualname__, _code(cls), *fixed)
    if key not in _ops:
        alike = sum(_plain(name) == _plain(cls.__qualname__) for _, name, *_ in _ops)
        _ops[key] = _define(cls, apply, args, alike)
    return _ops[key]


def _code(cls: Any) -> str:
    """Tells classes of one name apart; a class that was made again from the same code is alike."""
    parts = [getattr(getattr(cls, n, None), "__code__", None) for n in ("forward", "backward")]
    texts = [f"{c.co_code.hex()} {c.co_consts} {c.co_names}" for c in parts if c is not None]
    return hashlib.sha256(re.sub(r" at 0x\w+", "", " ".join(texts)).encode()).hexdigest()


def _plain(name: str) -> str:
    return re.sub(r"\W+", "_", name.rpartition("<locals>.")[2])


def _define(cls: Any, apply: Callable[..., Any], args: Sequence[Any], count: int) -> Any:
    """Register the op: its schema from a trial on meta tensors, its rule if it is pointwise."""
    # A class of a closure may hold values of its own: the first that was seen runs.
    name = _plain(cls.__qualname__) + (f"_{count + 1}" if count else "")

    def run(*tensors: Tensor) -> Any:
        given = iter(tensors)
        results = apply(cls, *(next(given) if a is _TENSOR else a for a in form))
        for tensor in results if isinstance(results, tuple) else (results,):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                setattr(tensor.grad_fn, _MARK, name)
        return _apart(results, tensors)

    def forward(*tensors: Tensor) -> Any:
        with torch.no_grad():
            return run(*tensors)

    form = [_TENSOR if isinstance(a, Tensor) else a for a in args]
    examples = [_example(a) for a in args if isinstance(a, Tensor)]
    with _disable_current_modes():
        outputs = _trial(cls, run, examples)
        pointwise = _is_pointwise(run, examples, outputs)
    operands = ", ".join(f"Tensor x{i}" for i in range(len(examples)))
    results = ", ".join(["Tensor"] * len(outputs))
    _LIBRARY.define(f"{name}({operands}) -> {results if len(outputs) == 1 else f'({results})'}")
    _LIBRARY.impl(name, run, "Autograd")
    _LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", forward, lib=_LIBRARY)
    if pointwise:
        text = f"{', '.join(['x*'] * len(examples))} -> {', '.join(['x*'] * len(outputs))}"
        register_rule(f"{NAMESPACE}::{name}", text)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _example(value: Tensor) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """Shape (sizes of the example for symbols), dtype, and whether a gradient is asked for."""
    sizes = [s.node.hint if isinstance(s, torch.SymInt) else int(s) for s in value.shape]
    return tuple(int(s) for s in sizes), value.dtype, value.requires_grad


def _made(examples: Sequence[tuple[tuple[int, ...], torch.dtype, bool]]) -> list[Tensor]:
    """Values, not leaves: what an op gets in a graph."""
    leaves = [
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)
        for shape, dtype, grad in examples
    ]
    return [leaf.clone() for leaf in leaves]


def _trial(cls: Any, run: Callable[..., Any], examples: Any) -> tuple[Tensor, ...]:
    """The results on meta tensors; raises `OwnBackward` for what an op can't do."""
    tensors = _made(examples)
    versions = [t._version for t in tensors]
    try:
        results = run(*tensors)
    except Exception as error:
        raise OwnBackward(cls, f"does not run on meta tensors ({error})") from error
    results = results if isinstance(results, tuple) else (results,)
    if not results or not all(isinstance(r, Tensor) for r in results):
        raise OwnBackward(cls, "returns something that is no tensor")
    if versions != [t._version for t in tensors]:
        raise OwnBackward(cls, "changes its inputs in place")
    return results


def _apart(results: Any, operands: Sequence[Tensor]) -> Any:
    """The results in memory of their own: an op's result is no view of its operands."""
    held = {t.untyped_storage()._cdata for t in operands}

    def own(value: Any) -> Any:
        shares = isinstance(value, Tensor) and value.untyped_storage()._cdata in held
        return value.clone() if shares else value

    return tuple(map(own, results)) if isinstance(results, tuple) else own(results)


def _is_pointwise(run: Callable[..., Any], examples: Any, outputs: Sequence[Tensor]) -> bool:
    """Whether operands and results have one shape, and only pointwise ops make the results and
    the gradients."""
    if len({shape for shape, _, _ in examples} | {tuple(o.shape) for o in outputs}) != 1:
        return False

    def both(*tensors: Tensor) -> Any:
        leaves = [
            t.detach().requires_grad_(grad)
            for t, (_, _, grad) in zip(tensors, examples, strict=True)
        ]
        results = run(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        with_grad = [r for r in results if r.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not with_grad or not wanted:
            return results
        ones = [torch.ones_like(r) for r in with_grad]
        return results, torch.autograd.grad(with_grad, wanted, ones, allow_unused=True)

    try:
        graph = make_fx(both)(*[t.detach() for t in _made(examples)]).graph
    except Exception:
        return False  # what can't be looked into is replicated
    return all(_keeps_places(n) for n in graph.nodes if n.op == "call_function")


def _keeps_places(node: fx.Node) -> bool:
    """Whether each element of the result is made of those in its own place."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target._opname in ("view", "expand", "reshape", "view_as"):
        source = node.args[0]
        return isinstance(source, fx.Node) and source.meta["val"].shape == node.meta["val"].shape
    return torch.Tag.pointwise in target.tags or target._opname in _AS_GOOD
