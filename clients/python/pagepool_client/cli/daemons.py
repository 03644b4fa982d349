"""memd and inferd as children of the command: started together, watched, and stopped in order."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagepool.errors import PagepoolError, Reason
from pagepool.listen import private_directory
from pagepool_client.channels import failures
from pagepool_client.inference import InferenceClient

POLL_S = 0.1
STOP_TIMEOUT_S = 20.0

_PHASES = {
    "loading": "loading the model",
    "attaching": "attaching to memd",
    "warming_up": "warming up: every shape is run once, so that nothing compiles later",
}


class Daemon:
    """A child process in a session of its own, so that Ctrl-C reaches the command alone; its log is a file."""

    def __init__(self, name: str, flags: Sequence[str], folder: Path) -> None:
        self.name = name
        self.target = f"unix:{folder / f'{name}.sock'}"
        self.log = folder / f"{name}.log"
        words = [sys.executable, "-P", "-m", name, "--listen", self.target, "--log-format", "console", *flags]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 the flags are the user's own
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def require_alive(self) -> None:
        """Raises PagepoolError with the last word of a daemon that has ended."""
        code = self._process.poll()
        if code is None:
            return
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        message = f"{self.name} has ended with {how}: {self._last_words()} (its log is {self.log})"
        raise PagepoolError(Reason.INTERNAL_ERROR, message, daemon=self.name, how=how)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End it in order, or by force after the time-out. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it by force. Idempotent."""
        self._process.kill()
        self._process.wait()

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        own = [line.removeprefix(f"{self.name}: ") for line in lines if line.startswith(f"{self.name}: ")]
        return (own or lines or ["it said nothing"])[-1]


class Daemons:
    """memd and inferd on sockets in `folder`. Leaving the `with` block stops inferd first, then memd."""

    def __init__(self, folder: Path, memd_flags: Sequence[str], inferd_flags: Sequence[str]) -> None:
        private_directory(folder)
        for name in ("memd", "inferd"):
            _require_free(f"unix:{folder / f'{name}.sock'}", name)
        self.memd = Daemon("memd", memd_flags, folder)
        try:
            self.inferd = Daemon("inferd", ["--memd", self.memd.target, *inferd_flags], folder)
        except BaseException:
            self.memd.kill()
            raise

    def require_alive(self) -> None:
        """Raises PagepoolError with the last word of one that has ended; memd's comes first, as the likelier cause."""
        self.memd.require_alive()
        self.inferd.require_alive()

    def wait_ready(self, report: Callable[[str, float], None]) -> None:
        """Wait until both serve; `report` is told what is going on, and for how many seconds.

        Raises PagepoolError if one of them ends instead.
        """
        begun = time.monotonic()
        with InferenceClient(self.inferd.target, timeout_s=2.0) as inferd:
            while True:
                self.require_alive()
                if _is_serving(self.inferd.target):
                    return
                report(_doing(inferd), time.monotonic() - begun)
                time.sleep(POLL_S)

    def restart_inferd(self, flags: Sequence[str]) -> None:
        """Another inferd on the same memd, in place of the one there is, which is stopped in order."""
        self.inferd.stop()
        self.inferd = Daemon("inferd", ["--memd", self.memd.target, *flags], self.inferd.log.parent)

    def stop(self) -> None:
        """Stop both in order; a second Ctrl-C ends them by force."""
        try:
            self.inferd.stop()
            self.memd.stop()
        except KeyboardInterrupt:
            self.inferd.kill()
            self.memd.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _require_free(target: str, name: str) -> None:
    if _is_serving(target) is not None:
        message = f"{name} runs at {target} already: use it, stop it, or choose another place with --socket-dir"
        raise PagepoolError(Reason.INVALID_FIELD, message, field="socket-dir", target=target)


def _is_serving(target: str) -> bool | None:
    """What health says; None if nobody answers."""
    with grpc.insecure_channel(target) as channel, suppress(PagepoolError), failures(target):
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=2.0)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    return None


def _doing(inferd: InferenceClient) -> str:
    """What inferd is doing, in its own words where it has some."""
    try:
        return f"warming up {inferd.model().model}"
    except PagepoolError as error:
        if error.reason is not Reason.ENGINE_STARTING:
            return "starting memd and inferd"
        phase, detail = error.metadata.get("phase", ""), error.metadata.get("detail", "")
        return detail if detail and detail != phase else _PHASES.get(phase, phase)
