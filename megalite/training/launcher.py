"""Which of the processes this is: what torchrun, or whatever else started it, wrote into the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megalite.config import ConfigError, ConfigErrors

NUMBERS = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}  # and what each is at least
HOW = "start with torchrun, which sets it"


@dataclass(frozen=True)
class Place:
    """`rank` of `world_size` processes, and `local_rank` among those of this machine."""

    rank: int
    local_rank: int
    world_size: int


def place_of(environment: Mapping[str, str]) -> Place:
    """The place that a launcher's variables give; one process alone where there are none.

    Raises ConfigErrors for what would end in a traceback, or in ranks that wait for each other for ever.
    """
    given = {name: text for name, text in environment.items() if text}
    errors = [
        ConfigError(name, given[name], "not a whole number", f"a launcher gives one >= {least}")
        for name, least in NUMBERS.items()
        if name in given and not (given[name].isdecimal() and int(given[name]) >= least)
    ]
    if errors:
        raise ConfigErrors(errors)
    rank, local_rank = int(given.get("RANK", "0")), int(given.get("LOCAL_RANK", "0"))
    world_size = int(given.get("WORLD_SIZE", "1"))
    if "RANK" in given and "WORLD_SIZE" not in given:
        errors.append(ConfigError("WORLD_SIZE", None, f"is missing beside RANK {rank}", HOW))
    elif rank >= world_size:
        rule = f"ranks of WORLD_SIZE {world_size} are 0 to {world_size - 1}"
        errors.append(ConfigError("RANK", rank, rule, "give every process a rank of its own"))
    if world_size > 1:
        needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
        rule = f"is missing beside WORLD_SIZE {world_size}"
        errors += [ConfigError(name, None, rule, HOW) for name in needed if name not in given]
        port = given.get("MASTER_PORT", "1")
        if not (port.isdecimal() and 1 <= int(port) < 1 << 16):  # Kubernetes sets it for a service "master"
            right = "a launcher gives one from 1 to 65535"
            errors.append(ConfigError("MASTER_PORT", port, "not a port", right))
    if errors:
        raise ConfigErrors(errors)
    return Place(rank, local_rank, world_size)
