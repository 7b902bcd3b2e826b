"""`kilat doctor`: the machine, the kernels, and whether a model fits."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from kilat.cli import doctor
from kilat.cli.doctor import Finding, fit_findings, kernel_findings, machine_findings
from kilat.cli.fit import Fit, predict
from kilat.cli.machine import Machine
from kilat.cli.main import main
from kilat.engine.build import build_engine
from kilat.engine.config import EngineConfig
from kilat.load.files import ModelFiles
from kilat.ops import kernels
from tests.cli.whole_model import PARAMETERS, write_model
from tests.engine import fp8_checkpoint

pytestmark = pytest.mark.cpu

GIB = 1 << 30
GOOD = Machine("a cpu", ("avx2", "fma"), 8, 32 * GIB, 16 * GIB)


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {f.what.strip(): f for f in findings}


def settings(**more: object) -> EngineConfig:
    return EngineConfig(model_path="", model_kind="hf", model_id="x", **more)  # type: ignore[arg-type]


def test_good_machine_needs_no_fix() -> None:
    found = by_name(machine_findings(GOOD))
    assert not any(found[name].fix for name in ("cpu", "instructions", "cores", "memory"))
    assert "16.0 GiB free" in found["memory"].value


def test_weak_machine_is_told_what_is_weak() -> None:
    found = by_name(machine_findings(Machine("old", (), 1, GIB, GIB)))
    assert found["instructions"].fix and found["cores"].fix


def test_reference_kernels_are_a_warning_only_when_they_were_not_asked_for() -> None:
    chosen = kernels.reference("no compiler")
    auto = by_name(kernel_findings(chosen, settings()))["kernels"]
    assert "no compiler" in auto.value and "slower" in auto.fix
    assert not by_name(kernel_findings(chosen, settings(kernels="reference")))["kernels"].fix


def test_prediction_agrees_with_the_ledger_of_the_built_engine(tmp_path: Path) -> None:
    files = ModelFiles("hf", write_model(tmp_path), "tiny")
    config = EngineConfig(
        model_path=str(files.path),
        model_kind="hf",
        model_id="tiny",
        kernels="reference",
        threads=1,
        kv_cache_bytes=4 << 20,
        max_num_seqs=4,
    )
    fit = predict(files, config, kernels.reference(), GOOD)
    engine = build_engine(config)
    try:
        built = engine.info.ledger_bytes
        assert fit.ledger_bytes["weights"] == built["weights"] == PARAMETERS * 4
        assert fit.ledger_bytes["pages"] == built["pages"]
        assert fit.kv_tokens == engine.info.n_pages * engine.info.page_tokens
        assert (fit.max_model_len, fit.dtype) == (engine.info.max_model_len, engine.info.dtype)
    finally:
        engine.close()


def test_prediction_knows_fp8_weights_and_pages(tmp_path: Path) -> None:
    files = ModelFiles("hf", fp8_checkpoint.write(tmp_path / "m", fp8=True), "tiny")
    base = {"kernels": "reference", "threads": 1, "kv_cache_bytes": 1 << 20, "max_num_seqs": 4}
    for options in ({}, {"quant": "none"}, {"kv_dtype": "fp8"}):
        config = EngineConfig(str(files.path), "hf", "tiny", **{**base, **options})  # type: ignore[arg-type]
        fit = predict(files, config, kernels.reference(), GOOD)
        engine = build_engine(config)
        try:
            built = engine.info.ledger_bytes
            assert (fit.ledger_bytes["weights"], fit.ledger_bytes["pages"]) == (
                built["weights"],
                built["pages"],
            )
        finally:
            engine.close()


def fit_of(weights: int, pages: int, dtype: str = "bfloat16") -> Fit:
    return Fit("cpu", 16 * GIB, dtype, 4096, pages // 1024, 1024, {"weights": weights, "pages": pages})


def test_model_that_fits_has_no_fix_and_one_that_does_not_says_what_would() -> None:
    good = by_name(fit_findings("m", fit_of(GIB, 2 * GIB)))["together"]
    assert good.value == "3.0 GiB of 16.0 GiB free" and not good.fix
    pages = by_name(fit_findings("m", fit_of(15 * GIB, 2 * GIB)))["together"]
    assert "--kv-cache-memory-bytes 1.0GiB" in pages.fix
    wide = by_name(fit_findings("m", fit_of(17 * GIB, GIB, "float32")))["together"]
    assert "--dtype bfloat16" in wide.fix
    large = by_name(fit_findings("m", fit_of(17 * GIB, GIB)))["together"]
    assert "free 1.0 GiB of memory" in large.fix and "smaller model" in large.fix


def test_doctor_shows_machine_kernels_and_the_ledger_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path)
    assert main(["doctor", str(folder), "--kernels", "reference", "--max-num-seqs", "2"]) == 0
    out = capsys.readouterr().out
    for name in (
        "cpu",
        "memory",
        "torch-reference",
        "batch-invariant",
        "weights",
        "pages",
        "workspace",
        "together",
    ):
        assert name in out, name


def test_model_that_cannot_be_served_makes_the_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path, model_type="mamba")
    assert main(["doctor", str(folder), "--kernels", "reference"]) == 1
    assert "'mamba' is not supported" in capsys.readouterr().out


def test_model_that_does_not_fit_makes_the_exit_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "read_machine", lambda: Machine("tiny", ("avx2",), 2, GIB, 10 << 20))
    assert main(["doctor", str(write_model(tmp_path)), "--kernels", "reference"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_wrong_engine_setting_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--kernels", "cuda"]) == 2
    err = capsys.readouterr().err
    assert "kernels is 'cuda'" in err and err.count("\n") == 1
