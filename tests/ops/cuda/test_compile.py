"""Machine code is compiled once and kept; a folder that cannot be written costs a second, not the engine."""

from pathlib import Path

import pytest

from kilat.ops.cuda import compile as nvrtc

pytestmark = pytest.mark.cpu


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been compiled, by a compiler that is not there."""
    names: list[str] = []

    def compile_source(text: bytes, name: str, options: tuple[str, ...]) -> tuple[bytes, str]:
        names.append(name)
        return text.upper(), ""

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    monkeypatch.setattr(nvrtc, "_version", lambda: (13, 0))
    return names


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.cu"
    path.write_bytes(b"code")
    return path


def test_machine_code_is_compiled_once_for_each_text_and_option(
    compiled: list[str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path / "cache"))
    assert [nvrtc.cubin((source,), ()) for _ in range(2)] == [b"CODE"] * 2 and len(compiled) == 1
    nvrtc.cubin((source,), ("-DX",))
    assert len(compiled) == 2
    source.write_bytes(b"other")
    assert nvrtc.cubin((source,), ()) == b"OTHER" and len(compiled) == 3


def test_folder_that_cannot_be_written_costs_a_compilation_each_time(
    compiled: list[str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path / "file"))
    assert [nvrtc.cubin((source,), ()) for _ in range(2)] == [b"CODE"] * 2 and len(compiled) == 2


def test_code_that_could_not_be_kept_leaves_no_file(
    compiled: list[str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc.os, "replace", full)
    assert nvrtc.cubin((source,), ()) == b"CODE"
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []
