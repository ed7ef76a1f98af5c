"""Canaries: one per function of jaxcompat, so a JAX release that moves things shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasite import jaxcompat


def traced_kernel():
    def kernel(x_ref, o_ref):
        o_ref[0, :] = x_ref[1, jax.ds(0, 4)]

    refs = [jaxcompat.abstract_ref((2, 4), np.float32) for _ in range(2)]
    with jaxcompat.kernel_tracing():
        return jax.make_jaxpr(kernel)(*refs)


def test_opened_gives_jaxpr_and_constants():
    table = np.arange(3.0)
    closed = jax.make_jaxpr(lambda x: x + jnp.asarray(table))(table)
    jaxpr, consts = jaxcompat.opened(closed)
    assert len(jaxpr.constvars) == len(consts)
    assert jaxcompat.opened(jaxpr)[0].eqns == jaxpr.eqns


def test_jaxprs_get_other_equations():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) + jnp.asarray(np.arange(3.0)))(1.0)
    opened, consts = jaxcompat.opened(closed)
    for jaxpr in (closed, opened):
        made = jaxcompat.with_equations(jaxpr, opened.eqns[:1])
        assert type(made) is type(jaxpr)
        assert len(jaxcompat.opened(made)[0].eqns) == 1
    assert len(jaxcompat.opened(made)[0].constvars) == len(consts)


def test_kernel_tracing_allows_one_ref_twice():
    def kernel(x_ref, o_ref):
        jax.jit(lambda a, b: o_ref.__setitem__(..., a[...] + b[...]))(x_ref, x_ref)

    refs = [jaxcompat.abstract_ref((4,), np.float32) for _ in range(2)]
    with jaxcompat.kernel_tracing():
        closed = jax.make_jaxpr(kernel)(*refs)
    assert closed.jaxpr.eqns


def test_named_axes_have_index_and_size():
    def kernel(o_ref):
        o_ref[...] = jax.lax.axis_index("core") + jax.lax.axis_size("core")

    ref = jaxcompat.abstract_ref((), np.int32)
    with jaxcompat.kernel_tracing(), jaxcompat.named_axes([("core", 2)]):
        closed = jax.make_jaxpr(kernel)(ref)
    assert closed.jaxpr.eqns[0].primitive.name == "axis_index"
    with jaxcompat.named_axes(()):
        pass


def test_one_kind_of_error_is_kept_out_of_the_log_of_callbacks(caplog):
    class Quiet(Exception):
        pass

    def failing(kind):
        def raise_it(x):
            raise kind("told")

        return jax.jit(lambda x: jax.pure_callback(raise_it, x, x))

    jaxcompat.keep_out_of_callback_log(Quiet)
    for kind, logged in ((Quiet, 0), (KeyError, 1)):
        caplog.clear()
        with pytest.raises(jax.errors.JaxRuntimeError, match="told"):
            jax.block_until_ready(failing(kind)(np.float32(1)))
        assert len(caplog.records) == logged


def test_traced_values_are_told_from_concrete_ones():
    assert jaxcompat.is_concrete(jnp.ones(())) and jaxcompat.is_concrete(1)
    assert jax.jit(lambda x: x if jaxcompat.is_concrete(x) else -x)(1.0) == -1


def test_trace_context_differs_where_tracing_would():
    plain = jaxcompat.trace_context()
    assert plain == jaxcompat.trace_context() and hash(plain) is not None
    with jax.default_matmul_precision("highest"):
        assert jaxcompat.trace_context() != plain


def test_refs_and_views_are_told_from_values():
    seen = []

    def kernel(x_ref):
        view = x_ref.at[0]
        seen.append((jaxcompat.is_ref(x_ref), jaxcompat.is_ref(view)))
        seen.append(jaxcompat.is_ref(x_ref[...]))
        root, transforms = jaxcompat.ref_and_transforms(view)
        seen.append((root is x_ref, len(transforms)))
        seen.append(jaxcompat.aval_of(root).shape)

    with jaxcompat.kernel_tracing():
        jax.make_jaxpr(kernel)(jaxcompat.abstract_ref((2, 4), np.float32))
    assert seen == [(True, True), False, (True, 1), (2, 4)]


def test_memory_spaces_of_traced_values_are_those_of_their_types():
    found = []

    def kernel(x_ref):
        found.append(jaxcompat.memory_space_of(x_ref))
        jaxcompat.memory_space_of(x_ref[...])  # does not raise

    with jaxcompat.kernel_tracing():
        jax.make_jaxpr(kernel)(jaxcompat.abstract_ref((2, 4), np.float32, "here"))
    assert found == ["here"]
    assert jaxcompat.memory_space_of(np.ones(3)) is None


def test_export_says_which_calls_it_refuses():
    import jax.export
    from jax.interpreters import mlir

    asked = []

    def export(checks):
        primitive = jaxcompat.Primitive("asks")
        primitive.def_abstract_eval(lambda x: x)

        def lower(ctx, x):
            asked.append(jaxcompat.export_refuses("mine"))
            return [x]

        mlir.register_lowering(primitive, lower)
        export = jax.export.export(jax.jit(primitive.bind), disabled_checks=checks)
        export(jax.ShapeDtypeStruct((), np.float32))

    export([])
    export([jax.export.DisabledSafetyCheck.custom_call("mine")])
    export([jax.export.DisabledSafetyCheck.custom_call("another")])
    assert asked == [True, False, True]
    assert not jaxcompat.export_refuses("mine")


def test_a_view_as_an_index_is_a_pytree():
    leaves = []

    def kernel(x_ref, i_ref):
        view = x_ref.at[i_ref.at[0].at[1:]]
        parts = jaxcompat.ref_and_transforms(view)
        flat, tree = jax.tree.flatten(parts)
        leaves.append(all(isinstance(x, (int, jax.core.Tracer)) for x in flat))
        _, (indexer,) = jax.tree.unflatten(tree, flat)
        root, transforms = jaxcompat.ref_and_transforms(indexer.indices[0])
        leaves.append((root is i_ref, len(transforms)))

    with jaxcompat.kernel_tracing():
        refs = (
            jaxcompat.abstract_ref((2, 4), np.float32),
            jaxcompat.abstract_ref((2, 3), np.int32),
        )
        jax.make_jaxpr(kernel)(*refs)
    assert leaves == [True, (True, 2)]


def test_index_classes_keep_their_layout():
    get, swap = (e for e in traced_kernel().jaxpr.eqns)
    (indexer,) = jax.tree.unflatten(get.params["tree"], get.invars[1:])
    assert type(indexer).__name__ == "NDIndexer"
    row, span = indexer.indices
    assert int(row.val) == 1
    assert (span.start, span.size, span.stride) == (0, 4, 1)
    assert tuple(indexer.get_indexer_shape()) == (4,)
    assert swap.primitive.name == "swap"


@pytest.mark.parametrize("name", ["ReshapeTransform", "TransposeTransform"])
def test_view_classes_keep_their_names(name):
    view = {
        "ReshapeTransform": lambda r: r.reshape(8),
        "TransposeTransform": lambda r: r.T,
    }[name]
    found = []

    def kernel(x_ref):
        found.append(type(jaxcompat.ref_and_transforms(view(x_ref))[1][0]).__name__)

    with jaxcompat.kernel_tracing():
        jax.make_jaxpr(kernel)(jaxcompat.abstract_ref((2, 4), np.float32))
    assert found == [name]


def test_scan_split_counts_constants_and_carry():
    def f(k, xs):
        return jax.lax.scan(lambda c, x: ((c[0] + k * x, c[1] + 1), x), (k, 1), xs)

    eqns = jax.make_jaxpr(f)(1.0, np.ones(3)).jaxpr.eqns
    (scan,) = [e for e in eqns if e.primitive.name == "scan"]
    assert jaxcompat.scan_split(scan.params) == (1, 2)


def test_lower_high_level_removes_high_level_primitives():
    closed = jax.make_jaxpr(jnp.searchsorted)(np.arange(4.0), np.arange(2.0))
    lowered = jaxcompat.lower_high_level(closed)
    names = {e.primitive.name for e in jaxcompat.opened(lowered)[0].eqns}
    assert "call_hi_primitive" not in names


def test_effects_are_ref_effects():
    effects = traced_kernel().jaxpr.effects
    kinds = {type(e) for e in effects}
    assert type(jaxcompat.ref_effect(0)) in kinds
    assert type(jaxcompat.ref_effect(0, writes=True)) in kinds
    printed = jax.make_jaxpr(lambda: jax.debug.print("x"))()
    assert type(jaxcompat.debug_effect()) in {type(e) for e in printed.effects}


def test_a_view_transform_of_ours_is_one_of_jax():
    from pallasite.language.peers import MulticastRef

    found = []

    def body(ref):
        view = jaxcompat.transformed_ref(ref.at[1:3], MulticastRef(("x",)))
        found.append((view.shape, view.transforms[-1].pretty_print(None)))

    jax.make_jaxpr(lambda x: body(jax.new_ref(x)))(jax.numpy.zeros((4, 8)))
    ((shape, printed),) = found
    assert shape == (2, 8) and "MulticastRef" in str(printed)


def test_staged_equations_are_those_traced_so_far():
    staged = []

    def kernel(x_ref, o_ref):
        row = x_ref[1.5]  # alive: equations without results in use are left out
        staged.extend(jaxcompat.staged_equations())
        o_ref[0] = row

    refs = [jaxcompat.abstract_ref((2, 4), np.float32) for _ in range(2)]
    with jaxcompat.kernel_tracing():
        jax.make_jaxpr(kernel)(*refs)
    (get,) = [eqn for eqn in staged if eqn.primitive.name == "get"]
    assert get.invars[0].aval.shape == (2, 4)
    assert [entry.aval.dtype for entry in get.invars[1:]] == [np.float32]
    assert jaxcompat.staged_equations() == []


def test_user_frame_finds_this_file():
    eqn = traced_kernel().jaxpr.eqns[0]
    file, line, function = jaxcompat.user_frame(eqn.source_info)
    assert file.endswith("test_jaxcompat.py")
    assert line > 0
    assert "kernel" in function


def test_keys_have_words_and_an_implementation():
    key = jax.random.key(0)
    assert jaxcompat.is_key_dtype(key.dtype)
    assert not jaxcompat.is_key_dtype(np.dtype("float32"))
    assert jaxcompat.key_data_shape(key.dtype) == (2,)
    impl = jaxcompat.key_implementation(key.dtype)
    np.testing.assert_array_equal(impl.seed(jnp.int32(0)), jax.random.key_data(key))


def test_output_types_vary_like_the_operands():
    aval = jax.core.ShapedArray((2,), np.dtype("float32"))
    out = jaxcompat.out_aval_like([aval], (3,), np.float16)
    assert (out.shape, out.dtype) == ((3,), np.float16)
    assert jaxcompat.manual_axes(out) == frozenset()
    assert jaxcompat.plain_avals([aval])[0].shape == (2,)


def test_values_can_be_marked_as_varying():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(x, w):
        a, b = jaxcompat.vary_alike([x, w])
        assert jaxcompat.manual_axes(jax.typeof(w)) == frozenset()
        assert jaxcompat.manual_axes(jax.typeof(b)) == {"d"}
        assert a is x
        return a * b

    spec = jax.sharding.PartitionSpec
    run = jax.shard_map(
        body, mesh=mesh, in_specs=(spec("d"), spec()), out_specs=spec("d")
    )
    jax.jit(run)(np.ones(2, np.float32), np.ones(2, np.float32))
    assert jaxcompat.vary_alike([1.0]) == [1.0]


def test_closed_over_values_become_operands():
    def outer(x, n):
        run, values = jaxcompat.without_closure(lambda y: [y * x + n], x)
        assert len(values) == 2
        return run(x, *values)[0]

    assert jax.jit(outer)(3.0, 4) == 13.0


def test_our_primitive_is_not_special_to_jax():
    """JAX imports upstream Pallas for a primitive *named* pallas_call."""
    from pallasite.primitive import call_p

    assert call_p.name != "pallas_call"


def test_export_can_be_told_from_compilation():
    from jax.interpreters import mlir

    seen = []
    probe_p = jaxcompat.Primitive("pallasite_probe")
    probe_p.def_abstract_eval(lambda x: x)

    def rule(ctx, x):
        seen.append(jaxcompat.is_export(ctx))
        return [x]

    mlir.register_lowering(probe_p, rule)
    function = jax.jit(lambda x: probe_p.bind(x))
    function.lower(jnp.ones(2))
    jax.export.export(function)(jnp.ones(2))
    assert seen == [False, True]


# --- automatic partitioning ---


def test_flags_are_read():
    assert jaxcompat.flag("jax_enable_x64") in (True, False)
    assert not jaxcompat.flag("jax_compilation_cache_dir")


def test_devices_of_a_lowering():
    """One for one device and inside shard_map; all of them under sharded jit."""
    from jax.interpreters import mlir
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    seen = []
    probe_p = jaxcompat.Primitive("pallasite_probe")
    probe_p.def_abstract_eval(lambda x: x)

    def rule(ctx, x):
        seen.append(jaxcompat.auto_devices(ctx))
        return [x]

    mlir.register_lowering(probe_p, rule)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    sharded = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("d")))
    jax.jit(lambda x: probe_p.bind(x)).lower(jnp.ones(8))
    jax.jit(lambda x: probe_p.bind(x)).lower(sharded)
    mapped = jax.shard_map(probe_p.bind, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    jax.jit(mapped).lower(sharded)
    assert seen == [1, jax.device_count(), 1]


def test_tile_assignments_go_there_and_back():
    devices = np.arange(8).reshape(4, 1, 2)
    sharding = jaxcompat.tiled_sharding(devices, 2)
    np.testing.assert_array_equal(jaxcompat.tile_assignment(sharding), devices)
    assert jaxcompat.tile_assignment(jaxcompat.tiled_sharding(devices[:1], 2)) is None


def test_the_module_of_one_device_has_collectives():
    def total(x):
        return [jax.lax.psum(x, "all", axis_index_groups=[[0, 2], [1, 3]])]

    like = jax.ShapeDtypeStruct((4,), np.float32)
    module = jaxcompat.module_of_one_device(total, [like], ("all", 4), ["cpu"], False)
    assert isinstance(module, bytes) and b"all_reduce" in module


def test_sharding_rules_are_parsed():
    from jax.interpreters import mlir

    text = "([i, j])->([i]) {i=4, j=2} reduction={j}, custom"
    with mlir.make_ir_context():
        assert text in str(jaxcompat.sharding_rule_attribute(text))


def test_explicit_shardings_are_in_the_types():
    from jax.sharding import AxisType
    from jax.sharding import PartitionSpec as P

    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        aval = jax.typeof(jax.device_put(jnp.ones((count, 2)), P("d", None)))
        assert jaxcompat.explicit_spec(aval) == (("d",), ())
        assert jaxcompat.mesh_sizes(aval) == {"d": count}
        out = jaxcompat.out_aval_like([aval], (2, count), np.float32, (None, "d"))
        assert jaxcompat.explicit_spec(out) == ((), ("d",))
    assert jaxcompat.explicit_spec(jax.typeof(jnp.ones((2, 3)))) == ((), ())


def test_checks_of_checkify_are_taken_apart():
    from jax.experimental import checkify

    def function(x):
        checkify.check(x > 0, "{} is not {what}", x, what=x + 1)

    (eqn,) = [
        e for e in jax.make_jaxpr(function)(1.0).eqns if e.primitive.name == "check"
    ]
    values = [f"value {n}" for n in range(len(eqn.invars))]
    ((failed, message, fields),) = jaxcompat.errors_in_check(eqn.params, values)
    assert message == "{} is not {what}" and failed in values
    assert fields[0][0] in values and set(fields[1]) == {"what"}


def test_rules_of_checkify_are_called():
    from jax.experimental import checkify

    identity, seen = jaxcompat.Primitive("canary"), []
    identity.def_impl(lambda x: x)
    identity.def_abstract_eval(lambda x: x)

    class Failure(next(iter(checkify.user_checks))):
        def get_effect_type(self):
            return jaxcompat.error_effect(type(self), list(self.args))

    def rule(add, error, enabled, x):
        seen.append(enabled)
        found = Failure(jaxcompat.current_traceback(), "x is {}", x)
        return add(error, x > 1, found), x

    jaxcompat.register_checkify(identity, rule)
    checked = checkify.checkify(identity.bind, errors=checkify.float_checks)
    assert checked(jnp.float32(1))[0].get() is None
    assert checked(jnp.float32(2))[0].get().startswith("x is 2.0")
    assert seen == [checkify.float_checks] * 2


def test_dlpack_shares_memory():
    exported = jnp.arange(8.0)
    (device,) = exported.devices()
    stream = jaxcompat.stream_for_imports(device)
    capsule = jaxcompat.dlpack_of_array(exported, stream)
    array = jaxcompat.array_of_dlpack(capsule, device, stream)
    assert array.unsafe_buffer_pointer() == exported.unsafe_buffer_pointer()
    assert array.tolist() == list(range(8)) and array.committed


def test_weakly_typed():
    x = jaxcompat.weakly_typed(jnp.ones(3))
    assert x.weak_type
    assert (x + jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16


def test_the_order_of_a_polynomials_coefficients_is_found():
    bound = jax.make_jaxpr(lambda c, x: jnp.polyval(c, x))(np.ones(3, np.float32), 1.0)
    (call,) = (e for e in bound.eqns if "jaxpr" in e.params)
    inner, _ = jaxcompat.opened(call.params["jaxpr"])
    names = {e.primitive.name: e.primitive for e in inner.eqns}
    if "polynomial" not in names:
        pytest.skip("this JAX has no primitive polynomial")
    primitive = names["polynomial"]
    value = float(primitive.bind(*map(np.float32, (2, 1, 10, 100))))
    assert value == (421 if jaxcompat.polynomial_lowest_first(primitive) else 124)


def test_primitives_with_derivatives_of_their_own_are_kept_until_import():
    avals = [np.ones(3, np.float32)]
    closed = jax.make_jaxpr(lambda x: jnp.frexp(x)[0])(*avals)
    kept = jaxcompat.lower_other_high_level(closed)
    names = {e.primitive.name: e for e in _equations(kept)}
    if jaxcompat.EXPANDABLE not in names:
        pytest.skip("this JAX has no such primitive")
    made = jaxcompat.expansion(names[jaxcompat.EXPANDABLE])
    assert jaxcompat.EXPANDABLE not in {e.primitive.name for e in _equations(made)}
    lowered = jaxcompat.lower_high_level(closed)
    assert jaxcompat.EXPANDABLE not in {e.primitive.name for e in _equations(lowered)}


def _equations(jaxpr):
    for eqn in jaxcompat.opened(jaxpr)[0].eqns:
        yield eqn
        for inner in jaxcompat.jaxprs_in_params(eqn.params):
            yield from _equations(inner)


def test_an_unknown_meaning_of_polynomial_is_refused():
    product = jaxcompat.Primitive("polynomial")
    product.def_impl(lambda x, *coefficients: x * coefficients[0] * coefficients[1])
    with pytest.raises(NotImplementedError, match="polynomial"):
        jaxcompat.polynomial_lowest_first(product)


def test_tokens_that_jax_waits_for_at_exit_are_known_by_name():
    from jax._src import dispatch

    tokens = vars(dispatch.RuntimeTokenSet())
    names = ("current_tokens", "output_runtime_tokens")
    assert all(isinstance(tokens[name], dict) for name in names)


def test_arguments_that_the_caller_keeps(monkeypatch):
    import pallasite as pl

    found, ask = [], jaxcompat.kept_arguments
    watch = lambda ctx, values: found.append(ask(ctx, values)) or found[-1]
    monkeypatch.setattr(jaxcompat, "kept_arguments", watch)

    def body(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    x = jnp.ones((8, 128))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = pl.pallas_call(body, shape, input_output_aliases={0: 0}, interpret=True)
    looped = lambda x, y: jax.lax.fori_loop(0, 3, lambda _, x: call(x, y), x)
    for function, donated in (
        (call, ()), (call, 0), (lambda x, y: call(x, y + 1), 1), (looped, ()),
        (lambda x, y: jax.jit(call)(x, y), ()),
    ):  # fmt: skip
        jax.jit(lambda x, y, f=function: f(x, y), donate_argnums=donated).lower(x, x)
    assert found == [{0, 1}, {1}, {0}, set(), set()]
    jax.export.export(jax.jit(lambda x, y: call(x, y)))(x, x)
    assert found[-1] == set()
