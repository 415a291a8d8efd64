"""The rules of the house, checked on the source itself: floors, budgets, bans, docstrings."""

import ast
import graphlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tether.cli.schema import options

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tether"
FLOORS: tuple[set[str], ...] = (
    {"tether", "errors", "checks", "distributed", "observer"},
    {"types", "config", "recipe_text", "metrics", "run_folder", "checkpoint"},
    {"core", "data", "models", "report"},
    {"generation", "rewards", "update", "fit"},
    {"rollout", "guard"},
    {"train", "baseline", "prepare", "provenance", "progress", "summary", "run"},
    {"exact"},
    {"study"},
    {"cli", "integrations", "__main__"},
)
MOST_LINES = 300
SHORTER = {"tether.train": 200}
MOST_FUNCTION_LINES = 50
MOST_MEDIAN_LINES = 14
MOST_OPTIONS = 60
LARGEST_RTOL = 1e-3

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


PATHS = {_module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in PATHS.items()}
TESTS = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "tests").rglob("*.py"))
}


def _room(module: str) -> str:
    """The unit that stands on a floor: tether.core.kl stands with core."""
    return module.split(".")[1] if "." in module else module


def _floor(module: str) -> int:
    """Counted from the ground; a room without a floor stands above all."""
    own = (i for i, rooms in enumerate(FLOORS) if _room(module) in rooms)
    return next(own, len(FLOORS))


def _imports(tree: ast.Module, known: set[str]) -> set[str]:
    """Every module of ours that a module imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the module in full"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & known) or {str(node.module)}
    return {name for name in found if name == "tether" or name.startswith("tether.")}


def _graph() -> dict[str, set[str]]:
    return {name: _imports(tree, set(TREES)) for name, tree in TREES.items()}


def _functions(tree: ast.AST) -> Iterator[Function]:
    yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def _length(function: Function) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def test_every_module_stands_on_a_floor():
    rooms = set().union(*FLOORS)
    assert {name for name in TREES if _room(name) not in rooms} == set()


def test_imports_only_go_down():
    upward = {
        f"{name} imports {target}"
        for name, targets in _graph().items()
        for target in targets
        if _floor(target) > _floor(name)
    }
    assert upward == set()


def test_no_import_goes_round_in_a_circle():
    graphlib.TopologicalSorter(_graph()).prepare()


def test_core_knows_nothing_but_types_and_errors():
    foreign = {
        f"{name} imports {target}"
        for name, targets in _graph().items()
        for target in targets
        if _room(name) == "core" and _room(target) not in {"core", "types", "errors"}
    }
    assert foreign == set()


def test_no_module_is_longer_than_its_budget():
    lines = {n: len(p.read_text(encoding="utf-8").splitlines()) for n, p in PATHS.items()}
    assert {n: c for n, c in lines.items() if c > SHORTER.get(n, MOST_LINES)} == {}


def test_no_function_is_longer_than_its_budget():
    long = {
        f"{name}.{function.name}": _length(function)
        for name, tree in TREES.items()
        for function in _functions(tree)
        if _length(function) > MOST_FUNCTION_LINES
    }
    assert long == {}


def test_the_median_function_is_short():
    lengths = [_length(f) for tree in TREES.values() for f in _functions(tree)]
    assert statistics.median(lengths) <= MOST_MEDIAN_LINES


def _undocumented(node: ast.Module | ast.ClassDef, name: str) -> Iterator[str]:
    """Public things without a docstring: the node itself, its classes, functions, methods."""
    if not ast.get_docstring(node):
        yield name
    for inner in node.body:
        if isinstance(inner, ast.ClassDef) and not inner.name.startswith("_"):
            yield from _undocumented(inner, f"{name}.{inner.name}")
        elif isinstance(inner, Function) and not inner.name.startswith("_"):
            yield from () if ast.get_docstring(inner) else (f"{name}.{inner.name}",)


def test_every_public_name_has_a_docstring():
    assert [n for name, tree in TREES.items() for n in _undocumented(tree, name)] == []


def _banned(tree: ast.Module) -> Iterator[str]:
    """Uses of what no module may use."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in {"print", "breakpoint", "TYPE_CHECKING"}:
            yield node.id
        if isinstance(node, ast.Attribute) and node.attr == "TYPE_CHECKING":
            yield node.attr
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            yield "from __future__"


def test_nothing_prints_or_hides_types_from_the_runtime_checks():
    assert [(name, word) for name, tree in TREES.items() for word in _banned(tree)] == []


@pytest.mark.parametrize(
    "code",
    [
        "import tether.config",
        "import tether.cli; assert tether.cli.main(['--help']) == 0",
        "import tether.cli; assert tether.cli.main(['train', '--help']) == 0",
    ],
)
def test_reading_options_and_help_imports_no_torch(code):
    check = "import sys; sys.exit(str({'torch', 'transformers'} & set(sys.modules) or ''))"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}; {check}"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr.strip()) == (1, ""), result.stderr


def test_the_module_is_the_command():
    result = subprocess.run(
        [sys.executable, "-m", "tether", "--help"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: tether")


def test_the_recipe_stays_small():
    assert len(options()) <= MOST_OPTIONS


def _is_mask_count(node: ast.AST, counts: set[str]) -> bool:
    """True where an expression counts a mask, directly or through a name assigned before."""
    if isinstance(node, ast.Name):
        return node.id in counts
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        reduces = node.func.attr in {"sum", "count_nonzero"}
        if reduces and "mask" in ast.unparse(node):
            return True
    return any(_is_mask_count(child, counts) for child in ast.iter_child_nodes(node))


def _denominators(function: ast.AST) -> Iterator[ast.expr]:
    """What a function divides by, written with / or .div()."""
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
            yield node.right if isinstance(node, ast.BinOp) else node.value
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in {"div", "div_"}:
            yield from node.args


def _mask_divisions(function: ast.AST) -> list[str]:
    """Denominators that count a mask, directly or through a name."""
    counts: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and _is_mask_count(node.value, counts):
            counts |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return [ast.unparse(d) for d in _denominators(function) if _is_mask_count(d, counts)]


def test_only_masking_divides_by_a_mask():
    found = {
        f"{name}: {text}"
        for name, tree in TREES.items()
        if name != "tether.core.masking"
        for function in _functions(tree)
        for text in _mask_divisions(function)
    }
    assert found == set()
    assert any(_mask_divisions(f) for f in _functions(TREES["tether.core.masking"]))


TOLERANCES = {
    "approx": ("rel", "abs"),
    "assert_close": ("rtol", "atol"),
    "assert_allclose": ("rtol", "atol"),
    "allclose": ("rtol", "atol"),
    "isclose": ("rtol", "atol", "rel_tol", "abs_tol"),
}


def _loose(call: ast.Call, constants: dict[str, float]) -> str | None:
    """What is wrong with the tolerances of a comparison; None where nothing is."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in TOLERANCES:
        return None
    given = {k.arg: k.value for k in call.keywords if k.arg in TOLERANCES[name]}
    if not given:
        return "no tolerance"
    for key in given.keys() & {"rtol", "rel", "rel_tol"}:
        text = ast.unparse(given[key])
        value = constants[text] if text in constants else ast.literal_eval(given[key])
        if value > LARGEST_RTOL:
            return f"{key}={text}"
    return None


def _constants(tree: ast.Module) -> dict[str, float]:
    """Numbers that a test module names at its top."""
    return {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, float)
    }


def test_every_comparison_in_the_tests_is_tight():
    loose = set()
    for name, tree in TESTS.items():
        on_gpu = {
            id(node)
            for function in _functions(tree)
            if any("mark.gpu" in ast.unparse(d) for d in function.decorator_list)
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and id(node) not in on_gpu:
                fault = _loose(node, _constants(tree))
                loose |= {f"{name}:{node.lineno} {fault}"} if fault else set()
    assert loose == set()


def test_the_rules_see_a_breach():
    """Each reader finds what it looks for in a source made to break the rule."""
    bad = ast.parse("def f(x, mask):\n    n = mask.sum()\n    return x.sum() / n, x / mask.sum()")
    assert len(_mask_divisions(bad)) == 2
    call = ast.parse("torch.allclose(a, b, rtol=0.01)", mode="eval").body
    assert isinstance(call, ast.Call)
    assert _loose(call, {}) == "rtol=0.01"
    assert _imports(ast.parse("def f():\n    from tether import cli"), {"tether.cli"}) == {
        "tether.cli"
    }
    assert list(_banned(ast.parse("print(1)"))) == ["print"]
    assert list(_undocumented(ast.parse("def f(): ..."), "m")) == ["m", "m.f"]
