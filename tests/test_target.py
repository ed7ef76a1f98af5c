"""The table of chips: every row is whole, devices are recognised, the host is read."""

import pytest

from pallasite import target
from pallasite.errors import SpecError


@pytest.mark.parametrize("row", target.CHIPS.values(), ids=lambda row: row.name)
def test_rows_are_whole(row: target.Chip):
    assert row.cores > 0 and row.rates and row.device_kinds
    assert row.main.bytes > 1 << 33 and (row.main.bytes_per_second or 0) > 1e11
    assert (row.rate("bf16") or 0) > 1e14 and row.rate("complex64") is None
    assert target.chip(row.name) is row
    assert all(target.chip_of_device(kind) is row for kind in row.device_kinds)


def test_tpus_have_what_their_compiler_needs():
    for row in target.TPUS.values():
        assert row.vmem.bytes >= 16 << 20 and row.topology
        assert row.sublanes_of(32) == 8 and row.sublanes_of(8) == 32
    known = {"v4": 8, "v5e": 8, "v5p": 8, "v6e": 8, "7x": 16}
    assert {name: target.TPUS[name].sublanes_of(16) for name in known} == known


def test_gpus_have_what_their_compiler_needs():
    for row in target.GPUS.values():
        assert 48 << 10 <= row.shared.bytes < 228 << 10
        assert row.arch.startswith("gfx" if row.is_amd else "sm_")
        assert row.wave == (64 if row.arch.startswith("gfx9") else 32)
        assert 0 <= row.stages_in_registers < row.stages


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Radeon RX 9070 XT", "rx9070xt"),
        ("TPU v5 lite", "v5e"),
        ("TPU  v5p", "v5p"),
        ("TPU v5", "v5p"),
        ("cpu", None),
        ("NVIDIA H1000", None),
    ],
)
def test_devices_are_recognised(kind: str, name: str | None):
    found = target.chip_of_device(kind)
    assert (found and found.name) == name


def test_an_unknown_chip_is_an_error_that_lists_the_others():
    with pytest.raises(SpecError, match=r"unknown chip 'v9'(.|\n)*v4, v5e, v5p"):
        target.chip("v9")


def test_caches_of_the_host_change_the_code():
    small, large = target.Host(32, 16, l2_bytes=256 << 10), target.Host(32, 16)
    from pallasite.backends.cpu.call import compile as compiler

    with target.using(small):
        here = compiler.identity("kernel")
    with target.using(large):
        assert compiler.identity("kernel") != here


@pytest.mark.parametrize("row", target.CHIPS.values(), ids=lambda row: row.name)
def test_no_usual_rate_exceeds_its_peak(row: target.Chip):
    usual, peak = target.Machine.usual(row), target.Machine.peak(row)
    for name in ("wide", "vector", "special", "bytes", "cached_bytes"):
        assert 0 < getattr(usual, name) <= getattr(peak, name), name
    assert all(usual.products[name] <= rate for name, rate in peak.products.items())
    assert peak.multiplying(1e12, ["bf16"]) == 1e12 / row.rates["bf16"]
    assert peak.copying(row.main.bytes_per_second or 0) == 1


def test_a_kernel_takes_as_long_as_its_slowest_unit():
    gpu, tpu, cpu = (
        target.Machine.usual(chip)
        for chip in (target.GPUS["h200"], target.TPUS["v6e"], target.Host(32, 16))
    )
    one, all_cores = (gpu.kernel(1e12, 0, 0, 1, programs) for programs in (1, 132))
    assert one == pytest.approx(132 * all_cores) and all_cores > 1e-3
    assert gpu.kernel(1e12, 0, 0, 133, 133) == pytest.approx(2 * 132 / 133 * all_cores)
    # Few programs wait for memory; many reach its bandwidth.
    waiting, moving = (gpu.kernel(0, 0, 1e9, n, n) for n in (1, 528))
    assert moving == gpu.copying(1e9) and waiting > 50 * moving
    # Units of a TPU work at once, and steps cost extra; a core of a CPU does it all.
    assert tpu.kernel(1e12, 0, 1e9, 0, 1) == tpu.multiplying(1e12)
    assert tpu.kernel(0, 0, 0, 1000, 1000) == pytest.approx(2.5e-4)
    parts = cpu.multiplying(1e9), cpu.copying(1e9), cpu.starting(1000)
    assert cpu.kernel(1e9, 0, 1e9, 1000, 1000) == pytest.approx(sum(parts))


def test_tiles_are_padded_to_registers():
    v6e, v7 = target.TPUS["v6e"], target.TPUS["7x"]
    assert v6e.tile_bytes((3, 1, 129), 32) == 3 * 8 * 256 * 4
    assert v6e.tile_bytes((9, 128), 16) == 16 * 128 * 2
    assert v7.tile_bytes((9, 128), 16) == 16 * 128 * 2
    assert v7.tile_bytes((1, 128), 16) == 2 * v6e.tile_bytes((1, 128), 16)
    assert target.physical((3, 64, 1)) == (4, 64, 1)
