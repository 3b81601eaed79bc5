"""What a reader pays for: nodes, dense forms, empty names, missing arguments.

`python tests/house/test_reading_cost.py` prints the numbers of this tree. Lines
and words are not counted: a bound on them only makes code denser.
"""

from __future__ import annotations

import ast
import collections
import inspect
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import source_tree
from scipy.sparse import csgraph

SOURCE = (
  "anysearch_jax",
  "retrieval",
  "launch",
  "configs",
  "bench",
  "examples",
)
# Names that say that something was found, never what.
EMPTY_NAMES = frozenset(
  {
    "after",
    "again",
    "alone",
    "anew",
    "asked",
    "before",
    "beside",
    "by",
    "chosen",
    "due",
    "each",
    "found",
    "given",
    "heard",
    "held",
    "here",
    "how",
    "kept",
    "known",
    "left",
    "made",
    "meant",
    "mine",
    "most",
    "named",
    "of",
    "one",
    "only",
    "ours",
    "over",
    "own",
    "rest",
    "said",
    "seen",
    "shown",
    "some",
    "taken",
    "there",
    "told",
    "wanted",
    "what",
    "where",
    "whole",
    "whose",
    "why",
  }
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_DISPLAY = (ast.Tuple, ast.List)
# What a node is, beside its place: an operator is part of its expression.
_NOT_NODES = (
  ast.expr_context,
  ast.operator,
  ast.boolop,
  ast.unaryop,
  ast.cmpop,
)


def trees(*folders: str) -> Iterator[tuple[pathlib.Path, ast.Module]]:
  """Yields each file of the folders with its syntax tree."""
  for path in source_tree.files(*folders):
    yield path, ast.parse(path.read_text())


def nodes(tree: ast.AST) -> int:
  """Counts the nodes of a syntax tree."""
  return sum(not isinstance(node, _NOT_NODES) for node in ast.walk(tree))


def functions(tree: ast.AST) -> list[_Function]:
  return [node for node in ast.walk(tree) if isinstance(node, _Function)]


def binds_an_empty_name(function: _Function) -> bool:
  """Returns whether a parameter or a variable has a name of `EMPTY_NAMES`."""
  bound = {
    node.id
    for node in ast.walk(function)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
  }
  arguments = function.args.args + function.args.kwonlyargs
  bound |= {argument.arg for argument in arguments}
  return bool(bound & EMPTY_NAMES)


def lacks_args(tree: ast.Module) -> list[str]:
  """Returns the public functions of 3+ parameters without an Args section."""
  names = []

  def visit(node: ast.AST) -> None:
    for child in ast.iter_child_nodes(node):
      if not isinstance(child, _Function):
        visit(child)  # Functions inside of functions are not public.
        continue
      parameters = child.args.posonlyargs + child.args.args
      parameters += child.args.kwonlyargs
      count = sum(a.arg not in ("self", "cls") for a in parameters)
      overload = any("overload" in ast.dump(d) for d in child.decorator_list)
      public = not child.name.startswith("_") and not overload
      if public and count >= 3:
        if "Args:" not in (ast.get_docstring(child) or ""):
          names.append(child.name)

  visit(tree)
  return names


class Golf(ast.NodeVisitor):
  """Counts forms that save a line and cost a reader.

  They are starred literals, literals with ** in a literal or a call, tuples
  assigned to names, conditions in conditions, `and` and `or` of values,
  assignments inside other expressions, arithmetic on comparisons, loops over
  one thing, and sentences split into data.
  """

  def __init__(self) -> None:
    self.count: collections.Counter[str] = collections.Counter()
    self._above: list[ast.AST] = []

  def visit(self, node: ast.AST) -> None:
    self._above.append(node)
    super().visit(node)
    self._above.pop()

  def visit_Starred(self, node: ast.Starred) -> None:
    literal = isinstance(node.value, _DISPLAY)
    self.count["splat"] += literal and isinstance(node.ctx, ast.Load)
    self.generic_visit(node)

  def visit_Dict(self, node: ast.Dict) -> None:
    for key, value in zip(node.keys, node.values):
      literal = isinstance(value, ast.Dict | ast.DictComp)
      self.count["dict_splat"] += key is None and literal
    self.generic_visit(node)

  def visit_Call(self, node: ast.Call) -> None:
    for keyword in node.keywords:
      literal = isinstance(keyword.value, ast.Dict)
      self.count["dict_splat"] += keyword.arg is None and literal
    called = node.func
    if isinstance(called, ast.Attribute) and called.attr == "split":
      of_text = isinstance(called.value, ast.Constant)
      self.count["split_data"] += of_text and not node.args
    self.generic_visit(node)

  def visit_Assign(self, node: ast.Assign) -> None:
    target, value = node.targets[0], node.value
    if isinstance(target, _DISPLAY):
      in_function = self._in_function()
      pairs = isinstance(value, _DISPLAY) and len(value.elts) == len(
        target.elts
      )
      self.count["packed"] += not in_function or (
        pairs and not _swaps(target, value)
      )
    self.generic_visit(node)

  def visit_IfExp(self, node: ast.IfExp) -> None:
    parts = (node.body, node.orelse, node.test)
    self.count["nested_if"] += any(isinstance(x, ast.IfExp) for x in parts)
    self.generic_visit(node)

  def visit_BoolOp(self, node: ast.BoolOp) -> None:
    parent = self._above[-2]
    tests = (ast.If, ast.While, ast.Assert, ast.BoolOp)
    is_test = isinstance(parent, tests) or (
      isinstance(parent, ast.IfExp | ast.comprehension)
      and node not in _values(parent)
    )
    is_and = isinstance(node.op, ast.And)
    if not is_test and _is_value(node.values[-1]):
      mixed = any(_ands(x) for x in node.values)
      self.count["value_and"] += is_and or mixed
    elif not is_test and not is_and:
      self.count["value_and"] += any(
        _ands(x) and _is_value(x.values[-1])
        for x in node.values
        if isinstance(x, ast.BoolOp)
      )
    self.generic_visit(node)

  def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
    self.count["hidden_walrus"] += not self._is_condition(node)
    self.generic_visit(node)

  def visit_BinOp(self, node: ast.BinOp) -> None:
    if isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
      self.count["bool_math"] += any(
        isinstance(side, ast.Compare)
        or (isinstance(side, ast.UnaryOp) and isinstance(side.op, ast.Not))
        for side in (node.left, node.right)
      )
    self.generic_visit(node)

  def visit_For(self, node: ast.For) -> None:
    self.count["one_loop"] += _is_one(node.iter)
    self.generic_visit(node)

  def visit_comprehension(self, node: ast.comprehension) -> None:
    self.count["one_loop"] += _is_one(node.iter)
    self.generic_visit(node)

  def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
    self._function(node)

  def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
    self._function(node)

  def _function(self, node: _Function) -> None:
    """Counts tuples that are named, and used once, behind a star."""
    tuples = {
      x.targets[0].id
      for x in ast.walk(node)
      if isinstance(x, ast.Assign)
      and isinstance(x.targets[0], ast.Name)
      and isinstance(x.value, ast.Tuple)
    }
    loads = collections.Counter(
      x.id
      for x in ast.walk(node)
      if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)
    )
    for x in ast.walk(node):
      if isinstance(x, ast.Starred) and isinstance(x.value, ast.Name):
        name = x.value.id
        self.count["splat"] += name in tuples and loads[name] == 1
    self.generic_visit(node)

  def _in_function(self) -> bool:
    """Returns whether the node is in a function, not in a class or module."""
    for node in reversed(self._above[:-1]):
      if isinstance(node, _Function | ast.Lambda):
        return True
      if isinstance(node, ast.ClassDef):
        return False
    return False

  def _is_condition(self, node: ast.NamedExpr) -> bool:
    """Returns whether an assignment expression is part of a condition."""
    for above in reversed(self._above[:-1]):
      match above:
        case ast.If() | ast.While():
          return any(x is node for x in ast.walk(above.test))
        case ast.IfExp() if any(x is node for x in ast.walk(above.test)):
          return True
        case ast.comprehension():
          if any(x is node for test in above.ifs for x in ast.walk(test)):
            return True
        case ast.BoolOp() | ast.match_case() | ast.Assert():
          return True
        case ast.stmt():
          return False
    return False


def _swaps(target: ast.expr, value: ast.expr) -> bool:
  """Returns whether `a, b = b, a`: the names appear on both sides."""
  sides = [
    {x.id for x in ast.walk(side) if isinstance(x, ast.Name)}
    for side in (target, value)
  ]
  attributes = any(isinstance(x, ast.Attribute) for x in ast.walk(target))
  return bool(sides[0] & sides[1]) and not attributes


def _values(parent: ast.AST) -> list[ast.AST]:
  """Returns the parts of a conditional or a loop that are not its test."""
  names = ("body", "orelse", "iter")
  return [x for x in (getattr(parent, name, None) for name in names) if x]


def _is_value(node: ast.AST) -> bool:
  literals = (ast.Tuple, ast.List, ast.Dict, ast.JoinedStr)
  if isinstance(node, ast.Constant):
    return not isinstance(node.value, bool)
  return isinstance(node, literals)


def _ands(node: ast.AST) -> bool:
  return isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And)


def _is_one(node: ast.AST) -> bool:
  """Returns whether a display has one item."""
  if not isinstance(node, _DISPLAY) or len(node.elts) != 1:
    return False
  return not isinstance(node.elts[0], ast.Starred)


def golf(tree: ast.AST) -> int:
  """Counts the dense forms of a syntax tree."""
  visitor = Golf()
  visitor.visit(tree)
  return visitor.count.total()


def circles() -> list[list[str]]:
  """Returns the groups of source files that import each other in a loop."""
  edges = {
    (path.relative_to(source_tree.ROOT).as_posix(), other)
    for path, tree in trees(*SOURCE)
    for other in _imports(tree)
  }
  files = sorted({name for edge in edges for name in edge})
  number = {name: i for i, name in enumerate(files)}
  imports = np.zeros((len(files), len(files)), bool)
  for importer, imported in edges:
    imports[number[importer], number[imported]] = True
  _, group_ids = csgraph.connected_components(imports, connection="strong")
  groups = collections.defaultdict(list)
  for name, group_id in zip(files, group_ids):
    groups[group_id].append(name)
  return sorted(group for group in groups.values() if len(group) > 1)


def _imports(tree: ast.AST) -> Iterator[str]:
  """Yields the project's files that a file imports, also inside functions."""
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.module:
      names = [f"{node.module}.{alias.name}" for alias in node.names]
      names.append(node.module)
    elif isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    else:
      continue
    for name in names:
      path = name.replace(".", "/") + ".py"
      for place in (path, path.removeprefix("anysearch_jax/")):
        if (source_tree.ROOT / place).is_file():
          yield place


def takes_whole_config() -> list[str]:
  """Returns the files with a function that takes the whole configuration."""
  return [
    path.relative_to(source_tree.ROOT).as_posix()
    for path, tree in trees(*SOURCE)
    if any(
      argument.annotation is not None
      and "ExperimentConfig" in ast.unparse(argument.annotation)
      for function in functions(tree)
      for argument in function.args.args + function.args.kwonlyargs
    )
  ]


def files_entered(play: Callable[[Callable[[], None]], object]) -> set[str]:
  """Returns the source files whose functions a call enters.

  Args:
    play: what is called; calling its argument forgets the files until then, as
      those that start a service.
  """
  roots = tuple(f"{source_tree.ROOT / folder}/" for folder in SOURCE)
  code_files: set[str] = set()

  def profile(frame, event, argument):
    # Bodies of modules and classes, which imports run, are not optimized.
    if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
      code_files.add(frame.f_code.co_filename)

  threading.setprofile(profile)
  sys.setprofile(profile)
  try:
    play(code_files.clear)
  finally:
    sys.setprofile(None)
    threading.setprofile(None)
  real = {str(pathlib.Path(name).resolve()) for name in code_files}
  return {
    pathlib.Path(name).relative_to(source_tree.ROOT).as_posix()
    for name in real
    if name.startswith(roots)
  }
