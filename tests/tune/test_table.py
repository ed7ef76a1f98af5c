"""Tables of configurations: files, exact and nearest lookup, and what kernels take."""

import contextvars
import json
import re
import runpy
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallasite as pl
from benchmarks import tune_tables
from pallasite import config, configured, kernels
from pallasite.__main__ import main
from pallasite.errors import KernelTypeError, PallasWarning, SpecError
from pallasite.sites import sites_in
from pallasite.target import TPUS
from pallasite.tune import choices, table, tunable
from pallasite.tune.space import Space
from pallasite.tune.table import Entry, Site, Table

NOW = choices.versions()


@pytest.fixture(autouse=True)
def own_folder(tmp_path):
    with config.override(cache_dir=str(tmp_path / "cache")):
        yield


@pl.tunable(block=(8, 16, 32))
def doubled(x, factor=2, *, block=8):
    def kernel(x_ref, o_ref):
        o_ref[...] = factor * x_ref[...]

    spec = pl.BlockSpec((block,), lambda i: (i,))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    grid = (pl.cdiv(x.shape[0], block),)
    return pl.pallas_call(
        kernel, out_shape=shape, grid=grid, in_specs=[spec], out_specs=spec
    )(x)


def grid_of(function, *args) -> tuple[int, ...]:
    # A function of its own: what is traced already keeps its configuration.
    (kernel,) = pl.lower(lambda *xs: function(*xs))(*args).kernels
    return kernel.body.ops[-1].attrs["grid"]


def entry(size: int, block: int, **more) -> Entry:
    source = tunable.source_of(doubled)
    site = Site("doubled", (f"float32[{size}]",), ((table.SOURCE, source),))
    return Entry(site, choices.chip_name(), {"block": block}, versions=NOW, **more)


X = jnp.arange(64.0)


def test_a_call_takes_the_default_a_tuned_or_the_given_configuration(tmp_path):
    assert grid_of(doubled, X) == (8,)
    Table([entry(64, 16)]).save(tmp_path / "found.json")
    with pl.configs(tmp_path / "found.json"):
        assert grid_of(doubled, X) == (4,)
        assert grid_of(lambda x: doubled(x, block=64), X) == (1,)
        assert grid_of(lambda x: doubled(x, 3), X) == (8,)  # another kernel
    assert grid_of(doubled, X) == (8,)


def test_a_jitted_function_is_traced_again_with_another_table():
    traced = []

    @jax.jit
    def f(x):
        traced.append(choices.choose(Site("f", ()), {"n": 0}, pl_space()))
        return x

    first, second = (
        Table([Entry(Site("f", ()), choices.chip_name(), {"n": n})]) for n in (1, 2)
    )
    for tables in (first, second, first):
        with pl.configs(tables):
            f(1.0)
    f(1.0)
    assert [t["n"] for t in traced] == [1, 2, 0]


def pl_space():
    from pallasite.tune.space import Space

    return Space({"n": (0, 1, 2)})


def test_another_function_of_the_same_name_is_not_tuned(tmp_path):
    """Nor is the same one after a change, also of a function that it calls."""
    text = """
import pallasite as pl
def helper(x): return x + {0}
@pl.tunable(block=(8, 16))
def doubled(x, *, block=8): return helper(x){1}
"""
    found = set()
    for number, changed in enumerate([(1, ""), (2, ""), (1, " * 2"), (1, "")]):
        file = tmp_path / f"file{number}.py"
        file.write_text(text.format(*changed))
        found.add(tunable.source_of(runpy.run_path(str(file))["doubled"]))
    assert len(found) == 3
    assert tunable.source_of(doubled) not in found
    assert tunable.source_of(eval("lambda x: x + 1")) != tunable.source_of(
        eval("lambda x: x + 2")
    )
    with pl.configs(Table([Entry(Site("doubled", ("float32[64]",)), "x", {})])):
        assert grid_of(doubled, X) == (8,)


def _copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def test_explain_says_which_configuration_and_from_where(tmp_path):
    def both(x):
        return jax.jit(doubled)(x) + kernels.softmax(doubled(x)[None])[0]

    def said() -> list[str]:
        report = pl.explain(both, measure=False)(X)
        return [kernel.config for kernel in report.kernels]

    default = "the default, not tuned for these shapes on this chip"
    first = said()
    assert first[:2] == [f"block=8: {default}"] * 2
    assert first[2].startswith("block_rows=") and default in first[2]
    table.keep(entry(64, 32, seconds=1.0, default_seconds=1.5))
    place = table.user_path()
    tuned = (
        f"block=32: tuned for these shapes, 1.5 times the default's speed, from {place}"
    )
    assert said()[:2] == [tuned] * 2
    with pl.configs(Table([entry(64, 16)])):
        assert said()[0] == "block=16: tuned for these shapes, from pl.configs"
    table.forget()
    table.keep(entry(128, 16))
    assert said()[0] == f"block=16: tuned for float32[128], from {place}"
    with configured.kept():  # a kernel that no function with a configuration calls
        doubled(X)
        doubled_plainly = pl.pallas_call(_copy, out_shape=X)
        (site,) = sites_in(doubled_plainly, X)
    assert site.call.configured is None


def test_hints_do_not_argue_with_the_tuner():
    wide = jnp.arange(float(1 << 20))

    def hints() -> str:
        (kernel,) = pl.explain(doubled, measure=False)(wide).kernels
        return " ".join(kernel.hints)

    assert "larger blocks make fewer steps" in hints()
    with pl.configs(Table([entry(1 << 20, 8)])):
        assert "larger blocks" not in hints()


def test_what_was_tuned_can_be_forgotten(capsys):
    table.keep(entry(64, 16))
    table.keep(Entry(Site("other", ()), choices.chip_name(), {}))
    assert main(["tune", "--forget", "nothing"]) == 1
    assert "stored are those of: doubled, other" in capsys.readouterr().err
    assert main(["tune", "--forget", "file.py::doubled"]) == 0
    assert "removed 1 configurations of doubled" in capsys.readouterr().out
    assert [e.site.kernel for e in table.user_table().entries] == ["other"]
    assert main(["cache", "--clear"]) == 0
    assert "1 tuned configurations" in capsys.readouterr().out
    assert not table.user_table().entries
    assert main(["tune", "--forget"]) == 0


def test_the_users_file_and_which_entry_counts():
    far, near = entry(128, 32), entry(96, 16)
    table.keep(far)
    assert grid_of(doubled, X) == (2,)  # the only shape known
    table.keep(near)
    assert grid_of(doubled, X) == (4,)  # the nearest one
    with pl.configs(Table([entry(127, 8)])):
        assert grid_of(doubled, X) == (4,)  # nearer, though in a later table
    table.keep(entry(64, 8))
    assert grid_of(doubled, X) == (8,)
    table.keep(entry(64, 32))  # replaces the one before
    assert grid_of(doubled, X) == (2,)
    assert len(table.user_table().entries) == 3


def test_shapes_too_far_from_all_that_were_tuned_take_the_default():
    """No size may be more than twice or less than half that of the entry."""
    for size, grid in {32: (4,), 31: (8,), 128: (4,), 129: (8,), 1024: (8,)}.items():
        with pl.configs(Table([entry(size, 16)])):
            assert grid_of(doubled, X) == grid


def test_one_far_size_makes_a_shape_far():
    site = lambda *shape: Site("f", (f"f32[{','.join(map(str, shape))}]",))
    assert table.distance(site(4, 8192, 128), site(4, 4096, 64)) == 2
    assert table.distance(site(4, 8192, 128), site(64, 8192, 128)) is None
    assert table.distance(site(0, 8), site(0, 8)) == 0
    assert table.distance(site(0, 8), site(1, 8)) is None


def test_what_does_not_fit_is_not_taken():
    with pl.configs(Table([entry(128, 64)])):
        assert grid_of(doubled, X) == (8,)  # near, but not in the space
    renamed = Entry(entry(64, 8).site, choices.chip_name(), {"size": 16})
    with pl.configs(Table([renamed])):
        assert grid_of(doubled, X) == (8,)
    with pl.configs(Table([entry(64, 16)])):
        assert grid_of(doubled, X.astype(jnp.int32)) == (8,)
    elsewhere = Entry(entry(64, 8).site, "v5e", {"block": 16})
    with pl.configs(Table([elsewhere])):
        assert grid_of(doubled, X) == (8,)
        with config.override(target="v5e"):
            assert grid_of(doubled, X) == (4,)


def test_an_entry_has_the_version_of_the_source_that_made_it():
    """Also where the package is imported from its folder and installed nowhere."""
    assert dict(NOW)["pallasite"] == pl.__version__
    shipped = [table.load(path) for path in table.SHIPPED.glob("*.json")]
    found = {dict(e.versions)["pallasite"] for each in shipped for e in each.entries}
    assert all(each[0].isdigit() for each in found)


def test_of_two_versions_this_one_counts_and_then_the_last():
    old = Entry(entry(64, 8).site, choices.chip_name(), {"block": 32}, found=9.0)
    with pl.configs(Table([old, entry(64, 16, found=1.0)])):
        assert grid_of(doubled, X) == (4,)
    with pl.configs(Table([entry(64, 32, found=1.0), entry(64, 16, found=2.0)])):
        assert grid_of(doubled, X) == (4,)


def test_files_round_trip_and_say_what_is_wrong_with_them(tmp_path):
    path = tmp_path / "found.json"
    made = entry(64, 16, seconds=1.0, default_seconds=2.0, kernels=("a", "b"))
    Table([made]).save(path)
    assert table.load(path).entries == (made,)
    assert table.load(path) is table.load(path)
    with pytest.raises(SpecError, match="configuration file not found"):
        table.load(tmp_path / "none.json")
    path.write_text(json.dumps({"format": 99, "configs": []}))
    with pytest.raises(SpecError, match="format 99"):
        table.load(path)
    Table([made]).save(path)
    row = json.loads(path.read_text())["configs"][0]
    for wrong in ([], 3, {"format": 1, "configs": [row | {"config": None}]}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(SpecError, match="cannot read configuration file"):
            table.load(path)
    with pytest.raises(KernelTypeError, match="takes the path of a file, or a table"):
        table.load(3)  # pyright: ignore[reportArgumentType]


def test_a_wrong_value_in_a_file_is_named(tmp_path):
    x, path = jnp.ones((16, 8)), tmp_path / "found.json"
    found = pl.autotune(kernels.softmax, keep=False, workers=0)(x)
    found.save(path)
    path.write_text(re.sub(r'"block_rows": \d+', '"block_rows": 0', path.read_text()))
    with pytest.raises(
        SpecError, match="block_rows of its configuration is 0"
    ) as error:
        with choices.configs(path):
            kernels.softmax(x)
    assert "tune it again: this is from a table" in str(error.value)
    with pytest.raises(SpecError, match="configuration file cannot be written"):
        found.save(tmp_path / "none" / "found.json")


def test_a_broken_file_of_the_user_is_no_error():
    path = table.user_path()
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert grid_of(doubled, X) == (8,)
    with config.override(cache_dir="off"):
        table.keep(entry(64, 16))
        assert grid_of(doubled, X) == (8,)


def test_a_file_that_cannot_be_read_is_put_aside_not_lost():
    path = table.user_path()
    assert path is not None
    path.parent.mkdir(parents=True)
    written = '{"format": 2, "configs": {}}'  # by a newer package
    path.write_text(written)
    with pytest.warns(PallasWarning, match="configs.json.unreadable"):
        table.keep(entry(64, 16))
    assert len(table.user_table().entries) == 1
    aside = path.with_name("configs.json.unreadable")
    assert aside.read_text() == written


def test_what_cannot_be_kept_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with config.override(cache_dir=str(tmp_path / "file" / "cache")):
        with pytest.warns(PallasWarning, match="tuning results are not stored"):
            table.keep(entry(64, 16))


def test_processes_that_keep_at_once_lose_nothing(monkeypatch):
    """The file is read and written again as one step."""
    save = Table.save

    def slow(self, path):
        time.sleep(0.05)
        save(self, path)

    monkeypatch.setattr(Table, "save", slow)
    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(table.keep, entry(n, 8))
        )
        for n in (16, 32, 64, 128)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(table.user_table().entries) == 4


def test_shipped_tables_are_of_configurations_the_library_takes():
    for each in table.shipped().entries:
        assert each.site.kernel in dir(kernels)


CAUSAL = Site(
    "attention",
    ("bfloat16[1,4096,2,128]",) * 3,
    (("mask", "Causal"), ("soft_cap", "False")),
)


@pytest.mark.parametrize("chip", ["v5e", "v6e", "v5p"])
def test_calls_take_what_is_shipped_for_their_chip(chip: str, monkeypatch):
    found = [each for each in table.shipped().entries if each.chip == chip]
    made = Entry(CAUSAL, chip, {"block_q": 256, "block_kv": 512}, versions=NOW)
    space = Space({"block_q": (64, 128, 256, 512), "block_kv": (64, 128, 256, 512)})
    default = {"block_q": 128, "block_kv": 128}
    monkeypatch.setattr(table, "shipped", lambda: Table([made, *found]))
    for each in (made, *(e for e in found if e.site.kernel == "attention")):
        with config.override(target=chip):
            assert choices.choose(each.site, default, space) == each.config
        with config.override(target="h200"):
            assert choices.choose(each.site, default, space) == default


@pytest.mark.parametrize("batch, splits", [(4, 4), (64, 1)])
def test_four_sequences_do_not_decide_for_sixty_four(batch, splits):
    pages = jax.ShapeDtypeStruct((64 * batch, 128, 8, 128), jnp.bfloat16)
    query = jax.ShapeDtypeStruct((batch, 32, 128), jnp.bfloat16)
    operands = [query, pages, jax.ShapeDtypeStruct((batch, 64), jnp.int32)]
    site = choices.site_of("paged_attention", operands, {})
    space = Space({"splits": (1, 2, 4, 8, 16)})
    with config.override(target="h200"):
        assert choices.choose(site, {"splits": 1}, space) == {"splits": splits}


@pytest.mark.parametrize("best, kept", [(0.5, {64, 128}), (0.99, set())])
def test_entries_without_gain_stay_beside_those_that_gain(tmp_path, best, kept):
    """Without the one of 64, calls of such sizes would take that of 128."""
    same = entry(64, 8, seconds=1.0, default_seconds=1.0)
    other = entry(128, 16, seconds=best, default_seconds=1.0)
    path = tmp_path / "v5e.json"
    tune_tables.write([same], path)
    assert table.load(path).entries == ()
    tune_tables.write([same, other], path)
    sizes = {int(e.site.operands[0][8:-1]) for e in table.load(path).entries}
    assert sizes == kept


def test_shipped_entries_are_no_defaults_alone():
    """Defaults that changed: what was tuned beside the old ones says nothing now."""
    default = {"block_q": 512, "block_kv": 512}
    groups: dict[Any, list[Entry]] = {}
    for each in table.shipped().entries:
        groups.setdefault((each.chip, each.site.kernel, each.site.options), []).append(
            each
        )
    for entries in groups.values():
        assert any(e.seconds < 0.98 * e.default_seconds for e in entries)
        if entries[0].site.kernel == "attention" and entries[0].chip in TPUS:
            assert any(e.config != default for e in entries)


def test_tunable_needs_arguments_with_defaults():
    with pytest.raises(SpecError, match="'size' of 'f' does not exist"):
        pl.tunable(size=(1, 2))(lambda_named_f())
    with pytest.raises(SpecError, match="no values"):
        pl.tunable(block=())(plainly_doubled)
    with pytest.raises(SpecError, match="no argument of 'plainly_doubled' has values"):
        pl.tunable()(plainly_doubled)
    with pytest.raises(SpecError, match=r"pass a sequence of them: block=\(8, ...\)"):
        pl.tunable(block=8)(plainly_doubled)  # pyright: ignore[reportArgumentType]


def plainly_doubled(x, *, block=8):
    del block
    return 2 * x


def lambda_named_f():
    def f(x):
        return x

    return f


@pytest.mark.parametrize(
    ("function", "args", "changed"),
    [
        (kernels.softmax, [(64, 128)], {"block_rows": 16}),
        (kernels.rms_norm, [(64, 128)], {"block_rows": 16}),
        (kernels.layer_norm, [(64, 128)], {"block_rows": 16}),
        (kernels.gated_linear_unit, [(64, 128)] * 2, {"block_rows": 16}),
        (kernels.matmul, [(128, 128)] * 2, {"block_m": 64}),
        (kernels.attention, [(1, 256, 1, 16)] * 3, {"block_q": 64}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_operations_of_the_library_take_configurations(function, args, changed):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in args]
    with choices.recorded() as asked:
        jax.make_jaxpr(function)(*shapes)
    (question,) = asked
    assert question.site.kernel == function.__name__
    assert question.default.keys() == question.space.values.keys()
    tried = {**question.default, **changed}
    tuned = Table([Entry(question.site, choices.chip_name(), tried)])
    before = pl.lower(function)(*shapes).kernels
    with pl.configs(tuned):
        assert pl.lower(function)(*shapes).kernels != before
