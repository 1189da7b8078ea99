"""The worker's side of the process that holds the tokeniser and forks a process for each grammar."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import threading
import time
from multiprocessing.connection import Connection

import msgspec

from tandem.engine.sampling.grammar_messages import LoadTokenizer, Mask
from tandem.protocol.codec import Codec
from tandem.protocol.rank_channel import RankChannel, open_channel
from tandem.runtime.errors import InternalError, InvalidRequest, client_reason, first_line
from tandem.runtime.files.tokenizer_files import load_tokenizer
from tandem.runtime.processes.python_command import python_command

LOAD_TIMEOUT_S = 60.0
"""Wait for the tokeniser to load, which takes about a second."""


class GrammarServer:
    """Starts the process and waits until it has loaded the tokeniser. Raises InvalidRequest, InternalError."""

    def __init__(self, tokenizer: LoadTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._is_closed = False
        self._start(LOAD_TIMEOUT_S)

    def _start(self, timeout_s: float) -> None:
        own, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                python_command("-m", "tandem.engine.sampling.grammar_process", str(other.fileno())),
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )
        self._control = own
        seconds, microseconds = divmod(int(timeout_s * 1e6), 10**6)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, max(1, microseconds)))
        with contextlib.closing(Connection(own.dup().detach())) as connection:
            try:
                connection.send_bytes(msgspec.msgpack.encode(self._tokenizer))
                if not connection.poll(timeout_s):
                    raise TimeoutError(f"it has not loaded the tokeniser within {timeout_s:.1f} s")
                answer = msgspec.msgpack.decode(connection.recv_bytes(), type=Mask)
            except (OSError, EOFError) as error:
                self._end()
                raise InternalError(f"the process for grammars does not start: {first_line(error)}") from error
        if answer.error is not None:
            self._end()
            raise InvalidRequest(_unusable(answer.error.message))

    def open(self, timeout_s: float) -> RankChannel[Mask]:
        """Returns a channel to a new process, of a new server if this one's process has died.

        Raises InternalError, also if another server has not started within timeout_s, or after `close`.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            raise InternalError("the process for grammars is being started again; try again")
        try:
            if self._process.poll() is not None and not self._is_closed:
                self._control.close()
                self._start(max(0.0, deadline - time.monotonic()))
            if self._is_closed:
                self._end()
                raise InternalError("grammars are no longer compiled, because the worker ends")
            channel, other = open_channel()
            with contextlib.closing(other):
                try:
                    socket.send_fds(self._control, [b"f"], [other.fileno()])
                except OSError as error:
                    channel.close()
                    raise InternalError(f"the process for grammars has died: {first_line(error)}") from error
            return RankChannel(channel, Codec(Mask))
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends the process, and with it those of all grammars. One that is being started ends when it has started."""
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        self._control.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def read_tokenizer(model: str, vocab_size: int) -> LoadTokenizer:
    """Reads the model's tokeniser. Raises InvalidRequest."""
    try:
        backend = load_tokenizer(model)
        return LoadTokenizer(backend.backend_tokenizer.to_str().encode(), vocab_size, backend.eos_token_id)
    except Exception as error:
        raise InvalidRequest(_unusable(client_reason(error))) from error


def _unusable(reason: str) -> str:
    return f"this model does not support grammars: its tokeniser cannot be used: {reason}"
