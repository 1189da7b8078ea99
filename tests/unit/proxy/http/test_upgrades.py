"""A request that asks for another protocol is served as if it did not ask, as RFC 9110 allows."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.support.http_listener import GET, LAST_GET, LIMIT_S, bodies, echo, on_uvloop, respond, served

UPGRADE = b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA\r\n"
BODY = b"a" * 70_000
SIZED = b"POST / HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = (
    b"POST / HTTP/1.1\r\nhost: x\r\n"
    + UPGRADE
    + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(BODY)
    + BODY
    + b"\r\n0\r\n\r\n"
)
EMPTY = b"GET / HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"\r\n"


@pytest.mark.parametrize("sent", [SIZED, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize("piece_bytes", [1 << 20, 7])
@on_uvloop
async def test_the_body_behind_an_upgrade_arrives(sent: bytes, piece_bytes: int) -> None:
    async with served(echo) as server:
        reader, writer = await server.connect()
        head = sent[:400]
        for start in range(0, len(head), piece_bytes):
            writer.write(head[start : start + piece_bytes])
            if piece_bytes < 100:
                await anyio.sleep(0.001)
        writer.write(sent[400:] + LAST_GET)
        with anyio.fail_after(LIMIT_S):
            assert bodies(await reader.read()) == [BODY, b"ok"]
        writer.close()


@on_uvloop
async def test_pipelined_upgrades_are_each_answered() -> None:
    async with served(echo) as server:
        sent = EMPTY + SIZED + GET + CHUNKED + EMPTY + LAST_GET
        assert bodies(await server.exchange(sent)) == [b"ok", BODY, b"ok", BODY, b"ok", b"ok"]


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("sent", [EMPTY, SIZED], ids=["empty", "sized"])
@on_uvloop
async def test_an_upgrade_on_the_last_request_of_a_connection_is_answered(sent: bytes, version: bytes) -> None:
    last = sent.replace(b"HTTP/1.1", b"HTTP/" + version, 1).replace(
        b"Upgrade: h2c", b"Upgrade: h2c\r\nConnection: close"
    )
    async with served(echo) as server:
        for before in (b"", GET, SIZED):
            answers = bodies(await server.exchange(before + last))
            assert answers[-1] == (BODY if sent is SIZED else b"ok") and len(answers) == 1 + bool(before)


@on_uvloop
async def test_the_application_sees_one_request_with_its_other_headers() -> None:
    scopes: list[dict[str, Any]] = []

    async def note(scope: dict[str, Any], receive: Any, send: Any) -> None:
        scopes.append(scope)
        await respond(send, b"ok")

    async with served(note) as server:
        await server.exchange(EMPTY.replace(b"GET / ", b"GET /a%20b?c=d ") + LAST_GET)
    asked, _ = scopes
    assert (asked["method"], asked["path"], asked["query_string"]) == ("GET", "/a b", b"c=d")
    names = [name for name, _ in asked["headers"]]
    assert names == [b"host", b"connection", b"http2-settings"]


@pytest.mark.parametrize("kind", ["headers", "bytes"])
@on_uvloop
async def test_the_limits_on_heads_hold_for_upgrades(kind: str) -> None:
    more = b"a: b\r\n" * 1000 if kind == "headers" else b"a: " + b"b" * 70_000 + b"\r\n"
    async with served(echo) as server:
        answer = await server.exchange(EMPTY[:-2] + more + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 431 ")


@on_uvloop
async def test_a_body_of_two_lengths_stays_refused() -> None:
    """Both lengths would be a way to smuggle a request past a proxy in front of this server."""
    async with served(echo) as server:
        both = CHUNKED.replace(b"transfer-encoding", b"content-length: 5\r\ntransfer-encoding", 1)
        answer = await server.exchange(both)
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"content-length") == 1


JAVA = """
import java.net.URI;
import java.net.http.*;

class Client {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int number = 0; number < 2; number++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0]))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString("{\\"number\\": " + number + "}"))
                .build();
            HttpResponse<String> response = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(response.statusCode() + " " + response.body());
        }
    }
}
"""


@pytest.mark.extended
@on_uvloop
async def test_javas_own_client_gets_its_answers(tmp_path: Path) -> None:
    if shutil.which("java") is None:
        pytest.skip("needs a JDK")
    (tmp_path / "Client.java").write_text(JAVA)
    async with served(echo) as server:
        command = ["java", "-Xshare:auto", str(tmp_path / "Client.java"), f"http://127.0.0.1:{server.port}/"]
        ran = await anyio.run_process(command, stderr=subprocess.STDOUT, check=False)
        assert ran.stdout.decode().splitlines() == ['200 {"number": 0}', '200 {"number": 1}']
