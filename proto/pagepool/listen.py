"""Where daemons listen: listener words, the default sockets, and the private directory that a socket lives in."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pagepool.errors import PagepoolError, invalid_field

MAX_SOCKET_PATH_BYTES = 107
"""What the kernel's sockaddr_un takes."""


@dataclass(frozen=True, slots=True)
class UnixListener:
    """A Unix socket in a private directory."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpListener:
    """A loopback address; port 0 takes a free one."""

    host: str
    port: int

    @property
    def address(self) -> str:
        """host:port as gRPC takes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"tcp:{self.address}"


Listener = UnixListener | TcpListener


def runtime_directory(environ: Mapping[str, str], uid: int) -> Path:
    """Where the daemons' sockets are unless told otherwise; clients look in the same place.

    $XDG_RUNTIME_DIR/pagepool where it is set, else /run/pagepool for root, else /tmp/pagepool-UID.
    """
    if base := environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "pagepool"
    return Path("/run/pagepool") if uid == 0 else Path(f"/tmp/pagepool-{uid}")  # noqa: S108 checked to be private


def default_socket(daemon: str, environ: Mapping[str, str], uid: int) -> Path:
    """The default Unix socket of "memd" or "inferd"."""
    return runtime_directory(environ, uid) / f"{daemon}.sock"


def parse_listener(text: str) -> Listener:
    """A listener from `unix:PATH` or `tcp:HOST:PORT`. Raises INVALID_FIELD on anything else, or a public address."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        return _unix_listener(text, Path(rest).absolute())
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
            return _tcp_listener(text, host, int(port))
    raise invalid_field("listen", text, "unix:PATH or tcp:HOST:PORT", "give for example --listen tcp:127.0.0.1:7070")


def _unix_listener(text: str, path: Path) -> UnixListener:
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        limit = f"a path of at most {MAX_SOCKET_PATH_BYTES} bytes, and this one has {size}"
        raise invalid_field("listen", text, limit, "choose a shorter directory")
    return UnixListener(path)


def _tcp_listener(text: str, host: str, port: int) -> TcpListener:
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        limit = "a loopback address, since there is no access control yet"
        raise invalid_field("listen", text, limit, "listen on tcp:127.0.0.1:PORT and reach it by an ssh tunnel")
    return TcpListener(host, port)


def private_directory(path: Path) -> None:
    """Makes the directory with mode 0700, or raises INVALID_FIELD if it cannot, or if it is not this user's alone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        info = path.lstat()
    except OSError as error:
        limit = f"in a directory that can be made ({error.strerror})"
        raise invalid_field("listen", path, limit, "choose a directory of your own") from error
    if not stat.S_ISDIR(info.st_mode):
        raise invalid_field("listen", path, "in a directory", "remove that file or choose another directory")
    if info.st_uid != os.getuid():
        limit = f"in a directory of user {os.getuid()}, and this one belongs to user {info.st_uid}"
        raise invalid_field("listen", path, limit, "choose a directory of your own")
    if mode := info.st_mode & 0o077:
        limit = f"in a directory closed to others, and this one has mode {stat.S_IMODE(info.st_mode):o}"
        remedy = f"choose a directory of its own, such as {path / 'pagepool'}"
        if not info.st_mode & stat.S_ISVTX:  # one that everybody shares, as /tmp, must stay open
            remedy = f"run `chmod 700 {path}` or choose another directory ({mode:o} is open)"
        raise invalid_field("listen", path, limit, remedy)


class SocketClaim:
    """The right to a Unix socket path, held by a lock on `<path>.lock` until `release` or the end of the process.

    The constructor raises INVALID_FIELD if somebody living has the path; a stale socket is removed.
    """

    def __init__(self, path: Path) -> None:
        private_directory(path.parent)
        self.path = path
        self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._take()
        except BaseException:
            os.close(self._lock)
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._taken() from None
        if not self.path.is_symlink() and not self.path.exists():
            return
        if not stat.S_ISSOCK(self.path.lstat().st_mode):
            raise invalid_field("listen", self.path, "a socket or nothing", "that is a file: choose another path")
        if _answers(self.path):
            raise self._taken()
        self.path.unlink()

    def _taken(self) -> PagepoolError:
        remedy = "stop that one, or choose another path with --listen unix:PATH"
        return invalid_field("listen", self.path, "a free socket path, and a living server has this one", remedy)

    def release(self) -> None:
        """Removes the socket and gives the path up. The lock file stays: removing it would race with the next owner."""
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full backlog or a time-out is a living server too
            return True
        return True
