from pathlib import Path

import pytest

from ringweave.cost import architectures
from ringweave.cost.architectures import ArchitectureSetting
from ringweave.plots import figures
from ringweave.plots.figures import WorkerSweep

SETTING = ArchitectureSetting(
    num_workers=16,
    num_groups=4,
    num_bytes=100_000_000,
    latency_s=0.2,
    bandwidth_bytes_per_s=125e6,
    reduce_s_per_byte=1e-10,
)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    return tmp_path / "p.svg"


@pytest.mark.slow
def test_against_latency(path: Path) -> None:
    figures.draw_over_latency(SETTING, path)
    words = path.read_text()
    for expected in (
        "S = 100MB, B = 1Gbit/s, C = 1e-10 s/byte, N = 16, k = 4",
        ">as in the paper<",
        "the server's link shared by all rings<",
        "0.1006 s: PS-HRA passes hierarchical",
        "3.163 s: PS passes PS-HRA",
        "1.308 s: PS-HRA passes hierarchical",
        "2.473 s: PS passes PS-HRA",
    ):
        assert expected in words


@pytest.mark.slow
def test_against_workers(path: Path) -> None:
    sweep = architectures.settings_over_workers(SETTING, range(4, 65, 4), lambda count: count // 4)
    figures.draw_over_workers([WorkerSweep(title="rings of 4", settings=tuple(sweep))], path)
    words = path.read_text()
    for expected in (
        "S = 100MB, B = 1Gbit/s, C = 1e-10 s/byte, a = 200ms",
        "as in the paper; rings of 4",
        "N = 12: hierarchical passes ring",
        "N = 16: PS-HRA passes hierarchical",
    ):
        assert expected in words
