"""What a checkpoint holds of a parameter: its values, or the optimizer's beside them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import Parameter

from megalite.checkpoint.block import Block
from megalite.parallel.params import record_of
from megalite.parallel.rectangles import global_rectangles


def parameter_blocks(prefix: str, param: Parameter, flat: Tensor, first: int = 0) -> Iterator[Block]:
    """The blocks of a flat tensor (n,) that belongs to the elements `first ... first + n` of `param`: one for
    a whole parameter, a few for a part of it, none where the rank holds only padding.
    """
    record = record_of(param)
    for offsets, values in global_rectangles(param, flat, first):
        yield Block(f"{prefix}.{record.name}", record.global_shape, offsets, values)
