"""The native library: built once, explained when it cannot be, and its threads come and go with the kernel set."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from kilat.base.errors import ConfigError
from kilat.ops.cpu import build as building
from kilat.ops.cpu.kernels import available, cpu_kernels
from tests.ops.cpu.cases import different_bits, normal

pytestmark = pytest.mark.cpu

FILES = (*building._COMMON, *building._X86)


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile in no time, and a cache of their own."""
    if building.compiler() is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "kilat_cpu.h").write_text("")
    for i, name in enumerate(FILES):
        (folder / name).write_text(f'extern "C" int f{i}(void) {{ return {i}; }}\n')
    monkeypatch.setattr(building, "source_dir", lambda: folder)
    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def test_without_compiler_the_reason_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path))
    usable, why = available()
    assert not usable and "no C++ compiler" in why and "install" in why


def test_without_sources_the_reason_says_so(monkeypatch):
    monkeypatch.setattr(building, "source_dir", lambda: None)
    usable, why = available()
    assert not usable and "not installed" in why


def test_cache_that_cannot_be_written_is_a_reason_with_the_folder(small_sources, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    # nobody, not even root, makes a folder in a file or in /proc
    for cache in (tmp_path / "file", Path("/proc/cache")):
        monkeypatch.setenv("KILAT_CACHE_DIR", str(cache))
        usable, why = available()
        assert not usable and str(cache / "native") in why and "set KILAT_CACHE_DIR" in why


def test_source_that_does_not_compile_is_reported_and_leaves_nothing_behind(small_sources, tmp_path):
    (small_sources / "pool.cpp").write_text("int f(void) { return no_such_name; }\n")
    with pytest.raises(ConfigError, match="no_such_name"):
        building.build()
    assert sorted(p.name for p in (tmp_path / "cache/native").iterdir()) == ["build.lock", "objects"]


def test_only_what_changed_is_compiled_again(small_sources, tmp_path):
    building.build()
    objects = tmp_path / "cache/native/objects"
    before = {p.name: p.stat().st_mtime_ns for p in objects.iterdir()}
    (small_sources / "pool.h").write_text("// changed\n")
    (small_sources / "pool.cpp").write_text('#include "pool.h"\nextern "C" int changed(void) { return 1; }\n')
    building.build()
    after = {p.name: p.stat().st_mtime_ns for p in objects.iterdir()}
    assert len(after) == len(before) + 1 and after.items() >= before.items()


def test_library_of_another_kind_is_refused(small_sources):
    building.build()
    usable, why = available()
    assert not usable and "kilat_cpu" in why


def test_built_once_and_again_only_when_a_source_changes(small_sources):
    first = building.build()
    built_at = first.stat().st_mtime_ns
    assert building.build() == first and first.stat().st_mtime_ns == built_at
    (small_sources / "pool.cpp").write_text('extern "C" int changed(void) { return 1; }\n')
    second = building.build()
    assert second != first and second.exists() and first.exists()


def test_builders_at_the_same_time_compile_once(small_sources, monkeypatch):
    compiled = []
    real = building._compile
    monkeypatch.setattr(building, "_compile", lambda *a: (compiled.append(1), time.sleep(0.2), real(*a)))
    threads = [threading.Thread(target=building.build) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads) and len(compiled) == 1


def n_tasks() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_threads_end_with_the_kernel_set(best_isa):
    gc.collect()
    before = n_tasks()
    for _ in range(10):
        kernels = cpu_kernels(3)
        assert n_tasks() == before + 2
        del kernels
        gc.collect()
    assert n_tasks() == before


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory use from /proc")
def test_memory_of_packed_weights_is_given_back(best_isa):
    weight = torch.zeros(4096, 1024)

    def pack_and_drop() -> None:
        kernels = cpu_kernels(1)
        packed = [kernels.pack_linear(weight, None) for _ in range(8)]
        del kernels
        assert all(p.n_bytes >= weight.nbytes for p in packed)

    pack_and_drop()
    gc.collect()
    before = resident_bytes()
    for _ in range(4):
        pack_and_drop()
    gc.collect()
    assert resident_bytes() < before + 4 * weight.nbytes


def test_no_set_without_a_thread(best_isa):
    with pytest.raises(ConfigError, match="0 threads"):
        cpu_kernels(0)


def test_calls_from_two_threads_do_not_mix(best_isa):
    kernels = cpu_kernels(2)
    x = normal(1, 64, 600, dtype=torch.bfloat16)
    packed = kernels.pack_linear(normal(2, 640, 600, dtype=torch.bfloat16), None)
    expected = kernels.linear(x, packed)
    wrong: list[str] = []

    def run() -> None:
        for _ in range(30):
            wrong.extend(filter(None, [different_bits(kernels.linear(x, packed), expected, 1)]))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads) and wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_child_computes_without_its_parents_threads(best_isa):
    kernels = cpu_kernels(2)
    x = normal(1, 64, 600, dtype=torch.float32)
    packed = kernels.pack_linear(normal(2, 640, 600, dtype=torch.float32), None)
    expected = kernels.linear(x, packed).numpy().tobytes()
    time.sleep(0.05)  # the helper is asleep by now, which is the harder case
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # torch's own threads are not there either, so the comparison is numpy's
            for _ in range(5):
                code = 0 if kernels.linear(x, packed).numpy().tobytes() == expected else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")
