"""How does one process hand its listeners to the next without a caller noticing?

On SIGUSR2 a process starts another with its own command line, which inherits the listening sockets
and a control socket. The two speak in single bytes:

- the successor has read its configuration and is prepared;
- the old one accepts no more, ends its journal with a checkpoint and lets go of it: go, or go and
  let nothing be changed, if changes are frozen;
- the successor thaws, and accepts: ready. The old one finishes what it has, and ends.

Connections wait in the kernel meanwhile. A successor that fails or takes too long is killed, and the
old one goes on as if nothing had been.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress

import msgspec
from msgspec import Struct

from headrace.gateway.hand import wanted
from headrace.gateway.server import Gateway
from headrace.model.ids import PoolName

VARIABLE = "HEADRACE_HANDOVER"
PREPARE_S = 60.0
"""What a successor gets to start in, while the old process serves, beside what its groups may take. 60: a
cold disk is slow."""
READY_S = 20.0
"""What it then gets to thaw and accept, while callers wait. 20: less than most of them bear."""
_PREPARED, _GO, _GO_FROZEN, _READY = b"p", b"g", b"f", b"r"
_log = logging.getLogger(__name__)


class Inheritance(Struct, frozen=True, kw_only=True):
    """What a successor finds in its environment."""

    traffic: int
    admin: int | None
    control: int
    key: str | None
    """The key that was printed at the start, where no file names any."""
    wanted: dict[PoolName, int] = {}
    """Groups that are to serve, by pool that scales."""


class Heir:
    """The successor's side."""

    def __init__(self, left: Inheritance) -> None:
        """Take over the descriptors."""
        self.sock = socket.socket(fileno=left.traffic)
        self.admin_sock = None if left.admin is None else socket.socket(fileno=left.admin)
        self.key, self.wanted = left.key, left.wanted
        self._control = socket.socket(fileno=left.control)
        for one in (self.sock, self.admin_sock, self._control):
            if one is not None:
                one.set_inheritable(False)

    @classmethod
    def of(cls, environ: MutableMapping[str, str]) -> "Heir | None":
        """Return the heir that this process is, if it is one; nobody finds it there again."""
        left = environ.pop(VARIABLE, None)
        return None if left is None else cls(msgspec.json.decode(left, type=Inheritance))

    def wait(self) -> bool:
        """Say that all is prepared, and wait until the journal is ours; raises OSError if never.

        Return whether changes are frozen.
        """
        self._control.sendall(_PREPARED)
        told = self._control.recv(1)
        if told not in (_GO, _GO_FROZEN):
            raise OSError("the process that handed over its listeners took them back")
        return told == _GO_FROZEN

    def ready(self) -> None:
        """Say that callers are answered here."""
        with suppress(OSError):  # then nobody waits for it, and we serve
            self._control.sendall(_READY)
        self._control.close()


class Succession:
    """The old process's side: starts a successor when told to."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        key: str | None = None,
        command: Sequence[str] | None = None,
        start_s: float = 0.0,
    ) -> None:
        """Hand over what `gateway` serves; `command`: other than this process was started by.

        `start_s`: what a successor's own groups may take until they are ready.
        """
        self._gateway, self._key, self._prepare_s = gateway, key, PREPARE_S + start_s
        self._command = command or [sys.executable, *sys.orig_argv[1:]]
        self._task: asyncio.Task[None] | None = None
        self._wanted = False
        self.successor: int | None = None
        """The process that serves now, once one does."""

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Heed SIGUSR2."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, self.begin)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGUSR2)
            if self._task is not None:
                self._task.cancel()

    def accepting(self) -> None:
        """Begin what was wanted before there was anything to hand over."""
        notify("READY=1")
        if self._wanted:
            self.begin()

    def begin(self) -> None:
        """Start a successor, unless one is on its way or this process is ending."""
        busy = self._task is not None and not self._task.done()
        if busy or self._gateway.ending:
            _log.warning("no hand-over: %s", "one is under way" if busy else "already ending")
            return
        self._wanted = self._gateway.socks is None
        if not self._wanted:
            self._task = asyncio.get_running_loop().create_task(self._hand_over())

    async def _hand_over(self) -> None:
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                try:
                    child = self._start(theirs)
                except OSError as error:
                    _log.warning("hand-over failed: %s", error)
                    return
            try:
                await self._agree(ours)
                self.successor = child.pid
            except (OSError, TimeoutError) as error:
                _log.warning("hand-over to process %d failed: %r", child.pid, error)
            finally:
                if self.successor is None:
                    child.kill()
                    child.wait()
        if self.successor is None:
            await self._gateway.come_back()
            return
        child.returncode = 0  # it outlives us: nothing to wait for
        notify(f"MAINPID={child.pid}")
        self._gateway.bow_out()

    async def _agree(self, control: socket.socket) -> None:
        """Speak with the successor until it serves; raises OSError or TimeoutError if it never does."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._prepare_s):
            if await loop.sock_recv(control, 1) != _PREPARED:
                raise OSError("it ended before it was prepared")
        self._gateway.step_back()
        async with asyncio.timeout(READY_S):
            await loop.sock_sendall(control, _GO_FROZEN if self._gateway.frozen else _GO)
            if await loop.sock_recv(control, 1) != _READY:
                raise OSError("it ended before it served")

    def _start(self, control: socket.socket) -> "subprocess.Popen[bytes]":
        assert self._gateway.socks is not None, "it serves"
        traffic, admin = self._gateway.socks
        left = Inheritance(
            traffic=traffic.fileno(),
            admin=None if admin is None else admin.fileno(),
            control=control.fileno(),
            key=self._key,
            wanted=wanted(self._gateway.driver.plane),
        )
        given = {**os.environ, VARIABLE: msgspec.json.encode(left).decode()}
        passed = [fd for fd in (left.traffic, left.admin, left.control) if fd is not None]
        return subprocess.Popen(self._command, env=given, pass_fds=passed)  # noqa: S603 - our own


def notify(state: str) -> None:
    """Tell systemd, if it is there and listens."""
    place = os.environ.get("NOTIFY_SOCKET")
    if not place:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(state.encode(), "\0" + place[1:] if place.startswith("@") else place)
