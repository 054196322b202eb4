"""The exception tree: whose fault it is, and what to do about it. Pure.

Every error a user can meet is one line that says what is wrong and what to do. The branch says who can
mend it: `UserError` is printed without a traceback and ends the command with exit code 2; a `RemoteError`
costs the peer that caused it, not us; a `LocalError` stops this process.
"""


class GeotrainError(Exception):
    """Base of everything this package raises on purpose."""


class UserError(GeotrainError):
    """The user's input is wrong; the message says what to change."""


class ConfigError(UserError):
    """A job, peer or topology file is missing, malformed, or has a wrong or unknown key."""


class CaptureError(UserError):
    """The model cannot be captured; the message names the op or module and what to do."""


class PlanError(UserError):
    """A plan does not fit the graph, the peers or the job; the message names the stage and the reason."""


class DataError(UserError):
    """The data is missing, empty, or does not fit the model."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, or its hash does not match."""


class TicketError(UserError):
    """The ticket is malformed, expired, or not for this coordinator."""


class RemoteError(GeotrainError):
    """The other side of a connection is at fault; drop it, keep going."""


class RemoteProtocolError(RemoteError):
    """Bytes from the network break the protocol: bad header, wrong checksum, unexpected shape or size."""


class GraphFormatError(RemoteProtocolError):
    """Graph bytes are malformed, or name an op that is not allowed."""


class PeerLost(RemoteError):
    """A peer's connection ended while its work was needed."""


class CoordinatorLost(RemoteError):
    """The coordinator's connection ended."""


class LocalError(GeotrainError):
    """This process cannot go on: no memory, no disk, port in use."""
