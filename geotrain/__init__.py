"""geotrain: train one PyTorch model across many odd machines and slow links."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .graph import capture, seeded
    from .layout import plan
    from .trainer import Trainer, TrainResult

__version__ = "0.1.0"
__all__ = ["TrainResult", "Trainer", "capture", "plan", "seeded"]

_HOMES = {"capture": "graph", "plan": "layout", "seeded": "graph", "Trainer": "trainer", "TrainResult": "trainer"}


def __getattr__(name: str) -> Any:
    """Imports torch only when something that needs it is used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'geotrain' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
