"""Errors on their way to the wire and back."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from pagepool.errors import Code, PagepoolError, Reason, invalid_field
from pagepool.handlers import snake_case
from pagepool.status import DETAILS_KEY, MAX_TRAILER_BYTES, ForeignError, from_rpc_error, from_status, to_status


class FailedCall(grpc.RpcError):
    """What a client sees, without a call."""

    def __init__(self, code: grpc.StatusCode, details: str | None, trailer: Any) -> None:
        self._answer = code, details, trailer

    def code(self) -> grpc.StatusCode:
        return self._answer[0]

    def details(self) -> str | None:
        return self._answer[1]

    def trailing_metadata(self) -> Any:
        return self._answer[2]


def failed(status: status_pb2.Status) -> FailedCall:
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    return FailedCall(code, status.message, (("other", "x"), (DETAILS_KEY, status.SerializeToString())))


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_survives_the_wire_with_field_metadata_and_retry(reason: Reason) -> None:
    error = PagepoolError(reason, "it failed", field="x.y", retry_after_s=1.25, value=7, limit="at most 5")
    found = from_rpc_error(failed(to_status(error)))
    assert type(found) is PagepoolError
    assert (found.reason, found.code, found.message) == (reason, error.code, "it failed")
    assert (found.field, found.retry_after_s, found.metadata) == ("x.y", 1.25, {"value": "7", "limit": "at most 5"})


def test_an_error_without_field_or_retry_carries_neither_detail() -> None:
    status = to_status(PagepoolError(Reason.BLOCK_NOT_FOUND, "no block", block_id=3))
    assert [detail.TypeName() for detail in status.details] == ["google.rpc.ErrorInfo"]
    assert status.code == code_pb2.NOT_FOUND
    found = from_status(status)
    assert (found.field, found.retry_after_s) == ("", None)


def test_every_code_has_its_grpc_number() -> None:
    assert {code.name: code.value for code in Code}.items() <= dict(code_pb2.Code.items()).items()


@given(
    message=st.text(max_size=5000),
    field=st.text(max_size=2000),
    metadata=st.dictionaries(st.from_regex(r"[a-z_]{1,40}", fullmatch=True), st.text(max_size=3000), max_size=12),
    retry=st.none() | st.floats(min_value=0, max_value=1e6),
)
def test_the_trailer_fits_whatever_the_error_says(
    message: str, field: str, metadata: dict[str, str], retry: float | None
) -> None:
    kept = {key: value for key, value in metadata.items() if key not in {"self", "reason", "message", "field"}}
    error = PagepoolError(Reason.INVALID_FIELD, message, field=field, retry_after_s=retry, **kept)
    status = to_status(error)
    header = len(quote(status.message, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"))
    assert header + len(base64.b64encode(status.SerializeToString())) + 200 < MAX_TRAILER_BYTES
    assert from_status(status).reason is Reason.INVALID_FIELD


def test_a_long_message_is_cut_with_a_mark_and_a_short_one_is_not() -> None:
    assert to_status(PagepoolError(Reason.INTERNAL_ERROR, "x" * 880)).message == "x" * 880
    cut = to_status(PagepoolError(Reason.INTERNAL_ERROR, "wörd " * 1000)).message
    assert cut.startswith("wörd wörd")
    assert cut.endswith("…")


def test_text_that_is_no_utf_8_becomes_question_marks() -> None:
    assert to_status(PagepoolError(Reason.INTERNAL_ERROR, "a\udcffb")).message == "a?b"


@pytest.mark.parametrize("reason", ["A_REASON_OF_NEXT_YEAR", ""])
def test_an_unknown_reason_is_tolerated_and_keeps_its_code(reason: str) -> None:
    status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="too much")
    status.details.add().Pack(error_details_pb2.ErrorInfo(domain="pagepool", reason=reason, metadata={"code": "x"}))
    found = from_rpc_error(failed(status))
    assert isinstance(found, ForeignError)
    assert (found.code, found.reason, found.message) == (Code.RESOURCE_EXHAUSTED, Reason.INTERNAL_ERROR, "too much")
    assert found.metadata.get("peer_reason", "") == reason


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ((grpc.StatusCode.UNKNOWN, "Stream removed"), Code.UNAVAILABLE),
        ((grpc.StatusCode.UNKNOWN, "Exception calling application"), Code.UNKNOWN),
        ((grpc.StatusCode.INTERNAL, "Stream removed"), Code.INTERNAL),
    ],
)
def test_a_peer_that_is_gone_is_unavailable_whatever_grpc_calls_it(
    said: tuple[grpc.StatusCode, str], meant: Code
) -> None:
    assert from_rpc_error(FailedCall(*said, None)).code is meant


def test_the_reason_of_another_domain_is_not_taken_for_ours() -> None:
    status = status_pb2.Status(code=code_pb2.NOT_FOUND, message="no")
    status.details.add().Pack(error_details_pb2.ErrorInfo(domain="example.org", reason="BLOCK_NOT_FOUND"))
    assert isinstance(from_status(status), ForeignError)


@pytest.mark.parametrize(
    ("code", "trailer", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, None, Code.UNAVAILABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, (), Code.UNKNOWN),
        (grpc.StatusCode.INTERNAL, ((DETAILS_KEY, b"\xff\xff"),), Code.INTERNAL),
    ],
)
def test_what_the_transport_answers_by_itself_becomes_a_foreign_error(
    code: grpc.StatusCode, trailer: Any, expected: Code
) -> None:
    found = from_rpc_error(FailedCall(code, None, trailer))
    assert isinstance(found, ForeignError)
    assert (found.code, found.metadata["peer_code"]) == (expected, code.name)


def test_a_field_error_names_field_and_description() -> None:
    status = to_status(invalid_field("top_p", 3, "in (0, 1]", "lower it"))
    request = error_details_pb2.BadRequest()
    assert status.details[1].Unpack(request)
    violation = request.field_violations[0]
    assert violation.field == "top_p"
    assert violation.description == "top_p is 3, but must be in (0, 1]; lower it"


def test_method_names_become_snake_case() -> None:
    assert [snake_case(name) for name in ("GetPool", "ListBlockTables", "Attach")] == [
        "get_pool",
        "list_block_tables",
        "attach",
    ]
