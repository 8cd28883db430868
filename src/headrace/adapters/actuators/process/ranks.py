"""The processes of one life of a group: all of them, or none.

Each is the leader of a session of its own, so that a signal reaches whatever it has started too.
"""

import asyncio
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from headrace.adapters.actuators.process import child as wrapper
from headrace.adapters.actuators.process.log import CappedLog, Output
from headrace.adapters.actuators.process.look import pause
from headrace.adapters.actuators.process.records import MARK, Child, Records, stat
from headrace.ports.clock import Clock

PASSED = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "HF_HOME",
    "SSL_CERT_FILE",
)
"""What of our own environment a child gets: what it needs to run, none of our keys."""
LOOK_S = 0.05
"""Between two looks at whether a process has ended."""
_KILLED_S = 10.0
"""What the kernel gets to end a process that was killed. 10: one that writes to a bad disk is slow."""
_log = logging.getLogger(__name__)


class Ranks:
    """Started one after the other; ended together."""

    def __init__(self, clock: Clock, records: Records, name: str, log_bytes: int) -> None:
        """Know where records and logs of a group by that name go."""
        self._clock = clock
        self._records, self._name, self._log_bytes = records, name, log_bytes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._outputs: list[Output] = []

    @property
    def running(self) -> int:
        """How many have not ended."""
        return sum(not _has_ended(one) for one in self._processes)

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        marks: tuple[bytes, ...] = (),
        told: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """Start the next rank; raises OSError if that cannot be done.

        `env` is added to what is passed on of ours. `told` gets each of `marks` that its log shows.
        """
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(f"no such program: {command[0]}")
        self._records.make()
        nth = len(self._processes)
        mark = secrets.token_hex(16)
        passed = {name: os.environ[name] for name in PASSED if name in os.environ}
        output = Output(CappedLog(self.log_path(nth), self._log_bytes), marks, told)
        self._outputs.append(output)
        try:
            process = subprocess.Popen(  # noqa: S603 - what the configuration names
                [sys.executable, "-I", "-S", wrapper.__file__, str(os.getpid()), *command],
                env={**passed, **env, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output.write,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            output.given()
        self._processes.append(process)
        found = stat(process.pid)
        started = 0 if found is None else found.started
        self._records.write(
            f"{self._name}.{nth}", Child(pid=process.pid, started=started, mark=mark)
        )

    def log_path(self, nth: int = 0) -> Path:
        """Return where the output of a rank goes."""
        return self._records.log_path(self._name, nth)

    def fallen(self) -> str:
        """Say which rank has ended, and how; nothing if all run."""
        for nth, one in enumerate(self._processes):
            if _has_ended(one):
                self.signal(signal.SIGKILL)  # while the ended one still holds its process group
                return f"rank {nth} ended with {one.wait()}; see {self.log_path(nth)}"
        return ""

    async def end(self, grace_s: float) -> None:
        """End all of them: they are asked to, and after `grace_s` made to."""
        self.signal(signal.SIGTERM)
        await self._until_ended(grace_s)
        self.kill()
        await self._until_ended(_KILLED_S)
        for nth, one in enumerate(self._processes):
            if one.poll() is None:
                _log.error("process %d of %s cannot be ended", one.pid, self._name)
            else:
                self._records.forget(f"{self._name}.{nth}")
        self._close()

    def kill(self) -> None:
        """Kill all of them, and all that they have started."""
        self.signal(signal.SIGKILL)

    def signal(self, sent: signal.Signals) -> None:
        """Send a signal to the process group of each that we have not yet seen off."""
        for one in self._processes:
            if one.returncode is None:  # nobody else can have its id
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(one.pid, sent)

    async def _until_ended(self, limit_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.running:
                    await pause(self._clock, LOOK_S)

    def _close(self) -> None:
        for output in self._outputs:
            output.close()
        self._outputs.clear()


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Return whether a process has ended. It is not reaped: until then its id is nobody else's."""
    if process.returncode is not None:
        return True
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, look) is not None
