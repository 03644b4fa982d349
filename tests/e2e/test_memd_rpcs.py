"""PoolService of a real memd: every call, and every error that its comment lists."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from pagepool.errors import PagepoolError, Reason
from pagepool.memd.v1 import pool_service_pb2 as pb
from pagepool.memd.v1 import types_pb2
from pagepool.status import from_rpc_error

NUM_BLOCKS = 100


@pytest.fixture
def cut(memd: Any, raw_worker: Callable[..., Any], geometry: types_pb2.Geometry, wait: Any) -> Iterator[Any]:
    """`memd` with a worker attached, so that the pool is cut: NUM_BLOCKS blocks of 16 tokens, none of them held."""
    wait(lambda: memd.usage().held_blocks + memd.usage().quarantined_blocks == 0)
    memd.clients, memd.worker = [], raw_worker()
    memd.worker.hello(geometry)
    yield memd
    for client in memd.clients:
        memd.pool().ReleaseLease(pb.ReleaseLeaseRequest(**client.own))


@pytest.fixture(scope="module")
def memd(start_shared_memd: Callable[..., Any]) -> Any:
    return start_shared_memd("--max-num-blocks", str(NUM_BLOCKS), "--heartbeat-timeout", "60s")


@pytest.fixture
def fresh(start_memd: Callable[..., Any]) -> Any:
    """A memd that no worker has attached to."""
    return start_memd("--max-num-blocks", str(NUM_BLOCKS))


class Client:
    """A lease and the calls under it."""

    def __init__(self, memd: Any, ttl_s: float = 60) -> None:
        self.stub = memd.pool()
        created = self.stub.CreateLease(pb.CreateLeaseRequest(ttl=seconds(ttl_s), holder="test"))
        self.lease, self.epoch = created.lease, created.epoch
        memd.clients.append(self)
        self.own = {"epoch": self.epoch, "lease_id": self.lease.lease_id}

    def allocate(self, num_blocks: int, **fields: Any) -> Any:
        return self.stub.AllocateBlocks(pb.AllocateBlocksRequest(**{**self.own, "num_blocks": num_blocks, **fields}))

    def free(self, block_ids: Any, **fields: Any) -> Any:
        return self.stub.FreeBlocks(pb.FreeBlocksRequest(**{**self.own, "block_ids": block_ids, **fields}))

    def share(self, block_ids: Any) -> Any:
        return self.stub.ShareBlocks(pb.ShareBlocksRequest(**self.own, block_ids=block_ids))

    def create(self, num_blocks: int, token_ids: Any = (), **fields: Any) -> types_pb2.BlockTable:
        request = pb.CreateBlockTableRequest(**self.own, num_blocks=num_blocks, token_ids=token_ids, **fields)
        return self.stub.CreateBlockTable(request).block_table

    def block(self, block_id: int) -> types_pb2.Block:
        return self.stub.GetBlock(pb.GetBlockRequest(block_id=block_id)).block


def seconds(value: float) -> Duration:
    return Duration(seconds=int(value), nanos=round(value % 1 * 1e9))


def expect_refusal(reason: Reason, call: Callable[..., Any], *arguments: Any, **fields: Any) -> PagepoolError:
    """The error of a call that must fail with this reason."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **fields)
    error = from_rpc_error(caught.value)
    assert error.reason is reason, error
    assert error.code.name == caught.value.code().name
    return error


def test_get_pool_describes_the_pool_before_and_after_it_is_cut(
    fresh: Any, raw_worker_of: Callable[..., Any], geometry: types_pb2.Geometry
) -> None:
    before = fresh.pool().GetPool(pb.GetPoolRequest()).pool
    assert not before.HasField("geometry")
    assert (before.block_size, before.slab_bytes, before.device, before.usage.total_blocks) == (16, 16 << 20, "host", 0)
    assert abs(before.start_time.ToSeconds() - time.time()) < 60
    raw_worker_of(fresh).hello(geometry)
    after = fresh.pool().GetPool(pb.GetPoolRequest()).pool
    assert after.geometry == geometry
    assert (after.epoch, after.num_leases) == (before.epoch, 1)
    assert (after.usage.total_blocks, after.usage.free_blocks) == (NUM_BLOCKS, NUM_BLOCKS)
    assert after.block_bytes == 4 * after.unit_bytes > 0


def test_blocks_are_allocated_described_and_freed(cut: Any) -> None:
    client = Client(cut)
    run = client.allocate(3)
    assert len(set(run.block_ids)) == len(set(run.entries)) == 3
    block = client.block(run.block_ids[0])
    assert (block.state, block.ref_count, block.sealed) == (types_pb2.BLOCK_STATE_HELD, 1, False)
    assert (block.format, block.tier, block.entry) == (types_pb2.FORMAT_F32, types_pb2.TIER_DEVICE, run.entries[0])
    assert [(holder.lease_id, holder.table_id) for holder in block.holders] == [(client.lease.lease_id, 0)]
    assert cut.usage().held_blocks == 3
    client.share([run.block_ids[0]])
    assert client.block(run.block_ids[0]).ref_count == 2
    client.free([run.block_ids[0], *run.block_ids])
    assert cut.usage().held_blocks == 0


def test_a_freed_unknown_or_foreign_block_is_refused_and_nothing_is_freed(cut: Any) -> None:
    first, second = Client(cut), Client(cut)
    run = first.allocate(2)
    first.free([run.block_ids[1]])
    assert expect_refusal(Reason.BLOCK_NOT_FOUND, first.free, run.block_ids).metadata["block_id"] == str(
        run.block_ids[1]
    )
    expect_refusal(Reason.BLOCK_NOT_FOUND, first.block, 10**9)
    expect_refusal(Reason.BLOCK_NOT_FOUND, second.share, [10**9])
    expect_refusal(Reason.BLOCK_NOT_HELD, second.free, [run.block_ids[0]])
    expect_refusal(Reason.BLOCK_NOT_HELD, first.free, [run.block_ids[0]] * 2)
    expect_refusal(Reason.BLOCK_NOT_SEALED, second.share, [run.block_ids[0]])
    assert first.block(run.block_ids[0]).ref_count == 1


def test_a_full_pool_answers_with_a_time_to_retry_and_takes_nothing(cut: Any) -> None:
    client = Client(cut)
    client.allocate(NUM_BLOCKS - 1)
    for field, value in (("priority", 101), ("priority", -101), ("salt", b"x" * 65)):
        error = expect_refusal(Reason.INVALID_FIELD, client.create, 1, [1], **{field: value})
        assert (error.field, set(error.metadata)) == (field, {"value", "limit"})
    error = expect_refusal(Reason.POOL_EXHAUSTED, client.allocate, 2)
    assert error.retry_after_s
    assert error.retry_after_s > 0
    assert cut.usage().free_blocks + cut.usage().cached_blocks == 1
    expect_refusal(Reason.POOL_EXHAUSTED, client.create, 2)
    assert expect_refusal(Reason.REQUEST_TOO_LARGE, client.allocate, NUM_BLOCKS + 1).field == "num_blocks"
    assert expect_refusal(Reason.INVALID_FIELD, client.allocate, 0).field == "num_blocks"
    assert "further calls" in expect_refusal(Reason.INVALID_FIELD, client.allocate, 300_000).message


def test_tables_match_the_prefix_that_a_worker_has_committed(cut: Any) -> None:
    tokens = list(range(40))
    grant = cut.worker.create(tokens, 3)
    cut.worker.commit(grant.table_id, tokens)
    client = Client(cut)
    table = client.create(4, [*tokens, 99], priority=-3)
    assert list(table.block_ids[:2]) == list(grant.block_ids[:2])
    assert (table.cached_tokens, table.num_tokens, len(table.block_ids), table.priority) == (32, 32, 4, -3)
    assert client.block(grant.block_ids[0]).ref_count == 2
    assert len(client.block(grant.block_ids[0]).digest) == 32
    assert client.create(3, tokens, salt=b"other").cached_tokens == 0
    own = {**client.own, "table_id": table.table_id}
    extended = client.stub.ExtendBlockTable(pb.ExtendBlockTableRequest(**own, num_blocks=2))
    found = client.stub.GetBlockTable(pb.GetBlockTableRequest(table_id=table.table_id)).block_table
    assert list(found.block_ids) == [*table.block_ids, *extended.block_ids]
    assert list(found.token_ids) == tokens[:32]
    client.stub.ReleaseBlockTable(pb.ReleaseBlockTableRequest(**own))
    expect_refusal(Reason.TABLE_NOT_FOUND, client.stub.ReleaseBlockTable, pb.ReleaseBlockTableRequest(**own))
    expect_refusal(Reason.TABLE_NOT_FOUND, client.stub.GetBlockTable, pb.GetBlockTableRequest(table_id=table.table_id))
    foreign = {**client.own, "table_id": grant.table_id}
    expect_refusal(Reason.TABLE_NOT_HELD, client.stub.ReleaseBlockTable, pb.ReleaseBlockTableRequest(**foreign))
    expect_refusal(
        Reason.TABLE_NOT_HELD, client.stub.ExtendBlockTable, pb.ExtendBlockTableRequest(**foreign, num_blocks=1)
    )


def test_an_old_epoch_is_refused_by_name_everywhere(cut: Any) -> None:
    client = Client(cut)
    stub, old = client.stub, client.epoch ^ 1
    for call, request in [
        (stub.GetBlock, pb.GetBlockRequest(epoch=old, block_id=1)),
        (stub.GetBlockTable, pb.GetBlockTableRequest(epoch=old, table_id=1)),
        (stub.RenewLease, pb.RenewLeaseRequest(epoch=old, lease_id=client.lease.lease_id)),
        (stub.ReleaseLease, pb.ReleaseLeaseRequest(epoch=old, lease_id=client.lease.lease_id)),
        (stub.AllocateBlocks, pb.AllocateBlocksRequest(epoch=old, lease_id=1, num_blocks=1)),
        (stub.FreeBlocks, pb.FreeBlocksRequest(epoch=0, lease_id=1, block_ids=[1])),
        (stub.ShareBlocks, pb.ShareBlocksRequest(epoch=old, lease_id=1, block_ids=[1])),
        (stub.CreateBlockTable, pb.CreateBlockTableRequest(epoch=old, lease_id=1, num_blocks=1)),
        (stub.ExtendBlockTable, pb.ExtendBlockTableRequest(epoch=old, lease_id=1, table_id=1, num_blocks=1)),
        (stub.ReleaseBlockTable, pb.ReleaseBlockTableRequest(epoch=old, lease_id=1, table_id=1)),
    ]:
        error = expect_refusal(Reason.EPOCH_MISMATCH, call, request)
        assert error.metadata["epoch"] == str(client.epoch)


def test_a_lease_that_is_not_renewed_ends_and_frees_its_blocks(cut: Any, wait: Callable[..., Any]) -> None:
    client = Client(cut, ttl_s=0.2)
    assert client.lease.ttl.ToSeconds() == 1
    client.allocate(5)
    renewed = client.stub.RenewLease(pb.RenewLeaseRequest(**client.own)).lease
    assert renewed.expire_time.ToNanoseconds() > client.lease.expire_time.ToNanoseconds()
    assert cut.usage().held_blocks == 5
    wait(lambda: cut.usage().held_blocks == 0)
    expect_refusal(Reason.LEASE_NOT_FOUND, client.allocate, 1)
    expect_refusal(Reason.LEASE_NOT_FOUND, client.stub.RenewLease, pb.RenewLeaseRequest(**client.own))


def test_a_released_lease_frees_its_blocks_and_may_be_released_again(cut: Any) -> None:
    client = Client(cut)
    client.allocate(5)
    for _ in range(2):
        client.stub.ReleaseLease(pb.ReleaseLeaseRequest(**client.own))
    assert cut.usage().held_blocks == 0


def test_a_workers_lease_is_not_for_clients(cut: Any) -> None:
    client = Client(cut)
    table_id = cut.worker.create([1], 1).table_id
    workers = cut.pool().GetBlockTable(pb.GetBlockTableRequest(table_id=table_id)).block_table.lease_id
    expect_refusal(Reason.LEASE_IS_WORKERS, client.allocate, 1, lease_id=workers)
    for call, request in [
        (client.stub.RenewLease, pb.RenewLeaseRequest),
        (client.stub.ReleaseLease, pb.ReleaseLeaseRequest),
    ]:
        expect_refusal(Reason.LEASE_IS_WORKERS, call, request(epoch=client.epoch, lease_id=workers))


def test_blocks_need_a_geometry_first(fresh: Any) -> None:
    fresh.clients = []
    expect_refusal(Reason.POOL_WITHOUT_GEOMETRY, Client(fresh).allocate, 1)
    expect_refusal(Reason.POOL_WITHOUT_GEOMETRY, Client(fresh).create, 1)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({}, "ttl"), ({"ttl": seconds(-1)}, "ttl"), ({"ttl": seconds(0)}, "ttl"), ({"holder": "x" * 129}, "holder")],
)
def test_leases_check_their_fields(memd: Any, fields: dict[str, Any], field: str) -> None:
    request = pb.CreateLeaseRequest(**({"ttl": seconds(1)} | fields if "holder" in fields else fields))
    assert expect_refusal(Reason.INVALID_FIELD, memd.pool().CreateLease, request).field == field


def test_a_repeated_request_id_returns_the_first_answer(cut: Any) -> None:
    client = Client(cut)
    first = client.allocate(2, request_id="a")
    assert client.allocate(2, request_id="a") == first
    assert cut.usage().held_blocks == 2
    expect_refusal(Reason.REQUEST_ID_REUSED, client.allocate, 3, request_id="a")
    client.free(first.block_ids, request_id="b")
    client.free(first.block_ids, request_id="b")
    expect_refusal(Reason.REQUEST_ID_REUSED, client.free, first.block_ids, request_id="a")
    assert expect_refusal(Reason.INVALID_FIELD, client.allocate, 1, request_id="x" * 129).field == "request_id"


def test_a_refused_request_is_not_remembered(cut: Any) -> None:
    client = Client(cut)
    run = client.allocate(NUM_BLOCKS)
    expect_refusal(Reason.POOL_EXHAUSTED, client.allocate, 1, request_id="again")
    client.free(run.block_ids)
    assert len(client.allocate(1, request_id="again").block_ids) == 1


def test_lists_come_in_pages_by_rising_id(cut: Any) -> None:
    client = Client(cut)
    ids = sorted(client.allocate(25).block_ids)
    seen, token, pages = [], "", 0
    while pages == 0 or token:
        page = client.stub.ListBlocks(pb.ListBlocksRequest(page_size=10, page_token=token))
        seen += [block.block_id for block in page.blocks]
        token, pages = page.next_page_token, pages + 1
        assert page.epoch == client.epoch
    assert (seen, pages) == (ids, 3)
    cached = pb.ListBlocksRequest(state=types_pb2.BLOCK_STATE_CACHED)
    assert not client.stub.ListBlocks(cached).blocks
    tables = sorted(client.create(1).table_id for _ in range(3))
    page = client.stub.ListBlockTables(pb.ListBlockTablesRequest(page_size=2))
    rest = client.stub.ListBlockTables(pb.ListBlockTablesRequest(page_size=2, page_token=page.next_page_token))
    assert [table.table_id for table in [*page.block_tables, *rest.block_tables]] == tables
    assert not rest.next_page_token


def test_wrong_pages_are_refused(cut: Any) -> None:
    client = Client(cut)
    client.allocate(3)
    blocks, tables = client.stub.ListBlocks, client.stub.ListBlockTables
    token = blocks(pb.ListBlocksRequest(page_size=1)).next_page_token
    assert expect_refusal(Reason.INVALID_FIELD, blocks, pb.ListBlocksRequest(page_size=-1)).field == "page_size"
    assert expect_refusal(Reason.INVALID_FIELD, tables, pb.ListBlockTablesRequest(page_size=-1)).field == "page_size"
    for bad in ("x", "ä", "AAAA", token[:-2], token[:-1] + "!", "A" + token[1:]):
        assert expect_refusal(Reason.INVALID_FIELD, blocks, pb.ListBlocksRequest(page_token=bad)).field == "page_token"
    assert (
        expect_refusal(Reason.INVALID_FIELD, tables, pb.ListBlockTablesRequest(page_token=token)).field == "page_token"
    )
    other = pb.ListBlocksRequest(page_token=token, state=types_pb2.BLOCK_STATE_HELD)
    assert expect_refusal(Reason.INVALID_FIELD, blocks, other).field == "page_token"
    assert expect_refusal(Reason.INVALID_FIELD, blocks, pb.ListBlocksRequest(state=77)).field == "state"


def test_watch_pool_sends_the_state_and_then_each_change(cut: Any) -> None:
    client = Client(cut)
    request = pb.WatchPoolRequest(min_interval=Duration(nanos=20_000_000))
    watch = client.stub.WatchPool(request, timeout=10)
    assert next(watch).pool.usage.held_blocks == 0
    client.allocate(4)
    assert next(watch).pool.usage.held_blocks == 4
    watch.cancel()
    for wrong in (Duration(seconds=-1), Duration(seconds=3601)):
        stream = client.stub.WatchPool(pb.WatchPoolRequest(min_interval=wrong))
        assert expect_refusal(Reason.INVALID_FIELD, next, stream).field == "min_interval"


def test_a_slow_watcher_gets_the_newest_state_and_not_a_backlog(cut: Any) -> None:
    client = Client(cut)
    watch = client.stub.WatchPool(pb.WatchPoolRequest(min_interval=Duration(nanos=300_000_000)), timeout=10)
    next(watch)
    for _ in range(30):
        client.allocate(1)
    seen = next(watch).pool.usage.held_blocks
    if seen < 30:  # the first change went out alone
        seen = next(watch).pool.usage.held_blocks
    assert seen == 30
    watch.cancel()


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x02\xc3\x28"], ids=["no message", "invalid UTF-8"])
def test_bytes_that_do_not_parse_are_named_as_such(memd: Any, data: bytes) -> None:
    channel = memd.channel()
    service = "/pagepool.memd.v1.PoolService/"
    error = expect_refusal(Reason.MALFORMED_REQUEST, channel.unary_unary(service + "CreateLease"), data)
    assert "pagepool.memd.v1.CreateLeaseRequest" in error.message
    stream = channel.unary_stream(service + "WatchPool")
    expect_refusal(Reason.MALFORMED_REQUEST, next, stream(b"\xff\xff\xff"))
    attach = channel.stream_stream("/pagepool.memd.v1.WorkerService/Attach")
    expect_refusal(Reason.MALFORMED_REQUEST, next, attach(iter([b"\xff\xff\xff"])))
    assert memd.pool().GetPool(pb.GetPoolRequest()).pool.epoch


def test_a_request_over_the_message_limit_is_refused_and_memd_goes_on(cut: Any) -> None:
    tcp = cut.pool(cut.tcp)
    with pytest.raises(grpc.RpcError) as caught:
        tcp.ListBlocks(pb.ListBlocksRequest(page_token="x" * (5 << 20)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert Client(cut).allocate(1).block_ids
    with pytest.raises(grpc.RpcError) as caught:
        cut.pool().ListBlocks(pb.ListBlocksRequest(page_token="x" * (65 << 20)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_error_with_a_very_long_value_still_arrives(memd: Any) -> None:
    request = pb.ListBlocksRequest(page_token="ä" * 100_000)
    error = expect_refusal(Reason.INVALID_FIELD, memd.pool().ListBlocks, request)
    assert error.field == "page_token"


def test_tcp_only_looks(cut: Any) -> None:
    client = Client(cut)
    grant = cut.worker.create([1, 2, 3], 1)
    cut.worker.commit(grant.table_id, [1, 2, 3])
    tcp = cut.pool(cut.tcp)
    assert tcp.GetPool(pb.GetPoolRequest()).pool.usage.held_blocks == 1
    assert tcp.GetBlock(pb.GetBlockRequest(block_id=grant.block_ids[0])).block.num_tokens == 3
    found = tcp.GetBlockTable(pb.GetBlockTableRequest(table_id=grant.table_id)).block_table
    assert (found.num_tokens, list(found.token_ids)) == (3, [])
    client.stub = tcp
    own = client.own
    for call in (
        lambda: client.allocate(1),
        lambda: client.free([1]),
        lambda: client.share([1]),
        lambda: client.create(1),
        lambda: tcp.CreateLease(pb.CreateLeaseRequest(ttl=seconds(1))),
        lambda: tcp.RenewLease(pb.RenewLeaseRequest(**own)),
        lambda: tcp.ReleaseLease(pb.ReleaseLeaseRequest(**own)),
        lambda: tcp.ExtendBlockTable(pb.ExtendBlockTableRequest(**own, table_id=1, num_blocks=1)),
        lambda: tcp.ReleaseBlockTable(pb.ReleaseBlockTableRequest(**own, table_id=1)),
    ):
        expect_refusal(Reason.READ_ONLY_LISTENER, call)
    attach = cut.channel(cut.tcp).stream_stream("/pagepool.memd.v1.WorkerService/Attach")
    expect_refusal(Reason.READ_ONLY_LISTENER, next, attach(iter([b""])))


def test_many_callers_at_once_never_get_the_same_block(cut: Any) -> None:
    ids: list[int] = []

    def work() -> None:
        client = Client(cut)
        for _ in range(3):
            ids.extend(client.allocate(2).block_ids)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == len(set(ids)) == 48
