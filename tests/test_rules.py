"""The rules of the codebase that matter, read off its source.

Each rule is a function from a source file to the breaches in it, one line of text each;
`Source` is a parsed file that knows its place in the package. The last tests show that
each rule finds its breach.
"""

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pallasite"
MAX_LINES = 800

# A module imports its own layer and lower ones only.
LAYERS: list[set[str]] = [
    {"errors", "config", "plugins", "checking", "target", "jaxcompat", "missing"},
    {"ir"},
    {"ops"},
    {"passes", "runtime"},
    {"backends"},
    {"interpret"},
    {"language"},
    {"importer"},
    {"emulation"},
    {"sharding"},
    {"configured", "placement"},
    {"primitive"},
    {"sites"},
    {"autodiff"},
    {"calls"},
    {"fusion"},
    {"tools", "proofs"},
    {"tune"},
    {"kernels"},
]
# Circles between modules that are meant, with the reason.
CIRCLES = [
    {"ir.nodes", "ir.parse", "ir.text"},  # a kernel's text is one of its properties
]
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}
# The public names: they may import anything. Only kernels and tune may import them.
PUBLIC = {
    "__init__",
    "__main__",
    "install",
    "mosaic_gpu",
    "tpu",
    "tpu_sc",
    "fuser",
    "torch",
    "triton",
}
USES_PUBLIC = {"kernels", "tune"}
SHARED_BY_BACKENDS = {"__init__", "base", "libdevice", "strided_views"}
WITHOUT_JAX = {"ir", "ops", "passes", "runtime", "backends", "interpret"}
WITH_JAX = {("runtime", "ffi"), ("runtime", "aot")}


@dataclass(frozen=True)
class Source:
    """One file of the package: `parts` is ("backends", "cpu", "emit") for its path."""

    package: Path
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def parts(self) -> tuple[str, ...]:
        return self.path.relative_to(self.package).with_suffix("").parts

    def at(self, node: ast.AST) -> str:
        name = self.path.relative_to(self.package.parent)
        return f"{name}:{getattr(node, 'lineno', 1)}"

    @cached_property
    def imports(self) -> list[tuple[ast.AST, str]]:
        """Every absolute dotted name imported, anywhere in the file."""
        return list(self._imports())

    def _imports(self) -> Iterator[tuple[ast.AST, str]]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = self._absolute(node)
                yield from ((node, f"{module}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Call) and _called(node) in _IMPORTERS:
                for argument in node.args[:1]:
                    if isinstance(argument, ast.Constant):
                        yield node, str(argument.value)

    @cached_property
    def own_imports(self) -> list[tuple[ast.AST, tuple[str, ...]]]:
        """Every pallasite module imported; `("__init__",)` for the package itself."""
        return list(self._own_imports())

    def _own_imports(self) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
        for node, name in self.imports:
            root, *parts = name.split(".")
            if root != self.package.name:
                continue
            while parts and not self._is_module(parts):
                parts.pop()
            yield node, tuple(parts) or ("__init__",)

    def _is_module(self, parts: list[str]) -> bool:
        path = self.package.joinpath(*parts)
        return path.is_dir() or path.with_suffix(".py").exists()

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        here = (self.package.name, *self.parts)
        base = here[: len(here) - node.level]
        return ".".join([*base, *filter(None, [node.module])])


_IMPORTERS = {"import_module", "__import__", "find_spec"}


def _called(node: ast.Call) -> str:
    function = node.func
    return getattr(function, "attr", getattr(function, "id", ""))


def _is_under(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


# The rules


def known_layer(source: Source) -> Iterator[str]:
    if source.parts[0] not in LAYER_OF.keys() | PUBLIC:
        yield (
            f"{source.at(source.tree)}: {source.parts[0]!r} has no layer; "
            "place it in LAYERS or PUBLIC"
        )


def layers_in_order(source: Source) -> Iterator[str]:
    importer = source.parts[0]
    if importer in PUBLIC:
        return
    for node, imported in source.own_imports:
        if imported[0] in PUBLIC:
            allowed = importer in USES_PUBLIC
        else:
            highest = LAYER_OF.get(importer, len(LAYERS))
            allowed = LAYER_OF.get(imported[0], len(LAYERS)) <= highest
        if not allowed:
            yield f"{source.at(node)}: {importer} imports {'.'.join(imported)}"


def backends_apart(source: Source) -> Iterator[str]:
    importer = _backend(source.parts)
    if importer in (None, "base"):
        return
    for node, imported in source.own_imports:
        if _backend(imported) not in (None, "base", importer):
            yield f"{source.at(node)}: {importer} imports {'.'.join(imported)}"


def _backend(parts: tuple[str, ...]) -> str | None:
    """The backend a module belongs to ("base": what they share), None for the rest."""
    if parts[0] != "backends":
        return None
    name = parts[1] if len(parts) > 1 else "__init__"
    return "base" if name in SHARED_BY_BACKENDS else name


def private_jax_in_one_file(source: Source) -> Iterator[str]:
    if source.parts == ("jaxcompat",):
        return
    for node, name in source.imports:
        if _is_under(name, "jax._src"):
            yield f"{source.at(node)}: imports {name}; add a function to jaxcompat.py"
    for node in source.nodes:
        is_src = isinstance(node, ast.Attribute) and node.attr == "_src"
        if is_src and ast.unparse(node) == "jax._src":
            yield f"{source.at(node)}: uses jax._src; add a function to jaxcompat.py"


def no_jax_in_the_compiler(source: Source) -> Iterator[str]:
    if source.parts[0] not in WITHOUT_JAX or source.parts in WITH_JAX:
        return
    for node, name in source.imports:
        if _is_under(name, "jax") or _is_under(name, "jaxlib"):
            yield f"{source.at(node)}: {source.parts[0]} imports {name}"


def no_upstream_pallas(source: Source) -> Iterator[str]:
    for node, name in source.imports:
        for upstream in ("jax.experimental.pallas", "jax._src.pallas"):
            if isinstance(node, ast.stmt) and _is_under(name, upstream):
                yield f"{source.at(node)}: imports {name}"


def errors_say_something(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Raise) and _is_bare_not_implemented(node.exc):
            yield f"{source.at(node)}: NotImplementedError without a message"
        if (
            isinstance(node, ast.Assert)
            and isinstance(node.test, ast.Constant)
            and not node.test.value
        ):
            yield f"{source.at(node)}: assert False; raise InternalError instead"


def _is_bare_not_implemented(error: ast.expr | None) -> bool:
    if isinstance(error, ast.Call) and not error.args and not error.keywords:
        error = error.func
    return isinstance(error, ast.Name) and error.id == "NotImplementedError"


def has_docstring(source: Source) -> Iterator[str]:
    if not ast.get_docstring(source.tree):
        yield f"{source.at(source.tree)}: the module has no docstring"


def is_not_too_long(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > MAX_LINES:
        yield (
            f"{source.at(source.tree)}: {lines} lines, at most {MAX_LINES}; "
            "split it by subject"
        )


_ROLES = {"grid", "windows", "semantics", "contract", "batch"}


def roles_by_name(source: Source) -> Iterator[str]:
    """Only `ir/` and the type rules know where a structured op has its parts."""
    if source.parts[0] in ("ir", "ops"):
        return
    for node in source.nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            part, index = node.value.attr, node.slice
            name = index.value if isinstance(index, ast.Constant) else None
            place = isinstance(index, (ast.Slice, ast.UnaryOp)) or isinstance(name, int)
            is_region = part == "params" and ast.unparse(node.value) != "f.params"
            if (part == "attrs" and name in _ROLES) or (is_region and place):
                yield (
                    f"{source.at(node)}: {ast.unparse(node)}; "
                    "use Pipeline, Loop, While, Cond or Dot of ir/roles.py"
                )


def rules_in_tables(source: Source) -> Iterator[str]:
    """No function is found by a name put together, or by listing what there is."""
    modules = {
        alias.asname or alias.name
        for node in source.nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in _LISTINGS:
            yield f"{source.at(node)}: {ast.unparse(node)}; use a table"
        if _called(node) != "getattr" or len(node.args) < 2:
            continue
        owner, name = node.args[:2]
        computed = isinstance(name, (ast.JoinedStr, ast.BinOp, ast.Call))
        of_module = isinstance(owner, ast.Name) and owner.id in modules
        if computed or (of_module and not isinstance(name, ast.Constant)):
            yield f"{source.at(node)}: {ast.unparse(node)}; use a table"


_LISTINGS = {"dir", "vars", "globals"}


# Rates and overheads of a chip: only `target/` turns work into time with them.
_CHIP_RATES = {"rates", "narrow_rates", "bytes_per_second", "latency", "cache_speedup"}
_CHIP_RATES |= {"usual_vector_rate", "usual_special_rate"}
_CHIP_RATES |= {"special_lanes", "vector_units", "ns_per_flop", "ns_per_byte"}
_CHIP_RATES |= {"ns_per_transcendental", "ns_per_step", "ns_per_wake"}
_CHIP_RATES |= {"step_seconds", "product_seconds", "launch_seconds"}
_MACHINE_RATES = {"vector", "special", "wide", "cached_bytes", "products", "flops"}
_MACHINE_RATES |= {"bandwidth", "rate", "product_rate", *_CHIP_RATES}
_ESTIMATE = re.compile(
    "(^|_)(SECONDS|NS|HERTZ|RATES?|SPEED|OVERHEAD|BANDWIDTH|LATENCY|FLOPS|CYCLES"
    "|PER_(SECOND|CYCLE|FLOP|BYTE|STEP))$"
)
# Numbers that are no estimates of a chip, and why.
_NO_ESTIMATES = {
    "passes.progress.FIRST_SECONDS": "a compiler pass is reported after it",
    "passes.schedule.plan_parts.SERIAL_SECONDS": "a warning is worth it",
    "tools.measure.BATCH_SECONDS": "a tool measures for so long",
    "tools.recorded_runs.BATCH_SECONDS": "a tool measures for so long",
    "tune.measure.VISIT_SECONDS": "the tuner measures for so long",
    "tune.tuner.LAST_SECONDS": "the tuner measures for so long",
    "tune.workers.START_SECONDS": "a timeout",
}
_DESCRIBES_CHIPS = ("language", "tpu_info")  # to authors: public fields


def one_machine_model(source: Source) -> Iterator[str]:
    """Only `target/` has rates and overheads of chips: others ask its `Machine`."""
    if source.parts[0] == "target" or source.parts == _DESCRIBES_CHIPS:
        return
    fix = "ask target/machine.py"
    for node in source.tree.body:
        for name in _numbers(node):
            place = ".".join([*source.parts, name])
            if _ESTIMATE.search(name) and place not in _NO_ESTIMATES:
                yield f"{source.at(node)}: {name}; {fix}"
    for node in source.nodes:
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Div)
            and _rate_read(node.right) in _MACHINE_RATES - _CHIP_RATES
        ):
            yield f"{source.at(node)}: {ast.unparse(node)}; {fix}"
        if isinstance(node, ast.Attribute) and node.attr in _CHIP_RATES:
            yield f"{source.at(node)}: {ast.unparse(node)}; {fix}"


def _numbers(node: ast.stmt) -> Iterator[str]:
    """The names that a statement gives numbers, or tables of them."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for name in (n for target in targets for n in ast.walk(target)):
        parts = list(ast.walk(node.value)) if node.value is not None else []
        constants = (p.value for p in parts if isinstance(p, ast.Constant))
        is_number = any(isinstance(v, (int, float)) for v in constants)
        is_code = any(isinstance(p, ast.Lambda) for p in parts)
        if isinstance(name, ast.Name) and is_number and not is_code:
            yield name.id


def _rate_read(node: ast.expr) -> str:
    """The attribute that an expression reads, indexes, calls or scales."""
    while not isinstance(node, ast.Attribute):
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.BinOp):
            return _rate_read(node.left) or _rate_read(node.right)
        else:
            return ""
    return node.attr


RULES = [
    known_layer,
    layers_in_order,
    backends_apart,
    private_jax_in_one_file,
    no_jax_in_the_compiler,
    no_upstream_pallas,
    errors_say_something,
    has_docstring,
    is_not_too_long,
    roles_by_name,
    rules_in_tables,
    one_machine_model,
]


@cache
def package_sources() -> list[Source]:
    """The files of the package, parsed once."""
    return [Source(PACKAGE, path) for path in sorted(PACKAGE.rglob("*.py"))]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_rule(rule: Callable[[Source], Iterator[str]]):
    sources = package_sources()
    breaches = [breach for source in sources for breach in rule(source)]
    assert not breaches, "\n" + "\n".join(breaches)


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that reach each other by imports (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in imports[module]:
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            first = stack.index(module)
            together = {stack.pop() for _ in stack[first:]}
            if len(together) > 1:
                found.append(together)

    for module in imports:
        if module not in order:
            visit(module)
    return found


def test_circles_between_modules_are_named():
    sources = package_sources()
    name = lambda parts: ".".join(parts).removesuffix(".__init__")
    imports = {name(source.parts): set[str]() for source in sources}
    for source in sources:
        for _, imported in source.own_imports:
            if name(imported) in imports.keys() - {name(source.parts)}:
                imports[name(source.parts)].add(name(imported))
    assert sorted(map(sorted, circles(imports))) == sorted(map(sorted, CIRCLES))


def test_circles_are_found():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str](), "e": {"a"}}
    assert circles(imports) == [{"b", "c"}]


# Rules of the rest of the repository


@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_example_has_main(example: Path):
    body = ast.parse(example.read_text()).body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    assert "main" in names
    guards = [node for node in body if isinstance(node, ast.If)]
    assert any("__main__" in ast.unparse(node.test) for node in guards)


def test_knobs_are_documented():
    if not (PACKAGE / "config.py").exists():
        pytest.skip("pallasite.config does not exist yet")
    from pallasite import config

    pages = [ROOT / "docs" / name for name in ("language.md", "compat.md")]
    text = "".join(page.read_text() for page in pages)
    assert not [knob.env for knob in config.KNOBS.values() if knob.env not in text]


def test_version_is_the_same_everywhere():
    initial = PACKAGE / "__init__.py"
    if not initial.exists() or not initial.read_text().strip():
        pytest.skip("the package does not exist yet")
    import pallasite

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    place = ROOT / settings["tool"]["hatch"]["version"]["path"]
    (written,) = re.findall(r'^VERSION = "(.*?)"', place.read_text(), re.MULTILINE)
    assert settings["project"]["dynamic"] == ["version"]
    assert pallasite.__version__ == written


def test_releases_are_in_order_and_cited():
    """A tag's version heads the changelog; between tags the version is the next's."""
    from pallasite.config import VERSION

    heads = re.findall(r"^## \[(.*?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    unreleased, *released = heads
    assert unreleased == ("Unreleased", "") and released
    numbers = [tuple(map(int, name.split("."))) for name, _ in released]
    assert numbers == sorted(set(numbers), reverse=True)
    own, _, between = VERSION.partition(".dev")
    newest = tuple(map(int, own.split(".")))
    assert newest > numbers[0] if between else newest == numbers[0]
    cited = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {released[0][0]}\n" in cited
    assert f'\ndate-released: "{released[0][1].removeprefix(" - ")}"\n' in cited


# The rules find what they are for

BREACHES = {
    known_layer: [("helpers", "")],
    layers_in_order: [
        ("ir/nodes", "from pallasite.ops import tile"),
        ("ir/nodes", "from ..ops import tile"),
        ("ir/nodes", "from pallasite import ops"),
        ("ops/tile", "def f():\n    import pallasite.passes.analysis.cost"),
        ("backends/cpu/emit", "import pallasite.language.refs"),
        ("calls/pallas_call", "import pallasite"),
        ("calls/pallas_call", "from .. import tpu"),
    ],
    backends_apart: [
        ("backends/cpu/emit", "from pallasite.backends.triton import emit"),
        ("backends/cpu/emit", "from .. import triton"),
    ],
    private_jax_in_one_file: [
        ("calls/pallas_call", "from jax import _src"),
        ("calls/pallas_call", "from jax._src.core import Jaxpr"),
        ("calls/pallas_call", "import jax\n\njax._src.core"),
        ("calls/pallas_call", "importlib.import_module('jax._src.core')"),
    ],
    no_jax_in_the_compiler: [
        ("ir/nodes", "import jax"),
        ("interpret/walker", "def f():\n    import jax.numpy as jnp"),
        ("runtime/cache", "from jax import ffi"),
        ("backends/tpu/emit", "from jaxlib.mlir import ir"),
    ],
    no_upstream_pallas: [
        ("install", "from jax.experimental import pallas"),
        ("calls/pallas_call", "import jax.experimental.pallas.tpu"),
        ("jaxcompat", "from jax._src.pallas import core"),
    ],
    errors_say_something: [
        ("ir/nodes", "raise NotImplementedError"),
        ("ir/nodes", "raise NotImplementedError()"),
        ("ir/nodes", "assert False, 'cannot happen'"),
    ],
    has_docstring: [("ir/nodes", "x = 1")],
    is_not_too_long: [("ir/nodes", "\n" * (MAX_LINES + 1))],
    roles_by_name: [
        ("passes/cost", "grid = op.attrs['grid']"),
        ("backends/triton/emit", "(lc, rc), _ = op.attrs['contract'], 0"),
        ("passes/cost", "blocks = op.regions[-1].params[len(grid) :]"),
        ("interpret/walker", "index = body.params[0]"),
        ("interpret/walker", "step = index_map.params[-1]"),
    ],
    rules_in_tables: [
        ("interpret/walker", "getattr(self, f'do_{op.name}')(op)"),
        ("interpret/walker", "getattr(self, 'do_' + op.name)(op)"),
        ("emulation/tiles", "from jax import lax\nfn = getattr(lax, name)"),
        ("backends/cpu/emit", "NATIVE = [n for n in dir(Emitter)]"),
    ],
    one_machine_model: [
        ("passes/cost", "STEP_SECONDS = 2.5e-7"),
        ("tools/hints", "STEP_SECONDS = {'cpu': 2e-8, 'tpu': 2.5e-7}"),
        ("passes/cost", "VECTOR_RATE: float = 4e12"),
        ("fusion/plan", "FEW, OPERATIONS_PER_BYTE = 4, 16"),
        ("passes/cost", "moved = total / chip.main.bytes_per_second"),
        ("tune/candidates", "work = total * host.ns_per_flop"),
        ("tune/candidates", "known = [chip.rates[t] for t in types]"),
        ("passes/cost", "computing = flops / machine.product_rate('bf16')"),
        ("passes/cost", "computing = flops / (0.5 * machine.vector)"),
        ("passes/cost", "computing = flops / chip.rate(dtype)"),
    ],
}
FINE = [
    ("backends/cpu/emit", "from ..base import Backend\nfrom . import compile"),
    ("backends/base", "from pallasite.backends.cpu import emit"),
    ("calls/pallas_call", "import jax\nfrom pallasite.errors import SpecError"),
    ("install", "NAME = 'jax.experimental.pallas'"),
    ("ir/nodes", "raise NotImplementedError('scan has no rule')"),
    ("jaxcompat", "from jax._src import core"),
    ("kernels/matmul", "import pallasite as pl"),
    ("passes/cost", "from pallasite.runtime import cache\nfrom ..ir.nodes import Op"),
    ("runtime/ffi", "import jax"),
    ("passes/cost", "axis = op.attrs['axis']\nparam = body.params[axis]"),
    ("backends/cpu/emit", "frame = f.params[0]"),
    ("ir/nodes", "ids = self.body.params[: len(op.attrs['grid'])]"),
    ("language/specs", "given = {f: getattr(self, f) for f in fields}"),
    ("jaxcompat", "from jax import lax\ntop_k = getattr(lax, 'top_k', None)"),
    ("target/machine", "STEP_SECONDS = 2.5e-7\nmoved = n / chip.rates['bf16']"),
    ("tune/workers", "START_SECONDS = 180.0"),
    ("passes/cost", "computing = machine.computing(flops)\nshare = flops / total"),
]
_FILES = [
    "errors",
    "ops/tile",
    "passes/cost",
    "runtime/cache",
    "calls/pallas_call",
    "tpu",
]
_FILES += ["backends/base", "backends/cpu/emit", "backends/triton/emit", "ir/nodes"]
_FILES += ["interpret/walker", "language/refs"]


def _source(package: Path, module: str, text: str) -> Source:
    for name in [*_FILES, module]:
        path = package.joinpath(name).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    path.write_text(text)
    return Source(package, path)


@pytest.mark.parametrize(
    ("rule", "module", "text"),
    [(rule, *case) for rule, cases in BREACHES.items() for case in cases],
)
def test_rule_finds_breach(rule, module: str, text: str, tmp_path: Path):
    assert len(list(rule(_source(tmp_path / "pallasite", module, text)))) == 1


@pytest.mark.parametrize(("module", "text"), FINE)
def test_rules_accept(module: str, text: str, tmp_path: Path):
    source = _source(tmp_path / "pallasite", module, f'"""Docs."""\n{text}')
    assert not [breach for rule in RULES for breach in rule(source)]


def test_every_rule_is_tried():
    assert set(BREACHES) == set(RULES)
