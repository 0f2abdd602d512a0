"""Ranks, groups and collectives: the only user of torch.distributed."""

from paceline.mesh.env import init
from paceline.mesh.mesh import Mesh

__all__ = ["Mesh", "init"]
