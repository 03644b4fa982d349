"""memd seen by people: real grpcurl and buf, without any proto file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.duration_pb2 import Duration
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from pagepool.memd.v1 import pool_service_pb2 as pb
from pagepool.memd.v1 import types_pb2, worker_service_pb2

SERVICES = {"pagepool.memd.v1.PoolService", "pagepool.memd.v1.WorkerService", "grpc.health.v1.Health"}
DETAILS = ("google.rpc.ErrorInfo", "google.rpc.BadRequest", "google.rpc.RetryInfo")


def tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without proto files to run the tools in."""
    return tmp_path_factory.mktemp("empty")


@pytest.fixture
def busy(memd: Any, raw_worker: Any, geometry: types_pb2.Geometry, wait: Any) -> Iterator[Any]:
    """memd with a table and a client's blocks: ten blocks held in all."""
    memd.worker = raw_worker()
    memd.worker.hello(geometry)
    memd.grant = memd.worker.create(list(range(40)), 3, salt=os.urandom(8))
    memd.worker.commit(memd.grant.table_id, list(range(40)))
    lease = memd.pool().CreateLease(pb.CreateLeaseRequest(ttl=Duration(seconds=60)))
    own = {"epoch": lease.epoch, "lease_id": lease.lease.lease_id}
    memd.pool().AllocateBlocks(pb.AllocateBlocksRequest(**own, num_blocks=7))
    yield memd
    memd.pool().ReleaseLease(pb.ReleaseLeaseRequest(**own))
    memd.worker.close()
    wait(lambda: memd.usage().held_blocks == 0)


@pytest.fixture(scope="module")
def memd(start_shared_memd: Callable[..., Any]) -> Any:
    return start_shared_memd("--heartbeat-timeout", "60s")


@pytest.fixture(params=["unix", "tcp"])
def grpcurl(request: pytest.FixtureRequest, memd: Any, empty: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs grpcurl over the Unix socket, and again over TCP."""
    where = ["-unix", "-authority", "localhost", str(memd.socket)] if request.param == "unix" else [memd.tcp]
    command = tool("grpcurl")

    def call(*words: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        line = [command, "-plaintext", *flags, *where, *words]
        return subprocess.run(line, capture_output=True, text=True, cwd=empty, timeout=30, check=False)

    return call


def symbols() -> list[str]:
    """Every service, message and enum of memd, and what error details are made of."""
    names = [*sorted(SERVICES), *DETAILS]
    for proto in (pb.DESCRIPTOR, types_pb2.DESCRIPTOR, worker_service_pb2.DESCRIPTOR):
        names += [message.full_name for message in proto.message_types_by_name.values()]
        names += [enum.full_name for enum in proto.enum_types_by_name.values()]
    return names


def test_grpcurl_lists_and_describes_what_is_there(grpcurl: Callable[..., Any]) -> None:
    assert set(grpcurl("list").stdout.split()) >= SERVICES
    for name in ("pagepool.memd.v1.BlockState", "google.rpc.ErrorInfo"):
        done = grpcurl("describe", name)
        assert f"{name} is a" in done.stdout, done.stderr
    whole = grpcurl("describe")
    assert whole.returncode == 0, whole.stderr
    assert "rpc Attach ( stream .pagepool.memd.v1.AttachRequest )" in whole.stdout


@pytest.mark.full
@pytest.mark.parametrize("name", symbols())
def test_grpcurl_describes_each_symbol(grpcurl: Callable[..., Any], name: str) -> None:
    done = grpcurl("describe", name)
    assert f"{name} is a" in done.stdout, done.stderr


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_finds_the_file_of_each_symbol_and_all_that_it_imports(memd: Any, version: str) -> None:
    call = memd.channel(memd.tcp).stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    names = [*symbols(), f"grpc.reflection.{version}.ServerReflection"]
    requests = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in names]
    found = [answer.file_descriptor_response.file_descriptor_proto for answer in call(iter(requests))]
    assert [name for name, files in zip(names, found, strict=True) if not files] == []
    files = [descriptor_pb2.FileDescriptorProto.FromString(data) for several in found for data in several]
    imports = sorted({name for file in files for name in file.dependency})
    requests = [reflection_pb2.ServerReflectionRequest(file_by_filename=name) for name in imports]
    assert not [answer.error_response for answer in call(iter(requests)) if answer.HasField("error_response")]


def test_grpcurl_reads_the_pool(busy: Any, grpcurl: Callable[..., Any]) -> None:
    def ask(method: str, **fields: Any) -> Any:
        done = grpcurl(method, flags=("-d", json.dumps(fields)))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    service = "pagepool.memd.v1.PoolService/"
    assert ask("grpc.health.v1.Health/Check", service="pagepool.memd.v1.PoolService")["status"] == "SERVING"
    pool = ask(service + "GetPool")["pool"]
    assert pool["usage"]["held_blocks"] == "10"
    assert pool["geometry"]["model_name"] == "tiny"
    page = ask(service + "ListBlocks", page_size=6, state="BLOCK_STATE_HELD")
    rest = ask(service + "ListBlocks", page_size=6, state="BLOCK_STATE_HELD", page_token=page["next_page_token"])
    assert [len(page["blocks"]), len(rest["blocks"])] == [6, 4]
    assert "next_page_token" not in rest
    block = ask(service + "GetBlock", block_id=busy.grant.block_ids[0])["block"]
    assert (block["state"], block["sealed"], block["num_tokens"]) == ("BLOCK_STATE_HELD", True, 16)
    tables = ask(service + "ListBlockTables")["block_tables"]
    assert [table["holder"] for table in tables] == ["raw"]


def test_grpcurl_watches_the_pool(busy: Any, grpcurl: Callable[..., Any]) -> None:
    done = grpcurl("pagepool.memd.v1.PoolService/WatchPool", flags=("-max-time", "1"))
    first, _ = json.JSONDecoder().raw_decode(done.stdout)
    assert first["pool"]["usage"]["held_blocks"] == "10"
    assert "DeadlineExceeded" in done.stderr


def test_grpcurl_shows_error_details_as_fields(memd: Any, grpcurl: Callable[..., Any]) -> None:
    done = grpcurl("pagepool.memd.v1.PoolService/ListBlocks", flags=("-d", '{"page_size": -1}'))
    assert "Code: InvalidArgument" in done.stderr
    assert '"reason":"INVALID_FIELD"' in done.stderr
    assert '"field":"page_size"' in done.stderr
    missing = grpcurl("pagepool.memd.v1.PoolService/GetBlock", flags=("-d", '{"block_id": 5}'))
    assert '"reason":"BLOCK_NOT_FOUND"' in missing.stderr
    assert '"metadata":{"block_id":"5"}' in missing.stderr


@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
def test_buf_curl_finds_its_way_by_either_reflection(memd: Any, empty: Path, protocol: str) -> None:
    command = [tool("buf"), "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--reflect-protocol", protocol]
    url = f"http://{memd.tcp}/pagepool.memd.v1.PoolService/GetPool"
    done = subprocess.run([*command, url], capture_output=True, text=True, cwd=empty, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pool"]["device"] == "host"


def test_channelz_is_on_the_unix_socket_only(memd: Any, grpcurl: Callable[..., Any]) -> None:
    listed = grpcurl("list").stdout.split()
    servers = channelz_pb2_grpc.ChannelzStub(memd.channel()).GetServers(channelz_pb2.GetServersRequest()).server
    assert servers
    over_tcp = grpcurl("grpc.channelz.v1.Channelz/GetServers")
    assert ("grpc.channelz.v1.Channelz" in listed) == (over_tcp.returncode == 0)
