"""Routes of files and batches, in OpenAI's form."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, BinaryIO, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from tandem.proxy.admission.budgets import ClientSlots
from tandem.proxy.answers.errors import BatchesDisabled, ClientTooSlow
from tandem.proxy.answers.http_answers import Download, id_header
from tandem.proxy.api.field_checks import decode_body
from tandem.proxy.batches.batch import BatchObject, BatchRequest
from tandem.proxy.batches.batch_store import BatchStore, Owner
from tandem.proxy.batches.file_store import MAX_FILE_BYTES, StoredFile
from tandem.proxy.batches.json_files import storage_errors
from tandem.proxy.batches.runner import BatchRunner
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.listing import Page, PageQuery, page
from tandem.proxy.http.starlette_app import ApiRoute, answer, api_key_of, cache_scope_of, client_of, json_answer
from tandem.proxy.reading.spooled_body import SpooledBody
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.threads import Threads

_FORM_BYTES = 64 * 1024
"""Size of a form without its file."""
MAX_UPLOADS, MAX_UPLOADS_PER_CLIENT = 8, 2
"""Uploads at the same time on one proxy. An upload is in the folder for temporary files until it is complete."""
_FILES_OF_AN_UPLOAD = 2
"""The temporary file and its copy."""
MIN_UPLOAD_BYTES_PER_S, UPLOAD_GRACE_S = 64 * 1024, 30.0
"""Mean pace that an upload must keep after the grace period, so that it gives its place to others within an hour."""
MAX_CALLS, MAX_CALLS_PER_CLIENT = 64, 16
"""Other calls of these routes at a time on one proxy. Some read the objects of all files of their client."""
_BOUNDARY = re.compile(r';\s*boundary\s*=\s*(?:"([^"\\]{1,70})"|([^\s;",]{1,70}))', re.IGNORECASE)
_REQUEST = msgspec.json.Decoder(BatchRequest)

T = TypeVar("T")


class UploadForm(msgspec.Struct):
    """The form of an upload."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]


class FileList(Page, frozen=True, kw_only=True):
    data: list[StoredFile]


class BatchList(Page, frozen=True, kw_only=True):
    data: list[BatchObject]


class DeletedFile(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


def batch_routes(state: AppState) -> list[ApiRoute]:
    upload_threads = Threads("uploads", MAX_UPLOADS)  # a copy of 200 MiB takes seconds on a slow disk
    uploads = ClientSlots(MAX_UPLOADS, MAX_UPLOADS_PER_CLIENT, state.descriptors, _FILES_OF_AN_UPLOAD)
    calls = ClientSlots(MAX_CALLS, MAX_CALLS_PER_CLIENT, state.descriptors)

    def runner() -> BatchRunner:
        if state.batches is None:
            raise BatchesDisabled("This server keeps no files; its operator can start it with --data-dir DIR.")
        return state.batches

    def store_of(request: Request) -> BatchStore:
        return runner().store(cache_scope_of(request))

    async def run(request: Request, work: Callable[[BatchStore], T]) -> T:
        """Calls `work` with the client's store."""
        store = store_of(request)
        with calls.hold(client_of(request)):
            return await runner().threads.run(lambda: work(store))

    async def listed(
        request: Request,
        ids_of: Callable[[BatchStore], list[str]],
        find: Callable[[BatchStore, str], msgspec.Struct | None],
    ) -> Response:
        """Answers with a page of the client's objects. find: returns None for an object that is left out."""
        query = PageQuery.of(request)

        def read(store: BatchStore) -> bytes:
            ids = ids_of(store)

            def load(number: int) -> bytes | None:
                found = find(store, ids[number])
                return None if found is None else msgspec.json.encode(found)

            return page(query, ids, load)

        return answer(request, await run(request, read))

    async def upload(request: Request) -> Response:
        store = store_of(request)
        receive = state.bodies.limited(_paced(request.receive), request.headers, MAX_FILE_BYTES + _FORM_BYTES)
        limited = Request(request.scope, _without_preamble(receive, request.headers.get("content-type", "")))
        try:
            with uploads.hold(client_of(request)), storage_errors():
                async with limited.form(max_files=1, max_fields=8, max_part_size=_FORM_BYTES) as form:
                    file, purpose = form.get("file"), form.get("purpose")
                    if not isinstance(file, UploadFile):
                        raise InvalidRequest("The form has no file; send it as multipart/form-data in `file`.", "file")
                    if purpose != "batch":
                        raise InvalidRequest("purpose must be 'batch'; this server keeps files for batches.", "purpose")
                    name, size = (file.filename or "file")[:255], file.size or 0
                    if size > MAX_FILE_BYTES:
                        raise InvalidRequest(f"The file is larger than the limit of {MAX_FILE_BYTES} bytes.", "file")
                    content = file.file
                    stored = await upload_threads.run(lambda: store.files.add(content, size, name, "batch"))
                    return json_answer(request, stored)
        except HTTPException as error:  # Starlette's, for a malformed form
            raise InvalidRequest(f"The form is malformed: {error.detail}", "file") from error

    async def files(request: Request) -> Response:
        purpose = request.query_params.get("purpose") or None

        def find(store: BatchStore, file_id: str) -> StoredFile | None:
            stored = store.files.find(file_id)
            return stored if stored is not None and purpose in (None, stored.purpose) else None

        return await listed(request, lambda store: store.files.ids(), find)

    async def file(request: Request) -> Response:
        file_id = request.path_params["file_id"]
        return json_answer(request, await run(request, lambda store: store.files.get(file_id)))

    async def content(request: Request) -> Response:
        def open_file() -> Awaitable[BinaryIO]:
            return run(request, lambda store: store.files.open(request.path_params["file_id"]))

        return Download(open_file, state.descriptors, client_of(request), id_header(request))

    async def delete(request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await run(request, lambda store: store.files.delete(file_id))
        return json_answer(request, DeletedFile(file_id))

    async def create(request: Request) -> Response:
        key = api_key_of(request)
        store_of(request)  # refuses before the body is read
        async with state.bodies.receive(request.receive, request.headers, client_of(request)) as body:
            if isinstance(body, SpooledBody):
                raise InvalidRequest("The body is too large for a batch; its requests are in the file.")
            wanted = decode_body(_REQUEST, body)
        host = request.client.host if request.client is not None else ""
        owner = Owner(key.client if key is not None else "", host)
        batch = await run(request, lambda store: store.create(wanted, owner))
        runner().wake()
        return json_answer(request, batch)

    async def batches(request: Request) -> Response:
        return await listed(request, BatchStore.ids, BatchStore.find)

    async def batch(request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        return json_answer(request, await run(request, lambda store: store.get(batch_id)))

    async def cancel(request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        return json_answer(request, await run(request, lambda store: store.cancel(batch_id)))

    return [
        ApiRoute("POST", "/v1/files", upload, "Upload a file: `file` and `purpose` (batch) as a form.", StoredFile,
            form=UploadForm, more_errors=(429, 501, 507)),
        ApiRoute("GET", "/v1/files", files, "Your files, newest first.", FileList, more_errors=(400, 501)),
        ApiRoute("GET", "/v1/files/{file_id}", file, "What is known of a file.", StoredFile, more_errors=(404, 501)),
        ApiRoute("GET", "/v1/files/{file_id}/content", content, "The file.", "application/octet-stream",
            more_errors=(404, 501)),
        ApiRoute("DELETE", "/v1/files/{file_id}", delete, "Remove a file.", DeletedFile, more_errors=(404, 501)),
        ApiRoute("POST", "/v1/batches", create, "Run the requests of a file.", BatchObject, BatchRequest,
            more_errors=(501, 507)),
        ApiRoute("GET", "/v1/batches", batches, "Your batches, newest first.", BatchList, more_errors=(400, 501)),
        ApiRoute("GET", "/v1/batches/{batch_id}", batch, "A batch.", BatchObject, more_errors=(404, 501)),
        ApiRoute("POST", "/v1/batches/{batch_id}/cancel", cancel, "Cancel a batch.", BatchObject,
            more_errors=(400, 404, 501, 507)),
    ]  # fmt: skip


def _without_preamble(receive: Receive, content_type: str) -> Receive:
    """Returns `receive` for a form, without what may stand before its first boundary (RFC 2046, 5.1.1).

    Starlette's parser takes that for a malformed form.
    """
    if (named := _BOUNDARY.search(content_type)) is None:
        return receive
    delimiter = b"\n--" + (named[1] or named[2]).encode("latin-1", "replace")
    searched = re.compile(re.escape(delimiter) + rb"[\r\n\t -]")
    # The delimiter begins a line; the first line needs no line end before it. None once it was found.
    held: bytes | None = b"\n"

    async def receive_form() -> Message:
        nonlocal held
        message = await receive()
        if held is None or message["type"] != "http.request":
            return message
        data = held + message.get("body", b"")
        found = searched.search(data)
        held = data[-len(delimiter) :] if found is None else None
        return {**message, "body": b"" if found is None else data[found.start() + 1 :]}

    return receive_form


def _paced(receive: Receive) -> Receive:
    """Returns `receive` for an upload, which raises ClientTooSlow below the least mean pace."""
    now = asyncio.get_running_loop().time
    began_at, num_bytes = now(), 0

    async def receive_paced() -> Message:
        nonlocal num_bytes
        try:
            async with asyncio.timeout_at(began_at + UPLOAD_GRACE_S + num_bytes / MIN_UPLOAD_BYTES_PER_S):
                message = await receive()
        except TimeoutError as error:
            raise ClientTooSlow(
                f"The upload was slower than {MIN_UPLOAD_BYTES_PER_S >> 10} KiB/s; send smaller files."
            ) from error
        num_bytes += len(message.get("body", b""))
        return message

    return receive_paced
