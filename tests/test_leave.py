"""The reason of a run's end reaches each node's torchrun once, and the first rank prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.leave import last_words, leave


@pytest.mark.parametrize(("rank", "local_rank", "tells"), [(0, 0, True), (1, 1, False), (8, 0, True)])
def test_the_first_rank_of_each_node_tells_its_torchrun(
    rank: int,
    local_rank: int,
    tells: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(SystemExit) as ended:
        leave("error: no data", rank, code=3)
    assert ended.value.code == 3
    assert file.exists() == tells
    if tells:
        assert json.loads(file.read_text())["message"]["message"] == "error: no data"
    assert capsys.readouterr().err == ("error: no data\n" if rank == 0 else "")


def test_half_a_message_is_not_left_to_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would end with a traceback about JSON."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("json.dump", full_disk)
    last_words("error: no data")
    assert not file.exists()
