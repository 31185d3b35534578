"""Replaces the attention call inside stock processor classes, leaving the rest of them as it is.

A processor of diffusers projects, normalises and rotates q, k and v, then calls one attention
function. A derived class keeps all of that: its methods are the stock ones on the same code, over
a copy of their module's globals in which only that function is another one. Two spellings exist:

- `dispatch_attention_fn(..., backend=self._attention_backend)` is a global to replace, in the
  method and in functions of its module that it hands the backend to;
- `F.scaled_dot_product_attention(...)` does not say whose call it is, so the method is compiled
  from its source once more, with `self._attention_backend` as an additional first argument. So is
  a method that calls the former without a backend.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.gated_value import GatedValue
from multimodal_gen.integrations.hooks import StandIn
from multimodal_gen.integrations.module_attention import ModuleAttention
from multimodal_gen.integrations.padding import PairMask
from multimodal_gen.runtime.layers.attention.backends.block_masks import is_block_mask
from multimodal_gen.runtime.managers.forward_context import current_forward_context

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

SDPA = "scaled_dot_product_attention"
SDPA_HOOK = "_multimodal_gen_sdpa"
LAYER = "_attention_backend"


class CannotPatchError(Exception):
    """A processor's attention call was not found, or cannot be replaced; the message says why."""


def with_layer_in_calls(method: FunctionType, owner: str) -> CodeType:
    """Compile a method from source with its attention calls given the processor's layer.

    It is compiled inside a class named `owner`, by which Python spells its private names.
    """
    try:
        source = textwrap.dedent(inspect.getsource(method))
    except OSError as error:
        raise CannotPatchError(f"the source of {method.__qualname__} is not there") from error
    tree = ast.parse(source)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        raise CannotPatchError(f"{method.__qualname__} is not a plain method")
    rewriter = _AttentionRewriter(definition.args.args[0].arg, _dispatch_names(method))
    rewriter.visit(definition)
    if not rewriter.count:
        name = SDPA if _mentions(method.__code__, SDPA) else _DISPATCH
        raise CannotPatchError(f"{method.__qualname__} does not call {name} itself")
    body = ast.parse(f"class {owner}: pass").body
    assert isinstance(body[0], ast.ClassDef)
    body[0].body, tree.body = [definition], body
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, method.__code__.co_firstlineno - 1)
    flags = method.__code__.co_flags & _future_flags()
    module = compile(tree, method.__code__.co_filename, "exec", flags, dont_inherit=True)
    return _code_inside(_code_inside(module, owner), method.__name__)


def _code_inside(code: CodeType, name: str) -> CodeType:
    return next(
        const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name
    )


class _AttentionRewriter(ast.NodeTransformer):
    """Hands the layer to attention calls.

    `F.scaled_dot_product_attention(...)` becomes `hook(self._attention_backend, ...)`, and
    `dispatch_attention_fn(...)` without a backend, with `backend=None` or with FlexAttention's,
    whose masks layers take, gets `backend=self._attention_backend`.
    """

    def __init__(self, self_name: str, dispatch_names: set[str]) -> None:
        self.self_name = self_name
        self.dispatch_names = dispatch_names
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        owner = ast.Name(self.self_name, ast.Load())
        layer = ast.Attribute(owner, LAYER, ast.Load())
        if isinstance(node.func, ast.Name) and node.func.id in self.dispatch_names:
            given = {keyword.arg: keyword for keyword in node.keywords}
            if not given.keys() & {"backend", None}:
                node.keywords.append(ast.keyword("backend", layer))
            elif "backend" in given and _is_none_or_flex(given["backend"].value):
                given["backend"].value = layer
            self.count += 1
            return node
        if not (isinstance(node.func, ast.Attribute) and node.func.attr == SDPA):
            return node
        self.count += 1
        node.func = ast.Name(SDPA_HOOK, ast.Load())
        node.args.insert(0, layer)
        return node


def _is_none_or_flex(node: ast.AST) -> bool:
    """Whether an expression is None, "flex" or `AttentionBackendName.FLEX`."""
    if isinstance(node, ast.Attribute):
        return node.attr == _FLEX.upper()
    return isinstance(node, ast.Constant) and node.value in (None, _FLEX)


def _future_flags() -> int:
    import __future__

    features = (getattr(__future__, name) for name in __future__.all_feature_names)
    return sum({feature.compiler_flag for feature in features})


_DISPATCH = "dispatch_attention_fn"
_REPLACED = "_multimodal_gen_replaced"
_BEFORE = "_multimodal_gen_before"
_OURS = frozenset({LAYER, _REPLACED, _BEFORE})
_SUPPORTED = "_SUPPORTED_BACKENDS"
_FLEX = "flex"
_REPLACED_BACKENDS = ("None", f'"{_FLEX}"', f"AttentionBackendName.{_FLEX.upper()}")


class _WithOurs(tuple[str, ...]):
    """The backends that a processor runs on, and layers: they take FlexAttention's masks too."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, ModuleAttention) or super().__contains__(name)


def patched_class(stock: type, replacements: Mapping[str, Any] | None = None) -> type:
    """Return a subclass of a processor class whose attention call takes a `ModuleAttention`.

    Args:
        stock: the processor's class.
        replacements: further globals of its methods to replace, by name.

    The same class comes back until a global that its methods use, or a method, is another object:
    a helper patched later is honoured, and `torch.compile` has no new class to compile for.

    Raises:
        CannotPatchError: the class calls no attention function that can be replaced, or its
            objects have no `__dict__`; or it goes by which backend of diffusers it has.
    """
    methods = dict(_attention_methods(stock))
    inherited = tuple(_inherited_methods(stock))
    if not methods and not inherited:
        slices = "Sliced" in stock.__name__
        hint = ", which slices: call disable_attention_slicing()" if slices else ""
        raise CannotPatchError(f"{stock.__name__} calls neither {_DISPATCH} nor {SDPA}{hint}")
    if not stock.__dictoffset__ or _slots(stock) - {LAYER}:
        raise CannotPatchError(f"{stock.__name__} keeps its state in __slots__")
    _require_indifferent(
        stock, [*methods.values(), *(f for _, fs in inherited for f in fs.values())]
    )
    key = stock, tuple((replacements or {}).items())
    used = _used(methods)
    for base, found in inherited:
        used |= {f"{base.__qualname__}.{name}": each for name, each in _used(found).items()}
    known = _PATCHED_CLASSES.get(key)
    if known is None or not _same(known[0], used):
        known = used, _make_class(stock, methods, replacements or {}, inherited)
        _PATCHED_CLASSES[key] = known
    return known[1]


def patch(processor: object, layer: ModuleAttention, derived: type) -> Any:
    """Return a processor of the derived class with the state of `processor`, bound to `layer`."""
    new: Any = object.__new__(derived)
    new.__dict__.update(vars(processor))
    new.__dict__[_REPLACED] = processor
    new.__dict__[_BEFORE] = dict(vars(processor))
    new.__dict__[LAYER] = layer
    layer.own_backend = getattr(processor, LAYER, None)
    return new


def unpatch(replacement: Any) -> Any:
    """Return the processor that `replacement` stands in for, with the state it has by now.

    What was set on either of them since `patch` is kept; on the same name the replacement, which
    is the one in use, has the last word.
    """
    found = vars(replacement)[_REPLACED]
    state, before = vars(replacement), vars(replacement)[_BEFORE]
    for name, value in state.items():
        if name not in _OURS and (name not in before or before[name] is not value):
            vars(found)[name] = value
    for name in before.keys() - state.keys() - _OURS:
        vars(found).pop(name, None)
    return found


# By processor class and replacements: what the derived class was made from, and the class. It
# lives as long as the process, so that two pipelines share a class and what was compiled for it.
_PATCHED_CLASSES: dict[Any, tuple[dict[str, Any], type]] = {}


def _used(methods: Mapping[str, FunctionType]) -> dict[str, Any]:
    """Return the methods and the globals they name; held, so that no identity is reused."""
    used: dict[str, Any] = dict(methods)
    for name, method in methods.items():
        for used_name in set(_names(method.__code__)) & method.__globals__.keys():
            used[f"{name}: {used_name}"] = method.__globals__[used_name]
    return used


def _same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return before.keys() == now.keys() and all(before[key] is now[key] for key in now)


def _make_class(
    stock: type,
    methods: Mapping[str, FunctionType],
    replacements: Mapping[str, Any],
    inherited: tuple[tuple[type, Mapping[str, FunctionType]], ...],
) -> type:
    namespace: dict[str, Any] = {
        name: _patched(method, replacements, _defining_class(stock, name))
        for name, method in methods.items()
    }
    namespace.update(
        {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
            "in_copies": _unpatched,
            LAYER: None,
        }
    )
    if hasattr(stock, _SUPPORTED):
        namespace[_SUPPORTED] = _WithOurs(getattr(stock, _SUPPORTED))
    # Between the class and the base whose method it reaches by super(): C3 puts them there.
    between = tuple(
        type(
            base.__name__,
            (base,),
            {
                "__module__": base.__module__,
                **{n: _patched(m, replacements, base.__name__) for n, m in found.items()},
            },
        )
        for base, found in inherited
    )
    return type(stock.__name__, (StandIn, stock, *between), namespace)


def _require_indifferent(stock: type, methods: Sequence[FunctionType]) -> None:
    """Refuse processors to which it matters which backend of diffusers they have."""
    wanted = getattr(stock, LAYER, None)
    if wanted not in (None, _FLEX):  # whose masks layers take, too
        raise CannotPatchError(f"{stock.__name__} wants diffusers' backend {wanted}")
    for method in methods:
        named = (method.__globals__.get(name) for name in _names(method.__code__))
        functions = (function for function in named if isinstance(function, FunctionType))
        if any(LAYER in function.__code__.co_consts for function in functions):
            raise CannotPatchError(f"{stock.__name__} asks which of diffusers' backends it has")


def _attention_methods(stock: type) -> Iterator[tuple[str, FunctionType]]:
    for name, method in inspect.getmembers(stock, inspect.isfunction):
        if _attends(method):
            yield name, method


def _inherited_methods(stock: type) -> Iterator[tuple[type, dict[str, FunctionType]]]:
    """Yield the bases with attention calls in methods that are overridden, reached by super()."""
    seen = set(vars(stock))
    for base in stock.__mro__[1:-1]:
        found = {
            name: f
            for name, f in vars(base).items()
            if name in seen and isinstance(f, FunctionType) and _attends(f)
        }
        if found:
            yield base, found
        seen |= set(vars(base))


def _attends(method: FunctionType) -> bool:
    """Whether a method calls an attention function."""
    return _mentions(method.__code__, SDPA) or bool(_dispatch_names(method))


def _dispatch_names(method: FunctionType) -> set[str]:
    """Return the names under which a function's globals hold diffusers' dispatch function."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    names = set(_names(method.__code__))
    return {name for name in names if method.__globals__.get(name) is dispatch_attention_fn}


def _slots(stock: type) -> set[str]:
    members = (vars(cls).items() for cls in stock.__mro__)
    return {name for found in members for name, v in found if inspect.ismemberdescriptor(v)}


def _defining_class(stock: type, name: str) -> str:
    return next(cls.__name__ for cls in stock.__mro__ if name in vars(cls))


def _patched(method: FunctionType, replacements: Mapping[str, Any], owner: str) -> FunctionType:
    _require_plain(method)
    code = method.__code__
    replaced = {**_dispatch_replaced(method), **_helpers(method), **replacements}
    without = not _mentions(code, LAYER) or _leaves_backend_open(method)
    if _mentions(code, SDPA) or (_dispatch_names(method) and without):
        code = with_layer_in_calls(method, owner)
        replaced[SDPA_HOOK] = sdpa
    return _with_globals(method, code, replaced)


def _leaves_backend_open(method: FunctionType) -> bool:
    """Return whether calls of a method name none or FlexAttention's, and others its own."""
    try:
        source = inspect.getsource(method)
    except OSError:
        return False
    return any(f"backend={name}" in source for name in _REPLACED_BACKENDS)


def _helpers(method: FunctionType) -> dict[str, FunctionType]:
    """Return the functions to which a method leaves calls of the dispatch function, patched."""
    named = {name: method.__globals__.get(name) for name in _names(method.__code__)}
    helpers = {
        name: function
        for name, function in named.items()
        if isinstance(function, FunctionType)
        and function.__module__ == method.__module__
        and _dispatch_names(function)
    }
    for function in helpers.values():
        _require_plain(function)
    return {
        name: _with_globals(function, function.__code__, _dispatch_replaced(function))
        for name, function in helpers.items()
    }


def _dispatch_replaced(function: FunctionType) -> dict[str, Any]:
    return dict.fromkeys(_dispatch_names(function), dispatch)


def _require_plain(function: FunctionType) -> None:
    # `__class__` is what super() without arguments refers to; it stays the class that it is.
    if hasattr(function, "__wrapped__") or set(function.__code__.co_freevars) - {"__class__"}:
        raise CannotPatchError(f"{function.__qualname__} is decorated or a closure")


def _with_globals(
    method: FunctionType, code: CodeType, replaced: Mapping[str, Any]
) -> FunctionType:
    """Return a function like `method` on `code`, over its globals with some of them replaced."""
    # Dynamo looks globals up in the module called `__name__`, which would be the stock one, with
    # the stock attention call. `__package__` stays: it is what relative imports go by.
    scope = {key: value for key, value in method.__globals__.items() if key != "__name__"}
    scope.update(replaced)
    closure = method.__closure__ if code.co_freevars else None
    new = FunctionType(code, scope, method.__name__, method.__defaults__, closure)
    new.__kwdefaults__ = method.__kwdefaults__
    new.__annotations__ = dict(method.__annotations__)
    new.__qualname__ = method.__qualname__
    new.__module__ = method.__module__
    new.__doc__ = method.__doc__
    return new


def dispatch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: "torch.Tensor | GatedValue",
    attn_mask: "torch.Tensor | PairMask | BlockMask | None" = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: Any = None,
    parallel_config: Any = None,
) -> torch.Tensor:
    """Stand in for diffusers' `dispatch_attention_fn`, whose arguments and [B, S, H, D] it has.

    A `backend` that is not ours was set by diffusers' own `set_attention_backend` after `apply`:
    the later word counts, so the call goes to diffusers.

    Raises:
        UsageError: the call asks for something the layers do not do.
    """
    gate = value.gate if isinstance(value, GatedValue) else None
    value = value.value if isinstance(value, GatedValue) else value
    taken = attn_mask is None or isinstance(attn_mask, (torch.Tensor, PairMask))
    if not (taken or is_block_mask(attn_mask)) and isinstance(backend, ModuleAttention):
        backend.warn(
            f"calls of {backend.site.component} with a {type(attn_mask).__name__} as their mask "
            f"are left to diffusers, which computes them as without apply()"
        )
        backend = backend.own_backend
    if not isinstance(backend, ModuleAttention):
        mask = attn_mask.dense() if isinstance(attn_mask, PairMask) else attn_mask
        return _stock_dispatch()(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            attention_kwargs=attention_kwargs,
            backend=backend,
            parallel_config=parallel_config,
        )
    _refuse_dropout(backend, dropout_p)
    if parallel_config is not None:
        raise UsageError(
            f"context parallelism of diffusers must be off under apply(), got {parallel_config} "
            f"in {backend.site.name}; remove() the handle, or do not enable parallelism"
        )
    if attention_kwargs:
        raise UsageError(
            f"attention_kwargs must be empty, got {sorted(attention_kwargs)} in "
            f"{backend.site.name}: they belong to one of diffusers' own backends"
        )
    if isinstance(attn_mask, PairMask):
        attn_mask = attn_mask.mask
    elif isinstance(attn_mask, torch.Tensor) and attn_mask.dim() == 2:
        # [B, Sk] to diffusers, which masks keys alone; to the layers it masks queries too.
        attn_mask = _over_keys(attn_mask)
    return backend.attend(query, key, value, attn_mask, causal=is_causal, scale=scale, gate=gate)


def _over_keys(mask: torch.Tensor) -> torch.Tensor:
    """Return [B, Sk] as [B, 1, 1, Sk], for all layers of a denoiser call as the same tensor.

    The layers know a mask they have packed by its identity.
    """
    context = None if torch.compiler.is_compiling() else current_forward_context()
    if context is None:
        return mask[:, None, None, :]
    return context.cache.get(mask, "over keys", lambda: mask[:, None, None, :])


def sdpa(
    backend: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stand in for PyTorch's `scaled_dot_product_attention` in a processor's method.

    Args:
        backend: the processor's `_attention_backend`.
        query: [B, H, Sq, D], or [B, Sq, D].
        key: [B, Hkv, Sk, D], or [B, Sk, D].
        value: as `key`.
        attn_mask: broadcastable to [B, H, Sq, Sk].
        dropout_p: must be 0.
        is_causal: top-left aligned causality.
        scale: factor on q k^T.
        enable_gqa: whether Hkv may be smaller than H.

    Returns:
        The shape of `query`.

    Raises:
        UsageError: the call asks for something the layers do not do.
    """
    if not isinstance(backend, ModuleAttention):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    _refuse_dropout(backend, dropout_p)
    if query.dim() == 3:
        mask = None if attn_mask is None else attn_mask[..., None, :, :]
        out = sdpa(
            backend, query[:, None], key[:, None], value[:, None], mask, 0.0, is_causal, scale
        )
        return out[:, 0]
    if attn_mask is not None and attn_mask.dim() < 4:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out = backend.attend(query, key, value, attn_mask, causal=is_causal, scale=scale)
    return out.transpose(1, 2)


def _refuse_dropout(backend: ModuleAttention, dropout_p: float) -> None:
    if dropout_p:
        raise UsageError(
            f"dropout_p must be 0.0 under apply(), got {dropout_p} in {backend.site.name}; "
            f"attention kernels apply no dropout, call the model's eval()"
        )


def _stock_dispatch() -> Callable[..., torch.Tensor]:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    function: Callable[..., torch.Tensor] = dispatch_attention_fn
    return function


def _unpatched(self: Any) -> Any:
    """Return a stock processor with the state of a derived one: copies are not attached."""
    state = dict(vars(self))
    replaced = state.pop(_REPLACED)
    del state[_BEFORE]
    if isinstance(state[LAYER], ModuleAttention):
        del state[LAYER]
        if LAYER in vars(replaced):
            state[LAYER] = vars(replaced)[LAYER]
    processor: Any = object.__new__(type(replaced))
    processor.__dict__.update(state)
    return processor


def _mentions(code: CodeType, name: str) -> bool:
    return name in set(_names(code))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)
