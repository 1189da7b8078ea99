"""vLLM's engine core on a thread of this process, and what it tells the worker after each step.

The core is vLLM's own (`vllm.v1.engine.core.EngineCore`: scheduler, executor, structured output), without the
processes and sockets that vLLM puts around it: the worker is the process already. Orders are carried out between steps,
in order. All of vLLM that is not documented for others is used in `vllm_worker` only, of the
versions in `vllm_worker/versions.py`, and `tests/integration/vllm` fails when it changes.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import vllm.envs as vllm_envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request

from tandem.engine.steps.step_deadline import StepDeadline
from tandem.protocol.messages.sampling import FinishReason as SamplingFinish
from tandem.protocol.prefix_hash import client_of
from tandem.runtime.errors import ConfigError, InternalError, TandemError, first_line
from tandem.runtime.threads import show_thread_name
from tandem.vllm_worker.engine.load_errors import load_error
from tandem.vllm_worker.engine.loras import Loras
from tandem.vllm_worker.engine.prefix_events import CollectedEvents, PrefixEvents
from tandem.vllm_worker.engine.step_pause import StepPause
from tandem.vllm_worker.engine.step_shares import StepShares
from tandem.vllm_worker.engine.step_timer import StepTime, StepTimer
from tandem.vllm_worker.engine.vllm_grammars import VllmGrammars, constraint_of
from tandem.vllm_worker.engine.vllm_sampling import prompt_logprobs, sampled_tokens, vllm_sampling
from tandem.vllm_worker.extensions.kv_ranks import AskRanks, RankKV
from tandem.vllm_worker.extensions.tandem_connector import RECEIVES, SHIPS, TandemConnector
from tandem.vllm_worker.extensions.worker_extension import OUTPUT
from tandem.vllm_worker.scheduler.engine_orders import (
    AddRequest,
    ComputedBlocks,
    EngineFacts,
    EngineFigures,
    EngineOutput,
    StepReport,
)

log = logging.getLogger(__name__)


class VllmEngine:
    """Runs the engine core. Call its methods on the event loop.

    open_kv: called on the engine's thread when the model is loaded, with the tokens of a block of the prefix cache;
    opens the KV of all ranks. post: called there with each report. on_failed: called there once, with the error that
    has ended the engine, and the engine ids of the requests in the step that failed; none if it failed outside of one.
    """

    def __init__(
        self,
        arguments: EngineArgs,
        open_kv: Callable[[VllmConfig, int, AskRanks], RankKV],
        post: Callable[[StepReport], None],
        on_failed: Callable[[BaseException, list[str]], None],
    ) -> None:
        self._arguments = arguments
        self._open_kv = open_kv
        self._post = post
        self._on_failed = on_failed
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._waiting: dict[str, Request] = {}  # for their grammars
        self._refused: list[EngineOutput] = []
        self._progress: dict[str, list[int]] = {}  # complete blocks of shipping requests, by group, at the last report
        self._num_preempted = self._num_drafted = self._num_accepted = 0
        self._timer = StepTimer()
        self._deadline = StepDeadline()
        self._pause = StepPause()

    def start(self) -> Future[None]:
        """Loads the model. The result is there when the engine can take requests; else an error of `load_error`."""
        self._thread.start()
        return self._ready

    def check(self, now: float) -> str:
        """Returns why the running step counts as stuck, or an empty string. Call it every CHECK_INTERVAL_S.

        A step has as long as vLLM gives one of several ranks, and the time for its tokens (`StepDeadline`).
        """
        self._grammars.end_idle()
        return self._deadline.check(now)

    def stop(self, timeout_s: float) -> None:
        """Ends after the running step, and waits for that so long."""
        self._orders.put(None)
        self._thread.join(timeout_s)

    # ---- orders

    def add(self, order: AddRequest, hashes: list[bytes]) -> None:
        """hashes: of the full blocks of `order.token_ids`."""
        self._orders.put(partial(self._add, order, hashes))

    def abort(self, engine_ids: list[str]) -> None:
        self._orders.put(lambda: self._abort(engine_ids))

    def on_received(self, engine_id: str, first_token_id: int) -> None:
        """All KV of a request has arrived, and the token that follows its prompt is known."""
        self._orders.put(lambda: self._receive(engine_id, first_token_id))

    def end_receiving(self, engine_id: str) -> None:
        """Nothing more is written to the blocks of an aborted request."""
        self._orders.put(lambda: self._end_receiving(engine_id))

    def end_shipping(self, engine_id: str) -> None:
        """Nothing more is read from the blocks of a request."""
        self._orders.put(lambda: self._end_shipping(engine_id))

    def clear_cache(self) -> None:
        self._orders.put(lambda: self._clear_cache())

    # ---- facts, once it is ready

    @property
    def vllm_config(self) -> VllmConfig:
        return self._core.vllm_config

    @property
    def facts(self) -> EngineFacts:
        config = self.vllm_config
        return EngineFacts(
            config.model_config.max_model_len,
            self._vocab_size,
            self._figures().num_blocks,
            config.model_config.quantization or "",
            min(self._scheduler.max_num_encoder_input_tokens, self._scheduler.encoder_cache_manager.cache_size),
            self._connector.block_sizes,
            self._speculates,
        )

    @property
    def kv(self) -> RankKV:
        return self._kv

    # ---- on the engine's thread

    def _run(self) -> None:
        show_thread_name()
        try:
            self._load()
        except BaseException as error:
            loading = load_error(error)
            loading.__cause__ = error
            self._ready.set_exception(loading)
            return
        self._ready.set_result(None)
        max_tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        try:
            while self._carry_out():
                with self._deadline.waiting(max_tokens, vllm_envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS):
                    self._step()
        except BaseException as error:
            log.exception("vLLM's engine has failed")
            self._on_failed(error, self._ids_in_step())
            return
        self._core.shutdown()

    def _load(self) -> None:
        vllm_config = vllm_config_of(self._arguments)
        self._core = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
        self._core.collective_rpc("keep_generated_tokens")
        self._core.collective_rpc("slice_prompt_logits")
        self._scheduler: Any = self._core.scheduler
        self._connector: TandemConnector = self._scheduler.connector
        group, block_size = self._connector.prefix_group()
        self._prefixes = PrefixEvents(group, max(1, block_size // self._scheduler.hash_block_size))
        self._kv = self._open_kv(vllm_config, block_size, self._core.collective_rpc)
        self._loras = Loras(self._core)
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._speculates = vllm_config.num_speculative_tokens > 0
        grammars = VllmGrammars(self._arguments.model, self._vocab_size, lambda: self._orders.put(_wake))
        self._grammars = self._core.structured_output_manager = self._scheduler.structured_output_manager = grammars
        self._shares = StepShares(self._scheduler, self._waiting, grammars)
        self._events = self._scheduler.kv_event_publisher = CollectedEvents()

    def _carry_out(self) -> bool:
        """Carries out orders. Waits for one while there is nothing to do, and for a while if a step could do nothing.

        Returns False at the end.
        """
        is_idle = not (
            self._scheduler.has_requests() or self._core.batch_queue or self._waiting or self._shares.num_held
        )
        timeout_s = None if is_idle else self._pause.pause_s
        while True:
            try:
                order = self._orders.get(timeout=timeout_s) if timeout_s != 0.0 else self._orders.get_nowait()
            except queue.Empty:
                return True
            if order is None:
                return False
            order()
            self._pause.on_order()
            timeout_s = 0.0
            if is_idle:
                is_idle = False
                self._timer.on_idle()

    def _step(self) -> None:
        for order, hashes in self._shares.take(time.monotonic()):
            self._add_now(order, hashes)
        self._add_compiled()
        started_at = time.monotonic()
        found, has_computed = self._core.step_fn()
        ended_at = time.monotonic()
        self._core.post_step(has_computed)
        if self._connector.last_step is not None:
            self._timer.on_scheduled(started_at)
        ended: SchedulerOutput | None = None
        time_of_step = StepTime(0.0, None)
        if found is not None and self._connector.running_steps:  # vLLM has waited for the oldest batch
            ended = self._connector.running_steps.popleft()
            time_of_step = self._timer.on_finished(ended_at, has_computed=ended.total_num_scheduled_tokens > 0)
        outputs = [each for out in (found or {}).values() for each in out.outputs]
        self._post(self._report(outputs, ended, time_of_step))
        self._pause.on_step(has_computed or bool(outputs), not self._shares.may_change)

    def _ids_in_step(self) -> list[str]:
        """Returns the requests of the steps that run, of which vLLM does not say which has failed."""
        steps = self._connector.running_steps
        return list(dict.fromkeys(each for step in steps for each in step.num_scheduled_tokens))

    def _report(
        self, outputs: list[EngineCoreOutput], ended: SchedulerOutput | None, time_of_step: StepTime
    ) -> StepReport:
        """ended: the batch that has ended, which is an earlier one than that scheduled last if vLLM schedules ahead."""
        connector, scheduled = self._connector, self._connector.last_step
        begun, connector.begun = connector.begun, []
        allocated, connector.allocated = connector.allocated, []
        connector.last_step = None
        lost: list[str] = []
        if scheduled is not None and scheduled.preempted_req_ids:
            self._num_preempted += len(scheduled.preempted_req_ids)
            lost = [each for each in scheduled.preempted_req_ids if self._progress.pop(each, None) is not None]
        num_decoding = num_prompt_tokens = num_media_encoded = 0
        if ended is not None:
            new, drafts = {request.req_id for request in ended.scheduled_new_reqs}, ended.scheduled_spec_decode_tokens
            for engine_id, num_tokens in ended.num_scheduled_tokens.items():
                is_prompt = engine_id in new or num_tokens > 1 + len(drafts.get(engine_id, ()))
                num_prompt_tokens += num_tokens if is_prompt else 0
                num_decoding += not is_prompt
            num_media_encoded = sum(map(len, ended.scheduled_encoder_inputs.values()))
            for output in outputs if drafts else ():
                if output.request_id in drafts and output.new_token_ids:
                    self._num_drafted += len(drafts[output.request_id])
                    self._num_accepted += len(output.new_token_ids) - 1
        added, evicted = self._prefixes.take(self._events)
        refused, self._refused = self._refused, []
        return StepReport(
            begun=begun,
            allocated=allocated,
            computed=self._computed(),
            outputs=[*refused, *(self._translate(output) for output in outputs)],
            lost=lost,
            figures=self._figures(),
            step_s=time_of_step.step_s,
            gap_s=time_of_step.gap_s,
            num_decoding=num_decoding,
            num_prompt_tokens=num_prompt_tokens,
            num_media_encoded=num_media_encoded,
            added=added,
            evicted=evicted,
        )

    def _translate(self, output: EngineCoreOutput) -> EngineOutput:
        stats = output.prefill_stats
        ended = output.finish_reason
        reasons: dict[Any, SamplingFinish] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
        reason = reasons.get(ended)
        error: TandemError | None = None
        if ended is not None and reason is None:
            error = self._grammars.take_error(output.request_id)
            error = error or InternalError(f"vLLM has ended the request: {ended}")
        return EngineOutput(
            output.request_id,
            list(sampled_tokens(output.new_token_ids, output.new_logprobs)),
            reason,
            error,
            stats.num_cached_tokens if stats is not None else 0,
            prompt_logprobs(output.new_prompt_logprobs_tensors),
        )

    def _computed(self) -> list[ComputedBlocks]:
        found = []
        for engine_id, num_known in list(self._progress.items()):
            request = self._scheduler.requests.get(engine_id)
            if request is None:
                del self._progress[engine_id]
                continue
            num_given = request.num_prompt_tokens + len(request.sampling_params.extra_args[OUTPUT])
            num_tokens = min(request.num_computed_tokens - request.num_in_flight_tokens, num_given)
            is_whole = num_tokens == num_given
            sizes = self._connector.block_sizes
            num_blocks = [-(-num_tokens // size) if is_whole else num_tokens // size for size in sizes]
            if num_blocks != num_known:
                self._progress[engine_id] = num_blocks
                tables = self._connector.block_tables(self._scheduler.kv_cache_manager.get_blocks(engine_id))
                complete = [table[:num] for table, num in zip(tables, num_blocks, strict=True)]
                found.append(ComputedBlocks(engine_id, complete))
        return found

    def _figures(self) -> EngineFigures:
        num_running, num_waiting = self._scheduler.get_request_counts()
        pool = self._scheduler.kv_cache_manager.block_pool
        num_free = pool.get_num_free_blocks()
        return EngineFigures(
            num_running,
            num_waiting + len(self._waiting) + self._shares.num_held,
            pool.num_gpu_blocks - 1,  # one block is vLLM's null block
            num_free,
            min(num_free, self._prefixes.num_cached),
            self._num_preempted,
            self._num_drafted,
            self._num_accepted,
        )

    # ---- orders, on the engine's thread

    def _add(self, order: AddRequest, hashes: list[bytes]) -> None:
        if not self._shares.must_wait(order, hashes, time.monotonic()):
            self._add_now(order, hashes)

    def _add_now(self, order: AddRequest, hashes: list[bytes]) -> None:
        try:
            added = self._new_request(order)
        except TandemError as error:
            self._refuse(order.engine_id, error)
            return
        except (ValueError, VLLMClientError) as error:
            self._refuse(order.engine_id, InternalError(f"vLLM has refused the request: {first_line(error)}"))
            return
        self._prefixes.name(added.block_hashes, hashes)
        if added.use_structured_output:
            self._waiting[order.engine_id] = added
        else:
            self._begin(added)

    def _new_request(self, order: AddRequest) -> Request:
        message, media = order.message, order.media
        if media is not None and media.error is not None:
            raise media.error
        num_prompt = len(order.token_ids) - order.num_generated
        prompt, generated = order.token_ids[:num_prompt], order.token_ids[num_prompt:]
        kv_params = {name: True for name, wanted in ((RECEIVES, order.receives), (SHIPS, order.ships)) if wanted}
        added, _ = self._core.preprocess_add_request(
            EngineCoreRequest(
                request_id=order.engine_id,
                prompt_token_ids=prompt,
                mm_features=list(media.features) if media is not None else None,
                sampling_params=vllm_sampling(
                    message, order.number, generated, order.max_tokens, self._vocab_size, kv_params, self._speculates
                ),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=self._loras.request(
                    message.adapter,
                    client_of(message.cache_salt),
                    itertools.chain(self._scheduler.requests.values(), self._waiting.values()),
                ),
                cache_salt=message.cache_salt or None,
                data_parallel_rank=None,
                priority=message.priority,
            )
        )
        if generated:
            added.append_output_token_ids(generated)
            added.prefill_stats = None  # as for a request that was preempted
        return added

    def _add_compiled(self) -> None:
        """Adds requests whose grammars are compiled."""
        for engine_id, request in list(self._waiting.items()):
            if not constraint_of(request).is_ready:
                continue
            del self._waiting[engine_id]
            if (error := self._grammars.why_refused(request)) is not None:
                self._refuse(engine_id, error)
            else:
                self._begin(request)

    def _begin(self, request: Request) -> None:
        if SHIPS in (request.kv_transfer_params or {}):
            self._progress[request.request_id] = []
        self._core.add_request(request)

    def _refuse(self, engine_id: str, error: TandemError) -> None:
        self._refused.append(EngineOutput(engine_id, [], error=error))

    def _abort(self, engine_ids: list[str]) -> None:
        for engine_id in engine_ids:
            self._shares.forget(engine_id)
            self._waiting.pop(engine_id, None)
            self._progress.pop(engine_id, None)
            self._grammars.take_error(engine_id)
        self._core.abort_requests(engine_ids)

    def _receive(self, engine_id: str, first_token_id: int) -> None:
        request = self._scheduler.requests.get(engine_id)
        if request is None:
            return
        if not request.is_finished():
            request.append_output_token_ids(first_token_id)
            request.sampling_params.extra_args[OUTPUT].append(first_token_id)
        self._connector.finished_receiving.add(engine_id)

    def _end_receiving(self, engine_id: str) -> None:
        if engine_id in self._scheduler.requests:
            self._connector.finished_receiving.add(engine_id)

    def _end_shipping(self, engine_id: str) -> None:
        self._progress.pop(engine_id, None)
        self._connector.end_shipping(engine_id)

    def _clear_cache(self) -> None:
        if not self._core.reset_prefix_cache():
            log.warning("vLLM forgets cached prefixes only while no request has blocks: nothing was forgotten")
        self._events.events += self._scheduler.kv_cache_manager.take_events() or []  # vLLM waits for a step


def vllm_config_of(arguments: EngineArgs) -> VllmConfig:
    """Returns vLLM's configuration, with the defaults of `vllm serve`.

    Raises ConfigError for a model that generates no text, and what vLLM raises.
    """
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    if config.model_config.runner_type != "generate":
        architectures = ", ".join(config.model_config.architectures)
        raise ConfigError(
            f"{arguments.model} ({architectures}) generates no text, and workers with vLLM's engine serve nothing "
            "else; give a model that generates"
        )
    return config


def _wake() -> None:
    """An order that ends the pause before the next step, which adds requests whose grammars are compiled."""
