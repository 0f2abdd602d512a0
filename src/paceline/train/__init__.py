"""The trainer, and how a recipe becomes one."""
