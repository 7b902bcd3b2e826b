"""The printed report of a look at a device."""

import pytest

from kilat.cli.utilisation import MOST_STEPS, show, window_steps
from kilat.engine.utilisation import DeviceUse, Roofs, Steps, Utilisation, utilisation

pytestmark = pytest.mark.logic

STEPS = Steps(n=2, wall_ns=20_000_000, rows=512, tokens=512, read_bytes=84e9, flops=8e12)
ROOFS = Roofs(copy_bytes_per_s=4300e9, product_flops_per_s=788e12, product="bfloat16 8192^3")
SEEN = DeviceUse(
    24_000_000,
    23_760_000,
    {"device: between kernels": 200_000, "host: schedule": 40_000},
    [("gemm_of_a_long_name" * 9, 20_000_000, 128), ("norm", 3_760_000, 130)],
)


def shown(use: Utilisation | None, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The words of each line."""
    show(use)
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_two_windows_fit_into_the_rest_of_a_round() -> None:
    for n_done in range(7, 500):
        assert 1 <= window_steps(n_done) <= MOST_STEPS
        assert 2 * window_steps(n_done) < n_done
    assert window_steps(1) == 1 and window_steps(10_000) == MOST_STEPS


def test_shares_roofs_gaps_and_kernels_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(utilisation("H200", "kernels", STEPS, (2, SEEN), ROOFS), capsys)
    assert "utilisation of H200, 2 steps".split() == lines[0][:5]
    assert "256.0 rows," in " ".join(lines[0])
    assert "busy: kernels 12.00 ms under the profiler 99.0% time".split() in lines
    assert "bandwidth 42.000 GB 97.7% 4,300.0 GB/s: a copy".split() in lines
    assert "arithmetic 4.0000 TFLOP 50.8% 788.00 TFLOP/s: bfloat16 8192^3".split() in lines
    assert "device: between kernels 0.100 0.83%".split() in lines
    assert "host: schedule 0.020 0.17%".split() in lines
    assert "norm 1.880 15.67% 65.0".split() in lines
    assert any(line and line[0] == ("gemm_of_a_long_name" * 9)[:72] for line in lines)


def test_device_that_could_not_be_watched_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(utilisation("H200", "kernels", STEPS, "may not look", ROOFS), capsys)
    assert "busy: kernels 10.00 ms - time".split() in lines and ["may", "not", "look"] in lines
    assert not any("between" in line for line in lines)


def test_round_that_was_too_short_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    [line] = shown(None, capsys)
    assert "longer answers" in " ".join(line)
