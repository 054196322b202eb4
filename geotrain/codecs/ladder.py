"""What the planner knows of codecs: bytes, seconds, and how much training they cost. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rung:
    """One codec in one direction. `cost`: the extra steps needed, as a fraction, for each boundary that uses it.
    Seconds are those of an element: encoding at the sender, decoding at the receiver."""

    codec: str
    bytes_per_element: float
    encode_seconds_per_element: float = 0.0
    decode_seconds_per_element: float = 0.0
    cost: float = 0.0


RAW = Rung("identity", 4.0)
"""Nothing is lost; its bytes are the tensors' own."""
