"""`pallasite explore`: the page, what is in it, and what a browser makes of it."""

import json
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import __main__ as command_line
from pallasite import kernels
from pallasite.backends import base
from pallasite.language.trace import jaxprs_kept
from pallasite.passes.analysis.work import count, count_by_line
from pallasite.passes.run import run
from pallasite.sites import sites_in
from pallasite.tools.explorer import grid_steps, serve
from pallasite.tools.explorer.linked_text import linked
from pallasite.tools.explorer.page import page_of

S = jax.ShapeDtypeStruct
HERE = Path(__file__).name


def product_kernel(x_ref, y_ref, o_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.dot(x_ref[...], jnp.exp(y_ref[...]))


DOT_LINE = product_kernel.__code__.co_firstlineno + 5


def product(x, y):
    return pl.pallas_call(
        product_kernel,
        out_shape=S((512, 512), jnp.float32),
        grid=(4, 4, 4),
        in_specs=[
            pl.BlockSpec((128, 128), lambda i, j, k: (i, k)),
            pl.BlockSpec((128, 128), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((128, 128), lambda i, j, k: (i, j)),
    )(x, y)


X = S((512, 512), jnp.float32)


@pytest.fixture(scope="module")
def page():
    with jaxprs_kept() as jaxprs:
        sites = sites_in(product, X, X)
    targets = ["cpu", "tpu:v5e", "gpu:h200"]
    return page_of("a product", sites, targets, jaxprs, measure=False)


@pytest.fixture(scope="module")
def data(page):
    (found,) = re.findall(r'id="data">(.*?)</script>', page.html, re.DOTALL)
    return json.loads(found)


def lines_at(data, stage, line):
    """The lines of a stage that come from a line of this file."""
    places = [n for run, n in stage["runs"] for _ in range(run)]
    texts = stage["text"].split("\n")
    assert len(places) == len(texts)
    wanted = [n for n, (_, at) in enumerate(data["places"]) if at == line]
    return [t for t, n in zip(texts, places, strict=True) if n in wanted]


def test_a_page_needs_nothing_else(page):
    assert page.ok and len(page.html) < 5e6
    own = re.sub(r'id="data">.*?</script>', "", page.html, flags=re.DOTALL)
    assert not re.search(r'(src|href)="(?!#)|@import|url\(', own)
    assert "http" not in own.replace("http://www.w3.org/2000/svg", "")


def test_every_stage_is_there_and_says_where_it_comes_from(data):
    names = {v["target"]: [s["name"] for s in v["stages"]] for v in data["views"]}
    assert names["cpu"][:2] == ["jaxpr", "import"]
    assert names["cpu"][-2:] == ["llvm", "asm"]
    assert names["tpu:v5e"][-1] == "mosaic" and names["gpu:h200"][-1] == "ttir"
    for view in data["views"]:
        for stage in view["stages"]:
            assert lines_at(data, stage, DOT_LINE), stage["name"]
            assert not stage["note"]
    jaxpr = data["views"][0]["stages"][0]
    assert any("dot_general" in t for t in lines_at(data, jaxpr, DOT_LINE))


@pytest.mark.tpu
def test_the_code_that_libtpu_makes_is_the_last_stage():
    def attend(q, k, v):
        return kernels.attention(q, k, v)

    heads = [S((1, 256, 2, 128), jnp.bfloat16)] * 3
    for function, operands in ((product, [X, X]), (attend, heads)):
        sites = sites_in(function, *operands)
        made = page_of("for a TPU", sites, ["tpu:v5e"], [], measure=None)
        (found,) = re.findall(r'id="data">(.*?)</script>', made.html, re.DOTALL)
        (view,) = json.loads(found)["views"]
        assert made.ok
        assert [stage["name"] for stage in view["stages"]][-2:] == ["mosaic", "llo"]
        code = view["stages"][-1]
        assert "vmatmul" in code["text"]
        assert "has no source locations" in code["note"]
        assert {"estimate", "busy"} <= {heading for heading, _ in view["report"]}


def test_code_is_linked_to_the_op_it_computes(data):
    cpu, tpu, gpu = data["views"]
    by_name = {s["name"]: s for v in (cpu, tpu, gpu) for s in v["stages"]}
    assert any(
        "fmul" in t or "fma" in t for t in lines_at(data, by_name["llvm"], DOT_LINE)
    )
    assert any("tpu.matmul" in t for t in lines_at(data, by_name["mosaic"], DOT_LINE))
    assert any("tt.dot" in t for t in lines_at(data, by_name["ttir"], DOT_LINE))
    assert not any(
        "!dbg" in s["text"] or " loc(" in s["text"] for s in by_name.values()
    )


def double_kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


def double(x):
    return pl.pallas_call(double_kernel, out_shape=S(x.shape, x.dtype))(x)


@pytest.mark.parametrize(("function", "count"), [(double, 1), (product, 2)])
def test_source_lines_do_not_change_machine_code(function, count):
    (site,) = sites_in(function, *[X] * count)
    plain, linked_ = (
        base.Compiled(base.get("cpu"), site.call.kernel, base.Options(lines=lines))
        for lines in (False, True)
    )
    # Also where the kernel is inlined into its handler.
    assert linked("asm", linked_["asm"]).is_linked
    assert not linked("asm", plain["asm"]).is_linked
    # At a function's entry LLVM may have them in another order.
    assert sorted(instructions(linked_["asm"])) == sorted(instructions(plain["asm"]))


def instructions(text):
    lines = (line for line, _ in linked("asm", text).lines)
    code = (line.split()[0] for line in lines if line[:1].isspace() and line.strip())
    return [name for name in code if name[0] not in ".#/"]


def test_costs_of_lines_are_those_of_the_kernel():
    (site,) = sites_in(product, X, X)
    lines, work = count_by_line(site.call.kernel), count(site.call.kernel)
    assert sum(each.flops for each in lines.values()) == work.flops
    assert sum(each.transcendentals for each in lines.values()) == work.transcendentals
    assert sum(each.moved for each in lines.values()) == work.bytes
    (dot,) = [w for (_, line), w in lines.items() if line == DOT_LINE]
    assert dot.flops == 2 * 512**3 + 4 * 512**2 and dot.transcendentals == 4 * 512**2
    assert dot.accessed == 64 * 4 * 128 * 128 * 4


def test_a_grid_has_the_blocks_of_each_step(data):
    tpu = next(v for v in data["views"] if v["target"] == "tpu:v5e")
    written = tpu["grids"][1]
    assert written["name"] == "as written" and written["sizes"] == [4, 4, 4]
    assert written["parallel"] == [True, True, False] and len(written["steps"]) == 64
    assert written["steps"][5] == [0, 1, 1]
    x, y, o = written["operands"]
    at = lambda operand, step: [column[step] for column in operand["starts"]]
    assert at(x, 5) == [0, 128] and at(y, 5) == [128, 128] and at(o, 5) == [0, 128]


def test_threads_take_ranges_from_the_end(data):
    cpu = data["views"][0]
    run = cpu["grids"][0]
    assert "threads" in run["order"] or "one thread" in run["order"]
    assert len({tuple(step) for step in run["steps"]}) == len(run["steps"])


def test_programs_in_groups_are_all_programs():
    found = grid_steps._grouped(np.arange(2 * 5 * 3), (2, 5, 3), group=2)
    assert sorted(found.tolist()) == list(range(30))
    assert found[:4].tolist() == [0, 3, 1, 4]  # two rows, column by column


def test_a_large_grid_costs_no_more_than_what_is_shown():
    """10**10 programs of which 1,024 are shown; all in memory would be 80 GB."""

    def scaled(x):
        spec = pl.BlockSpec((8, 128), lambda i, j: (i, j))
        return pl.pallas_call(
            double_kernel, x, grid=(10**5, 10**5), in_specs=[spec], out_specs=spec
        )(x)

    (site,) = sites_in(scaled, S((8 * 10**5, 128 * 10**5), jnp.int8))
    kernel = run(site.call.kernel)
    compiled = base.Compiled(base.get("cpu"), kernel, base.Options())
    for platform in ("cpu", "cuda", "tpu"):
        made = compiled if platform == "cpu" else None
        for grid in grid_steps.grids_of(kernel, made, platform):
            assert grid["total"] <= 10**10 and len(grid["steps"]) == 1024
            assert len({tuple(step) for step in grid["steps"]}) == 1024
    # Two outer programs, and the first of many steps within.
    steps = grid_steps._nested((2, 10**9), (0,), np.array([1, 0]))
    assert steps.shape == (2, 1024) and steps[:, 7].tolist() == [1, 7]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("import", '  %0 = exp %1 loc("a.py":7 in "f")', ("  %0 = exp %1", 7)),
        ("mosaic", '  %0 = math.exp %1 loc("a.py":7:1)', ("  %0 = math.exp %1", 7)),
        ("jaxpr", "  b:f32[] = exp a   # /x/a.py:7:6 (f)", ("  b:f32[] = exp a", 7)),
        ("ttir", "  %0 = math.exp %1  // a.py:7", ("  %0 = math.exp %1", 7)),
        ("cuda", "  float v0 = 1.0f;  // a.py:7", ("  float v0 = 1.0f;", 7)),
        ("ptx", '\t.file 1 "a.py"\n\t.loc 1 7 0\n\tadd.f32 a;', ("\tadd.f32 a;", 7)),
        ("llo", "vadd a.py:7", ("vadd a.py:7", None)),
    ],
)
def test_stages_say_where_a_line_comes_from(name, text, expected):
    found = linked(name, text)
    (line,) = [
        each for each in found.lines if each[0].strip() and ".file" not in each[0]
    ]
    assert (line[0], line[1] and line[1][1]) == expected
    assert bool(found.note) == (expected[1] is None)


def test_assembly_is_shown_without_directives_but_with_constants():
    kept = ["f:", "\tret", ".LC:", "\t.long\t7"]
    text = ["\t.section\t.ltext", "\t.p2align\t4", "\t.cfi_startproc", *kept]
    assert [line for line, _ in linked("asm", "\n".join(text)).lines] == kept


def test_the_command_writes_a_page(tmp_path, capfd, monkeypatch):
    file = tmp_path / "kernels.py"
    file.write_text(
        textwrap.dedent("""
        import jax
        import pallasite as pl

        def double(x):
            def kernel(x_ref, o_ref):
                o_ref[...] = 2 * x_ref[...]

            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return pl.pallas_call(kernel, out_shape=shape)(x)
        """)
    )
    out = tmp_path / "page.html"
    arguments = ["explore", f"{file}::double", "--args", "f32[8,128]", "-o", str(out)]
    arguments += ["--no-measure", "--json", "--in-child"]
    monkeypatch.setattr(command_line, "_install", lambda: None)
    assert command_line.main(arguments) == 0
    said = json.loads(capfd.readouterr().out)
    assert said == {"ok": True, "page": str(out), "bytes": out.stat().st_size}
    assert "o_ref[...] = 2 * x_ref[...]" in out.read_text()
    # Before anything is compiled: a page of a large model takes minutes.
    for place, text in (
        (tmp_path, "is a directory"),
        (tmp_path / "none" / "page.html", "is in a directory that does not exist"),
    ):
        arguments[5] = str(place)
        assert command_line.main(arguments) == 2
        assert text in capfd.readouterr().err
    arguments[1], arguments[5] = f"{file}::triple", str(out)
    assert command_line.main(arguments) == 2
    assert "has no function 'triple'" in capfd.readouterr().err


def test_a_server_makes_the_page_or_says_why_not(tmp_path):
    python = shutil.which("python3") or "python3"
    write = "import sys; open(sys.argv[2], 'w').write('made')"
    assert serve.made([python, "-c", write]) == "made"
    assert "&lt;reason&gt;" in serve.made(
        [python, "-c", "raise SystemExit('<reason>')"]
    )


# --- in a browser ---

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

VISIT = Path(__file__).with_name("visit_page.js")


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """Opens a page from disk; what the browser prints."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)}")
    profile = tmp_path_factory.mktemp("profile")
    common = ["--headless", "--no-sandbox", "--disable-gpu"]
    common += [f"--user-data-dir={profile}", "--virtual-time-budget=2000"]

    def run(path, *options):
        return subprocess.run(
            [browser, *common, *options, f"file://{path}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )

    return run


@pytest.fixture(scope="module")
def visit(page, browse, tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    script = VISIT.read_text().replace("DOT_LINE", str(DOT_LINE))
    script = f'<pre id="visit"></pre><script>{script}</script>'
    path = folder / "page.html"
    path.write_text(page.html.replace("</body>", f"{script}</body>"))
    done = browse(path, "--window-size=1400,1000", "--dump-dom")
    found = re.search(r'<pre id="visit">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found and found[1], done.stderr[-2000:]
    return json.loads(
        found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    )


def test_it_opens_on_the_most_expensive_line(visit):
    (line,), said = visit["opened"]
    assert "jnp.dot(" in line and f"{HERE}:{DOT_LINE} became" in said


def test_a_click_lights_up_origin_and_results(visit):
    (line,) = visit["source"]
    assert "jnp.dot(x_ref[...], jnp.exp(y_ref[...]))" in line
    assert visit["cost"] == "269 M"
    assert any(" = dot " in text for text in visit["a"]) and len(visit["a"]) >= 6
    assert re.match(rf"{HERE}:{DOT_LINE} became \d+ lines of import", visit["said"])
    assert visit["llvm"] > 10
    assert visit["unlinked"] == [0, "This line has no source location."]


def test_steps_are_taken_by_keys_buttons_and_time(visit):
    assert visit["first"] == "step 1 of 64: i0=0 i1=0 i2=0*  (* sequential)"
    assert visit["third"] == "step 3 of 64: i0=0 i1=0 i2=2*  (* sequential)"
    assert visit["states"] == ["read", "read", "carried"]
    assert visit["spoken"][0] == "x_ref: block at 0, 256, read"
    assert visit["last"].startswith("step 64 of 64: i0=3 i1=3 i2=3*")
    assert re.match(r"step [2-5] of 64", visit["playing"])


def test_a_page_can_be_read_aloud_and_sent(visit):
    assert visit["unnamed"] == 0 and visit["rows"] >= 5
    assert visit["requests"] == []
    assert visit["roofline"].startswith("Roofline: product_kernel on cpu")
    assert "b=llvm" in visit["address"] and "form=1" in visit["address"]


PICTURES = Path(__file__).parents[2] / "build" / "explore"  # kept, to be looked at


def attended(q):
    return kernels.attention(q, q, q, mask=kernels.masks.Causal())


@pytest.mark.parametrize("name", ["matmul", "attention"])
def test_pages_open_from_disk_and_pictures_are_kept(name, page, browse):
    html = page.html
    if name == "attention":
        with jaxprs_kept() as jaxprs:
            sites = sites_in(attended, S((1, 512, 2, 64), jnp.float32))
        html = page_of(name, sites, ["cpu", "tpu:v6e"], jaxprs, measure=False).html
    assert len(html) < 5e6
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"{name}.html"
    path.write_text(html)
    picture = path.with_suffix(".png")
    picture.unlink(missing_ok=True)
    browse(path, "--window-size=1400,3000", f"--screenshot={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5e4
