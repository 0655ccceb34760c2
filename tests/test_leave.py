"""Every rank hands the reason of its end to its node's torchrun, and the first rank prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.leave import leave


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_tells_its_torchrun(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(SystemExit) as ended:
        leave("error: no data", rank, code=3)
    assert ended.value.code == 3
    assert json.loads(file.read_text())["message"]["message"] == "error: no data"
    assert capsys.readouterr().err == ("error: no data\n" if rank == 0 else "")
