"""Tickets and run tokens: what a volunteer pastes to join, and how the coordinator knows it. I/O."""

import base64
import binascii
import hmac
import secrets
from dataclasses import dataclass
from typing import Any, cast

import msgpack
import xxhash

from .base import PROTOCOL_VERSION
from .errors import TicketError

PREFIX = "gt1-"
_MAX_CHARACTERS = 4096
_MAX_ADDRESSES = 8


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where the coordinator is and what opens its door. `str` makes the pasteable form, `parse` reads it.

    `addresses` are `host:port`, tried in order. `token` is a secret: whoever has it may join.
    """

    addresses: tuple[str, ...]
    run: str
    token: bytes
    version: int = PROTOCOL_VERSION

    def __str__(self) -> str:
        body = cast(bytes, msgpack.packb([self.version, list(self.addresses), self.run, self.token]))
        return PREFIX + base64.urlsafe_b64encode(_check(body) + body).decode().rstrip("=")

    @staticmethod
    def parse(text: str) -> "Ticket":
        """The inverse of `str`; a careless paste's spaces are dropped. Raises `TicketError`."""
        text = "".join(text.split())
        if not text.startswith(PREFIX):
            raise TicketError(
                f"this is not a ticket: one starts with {PREFIX}; copy the line that the coordinator printed"
            )
        broken = TicketError("the ticket is cut short or mistyped; copy the coordinator's whole line again")
        if len(text) > _MAX_CHARACTERS:
            raise broken
        encoded = text[len(PREFIX) :]
        try:
            data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise broken from None
        check, body = data[:4], data[4:]
        if check != _check(body):
            raise broken
        try:
            fields: Any = msgpack.unpackb(body, max_array_len=_MAX_ADDRESSES, max_map_len=0)
            version, addresses, run, token = fields
        except (ValueError, TypeError, msgpack.UnpackException):
            raise broken from None
        if version != PROTOCOL_VERSION:
            raise TicketError(
                f"the ticket is of protocol version {version!r}, this geotrain speaks {PROTOCOL_VERSION}; "
                "install the coordinator's version"
            )
        if (
            not isinstance(addresses, list)
            or not addresses
            or not all(isinstance(address, str) and _is_address(address) for address in addresses)
            or not isinstance(run, str)
            or not isinstance(token, bytes)
            or len(token) < 16
        ):
            raise broken
        return Ticket(tuple(addresses), run, token, version)


def new_token() -> bytes:
    """A fresh secret for one run, 16 bytes."""
    return secrets.token_bytes(16)


def same_token(given: bytes, expected: bytes) -> bool:
    """Compare two tokens in constant time."""
    return hmac.compare_digest(given, expected)


def _check(body: bytes) -> bytes:
    """Catches typing errors only; the token is what makes a ticket valid."""
    return xxhash.xxh32_digest(body)


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
