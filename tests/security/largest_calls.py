"""Calls a proxy with the largest paths, queries, headers, forms and bodies.

`python -m tests.security.largest_calls FOLDER`: the proxy runs in this process, without workers; a thread calls it.
Paths come from the routes, and the names of query parameters and headers from what the routes read. Prints `begin NAME`
before each call, and `end CPU_S BYTES LOOP_S SENT_BYTES STATUS` after it: the CPU time of the process, the memory that
the call took, and the CPU time of the event loop.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, get_args
from unittest.mock import MagicMock

import msgspec
import uvloop
from starlette.datastructures import Headers, QueryParams

from tandem.proxy.api.responses_api.response_store import ResponseStore, StoredResponse
from tandem.proxy.api.responses_api.responses_request import ResponseRequest, options_of
from tandem.proxy.batches.batch import BatchObject, BatchRequest
from tandem.proxy.batches.file_store import StoredFile, client_folder
from tandem.proxy.http.api_keys import ApiKeys
from tandem.proxy.http.app import client_routes
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.bodies import MAX_UNSPOOLED_BYTES
from tandem.proxy.http.openapi import document_routes
from tandem.proxy.http.routes.admin import LoadAdapterBody, RoleBody, UnloadAdapterBody, admin_routes
from tandem.proxy.http.starlette_app import ApiRoute
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.reading.reader_pool import ReaderPool
from tandem.proxy.records.record import MAX_RECORD_BYTES
from tandem.proxy.records.record_store import RecordStore
from tandem.proxy.server import serve
from tandem.proxy.text.model_text import ModelText
from tests.security.largest_bodies import bodies
from tests.security.largest_values import measured
from tests.support.noise_model import ensure_noise_model
from tests.support.ports import free_port
from tests.support.settings import proxy_config

KEY = "key-of-the-client"
MAX_HEAD = 60_000
"""Characters of a value in a request's head, which may have 64 KiB."""
NUM_LISTED = 3000
"""Files of the client, and batches with the largest metadata."""
TIMEOUT_S = 60.0
ADMIN_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/load_lora_adapter": LoadAdapterBody,
    "/v1/unload_lora_adapter": UnloadAdapterBody,
    "/workers/{worker_id}/role": RoleBody,
}
"""Types of the bodies of routes that the public description leaves out."""
HEAD_VALUES = {
    "letters": "a" * MAX_HEAD,
    "digits": "9" * MAX_HEAD,
    "blanks": "a" + " " * MAX_HEAD + "a",
    "commas": "a," * (MAX_HEAD // 2),
    "semicolons": "a;q=0.1," * (MAX_HEAD // 8),
    "quotes": '"' * MAX_HEAD,
    "backslashes": "\\" * MAX_HEAD,
    "points": "1." * (MAX_HEAD // 2),
    "colons": "http://a:" * (MAX_HEAD // 9),
    "other bytes": "\xe9" * MAX_HEAD,
    "a key": "Bearer " + "k" * MAX_HEAD,
}
PATH_VALUES = {
    "letters": "a" * MAX_HEAD,
    "escapes": "%61" * (MAX_HEAD // 3),
    "bytes": "%ff" * (MAX_HEAD // 3),
    "slashes": "%2f" * (MAX_HEAD // 3),
    "parents": "%2e%2e%2f" * (MAX_HEAD // 9),
    "zeros": "%00" * (MAX_HEAD // 3),
}
QUERY_VALUES = {
    **PATH_VALUES,
    "digits": "9" * MAX_HEAD,
    "other digits": "%D9%A9" * (MAX_HEAD // 6),
    "signs": "+" * MAX_HEAD,
    "itself": "1&NAME=1" * (MAX_HEAD // 12),
    "others": "&".join(f"a{number}=1" for number in range(MAX_HEAD // 8)),
    "limit": "10000",
}


_PARAMETER = re.compile(r"\{\w+(?::path)?\}")


class ReadNames:
    """Notes which headers and query parameters the proxy reads, once installed."""

    def __init__(self) -> None:
        self.headers: set[str] = set()
        self.parameters: set[str] = set()

    def install(self) -> None:
        for kind, names in ((Headers, self.headers), (QueryParams, self.parameters)):
            for method in ("get", "getlist", "__getitem__", "__contains__"):
                setattr(kind, method, _noting(getattr(kind, method), names))


def _noting(read: Callable[..., Any], names: set[str]) -> Callable[..., Any]:
    def noted(self: Any, name: str, *default: Any) -> Any:
        names.add(name)
        return read(self, name, *default)

    return noted


def all_routes(config: ProxyConfig) -> list[ApiRoute]:
    state: Any = MagicMock(spec=AppState)
    routes = client_routes(config, state)
    descriptions = document_routes(routes, config.served_model_name, has_api_key=True)
    return [*routes, *descriptions, *admin_routes(config, state, MagicMock())]


def body_types(route: ApiRoute) -> list[type[msgspec.Struct]]:
    """Returns the types of a route's body; none where it has none or is a form."""
    if route.path in ADMIN_BODIES:
        return [ADMIN_BODIES[route.path]]
    body = route.body
    return list(get_args(body)) if isinstance(body, UnionType) else [body] if body is not None else []


class Caller:
    """Calls the proxy, one call after another. stored: a value for each parameter of a path."""

    def __init__(self, port: int, stored: dict[str, str]) -> None:
        self._port = port
        self._stored = stored
        self._loop_clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)

    def wait(self) -> None:
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
            except ConnectionRefusedError:
                time.sleep(0.05)

    def call(
        self, method: str, name: str, path: str, headers: dict[str, str], body: bytes = b"", repeated: int = 1
    ) -> None:
        """repeated: how often the body is sent, as one body."""
        fields = {"host": "x", "connection": "close", "authorization": f"Bearer {KEY}", **headers}
        if method != "GET":
            fields = {"content-type": "application/json", "content-length": str(len(body) * repeated), **fields}
        head = "".join([f"{method} {self.filled(path)} HTTP/1.1\r\n", *(f"{k}: {v}\r\n" for k, v in fields.items())])
        sent = [(head + "\r\n").encode("latin-1"), *[body] * repeated]
        status = 0

        def exchange() -> None:
            nonlocal status
            with socket.create_connection(("127.0.0.1", self._port), timeout=TIMEOUT_S) as connection:
                try:
                    for each in sent:
                        connection.sendall(each)
                except OSError:
                    pass  # answered before all of it has arrived
                status = int(connection.recv(12).split()[1])
                while connection.recv(1 << 16):
                    pass

        print(f"begin {method} {path[:100]} {name}", flush=True)
        loop_s = time.clock_gettime(self._loop_clock)
        cpu_s, num_bytes = measured(exchange)
        loop_s = time.clock_gettime(self._loop_clock) - loop_s
        print(f"end {cpu_s:.3f} {num_bytes} {loop_s:.3f} {sum(map(len, sent))} {status}", flush=True)

    def filled(self, path: str) -> str:
        return _PARAMETER.sub(lambda found: self._stored.get(re.sub(r"\W|:path", "", found[0]), "a"), path)


def call_all(caller: Caller, config: ProxyConfig, names: ReadNames) -> None:
    caller.wait()
    tried: set[str] = set()
    for route in all_routes(config):
        names.headers.clear()
        names.parameters.clear()
        body = b'{"prompt":"a","model":"m","input":"a","messages":[]}' if body_types(route) else b""
        call = partial(caller.call, route.method)
        call("as it is", route.path, {}, body)
        headers, parameters = names.headers - tried - {"content-length"}, sorted(names.parameters)
        tried |= headers  # what most routes read, one function reads for all of them
        for parameter in _PARAMETER.findall(route.path):
            for name, value in PATH_VALUES.items():
                call(f"{parameter} of {name}", route.path.replace(parameter, value), {}, body)
        for parameter in parameters:
            for name, value in QUERY_VALUES.items():
                call(f"{parameter} of {name}", f"{route.path}?{parameter}={value.replace('NAME', parameter)}", {}, body)
        for header in sorted(headers):
            for name, value in HEAD_VALUES.items():
                call(f"{header} of {name}", route.path, {header: value}, body)
        call("many headers", route.path, {f"x-{number}": "a" * 400 for number in range(120)}, body)
        for kind in body_types(route):
            if kind in (BatchRequest, *ADMIN_BODIES.values()):  # read here, not by a reader
                for max_bytes in (MAX_UNSPOOLED_BYTES, 1 << 20):
                    for name, largest in bodies(kind, max_bytes):
                        call(name, route.path, {}, largest)
            else:
                for piece in (b"[", b'"image_url"', b'{"priority":'):
                    call(f"16 MiB of {piece.decode()}", route.path, {}, piece * ((16 << 20) // len(piece)))
    for name, begin, piece in forms():
        form = {"content-type": "multipart/form-data; boundary=x"}
        caller.call("POST", f"form of {name}", "/v1/files", form, begin + piece * ((1 << 20) // len(piece)), 64)


def forms() -> Iterator[tuple[str, bytes, bytes]]:
    """Yields name and beginning of a form, and what follows many times."""
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    yield "letters", part, b"a"
    yield "line breaks", part, b"\r\n"
    yield "returns", part, b"\r"
    yield "near boundaries", part, b"\r\n--"
    yield "boundaries", part, b"\r\n--x"
    yield "parts", part, b"\r\n" + part
    yield "fields", part, b'\r\n--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb'
    yield "headers", b"--x\r\n", b"A: b\r\n"
    yield "a header", b"--x\r\nA:", b"b"
    yield "a name", b'--x\r\nContent-Disposition: form-data; name="', b"a;"
    yield "line breaks before it", b"", b"\r\n"


def stored_things(folder: Path) -> dict[str, str]:
    """Stores a large response, a large record, and many files and batches. Returns an id of each."""
    key = ApiKeys(KEY, None).find(f"Bearer {KEY}", "")
    assert key is not None
    scope = key.cache_scope
    items = b",".join([b'{"role":"user","content":"%s"}' % (b"a" * 100)] * 60_000)
    request = msgspec.json.decode(b'{"input":[' + items + b"]}", type=ResponseRequest)
    kept = StoredResponse(b"{}", options_of(request).input)
    assert ResponseStore(folder / "responses").save(scope, "resp_1", kept)
    client = client_folder(folder / "data", scope)
    (client / "files").mkdir(parents=True)
    (client / "batches").mkdir()
    metadata = {str(number): "x" * 512 for number in range(16)}
    for number in range(NUM_LISTED):
        file_id, batch_id = f"file-{number:024x}", f"batch_{number:024x}"
        stored = StoredFile(file_id, 1, number, "a" * 255, "batch")
        (client / "files" / f"{file_id}.json").write_bytes(msgspec.json.encode(stored))
        (client / "files" / f"{file_id}.data").write_bytes(b"a")
        batch = BatchObject(
            id=batch_id, endpoint="/v1/completions", input_file_id=file_id, completion_window="24h",
            created_at=number, expires_at=number, status="completed", metadata=metadata,
        )  # fmt: skip
        (client / "batches" / f"{batch_id}.json").write_bytes(msgspec.json.encode(batch))
    record = RecordStore(folder / "records")._path(f"key {scope}", "record-1")
    record.parent.mkdir(parents=True)
    record.write_bytes(b"x" * MAX_RECORD_BYTES)
    return {
        "request_id": "record-1",
        "response_id": "resp_1",
        "file_id": f"file-{0:024x}",
        "batch_id": f"batch_{0:024x}",
    }


def main(folder: Path) -> None:
    model = str(ensure_noise_model())
    config = proxy_config(
        control_endpoint=f"ipc://{folder}/control", model=model, port=free_port(), api_key=KEY, worker_wait_s=0.0,
        response_folder=str(folder / "responses"), data_folder=str(folder / "data"),
        record_folder=str(folder / "records"), lora_file=str(folder / "adapters.json"), shutdown_grace_s=0.0,
        drain_timeout_s=0.0,
    )  # fmt: skip
    stored = stored_things(folder)
    text = ModelText(model)
    readers = ReaderPool(BodyReader(text, config), config, 2)
    readers.fork()
    names = ReadNames()
    names.install()
    caller = Caller(config.http.port, stored)

    def call() -> None:
        try:
            call_all(caller, config, names)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=call).start()
    uvloop.run(serve(config, text, readers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
