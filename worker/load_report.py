"""Assembles the load report of a worker from the figures of its parts."""

from __future__ import annotations

import msgspec

from tandem.decode_worker.actions import Action
from tandem.handover.kv_traffic import KVTraffic
from tandem.kv_transfer.tiers.tier import TierAnswer
from tandem.protocol.messages.membership import TierFigures, WorkerLoad
from tandem.worker.media_intake import MediaIntake
from tandem.worker.step_loop import StepLoop
from tandem.worker.tier_traffic import TierTraffic
from tandem.worker.worker_scheduler import WorkerScheduler


def load_report(
    scheduler: WorkerScheduler,
    steps: StepLoop,
    traffic: KVTraffic[Action],
    tiers: TierTraffic,
    media: MediaIntake,
    num_role_changes: int,
) -> WorkerLoad:
    """Returns the next report, which has the traffic of pairs since the one before."""
    prefill, decode, blocks, times = scheduler.prefill, scheduler.decode, scheduler.blocks, scheduler.step_times
    waiting_tokens = prefill.prompts.waiting_tokens()
    return WorkerLoad(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_waiting_tokens=sum(num_tokens for _, num_tokens in waiting_tokens),
        num_blocks=blocks.num_blocks,
        num_free_blocks=blocks.num_free,
        num_quarantined_blocks=blocks.num_quarantined,
        num_cached_blocks=blocks.num_cached,
        num_prompt_tokens=prefill.num_prompt_tokens + decode.reservations.num_prompt_tokens,
        num_cached_tokens=prefill.num_cached_tokens + decode.reservations.num_cached_tokens,
        num_preempted=decode.num_preempted,
        step_time_s=steps.step_time_s,
        num_finished=prefill.num_finished + decode.num_finished,
        num_transferred_bytes=traffic.num_bytes,
        num_compared_blocks=traffic.num_compared_blocks,
        num_corrupt_blocks=traffic.num_corrupt_blocks,
        num_kept_blocks=decode.num_kept_blocks,
        waiting_tokens=waiting_tokens,
        prompt_tokens_per_s=times.prompt_tokens_per_s,
        traffic=traffic.take_traffic(),
        num_media_encoded=media.num_encoded,
        num_media_found=media.num_found,
        num_media_fetched_bytes=media.num_fetched_bytes,
        num_decoding=decode.num_running + decode.num_waiting,
        fixed_step_s=times.fixed_s,
        step_s_per_sequence=times.s_per_sequence,
        step_gap_s=times.gap_s,
        itl_slo_s=times.itl_slo_s,
        num_role_changes=num_role_changes,
        num_received_tokens=max(0, decode.reservations.num_prompt_tokens - decode.reservations.num_cached_tokens),
        num_received=decode.reservations.num_received,
        num_shipped=prefill.num_shipped,
        num_loaded_tokens=scheduler.tiers.num_loaded_tokens,
        loaded_tokens_per_s=scheduler.tiers.loaded_tokens_per_s,
        tiers=[_with_size(each, tiers.last_answer(each.name)) for each in scheduler.tiers.figures()],
    )


def _with_size(tier: TierFigures, last: TierAnswer) -> TierFigures:
    """last: the tier's last answer."""
    return msgspec.structs.replace(
        tier,
        num_bytes=last.num_bytes,
        max_bytes=last.max_bytes,
        num_corrupt=last.num_corrupt,
        error=tier.error or last.error or "",
    )
