"""The global batch size as a function of consumed samples."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megalite.config import BatchConfig
from megalite.config.batch_schedule import BatchSchedule, batch_schedule


def ramp(*numbers: int, to: int, multiple: int = 1) -> BatchSchedule:
    batch = BatchConfig(micro_batch_size=1, global_batch_size=to, rampup_batch_size=numbers)
    return batch_schedule(batch, 8, multiple)


def stepped(text: str, seq_length: int = 1) -> BatchSchedule:
    return batch_schedule(BatchConfig(micro_batch_size=1, step_batch_size_schedule=text), seq_length)


def megatrons_ramp(consumed: int, start: int, increment: int, samples: int, final: int) -> int:
    """As core/num_microbatches_calculator.py documents it, without the rounding of its division in floats."""
    each = Fraction(samples, (final - start) // increment)
    return final if consumed > samples else start + int(consumed / each) * increment


@pytest.mark.parametrize(("numbers", "final"), [((16, 8, 1000), 80), ((32, 32, 977), 256), ((1, 1, 3), 9)])
def test_a_ramp_is_megatrons(numbers: tuple[int, int, int], final: int) -> None:
    schedule = ramp(*numbers, to=final)
    for consumed in range(numbers[2] + 3):
        assert schedule.size_after(consumed) == megatrons_ramp(consumed, *numbers, final), consumed


def test_a_ramp_by_hand() -> None:
    schedule = ramp(4, 4, 24, to=16)  # three increments, one for every 8 samples
    assert schedule == BatchSchedule((0, 8, 16, 24), (4, 8, 12, 16))
    consumed, sizes = 0, []
    for _ in range(7):
        sizes.append(schedule.size_after(consumed))
        consumed += sizes[-1]
    assert sizes == [4, 4, 8, 12, 16, 16, 16]


def test_a_ramp_is_rounded_down_when_asked() -> None:
    assert ramp(4, 4, 24, to=16, multiple=8) == BatchSchedule((0, 8, 16, 24), (0, 8, 8, 16))


def test_steps_are_given_in_tokens() -> None:
    schedule = stepped("0:768 250B:1536, 0.5T:3072 1e12:6144", seq_length=4096)
    assert schedule.sizes == (768, 1536, 3072, 6144)
    assert schedule.starts == (0, 250 * 10**9 // 4096, 5 * 10**11 // 4096, 10**12 // 4096)
    assert schedule.size_after(schedule.starts[1] - 1) == 768
    assert schedule.size_after(schedule.starts[1]) == 1536


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1:8", "must hold from 0 tokens on"),
        ("", "must hold from 0 tokens on"),
        ("0:8 5", "'5' is not TOKENS:SIZE"),
        ("0:0", "'0:0' is not TOKENS:SIZE"),
        ("0:8 1X:16", "is not TOKENS:SIZE"),
        ("0:8 1e400B:2", "'1e400B:2': so many tokens cannot be counted in 64 bits"),
        ("0:8 5:99999999", "has a batch above 16777216 samples"),
        (f"0:8 5:{'9' * 5000}", "is not TOKENS:SIZE"),
        ("0:8 5:16 5:32", "thresholds must rise by at least a sample, 1 tokens"),
    ],
)
def test_steps_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stepped(text)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((4, 4), "three numbers"),
        ((0, 4, 8), "three numbers >= 1"),
        ((32, 4, 8), "starts above --global-batch-size 16"),
        ((4, 5, 8), "increments of 5 do not lead from 4 to --global-batch-size 16"),
    ],
)
def test_ramps_that_lead_nowhere(numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ramp(*numbers, to=16)


@pytest.mark.parametrize(
    "schedule",
    [ramp(4, 4, 24, to=16), ramp(1, 1, 3, to=9), stepped("0:8 10:3 11:5 40:7"), stepped("0:6")],
    ids=str,
)
def test_steps_are_counted_as_they_are_taken(schedule: BatchSchedule) -> None:
    for start in (0, 4, 11, 57):
        for samples in range(90):
            steps, consumed = 0, start
            while samples - consumed >= schedule.size_after(consumed):
                consumed += schedule.size_after(consumed)
                steps += 1
            assert schedule.advance(start, samples) == (steps, consumed), (start, samples)
