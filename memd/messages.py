"""The core's values as messages of memd.v1, and back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from memd.core.accounts import Usage
from memd.core.geometry import Geometry
from memd.core.operations import (
    CopyOnWrite,
    Fork,
    Release,
    ReserveRequest,
    Suspend,
    TableOperation,
    Take,
    Truncate,
)
from memd.core.pool import Pool
from memd.core.recodes import Recoded
from memd.core.values import (
    BlockView,
    Commit,
    ExtendRequest,
    LeaseView,
    PinRequest,
    Step,
    StepOutcome,
    TableRequest,
    TableView,
)
from pagekernels.layout import Format, LayerShape
from pagepool.durations import to_duration, to_seconds, to_timestamp
from pagepool.errors import PagepoolError, Reason, invalid_field
from pagepool.memd.v1 import pool_service_pb2, types_pb2, worker_service_pb2
from pagepool.token_ids import TOKEN_BYTES


def geometry_from(message: types_pb2.Geometry) -> Geometry:
    """The core's geometry; raises INVALID_FIELD if no format is given. The core checks the rest."""
    if message.format == types_pb2.FORMAT_UNSPECIFIED or message.format not in types_pb2.Format.values():
        raise invalid_field("geometry.format", message.format, "F32, F16 or BF16", "say how the KV is stored")
    layers = tuple(
        LayerShape(layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v, layer.window) for layer in message.layers
    )
    return Geometry(
        layers=layers,
        format=Format(message.format),
        key_means=message.key_means,
        layout_version=message.layout_version,
        model_digest=message.model_digest,
        model_name=message.model_name,
    )


def read_geometry(path: Path, layout_version: int) -> Geometry:
    """The geometry of a file that `inferd --print-geometry` wrote, in this memd's byte order, whatever the file's is.

    Raises INVALID_FIELD naming --geometry.
    """
    from google.protobuf import json_format  # rarely needed

    try:
        message = json_format.Parse(path.read_bytes(), types_pb2.Geometry())
    except (OSError, UnicodeDecodeError, json_format.ParseError) as error:
        limit = f"a file that `inferd --print-geometry` wrote ({error})"
        raise invalid_field("--geometry", path, limit, "write it anew") from error
    return replace(geometry_from(message), layout_version=layout_version)


def geometry_message(geometry: Geometry) -> types_pb2.Geometry:
    """The message of a geometry."""
    layers = [
        types_pb2.LayerGeometry(
            num_kv_heads=layer.num_kv_heads,
            head_dim_k=layer.head_dim_k,
            head_dim_v=layer.head_dim_v,
            window=layer.window,
        )
        for layer in geometry.layers
    ]
    return types_pb2.Geometry(
        layers=layers,
        format=cast("types_pb2.Format", geometry.format),
        key_means=geometry.key_means,
        layout_version=geometry.layout_version,
        model_digest=geometry.model_digest,
        model_name=geometry.model_name,
    )


def pool_message(pool: Pool, cuda_device: types_pb2.CudaDevice | None, start_time: float) -> types_pb2.Pool:
    """The pool as it is now; `start_time` is wall-clock. Without a GPU it lies in shared memory."""
    counters = {name: getattr(pool.counters, name) for name in types_pb2.PoolCounters.DESCRIPTOR.fields_by_name}
    return types_pb2.Pool(
        epoch=pool.epoch,
        block_size=pool.block_size,
        geometry=None if pool.geometry is None else geometry_message(pool.geometry),
        unit_bytes=pool.unit_bytes,
        block_bytes=pool.block_bytes,
        slab_bytes=pool.memory.slab_bytes,
        device="host" if cuda_device is None else f"cuda:{cuda_device.uuid}",
        usage=usage_message(pool.usage()),
        counters=types_pb2.PoolCounters(**counters),
        num_leases=pool.num_leases,
        num_block_tables=pool.num_tables,
        start_time=to_timestamp(start_time),
        cuda_device=cuda_device,
    )


def usage_message(usage: Usage) -> types_pb2.PoolUsage:
    """Units by what they are doing."""
    return types_pb2.PoolUsage(
        total_blocks=usage.total,
        free_blocks=usage.free,
        held_blocks=usage.held,
        cached_blocks=usage.cached,
        quarantined_blocks=usage.quarantined,
        pinned_blocks=usage.pinned,
        reserve_blocks=usage.reserve,
        split_blocks=usage.split,
        fp8_blocks=usage.fp8,
        kept_blocks=usage.kept,
        host_blocks=usage.host_total,
        host_free_blocks=usage.host_free,
        host_cached_blocks=usage.host_cached,
    )


def block_message(view: BlockView) -> types_pb2.Block:
    """One block."""
    holders = [
        types_pb2.BlockHolder(lease_id=one.lease_id, table_id=one.table_id, ref_count=one.ref_count, worker=one.worker)
        for one in view.holders
    ]
    return types_pb2.Block(
        block_id=view.block_id,
        state=cast("types_pb2.BlockState", view.state),
        ref_count=view.ref_count,
        format=cast("types_pb2.Format", view.format),
        tier=types_pb2.TIER_HOST if view.host else types_pb2.TIER_DEVICE,
        entry=view.entry,
        sealed=view.sealed,
        exact=view.exact,
        num_tokens=view.num_tokens,
        digest=view.digest,
        holders=holders,
        idle_time=to_duration(view.idle_s),
        priority=view.priority,
        pinned=view.pinned,
        kept_for=to_duration(view.kept_s) if view.kept_s else None,
        more_holders=view.more_holders,
        k_error=view.errors[0],
        v_error=view.errors[1],
    )


def table_message(view: TableView, token_ids: Sequence[int] = ()) -> types_pb2.BlockTable:
    """One block table, with the given token ids."""
    return types_pb2.BlockTable(
        table_id=view.table_id,
        lease_id=view.lease_id,
        holder=view.holder,
        block_ids=view.blocks.block_ids,
        entries=view.blocks.entries,
        num_tokens=view.num_tokens,
        cached_tokens=view.cached_tokens,
        token_ids=token_ids,
        priority=view.priority,
        idle_time=to_duration(view.idle_s),
        suspended=view.suspended,
    )


def lease_message(view: LeaseView, now: float) -> types_pb2.Lease:
    """One lease; its end is told in wall-clock time though it is kept on the monotonic clock."""
    return types_pb2.Lease(
        lease_id=view.lease_id,
        holder=view.holder,
        state=cast("types_pb2.LeaseState", view.state),
        expire_time=to_timestamp(time.time() + view.deadline - now),
        ttl=to_duration(view.ttl_s),
    )


def pin_from(message: pool_service_pb2.PinPrefixRequest) -> PinRequest:
    """How a prefix is to be kept; INVALID_FIELD if it is not said for how long."""
    if not message.HasField("ttl"):
        raise invalid_field("ttl", "not set", "from 1 second to 24 hours", "say for how long the prefix shall be kept")
    ttl_s = to_seconds(message.ttl)
    return PinRequest(message.token_ids, ttl_s, message.salt, message.priority, message.pinned)


def _packed(request: worker_service_pb2.TableRequest) -> bytes:
    packed = request.packed_token_ids
    if packed and request.token_ids:
        raise ValueError(f"table request {request.ref} has both token_ids and packed_token_ids")
    if len(packed) % TOKEN_BYTES:
        raise ValueError(f"packed_token_ids of table request {request.ref} has a part of an id at its end")
    return packed


def step_from(message: worker_service_pb2.Step) -> Step:
    """A worker's step. ValueError if it contradicts itself."""
    return Step(
        step_id=message.step_id,
        commits=[Commit(commit.table_id, commit.token_ids) for commit in message.commits],
        releases=message.release_table_ids,
        creates=[
            TableRequest(
                token_ids=request.token_ids[:],
                num_blocks=request.num_blocks,
                salt=request.salt,
                priority=request.priority,
                no_match=request.no_match,
                ref=request.ref,
                packed=_packed(request),
                arrival=request.arrival,
                headroom=request.headroom,
                resume_table_id=request.resume_table_id,
                partial=request.partial,
                wait_for_prefix=request.wait_for_prefix,
                num_yields=request.num_yields,
                exact=request.exact,
            )
            for request in message.creates
        ],
        extends=[ExtendRequest(request.table_id, request.num_blocks, request.ref) for request in message.extends],
        operations=[_operation(operation) for operation in message.operations],
        frees=message.free_block_ids,
        reserves=[
            ReserveRequest(one.num_blocks, one.num_tables, one.ref, one.for_table_id) for one in message.reserves
        ],
        acknowledged=message.acknowledged,
        recodings=[Recoded(one.sequence, one.errors, one.failed) for one in message.recodings],
    )


def _operation(message: worker_service_pb2.TableOperation) -> TableOperation:
    match message.WhichOneof("operation"):
        case "fork":
            return Fork(message.fork.table_id, message.fork.new_table_id)
        case "copy_on_write":
            copy = message.copy_on_write
            return CopyOnWrite(copy.table_id, copy.first_index, list(copy.block_ids))
        case "take":
            return Take(message.take.table_id, list(message.take.block_ids))
        case "truncate":
            cut = message.truncate
            return Truncate(cut.table_id, cut.num_tokens, cut.block_id)
        case "release_table_id":
            return Release(message.release_table_id)
        case "suspend":
            return Suspend(message.suspend.table_id, message.suspend.token_ids)
    what = "an operation of a step is none that this memd knows; use one version of pagepool"
    raise PagepoolError(Reason.PROTOCOL_VIOLATION, what, what=what)


def step_result(outcome: StepOutcome) -> worker_service_pb2.AttachResponse:
    """The answer to a step."""
    response = worker_service_pb2.AttachResponse()
    result = response.step_result
    result.step_id = outcome.step_id
    for grant in outcome.grants:
        result.grants.add(
            ref=grant.ref,
            table_id=grant.table_id,
            cached_tokens=grant.cached_tokens,
            block_ids=grant.blocks.block_ids,
            entries=grant.blocks.entries,
            num_tables=grant.num_tables,
            copy_source=grant.copy_source,
        )
    for refusal in outcome.refusals:
        result.refusals.add(
            ref=refusal.ref,
            reason=cast("worker_service_pb2.RefusalReason", refusal.reason),
            available_blocks=refusal.available_blocks,
            total_blocks=refusal.total_blocks,
            pinned_blocks=refusal.pinned_blocks,
            held_blocks=refusal.held_blocks,
        )
    return response
