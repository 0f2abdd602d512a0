"""What a ZeRO stage means: one row of one table. Nothing else in Paceline compares a stage.

Note [Stages]
-------------
| stage | optimizer state | gradients live               | parameters live        | gather                          | reduce            |
|-------|-----------------|------------------------------|------------------------|---------------------------------|-------------------|
| 0     | whole           | whole step                   | always                 | never                           | last micro-batch  |
| 1     | 1/S             | whole step                   | always                 | once, in publish                | last micro-batch  |
| 2     | 1/S             | a unit's backward until its reduce; then the f32 shard | always | once, in publish      | each micro-batch  |
| 3     | 1/S             | same                         | from gather to release | before each forward and backward | each micro-batch  |

Stage 0 is the mesh with one shard and as many replicas as ranks: DDP is a value, not a class.
"""

from dataclasses import dataclass

from paceline.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Residency:
    """A row of the table.

    Attributes:
        stage: its number, for people.
        states_sharded: master and optimizer state are cut into shards (else every rank holds them whole).
        reduce_each: gradients are reduced after each micro-batch (else summed locally and reduced after the last).
        parameters_sharded: parameters exist only between gather and release.
    """

    stage: int
    states_sharded: bool
    reduce_each: bool
    parameters_sharded: bool


TABLE = (
    Residency(0, states_sharded=False, reduce_each=False, parameters_sharded=False),
    Residency(1, states_sharded=True, reduce_each=False, parameters_sharded=False),
    Residency(2, states_sharded=True, reduce_each=True, parameters_sharded=False),
    Residency(3, states_sharded=True, reduce_each=True, parameters_sharded=True),
)


def residency(stage: int) -> Residency:
    """The row of `stage`; InputError names the ones there are."""
    if isinstance(stage, bool) or stage not in range(len(TABLE)):
        raise InputError(f"stage {stage!r}: a ZeRO stage is one of 0, 1, 2, 3, or 'auto'.")
    return TABLE[stage]
