"""Compiles a processor's method once more, with its attention call given the processor's layer."""

import ast
import inspect
import textwrap
from types import CodeType, FunctionType

SDPA = "scaled_dot_product_attention"
SDPA_HOOK = "_multimodal_gen_sdpa"
LAYER = "_attention_backend"


class CannotRebindError(Exception):
    """A processor's attention call was not found, or cannot be replaced; the message says why."""


def with_sdpa_hook(method: FunctionType, owner: str) -> CodeType:
    """Compile a method from source with its attention calls given the processor's layer.

    It is compiled inside a class named `owner`, by which Python spells its private names.
    """
    try:
        source = textwrap.dedent(inspect.getsource(method))
    except OSError as error:
        raise CannotRebindError(f"the source of {method.__qualname__} is not there") from error
    tree = ast.parse(source)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        raise CannotRebindError(f"{method.__qualname__} is not a plain method")
    rewriter = _SdpaRewriter(definition.args.args[0].arg)
    rewriter.visit(definition)
    if not rewriter.count:
        raise CannotRebindError(f"{method.__qualname__} does not call {SDPA} itself")
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


class _SdpaRewriter(ast.NodeTransformer):
    """Turns `F.scaled_dot_product_attention(...)` into `hook(self._attention_backend, ...)`."""

    def __init__(self, self_name: str) -> None:
        self.self_name = self_name
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Attribute) and node.func.attr == SDPA):
            return node
        self.count += 1
        owner = ast.Name(self.self_name, ast.Load())
        layer = ast.Attribute(owner, LAYER, ast.Load())
        node.func = ast.Name(SDPA_HOOK, ast.Load())
        node.args.insert(0, layer)
        return node


def _future_flags() -> int:
    import __future__

    features = (getattr(__future__, name) for name in __future__.all_feature_names)
    return sum({feature.compiler_flag for feature in features})
