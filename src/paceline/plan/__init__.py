"""What a recipe becomes on a machine: every `auto` resolved, with its reason. Loads no torch."""

from paceline.plan.auto import resolve
from paceline.plan.census import Census, decoder_census, recipe_census
from paceline.plan.hardware import Hardware, probe, usable_cores
from paceline.plan.settled import Plan, Setting
from paceline.plan.states import States, model_states

__all__ = [
    "Census",
    "Hardware",
    "Plan",
    "Setting",
    "States",
    "decoder_census",
    "model_states",
    "probe",
    "recipe_census",
    "resolve",
    "usable_cores",
]
