"""RPC for everything but collectives: one framing, mutual TLS, bounded memory and time, no pickle.

A server has handlers for kinds of messages, and a client calls them. Both first prove that they belong to the same
job.
"""

from ringweave.rpc.client import PendingCall, RpcClient
from ringweave.rpc.framing import Ack, RpcLimits, RpcMessage, RpcReply
from ringweave.rpc.server import IncomingCall, PeerStatus, RpcCall, RpcHandler, RpcServer
from ringweave.rpc.tls import (
    CertificateAuthority,
    Credentials,
    Identity,
    PeerAuthentication,
    TlsAuthentication,
)
