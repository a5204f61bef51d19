"""Every connection of ringweave's own that is not a collective: one framing, mutual TLS, bounds everywhere, no pickle.

A server has handlers for kinds of messages, a client calls them; both first prove that they belong to the same job.
"""

from ringweave.wire.calls import Call, Handler, Incoming
from ringweave.wire.client import Client
from ringweave.wire.framing.limits import Limits
from ringweave.wire.framing.messages import Answer, Done, Message
from ringweave.wire.pending import Pending
from ringweave.wire.security.authority import Authority
from ringweave.wire.security.credentials import Credentials
from ringweave.wire.security.identities import Identity
from ringweave.wire.security.trust import Plain, Tls, Trust
from ringweave.wire.server import PeerStatus, Server

__all__ = [
    "Answer",
    "Authority",
    "Call",
    "Client",
    "Credentials",
    "Done",
    "Handler",
    "Identity",
    "Incoming",
    "Limits",
    "Message",
    "PeerStatus",
    "Pending",
    "Plain",
    "Server",
    "Tls",
    "Trust",
]
