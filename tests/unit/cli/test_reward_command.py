"""`fourfold reward`: its table, and arguments that are refused before a call."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.cli import main as cli_main
from fourfold.coordinator.v1 import scorer_service_pb2 as pb
from fourfold_coordinator.cli.reward import table


def test_the_table_has_a_line_for_each_deployment() -> None:
    shadow = pb.Deployment(targets=["b:2"], scorers=["y@2"], samples=640, problem="y: its calls fail")
    lines = table(
        [
            pb.Scorer(
                name="math",
                weight=0.5,
                live=pb.Deployment(scorers=["x@1"], samples=1024),
                canary=pb.Deployment(targets=["a:1"], scorers=["x@2"], samples=256),
                canary_share=0.25,
                previous=pb.Deployment(targets=["c:3"]),
            ),
            pb.Scorer(
                name="style",
                weight=1,
                live=pb.Deployment(targets=["d:4", "e:5"], scorers=["z@1"]),
                shadow=shadow,
                agreement=pb.Agreement(samples=640, rank_correlation=0.93, flip_share=0.04, mean_shift=0.02),
            ),
        ]
    )
    assert [line.split() for line in lines[1:4]] == [
        ["math", "0.5", "live", "x@1", "at", "registered", "1,024"],
        ["canary", "x@2", "at", "a:1", "256", "25%", "of", "the", "groups"],
        ["previous", "unknown", "at", "c:3"],
    ]
    assert "z@1 at d:4, e:5" in lines[4]
    assert lines[5].endswith("rank 0.930, flips 4.0%, shift +0.02 over 640 samples; y: its calls fail")
    assert table([]) == ["agents bring all rewards; the run has no scorers"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["list", "nowhere"], "nowhere: neither a folder of runs/ nor HOST:PORT of a coordinator"),
        (["list", "127.0.0.1:1", "--timeout", "-3"], "--timeout -3: it must be above 0"),
        (["list", "127.0.0.1:1", "--timeout", "inf"], "--timeout inf: it must be above 0 and at most 3600 s"),
        (["list", "127.0.0.1:1", "--timeout", "5"], "nothing listens there"),
    ],
)
def test_wrong_arguments_are_one_line(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli_main.main(["reward", *words]) == 1
    errors = capsys.readouterr().err
    assert text in errors and "Traceback" not in errors
