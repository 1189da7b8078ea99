"""What the schedulers of Tandem's engine ask of the worker's shell. Pure."""

from __future__ import annotations

from tandem.engine.kv_cache.prefix_tiers import TierAction
from tandem.handover.actions import HandoverAction

Action = HandoverAction | TierAction
