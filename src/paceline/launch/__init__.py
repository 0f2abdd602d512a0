"""Starts ranks and watches them. Loads no torch."""

from paceline.launch.environment import choose_procs, is_rank, rank_environment, visible_gpus
from paceline.launch.local import LocalJob, run

__all__ = ["LocalJob", "choose_procs", "is_rank", "rank_environment", "run", "visible_gpus"]
