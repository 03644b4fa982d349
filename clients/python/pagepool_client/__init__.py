"""Python clients of memd and inferd, and the pagepool command.

    with InferenceClient() as inferd:
        for piece in inferd.generate(messages=[{"role": "user", "content": "Hello!"}]).pieces():
            print(piece, end="", flush=True)

    with PoolClient() as memd, memd.lease(holder="me") as lease:
        print(lease.allocate(4).block_ids, memd.pool().usage)

All errors are pagepool.errors.PagepoolError. Whatever is abandoned is cancelled on the server.
"""

from pagepool.errors import PagepoolError, Reason
from pagepool_client.async_inference import AsyncGeneration, AsyncInferenceClient
from pagepool_client.async_lease import AsyncPoolLease
from pagepool_client.async_pool import AsyncPoolClient
from pagepool_client.continuations import Continuation
from pagepool_client.inference import Generation, InferenceClient
from pagepool_client.lease import PoolLease
from pagepool_client.lease_words import Retention
from pagepool_client.pool import PoolClient
from pagepool_client.prompts import Beam, Message, Options
from pagepool_client.session import Attachment, PoolSession
from pagepool_client.streams import AsyncServerStream, ServerStream

__all__ = [
    "AsyncGeneration",
    "AsyncInferenceClient",
    "AsyncPoolClient",
    "AsyncPoolLease",
    "AsyncServerStream",
    "Attachment",
    "Beam",
    "Continuation",
    "Generation",
    "InferenceClient",
    "Message",
    "Options",
    "PagepoolError",
    "PoolClient",
    "PoolLease",
    "PoolSession",
    "Reason",
    "Retention",
    "ServerStream",
]
