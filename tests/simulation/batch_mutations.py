"""Faults in how batches are run: by which proxy, beside which others, in whose turn, and with which results."""

from __future__ import annotations

from tests.simulation.mutation import Mutation

RUN, LINES = "proxy/batches/batch_run.py", "proxy/batches/batch_lines.py"
STORE, JOURNAL, SLOTS = "proxy/batches/batch_store.py", "proxy/batches/batch_store.py", "proxy/admission/fair_slots.py"

BATCHES = (
    Mutation(
        "a line that ran when a proxy died runs beside others again",
        RUN,
        "            if not self._is_finished(line) and line.number not in self._deaths:\n",
        "            if not self._is_finished(line):\n",
    ),
    Mutation(
        "lines with results are run again after a take-over",
        RUN,
        "        self._finished = self._held.finished()\n",
        "        self._held.finished()\n",
    ),
    Mutation(
        "a line counts as running after it has ended",
        RUN,
        "        self._held.journal.end(line.number)\n",
        "        pass\n",
    ),
    Mutation("a line runs at the priority that it names", LINES, '"priority":%d', '"wanted_priority":%d'),
    Mutation(
        "a line that is refused is not tried again",
        RUN,
        "if status not in _RETRY_STATUSES:",
        "if status != 504:",
    ),
    Mutation(
        "a client that was served keeps its place",
        SLOTS,
        "                waiting.place = grant.after\n",
        "                pass\n",
    ),
    Mutation(
        "the client that holds most is next",
        SLOTS,
        "client = min(candidates, key=lambda each: (self._held[each], self._waiting[each].place))",
        "client = max(candidates, key=lambda each: (self._held[each], self._waiting[each].place))",
    ),
    Mutation(
        "a client may hold all slots",
        SLOTS,
        "if self._held[client] < self._max_per_client]",
        "if self._held[client] < self._num_slots]",
    ),
    Mutation(
        "a line that is cancelled keeps its slot",
        SLOTS,
        "        finally:\n            self.release(client)\n\n    @asynccontextmanager\n    async def slot_alone",
        "        finally:\n            pass\n\n    @asynccontextmanager\n    async def slot_alone",
    ),
    Mutation(
        "results of failed lines are not counted", STORE, "counts.failed + (not result.is_success)", "counts.failed"
    ),
)
