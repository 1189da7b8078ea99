"""Routes of files and batches, in OpenAI's form."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from tandem.proxy.admission.client_slots import ClientSlots
from tandem.proxy.answers.errors import BatchesDisabled
from tandem.proxy.answers.request_id import id_header
from tandem.proxy.api.field_errors import decode_body
from tandem.proxy.batches.batch import BatchObject, BatchRequest
from tandem.proxy.batches.batch_store import BatchStore, Owner
from tandem.proxy.batches.file_store import MAX_FILE_BYTES, StoredFile, storage_errors
from tandem.proxy.batches.runner import BatchRunner
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.listing import page
from tandem.proxy.http.starlette_app import ApiRoute, api_key_of, cache_scope_of, client_of, json_answer
from tandem.proxy.reading.spooled_body import SpooledBody
from tandem.runtime.errors import InvalidRequest

_FORM_BYTES = 64 * 1024
"""Size of a form without its file."""
MAX_UPLOADS, MAX_UPLOADS_PER_CLIENT = 8, 2
"""Uploads at the same time on one proxy. An upload is in the folder for temporary files until it is complete."""
_REQUEST = msgspec.json.Decoder(BatchRequest)


class UploadForm(msgspec.Struct):
    """The form of an upload."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]


class FileList(msgspec.Struct, frozen=True):
    data: list[StoredFile]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class BatchList(msgspec.Struct, frozen=True):
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


def batch_routes(state: AppState) -> list[ApiRoute]:
    uploads = ClientSlots(MAX_UPLOADS, MAX_UPLOADS_PER_CLIENT)

    def runner() -> BatchRunner:
        if state.batches is None:
            raise BatchesDisabled("This server keeps no files; its operator can start it with --data-dir DIR.")
        return state.batches

    def store_of(request: Request) -> BatchStore:
        return runner().store(cache_scope_of(request))

    async def upload(request: Request) -> Response:
        store = store_of(request)
        limited = Request(
            request.scope, state.bodies.limited(request.receive, request.headers, MAX_FILE_BYTES + _FORM_BYTES)
        )
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
                    return json_answer(
                        request, await asyncio.to_thread(store.files.add, file.file, size, name, "batch")
                    )
        except HTTPException as error:  # Starlette's, for a malformed form
            raise InvalidRequest(f"The form is malformed: {error.detail}", "file") from error

    async def files(request: Request) -> Response:
        found = await asyncio.to_thread(store_of(request).files.all)
        if (purpose := request.query_params.get("purpose")) is not None:
            found = [stored for stored in found if stored.purpose == purpose]
        return json_answer(request, FileList(*page(request, found)))

    async def file(request: Request) -> Response:
        return json_answer(request, await asyncio.to_thread(store_of(request).files.get, _id(request, "file_id")))

    async def content(request: Request) -> Response:
        path = await asyncio.to_thread(store_of(request).files.path, _id(request, "file_id"))
        return FileResponse(path, headers=id_header(request), media_type="application/octet-stream")

    async def delete(request: Request) -> Response:
        file_id = _id(request, "file_id")
        await asyncio.to_thread(store_of(request).files.delete, file_id)
        return json_answer(request, DeletedFile(file_id))

    async def create(request: Request) -> Response:
        store, key = store_of(request), api_key_of(request)
        async with state.bodies.receive(request.receive, request.headers) as body:
            if isinstance(body, SpooledBody):
                raise InvalidRequest("The body is too large for a batch; its requests are in the file.")
            wanted = decode_body(_REQUEST, body)
        host = request.client.host if request.client is not None else ""
        owner = Owner(key.client if key is not None else "", host)
        batch = await asyncio.to_thread(store.create, wanted, owner)
        runner().wake()
        return json_answer(request, batch)

    async def batches(request: Request) -> Response:
        return json_answer(request, BatchList(*page(request, await asyncio.to_thread(store_of(request).all))))

    async def batch(request: Request) -> Response:
        return json_answer(request, await asyncio.to_thread(store_of(request).get, _id(request, "batch_id")))

    async def cancel(request: Request) -> Response:
        return json_answer(request, await asyncio.to_thread(store_of(request).cancel, _id(request, "batch_id")))

    return [
        ApiRoute("POST", "/v1/files", upload),
        ApiRoute("GET", "/v1/files", files),
        ApiRoute("GET", "/v1/files/{file_id}", file),
        ApiRoute("GET", "/v1/files/{file_id}/content", content),
        ApiRoute("DELETE", "/v1/files/{file_id}", delete),
        ApiRoute("POST", "/v1/batches", create),
        ApiRoute("GET", "/v1/batches", batches),
        ApiRoute("GET", "/v1/batches/{batch_id}", batch),
        ApiRoute("POST", "/v1/batches/{batch_id}/cancel", cancel),
    ]


def _id(request: Request, name: str) -> str:
    return str(request.path_params[name])
