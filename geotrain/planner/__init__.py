"""Plans: who runs which ops. `plan` makes one, `check` refuses a bad one. Pure."""

from .check import check, weighed
from .make import plan

__all__ = ["check", "plan", "weighed"]
