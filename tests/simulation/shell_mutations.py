"""Faults in what surrounds the schedulers: sockets, pairs, registration, dispatch, the launcher and its processes."""

from __future__ import annotations

from tests.simulation.mutation import (
    CONTROL,
    LAUNCHER,
    PRESENCE,
    ROLES,
    SUPERVISOR,
    TABLE,
    TRAFFIC,
    WORKER,
    Mutation,
)

SHELL = (
    Mutation(
        "the end of a shipment is not reported",
        TRAFFIC,
        "self._perform(self._sending.on_shipped(action.transfer_id, error))",
        "pass",
    ),
    Mutation("leases are not renewed", TRAFFIC, "self._incoming_table.due_for_renewal(now)", "()"),
    Mutation(
        "blocks are reserved through a closed pair",
        TRAFFIC,
        "if self._incoming_table.is_open(message.pair_id):",
        "if True:",
    ),
    Mutation(
        "the end of a receive is not reported",
        TRAFFIC,
        "self._perform(self._receiving.on_received(action.transfer_id, error))",
        "pass",
    ),
    Mutation(
        "messages to the sender of a pair are lost",
        TRAFFIC,
        "            self._send_back(action.pair_id, action.message)\n\n    def ship",
        "            pass\n\n    def ship",
    ),
    Mutation(
        "a shipment is announced before it is written",
        TRAFFIC,
        "        if not one_sided:\n",
        "        if True:\n",
    ),
    Mutation(
        "a broken control connection is not noticed",
        TRAFFIC,
        'on_broken=partial(self.fail, action.pair_id, "its control connection broke")',
        "on_broken=None",
    ),
    Mutation(
        "a sender's end is not reported",
        TRAFFIC,
        "sender.close(partial(post, self._loop, self._on_closed, pair_id))",
        "sender.close(lambda: None)",
    ),
    Mutation(
        "a sender counts as closed while it writes",
        TRAFFIC,
        "sender.close(partial(post, self._loop, self._on_closed, pair_id))",
        "sender.close(lambda: None)\n            self._on_closed(pair_id)",
    ),
    Mutation(
        "a pair's socket is not closed",
        TRAFFIC,
        "if (socket := self._sockets.pop(action.pair_id, None)) is not None:\n                        socket.close()",
        "self._sockets.pop(action.pair_id, None)",
    ),
    Mutation(
        "the exit of a prefill worker is not noticed",
        TRAFFIC,
        "partial(self._on_exit, pair_id, pid)",
        "partial(str)",
    ),
    Mutation(
        "a silent proxy is not lost",
        PRESENCE,
        "                    self._lose(link)\n                    link.gave_up = True",
        "                    pass",
    ),
    Mutation(
        "requests of a lost proxy are not aborted",
        PRESENCE,
        "        self._worker.on_proxy_lost(proxy_id)\n\n    def _update_link",
        "\n    def _update_link",
    ),
    Mutation(
        "a worker does not register again",
        PRESENCE,
        "                        link.known_by = None\n                    self._register_with(link)",
        "                        link.known_by = None",
    ),
    Mutation("a worker has no clock ticks", PRESENCE, "                self._worker.on_tick(now)\n", ""),
    Mutation("a drain has no end", PRESENCE, "if self._drain.is_over(now, self._requests.is_idle):", "if False:"),
    Mutation(
        "aborts are ignored",
        "worker/serving_worker.py",
        "self._perform(self._scheduler.on_abort(message.proxy_id, message.attempt_id))",
        "pass",
    ),
    Mutation(
        "a refused prompt is not answered",
        "worker/serving_worker.py",
        "for attempt_id in message.attempt_ids[:MAX_SEQUENCES]:",
        "for attempt_id in ():",
    ),
    Mutation(
        "actions of an event do not start a step",
        WORKER,
        "        super()._perform(actions)\n        self._start_step()",
        "        super()._perform(actions)",
    ),
    Mutation("the end of a step is not counted", "worker/step_loop.py", "self._num_in_flight -= 1", "pass"),
    Mutation(
        "the dispatcher is not told of a lost worker",
        CONTROL,
        "self._state.dispatcher.on_worker_lost(\n                gone.worker, gone.reason, gone.has_crashed, "
        "gone.has_left, gone.attempt_ids, gone.in_order\n            )",
        "pass",
    ),
    Mutation(
        "the connection to a lost worker stays open",
        CONTROL,
        "self._connections.close(gone.worker, is_gone=gone.is_gone)",
        "pass",
    ),
    Mutation("silent workers are not looked for", CONTROL, "self._apply(self._table.check(self._loop.time()))", "pass"),
    Mutation(
        "an unknown worker is not told so",
        CONTROL,
        "self._unchanged[known, self._table",
        "self._unchanged[True, self._table",
    ),
    Mutation(
        "a new worker is not shown to the others",
        CONTROL,
        "        for identity in self._identities.values():\n            self._socket.send(identity, view)",
        "        for identity in ():\n            self._socket.send(identity, view)",
    ),
    Mutation(
        "a broken connection to a worker is not noticed",
        "proxy/dispatch/dispatcher.py",
        "on_broken=lambda: on_broken(worker)",
        "on_broken=None",
    ),
    Mutation(
        "a worker gets prompts although its connection has broken",
        CONTROL,
        "        self._ping(worker)\n        self._state",
        "        self._state",
    ),
    Mutation("a worker does not answer", "worker/serving_worker.py", "self._answers.answer(identity, message)", "pass"),
)

LAUNCH = (
    Mutation(
        "proxies are not told that a process has exited",
        LAUNCHER,
        "control.send(WorkerExited(name, pid, exit_cause(returncode, child.was_asked_to_end)))",
        "pass",
    ),
    Mutation(
        "a worker that retired is not forgotten",
        LAUNCHER,
        "if not self._is_leaving(name):\n                self",
        "if False:\n                self",
    ),
    Mutation(
        "a worker that was stopped is not forgotten",
        LAUNCHER,
        "child.last_pid, cause))\n        self._forget(name)",
        "child.last_pid, cause))",
    ),
    Mutation(
        "a worker that does not drain is not killed",
        LAUNCHER,
        "            child.kill()\n            await",
        "            await",
    ),
    Mutation("silent processes are not replaced", LAUNCHER, "self._children[name].replace()", "pass"),
    Mutation(
        "a process that exited is not started again",
        LAUNCHER,
        'exited with %d; restarting it", name, pid, returncode)\n        return True',
        'exited with %d", name, pid, returncode)\n        return False',
    ),
    Mutation(
        "a worker that leaves is restarted",
        SUPERVISOR,
        'does not restart it."""\n        self._stopping.set()\n        self._drain()',
        'does not restart it."""\n        self._drain()',
    ),
    Mutation(
        "a restart that was asked for does not drain",
        SUPERVISOR,
        'when it has ended."""\n        self._drain()',
        'when it has ended."""\n        self.send_signal(signal.SIGKILL)',
    ),
    Mutation(
        "a process is never restarted twice",
        SUPERVISOR,
        "await asyncio.wait_for(self._stopping.wait(), delay_s)",
        "await self._stopping.wait()",
    ),
    Mutation("delays of restarts have no limit", SUPERVISOR, "min(2 * delay_s, MAX_RESTART_DELAY_S)", "64 * delay_s"),
    Mutation("workers that change their role leave as well", ROLES, "                surplus.remove(name)\n", ""),
    Mutation("workers that change their role are started as well", ROLES, "                added.remove(role)\n", ""),
    Mutation(
        "a role that was ordered does not count before it is reported",
        ROLES,
        "self._roles[name], self._ordered[name] = role, now + ORDER_S",
        "pass",
    ),
    Mutation(
        "a role that was refused counts",
        ROLES,
        "        self._ordered.pop(name, None)\n\n    def on_report",
        "        pass\n\n    def on_report",
    ),
    Mutation(
        "orders are never void",
        CONTROL,
        "        is_for_another = order.proxy_id not in",
        "        return False\n        is_for_another = order.proxy_id not in",
    ),
    Mutation("reports do not change roles", ROLES, "        self._roles.update(changed)\n", ""),
)
"""Starting, watching, scaling and moving processes. An operator who repeats a command heals most of them, so the
launcher's numbers, roles and restarts are checked when they are made (`simulator/site.py`)."""

FAILURES = (
    Mutation(
        "a worker whose engine has failed says that it leaves in order",
        PRESENCE,
        'self.info.epoch, "failure")',
        'self.info.epoch, "order")',
    ),
    Mutation("a worker that fails excuses its attempts", TABLE, "has_failed = cause == ", "has_failed = cause != "),
    Mutation(
        "an exit that nobody asked for excuses its attempts",
        SUPERVISOR,
        'and not was_asked):\n        return "crash"',
        'and was_asked):\n        return "crash"',
    ),
    Mutation(
        "proxies blame no prompt for a crash",
        CONTROL,
        "gone.worker, gone.reason, gone.has_crashed, gone.has_left",
        "gone.worker, gone.reason, False, gone.has_left",
    ),
)
"""Shown by `test_failed_engines`."""
