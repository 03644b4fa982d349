"""Settings of the daemons' gRPC servers and of the clients' channels that no short test would notice to be wrong."""

from __future__ import annotations

import pytest

from pagepool.serve import _options
from pagepool_client.channels import channel_options, stream_options


@pytest.mark.parametrize("local", [True, False])
def test_no_server_ends_a_stream_by_age_and_all_take_the_clients_pings(local: bool) -> None:
    options = dict(_options(local=local))
    assert not [name for name in options if "age" in name.split("_") or "idle" in name]
    assert options["grpc.keepalive_permit_without_calls"] == 1
    for channel in (channel_options(), stream_options()):
        pings_ms = int(dict(channel)["grpc.keepalive_time_ms"])
        assert pings_ms >= options["grpc.http2.min_ping_interval_without_data_ms"]


def test_only_the_unix_socket_takes_large_messages_and_shows_channelz() -> None:
    local, public = dict(_options(local=True)), dict(_options(local=False))
    assert (local["grpc.max_receive_message_length"], public["grpc.max_receive_message_length"]) == (64 << 20, 4 << 20)
    assert (local["grpc.enable_channelz"], public["grpc.enable_channelz"]) == (1, 0)
