"""Plans: who runs which ops. `plan` makes one, `check` refuses a bad one. Pure."""

from .check import check
from .make import plan

__all__ = ["check", "plan"]
