"""The worker's side of the process that holds the tokeniser and forks a process for each grammar."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from tandem.engine.sampling.grammar_process import LoadTokenizer, Mask
from tandem.protocol.codec import Codec
from tandem.protocol.rank_channel import RankChannel, open_channel
from tandem.runtime.errors import InternalError, InvalidRequest, first_line

LOAD_TIMEOUT_S = 60.0
"""Wait for the tokeniser to load, which takes about a second."""


class GrammarServer:
    """Starts the process and waits until it has loaded the tokeniser. Raises InvalidRequest, InternalError."""

    def __init__(self, tokenizer: LoadTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self.mask_bytes = 0
        self._start()

    @classmethod
    def of_model(cls, model: str, vocab_size: int) -> GrammarServer:
        """Loads the model's tokeniser. Raises InvalidRequest.

        A worker without a usable tokeniser still serves; only requests with a grammar fail.
        """
        return cls(read_tokenizer(model, vocab_size))

    def _start(self) -> None:
        own, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tandem.engine.sampling.grammar_process", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )
        self._control = own
        with contextlib.closing(Connection(own.dup().detach())) as connection:
            try:
                connection.send_bytes(msgspec.msgpack.encode(self._tokenizer))
                if not connection.poll(LOAD_TIMEOUT_S):
                    raise TimeoutError(f"it has not loaded the tokeniser within {LOAD_TIMEOUT_S:g} s")
                answer = msgspec.msgpack.decode(connection.recv_bytes(), type=Mask)
            except (OSError, EOFError) as error:
                self.close()
                raise InternalError(f"the process for grammars does not start: {first_line(error)}") from error
        if answer.error is not None:
            self.close()
            raise InvalidRequest(_unusable(answer.error.message))
        self.mask_bytes = len(answer.bits)

    def open(self) -> RankChannel[Mask]:
        """Returns a channel to a new process, of a new server if this one's process has died. Raises InternalError."""
        channel, other = open_channel()
        with self._lock, contextlib.closing(other):
            if self._process.poll() is not None:
                self._control.close()
                self._start()
            try:
                socket.send_fds(self._control, [b"f"], [other.fileno()])
            except OSError as error:
                channel.close()
                raise InternalError(f"the process for grammars has died: {first_line(error)}") from error
        return RankChannel(channel, Codec(Mask))

    def close(self) -> None:
        """Ends the process, and with it those of all grammars."""
        self._control.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def read_tokenizer(model: str, vocab_size: int) -> LoadTokenizer:
    """Reads the model's tokeniser. Raises InvalidRequest."""
    from transformers.tokenization_utils_tokenizers import TokenizersBackend  # slow to import

    try:
        backend: Any = TokenizersBackend.from_pretrained(model)
        return LoadTokenizer(backend.backend_tokenizer.to_str().encode(), vocab_size, backend.eos_token_id)
    except Exception as error:
        raise InvalidRequest(_unusable(first_line(error))) from error


def _unusable(reason: str) -> str:
    return f"this model does not support grammars: its tokeniser cannot be used: {reason}"
