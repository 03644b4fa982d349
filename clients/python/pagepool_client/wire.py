"""Between the pool's plain values and the messages of the Attach stream."""

from __future__ import annotations

from pagekernels.layout import PagedLayout
from pagepool.memd.v1.types_pb2 import Format, Geometry, LayerGeometry
from pagepool.memd.v1.worker_service_pb2 import (
    REFUSAL_REASON_PREFIX_PENDING,
    REFUSAL_REASON_REQUEST_TOO_LARGE,
    AttachRequest,
    StepResult,
    Welcome,
)
from pagepool.memd.v1.worker_service_pb2 import Grant as GrantMessage
from pagepool.memd.v1.worker_service_pb2 import Remap as RemapMessage
from pagepool.memd.v1.worker_service_pb2 import Step as StepMessage
from pagepool.pool_values import (
    CopyOnWrite,
    CudaDevice,
    Fork,
    Grant,
    PoolEvent,
    PoolInfo,
    Refusal,
    Release,
    Remap,
    Step,
    Suspend,
    TableOperation,
    Take,
    Truncate,
)
from pagepool.token_ids import pack


def geometry_message(layout: PagedLayout, model_digest: bytes, model_name: str) -> Geometry:
    """What a worker declares in Attach; the layout's version says on what kind of device it runs.

    `model_digest` is SHA-256 over the model's config and weights, 32 bytes.
    """
    layers = [
        LayerGeometry(
            num_kv_heads=layer.num_kv_heads,
            head_dim_k=layer.head_dim_k,
            head_dim_v=layer.head_dim_v,
            window=layer.window,
        )
        for layer in layout.layers
    ]
    return Geometry(
        layers=layers,
        format=Format.Name(int(layout.format)),
        layout_version=layout.version,
        model_digest=model_digest,
        model_name=model_name,
    )


def step_message(step_id: int, step: Step) -> AttachRequest:
    """A step as memd reads it. Raises ValueError if a number does not fit its field."""
    message = AttachRequest()
    words = message.step
    words.step_id = step_id
    words.release_table_ids.extend(step.releases)
    # Added in place: a list of finished messages would be copied, which costs half as much again.
    for commit in step.commits:
        words.commits.add(table_id=commit.table_id, token_ids=commit.token_ids)
    for request in step.creates:
        words.creates.add(
            ref=request.ref,
            packed_token_ids=pack(request.token_ids),
            salt=request.salt,
            priority=request.priority,
            num_blocks=request.num_blocks,
            no_match=request.no_match,
            arrival=request.arrival,
            headroom=request.headroom,
            resume_table_id=request.resume_table_id,
            partial=request.partial,
            wait_for_prefix=request.wait_for_prefix,
            num_yields=request.num_yields,
            exact=request.exact,
        )
    for extend in step.extends:
        words.extends.add(ref=extend.ref, table_id=extend.table_id, num_blocks=extend.num_blocks)
    for operation in step.operations:
        _add_operation(words, operation)
    words.free_block_ids.extend(step.frees)
    for reserve in step.reserves:
        words.reserves.add(
            ref=reserve.ref,
            num_blocks=reserve.num_blocks,
            num_tables=reserve.num_tables,
            for_table_id=reserve.for_table_id,
        )
    words.acknowledged = step.acknowledged
    return message


def _add_operation(words: StepMessage, operation: TableOperation) -> None:
    message = words.operations.add()
    match operation:
        case Fork(table_id, new_table_id):
            message.fork.table_id, message.fork.new_table_id = table_id, new_table_id
        case CopyOnWrite(table_id, first_index, block_ids):
            message.copy_on_write.table_id, message.copy_on_write.first_index = table_id, first_index
            message.copy_on_write.block_ids.extend(block_ids)
        case Take(table_id, block_ids):
            message.take.table_id = table_id
            message.take.block_ids.extend(block_ids)
        case Truncate(table_id, num_tokens, block_id):
            message.truncate.table_id, message.truncate.num_tokens = table_id, num_tokens
            message.truncate.block_id = block_id
        case Release(table_id):
            message.release_table_id = table_id
        case Suspend(table_id, token_ids):
            message.suspend.table_id = table_id
            message.suspend.token_ids.extend(token_ids)


def events_of(result: StepResult) -> list[PoolEvent]:
    """The grants and refusals of an answered step."""
    events: list[PoolEvent] = [_grant(each) for each in result.grants]
    events += [
        Refusal(
            each.ref,
            never=each.reason == REFUSAL_REASON_REQUEST_TOO_LARGE,
            available_blocks=each.available_blocks,
            total_blocks=each.total_blocks,
            pending=each.reason == REFUSAL_REASON_PREFIX_PENDING,
            pinned_blocks=each.pinned_blocks,
            held_blocks=each.held_blocks,
        )
        for each in result.refusals
    ]
    return events


def _grant(message: GrantMessage) -> Grant:
    source = message.copy_source if message.HasField("copy_source") else None
    ids, entries = list(message.block_ids), list(message.entries)
    return Grant(message.ref, message.table_id, message.cached_tokens, ids, entries, message.num_tables, source)


def remap_event(message: RemapMessage) -> Remap:
    """The news of a block that is in another place."""
    return Remap(
        message.sequence, message.table_id, message.index, message.old_block_id, message.block_id, message.entry
    )


def pool_info(welcome: Welcome) -> PoolInfo:
    """The pool that a Welcome describes."""
    cuda = next((slab.cuda_ipc for slab in welcome.slabs if slab.HasField("cuda_ipc")), None)
    files = [(slab.shared_memory.path, slab.size_bytes) for slab in welcome.slabs if slab.HasField("shared_memory")]
    return PoolInfo(
        epoch=welcome.epoch,
        lease_id=welcome.lease_id,
        block_size=welcome.block_size,
        num_blocks=welcome.num_blocks,
        unit_bytes=welcome.unit_bytes,
        slab_paths=tuple(path for path, _ in files) if cuda is None else (),
        slab_bytes=welcome.slabs[0].size_bytes if welcome.slabs else 0,
        host_slab=files[0] if cuda is not None and files else None,
        cuda_device=None if cuda is None else CudaDevice(cuda.device_uuid, cuda.memd_pid),
        cuda_handle=b"" if cuda is None else cuda.handle,
    )
