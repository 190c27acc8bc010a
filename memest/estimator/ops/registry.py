"""Registry of operators: what CUDA does that torch's meta kernels do not show.

A file of this package holds one family of operators. It registers the parts of each operator, the
fields of `Op`: by `op`, by `register`, or by the decorator of a part (`requests`, `result`). The
dispatcher gets them from `op_of`, which makes one `Op` per overload. `memest.register_kernel`
registers the kernels of users:

    @memest.register_kernel("mylib::fused_loss")
    def fused_loss(call):
        return memest.Scratch(after=(call.logits.numel() * 4,))  # the float32 copy
"""

import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._library.utils import lookup_op
from torch._ops import OpOverload

from memest.errors import PlanError
from memest.estimator import ops
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.temporaries import Events, Scratch, outputs
from memest.estimator.tensors.known_values import READS_VALUE
from memest.estimator.tensors.placement import FOREACH_REDUCTIONS
from memest.estimator.versions import OPERATORS_SINCE
from memest.plan.reading import read_table

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class KernelCall(dict[str, Any]):
    """Arguments of one call of an operator, by their names in its schema, with defaults.

    Arguments are items and attributes: `call["values"]`, `call.k`. Tensors have no values. `args`
    are the positional arguments. `out` is the call's result, a tensor or a tuple of tensors. `gpu`
    is the simulated GPU. `numbers_read` is the result of `Op.from_values`.
    """

    def __init__(
        self, arguments: Kwargs, args: Args, out: Any, gpu: Any, numbers_read: tuple[int, ...]
    ) -> None:
        super().__init__(arguments)
        self.args, self.out, self.gpu, self.numbers_read = args, out, gpu, numbers_read

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def outputs(self, *positions: int) -> Events:
        """Return events that allocate the results at `positions`, in this order; default: all."""
        results = self.out if isinstance(self.out, list | tuple) else [self.out]
        in_order = positions or range(len(results))
        return outputs({i: results[i].nbytes for i in in_order if results[i] is not None})


INDEX_BYTES = 8  # size of an int64

Rule = TypeVar("Rule", bound=Callable[..., Any])
RequestRule = Callable[[KernelCall], Scratch | Events | None]
ValueOf = Callable[[Tensor], Tensor | None]  # returns the values of a tensor, where they are known

_NAMESPACES_WITHOUT_TEMPORARIES = ("profiler", "_c10d_functional")
_SEVERAL_KERNELS = frozenset(("frexp", "ldexp", "ldexp_", "mvlgamma", "mvlgamma_"))
"""Operators tagged `pointwise` that run several kernels; not compared with a GPU."""


@dataclass(eq=False)
class Op:
    """One operator overload: its properties, and the rules that its module in `ops/` registered.
    The field of a rule that is not registered is None. `op_of` finds an overload by its `id`, since
    torch computes its hash in Python, which is slow."""

    func: Any
    requests: RequestRule | None = None  # temporaries, or all requests in their order
    modelled: Callable[[KernelCall], bool] | None = None
    """Returns whether `requests` holds for a call; None for all calls."""

    from_values: Callable[[ValueOf, Args], tuple[int, ...]] | None = None
    """Returns numbers that depend on values, `KernelCall.numbers_read`; () if those are unknown."""

    result: Callable[[KernelCall], Any] | None = None
    """Returns the results as meta tensors, if torch's meta kernel returns none or different ones.
    """

    layout: Callable[[KernelCall], Any] | None = None  # results with CUDA's strides
    decomposition: Callable[..., Any] | None = None
    """Replaces the operator below autograd by the operators that CUDA calls."""

    shaped_by: Callable[[Args], Any] | None = None  # arguments whose values decide the shape
    refuse: Callable[[KernelCall], str] | None = None
    """Returns torch's error text if CUDA refuses a call that the meta kernel accepts, else ""."""

    in_backward: Callable[[Any, Args], tuple[Any, Args]] | None = None
    """Returns the operator and arguments that autograd calls instead if no dispatch mode is on."""

    take_indices: Callable[[Any, Any, Args], tuple[Any, Args]] | None = None
    """Returns the call with indices as CUDA converts them: `(mode, func, args)`."""

    above_autograd: Callable[..., Any] | None = None
    """Runs the operator above autograd, as torch decides it for CUDA tensors: `(next, *args)`.

    It is called if the first tensor is on the GPU.
    """

    vmap_key: str = ""  # key at which `torch.vmap` decomposes it before this rule, or ""
    on_sparse: Callable[..., Any] | None = None  # runs it for COO: `(mode, *args, **kwargs)`
    on_compressed: Callable[..., Any] | None = None  # the same for CSR and CSC
    random_offset: Callable[[KernelCall], int | None] | None = None
    """Returns the increase of the generator's offset; None for the grid of `ops/random.Launch`."""

    product: Any = None  # cuBLAS call of a matrix product (`matmul.Product`), or None
    calls_cublas: Callable[[KernelCall], bool] | None = None
    """Returns whether a call uses a cuBLAS handle, for operators other than matrix products."""

    is_convolution: bool = False  # run by cuDNN; `benchmark` tries algorithms at the first call
    makes_alike: bool = False  # True for a factory with an argument that only describes the result
    may_mix_devices: bool = False  # True if host tensors and GPU tensors can be mixed

    def __post_init__(self) -> None:
        func, schema = self.func, self.func._schema
        self.name = str(func).removesuffix(".default")
        self.names = tuple(argument.name for argument in schema.arguments)
        optional = (a for a in schema.arguments if a.has_default_value())
        self.defaults = {argument.name: argument.default_value for argument in optional}
        # True if it can take a handle of cuBLAS, which has a workspace
        self.takes_handle = self.product is not None or self.calls_cublas is not None
        self.is_view, self.is_mutable = func.is_view, schema.is_mutable
        # makes a result, element by element
        self.is_pointwise = torch.Tag.pointwise in func.tags and not self.is_mutable
        # the CUDA kernel increments the versions of its tensors (ForeachFunctors.cuh)
        self.is_foreach_in_place = schema.name.startswith("aten::_foreach_") and self.is_mutable
        resizes = ("aten::resize_", "aten::resize_as_", "aten::_resize_output_")
        self.is_resize = schema.name in resizes
        # enlarges the storage that it writes to
        self.may_grow = self.is_resize or any(a.is_out for a in schema.arguments)
        self.returns_nothing = not schema.returns
        # writes to its first argument only, whose shape stays, without requests
        self.is_plain_in_place = self._is_plain_in_place()
        self.reads_value = func in READS_VALUE
        self.is_collective = func.namespace == "c10d"  # a `ProcessGroup` sends through it
        # waits for a functional collective and returns its input
        self.is_wait = schema.name == "_c10d_functional::wait_tensor"
        # can move the offset of the GPU's generator
        is_seeded = torch.Tag.nondeterministic_seeded in func.tags
        self.is_random = is_seeded or self.random_offset is not None
        # CUDA allocates the outputs and nothing else
        self.has_outputs_only = self.requests is None and self._allocates_outputs_only()

    def call(
        self, args: Args, kwargs: Kwargs, out: Any = None, gpu: Gpu | None = None,
        numbers_read: tuple[int, ...] = (),
    ) -> KernelCall:  # fmt: skip
        """Return a call of this operator, with its schema's defaults for missing arguments. `out`
        is its result, and `numbers_read` that of `from_values`."""
        arguments = self.defaults | dict(zip(self.names, args, strict=False)) | kwargs
        return KernelCall(arguments, args, out, gpu, numbers_read)

    def is_modelled(self, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
        """Return whether a rule covers the call's allocations, or they are just its outputs."""
        if self.requests is None:
            return self.has_outputs_only
        return self.modelled is None or bool(self.modelled(self.call(args, kwargs, None, gpu)))

    def check(self, args: Args, kwargs: Kwargs) -> None:
        """Check a call as the CUDA kernel does.

        Raises:
            RuntimeError: The kernel refuses the arguments, in torch's words.
            NotImplementedError: The kernel does not exist for their dtype.
        """
        reason = "" if self.refuse is None else self.refuse(self.call(args, kwargs))
        if reason:
            is_missing = "not implemented for" in reason  # torch's words for a missing kernel
            raise NotImplementedError(reason) if is_missing else RuntimeError(reason)

    def _is_plain_in_place(self) -> bool:
        aliases = [argument.alias_info for argument in self.func._schema.arguments]
        written = [i for i, alias in enumerate(aliases) if alias is not None and alias.is_write]
        has_rule = self.requests or self.result or self.refuse or self.shaped_by
        is_reshaping = self.may_grow or torch.Tag.inplace_view in self.func.tags
        return written == [0] and not has_rule and not is_reshaping

    def _allocates_outputs_only(self) -> bool:
        """Return whether the CUDA kernel, without a rule, allocates its outputs only. True for
        views, elementwise operators by torch's tag, `_foreach_*` except reductions, matrix
        products, names of `outputs_only.json`, and their forms in place."""
        schema = self.func._schema
        namespace, _, name = schema.name.partition("::")
        if namespace != "aten":
            return namespace in _NAMESPACES_WITHOUT_TEMPORARIES
        if name in _SEVERAL_KERNELS:
            return False
        if self.is_view or torch.Tag.pointwise in self.func.tags or self.product:
            return True
        if name.startswith("_foreach_"):
            is_reduction = name.startswith(FOREACH_REDUCTIONS)
            return not is_reduction or name.startswith("_foreach_maximum")
        if name in OUTPUTS_ONLY or f"{name}.{schema.overload_name}" in OUTPUTS_ONLY:
            return True
        if not name.endswith("_"):
            return False
        packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
        out_of_place = getattr(packet, self.func._overloadname, None)
        return out_of_place is not None and op_of(out_of_place).has_outputs_only


_parts_by_overload: dict[OpOverload, dict[str, Any]] = {}
_op_by_id: dict[int, Op] = {}

OUTPUTS_ONLY = frozenset[str]().union(*read_table(__file__, "outputs_only.json").values())
"""Operators, or overloads, whose kernels allocate their outputs only, by the family's file.

Evidence: recorded on an H200 without a temporary, or the same kind of kernel as one recorded.
"""


@cache
def load_families() -> None:
    """Import all modules of this package, each of which registers the rules of some operators."""
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        import_module(module.name)


def op_of(func: Any) -> Op:
    """Return the `Op` of an operator; the same object each time."""
    operator = _op_by_id.get(id(func))
    if operator is None:
        load_families()
        operator = _op_by_id[id(func)] = Op(func, **_parts_by_overload.get(func, {}))
    return operator


def rules_by_op(part: str) -> dict[OpOverload, Any]:
    """Return the rules in field `part` of `Op`, by operator, in the order of registration."""
    load_families()
    return {func: parts[part] for func, parts in _parts_by_overload.items() if part in parts}


def overloads(*operators: OpOverload | str) -> Iterator[OpOverload]:
    """Yield operator overloads: the given ones, and aten's by the names in a string, split at
    blanks. A name without an overload means the default one. Operators of newer releases of torch
    (`OPERATORS_SINCE`) are omitted if they are absent."""
    for operator in operators:
        if not isinstance(operator, str):
            yield operator
            continue
        for name in operator.split():
            packet, _, overload = name.partition(".")
            if packet in OPERATORS_SINCE and not hasattr(torch.ops.aten, packet):
                continue
            yield getattr(getattr(torch.ops.aten, packet), overload or "default")


def register(*operators: OpOverload | str, about: str = "", when: str = "", **parts: Any) -> None:
    """Set fields of `Op` (`parts`) for `overloads(*operators)`; `ValueError` if one is set twice.

    `about` describes what `requests` allocates and names the source. `when` describes the calls for
    which `modelled` returns True. Both are text for docs/kernels.md; "" adds none.
    """
    for part, text in (("requests", about), ("modelled", when)):
        if text:
            parts[part].__doc__ = text
    for func in overloads(*operators):
        fields = _parts_by_overload.setdefault(func, {})
        if duplicates := fields.keys() & parts.keys():
            raise ValueError(f"{func} has two rules for {', '.join(sorted(duplicates))}")
        fields.update(parts)
        _op_by_id.pop(id(func), None)


def _decorator(part: str, *operators: OpOverload | str, **fields: Any) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a function as field `part` of `Op` for `operators`, which
    are given as in `overloads`. `fields` are further fields, as in `register`."""

    def set_part(rule: Rule) -> Rule:
        fields[part] = rule
        register(*operators, **fields)
        return rule

    return set_part


requests = partial(_decorator, "requests")
result = partial(_decorator, "result")
refuse = partial(_decorator, "refuse")
random_offset = partial(_decorator, "random_offset")
decomposition = partial(_decorator, "decomposition")
above_autograd = partial(_decorator, "above_autograd")
on_sparse = partial(_decorator, "on_sparse")
on_compressed = partial(_decorator, "on_compressed")

Sizes = int | Sequence[int]


def op(
    operators: str, about: str, *, before: Callable[[KernelCall], Sizes] = lambda call: (),
    after: Callable[[KernelCall], Sizes] = lambda call: (),
    then: Callable[[KernelCall], Events] | None = None, **parts: Any,
) -> None:  # fmt: skip
    """Register `overloads(operators)`, whose kernels make temporaries before and after outputs.

    `before` and `after` return their bytes for a call; 0 allocates nothing. `then`, if given,
    replaces both: it returns all events after the outputs. `about` describes the allocations and
    their source. `parts` are other fields of `Op`.
    """

    def rule(call: KernelCall) -> Scratch | Events:
        if then is not None:
            return call.outputs() + then(call)
        return Scratch(_allocated(before(call)), _allocated(after(call)))

    # docs/kernels.md lists the rule under the family's file, which called this function
    rule.__module__ = sys._getframe(1).f_globals["__name__"]
    register(operators, about=about, requests=rule, **parts)


def _allocated(sizes: Sizes) -> tuple[int, ...]:
    all_sizes = (sizes,) if isinstance(sizes, int) else sizes
    return tuple(num_bytes for num_bytes in all_sizes if num_bytes)


def arguments_by_name(func: OpOverload, args: Args, kwargs: Kwargs) -> Kwargs:
    """Return the given arguments of a call, without defaults, by their names in the schema."""
    names = (argument.name for argument in func._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


def empty_like(position: int) -> Callable[[KernelCall], Tensor]:
    """Return a rule for `Op.result`: a contiguous tensor like the argument at `position`."""
    return lambda call: torch.empty_like(call.args[position], memory_format=torch.contiguous_format)


UNDER_VMAP = "FuncTorchBatched"  # dispatch key at which `torch.vmap` decomposes most operators


def register_kernel(op: OpOverload | str) -> Callable[[RequestRule], RequestRule]:
    """Return a decorator for a rule of what the kernel of `op` allocates besides its outputs.

    The rule gets a `KernelCall` and returns a `Scratch`, whose bytes are freed when the operator
    returns. None, or an empty one, means outputs only. What it returns may be reused for calls with
    the same shapes. A rule for an operator of torch replaces memest's own.

    Args:
        op: an operator, or its name such as `mylib::op` or `mylib::op.overload`.

    Raises:
        PlanError: there is no operator of this name.
    """
    load_families()
    try:
        func = lookup_op(op) if isinstance(op, str) else op
    except (AttributeError, RuntimeError, ValueError) as error:
        raise PlanError(
            f"there is no operator `{op}`",
            hint="import what defines it first; the name is `namespace::name` or with `.overload`",
        ) from error

    def replace_rule(rule: RequestRule) -> RequestRule:
        for part in ("requests", "modelled", "from_values"):
            _parts_by_overload.get(func, {}).pop(part, None)
        register(func, requests=rule)
        return rule

    return replace_rule
