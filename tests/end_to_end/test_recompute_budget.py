"""A budget for activation bytes: the run prints what it chose, or does not start."""

from __future__ import annotations

import re

from tests.end_to_end.launch import launch


def losses(output: str) -> list[str]:
    return re.findall(r"loss: ([\d.E+-]+)", output)


def test_a_budget_is_printed_and_changes_no_loss() -> None:
    plain = launch(processes=1)
    within = launch("--recompute-budget", "0.6", processes=1)
    assert within.returncode == 0, within.stderr
    (line,) = [line for line in within.stdout.splitlines() if line.startswith("recompute of ")]
    share = float(re.search(r"keeps ([\d.]+)% of the activation bytes", line)[1])  # type: ignore[index]
    assert 0 < share <= 60
    assert losses(within.stdout) == losses(plain.stdout) != []


def test_a_budget_that_cannot_be_met_ends_the_run_before_it_starts() -> None:
    done = launch("--recompute-budget", "0.001", processes=1)
    assert done.returncode == 2
    assert (
        "--recompute-budget 0.001: no set of parts keeps so little; the lowest reachable share" in done.stderr
    )
    assert "exitcode" not in done.stderr  # torchrun would have told: no rank was started
    assert losses(done.stdout) == []
