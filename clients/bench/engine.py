"""`make bench-engine`: what the engine itself costs a step, and whether a device ever waits for it.

A real engine, a real memd and a real channel to another process; only the model computes nothing. It is either done at
once, or it takes a given time a step, one step after the other, like a device with a queue.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import daemons

from inferd import surroundings
from inferd.channel import EngineChannel, Message
from inferd.core.limits import Limits
from inferd.core.messages import Failed, Finished, Sampling, Shutdown, Submit
from inferd.core.ports import StepInput
from inferd.engine import Engine
from inferd.sampler import Row
from inferd.surroundings import Mailbox, Surroundings
from pagekernels.layout import Format, LayerShape, PagedLayout
from pagepool import logs
from pagepool_client import Attachment, PoolSession
from pagepool_client.wire import geometry_message

BATCHES = (1, 32, 128)
PROMPT, NEW = 1000, 400
DEVICE_MS = 5.0
TINY = PagedLayout(16, (LayerShape(1, 1, 1),), Format.F32)


@dataclass(frozen=True, slots=True)
class NullStep:
    """A step that is over at `done_at`."""

    count: int
    done_at: float
    forward_s: float

    def tokens(self) -> list[int]:
        """One token for each row, when the time has come."""
        if (left_s := self.done_at - time.perf_counter()) > 0:
            time.sleep(left_s)
        return [1] * self.count


@dataclass(slots=True)
class NullModel:
    """Notes when it is given a full batch: wall time, CPU time of the engine's thread, and of its process."""

    batch: int
    step_s: float
    depth: int
    free_at: float = 0.0
    launches: list[tuple[float, float, float]] = field(default_factory=list)

    def launch(self, step: StepInput, rows: Sequence[Row]) -> NullStep:
        """Queue a step."""
        now = time.perf_counter()
        self.free_at = max(now, self.free_at) + self.step_s
        if len(rows) == len(step.token_ids) == self.batch:
            self.launches.append((now, time.thread_time(), time.process_time()))
        return NullStep(len(rows), self.free_at, self.step_s)

    def cost_ms(self) -> tuple[float, ...]:
        """Milliseconds a step of each of the three, between the first and the last full batch."""
        steps = len(self.launches) - 1
        return tuple(
            1e3 * (last - first) / steps for first, last in zip(self.launches[0], self.launches[-1], strict=True)
        )


def measure(memd: str, model: NullModel) -> tuple[float, ...]:
    """Run one batch of requests through an engine; NullModel.cost_ms."""
    mailbox, left = Mailbox(), set(range(model.batch))
    ours, theirs = socket.socketpair()
    with subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL), ours:
        theirs.close()
        channel = EngineChannel(ours)
        channel.start(lambda _: None)

        def send(message: Message) -> None:
            channel.send(message)
            if isinstance(message, Failed):
                raise SystemExit(message.message)
            if isinstance(message, Finished):
                left.remove(message.request)
                if not left:
                    mailbox.post(Shutdown(0.0))

        def attach() -> surroundings.Attachment:
            geometry = geometry_message(TINY, bytes(32), "tiny")
            session = PoolSession(Attachment(memd, "bench", geometry), mailbox.signal)
            return surroundings.Attachment(session, model, session.close)

        for request in range(model.batch):
            prompt = [request] * PROMPT
            mailbox.post(Submit(request, prompt, NEW, Sampling(temperature=0), ignore_eos=True))
        Engine(Surroundings(attach, send, mailbox, time.monotonic), Limits(8192, max(BATCHES)), []).run()
        channel.close()
    return model.cost_ms()


def main() -> None:
    """Print milliseconds a decode step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device-ms", type=float, default=DEVICE_MS, help="a step of the device that is waited for")
    options = parser.parse_args()
    step_s = options.device_ms / 1e3
    logs.configure("warning", "auto")
    with daemons.folder() as place, daemons.memd(place, "--pool-bytes", "16MiB") as (client, _):
        print(f"ms a decode step, contexts of {PROMPT:,} to {PROMPT + NEW:,} tokens\n")
        print(f"{'':5} {'a model that takes no time':>38}      {f'one that takes {options.device_ms:g} ms':>20}")
        print(f"batch {'a step':>8} {'CPU: thread':>15} {'process':>13}      {'depth 1':>10} {'depth 2':>9}")
        for batch in BATCHES:
            wall, thread, process = measure(client.target, NullModel(batch, 0.0, depth=2))
            one, two = (measure(client.target, NullModel(batch, step_s, depth))[0] for depth in (1, 2))
            print(f"{batch:5} {wall:8.3f} {thread:15.3f} {process:13.3f}      {one:10.3f} {two:9.3f}")


if __name__ == "__main__":
    main()
