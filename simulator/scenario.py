"""What one seed runs: the cluster, its load, and the faults that happen to it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from tandem.deploy.cluster_config import ClusterConfig, with_device_defaults
from tandem.deploy.launch.hang_detector import MAX_WORKER_SILENCE_S
from tandem.engine.batch import Batch
from tandem.protocol.messages.membership import Role
from tandem.proxy.batches.batch_lines import LOWEST_PRIORITY
from tandem.proxy.cluster.worker_table import MAX_WORKERS
from tandem.runtime.settings import with_values
from tandem.simulator.answers import Wishes, answer_of, draw_wishes, with_stop_string

Command = Literal["leave", "leave proxy", "restart all", "drain for good", "change role", "scale"]
"""What operators do."""
Delay = Literal[
    "freeze", "freeze proxy", "slow", "slow proxy", "silent partition", "one-way silent partition", "isolate silently",
]  # fmt: skip
"""What only takes time at first. Silent: what is sent is kept until the end of the fault, or until the connection
breaks. Slow: everything takes many times longer."""
Loss = Literal[
    "kill", "break connections", "partition", "one-way partition", "isolate", "kill proxy", "partition launcher",
    "kill launcher", "freeze launcher", "fail starts", "lose host",
]  # fmt: skip
"""A one-way partition: one process can no longer connect to the other. Isolated: cut off from all proxies."""
FaultKind = Command | Delay | Loss | Literal["hang"]
"""A worker that hangs never goes on."""
LOSSES: tuple[Loss, ...] = get_args(Loss)
DELAYS: tuple[Delay, ...] = get_args(Delay)
COMMANDS: tuple[Command, ...] = get_args(Command)
FAULT_KINDS: tuple[FaultKind, ...] = LOSSES + DELAYS + COMMANDS
MODEL = "simulated"
MAX_SEQUENCES = 12
"""Of one request: prompts times sequences."""
VLLM_SHARE = 0.2
"""Share of the clusters whose workers have vLLM's engine."""
VLLM_FAILURE_SHARE = 0.003
"""Share of the steps that fail, at most, with vLLM's engine: each ends a worker."""
NO_TIMEOUT_S = 600.0
"""Longer than any run."""
READY_S = 1.0
"""By which a cluster serves."""
STOP_SHARE = 0.2
"""Share of the requests with a stop string that is in their answer."""
START_S, LOAD_S = 2.0, 15.0
"""Requests and faults begin after `START_S`, and within at most `LOAD_S`."""


@dataclass(frozen=True)
class Request:
    """One request of a client. stops_after: tokens of one answer after which the client goes away, or None."""

    number: int
    at: float
    proxy: int
    prompt: tuple[int, ...]
    max_tokens: int
    num_sequences: int
    """For each prompt."""
    priority: int
    timeout_s: float
    stops_after: int | None
    read_s: float = 0.0
    """Seconds that the client takes to read what has come."""
    more_prompts: tuple[tuple[int, ...], ...] = ()
    """Of a request with several prompts."""
    is_of_batch: bool = False
    """Whether it is a line of a batch, which is sent until it has an answer."""
    wishes: Wishes = field(default_factory=Wishes)
    """What else the client asks for."""

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        return (self.prompt, *self.more_prompts)


@dataclass(frozen=True)
class Fault:
    """A fault of a scenario."""

    at: float
    kind: FaultKind
    target: int
    """Number of a process."""
    other: int
    """Number of the other process of a partition."""
    duration_s: float
    """Duration of a freeze or a partition."""


@dataclass(frozen=True)
class SimulatedStepTimes:
    """Seconds of a step: `fixed_s`, and more for each token of a prompt and each sequence. gap_s: between steps."""

    fixed_s: float = 0.004
    per_prompt_token_s: float = 0.0001
    per_sequence_s: float = 0.0005
    gap_s: float = 0.0

    def of(self, batch: Batch) -> float:
        num_tokens = sum(len(item.token_ids) for item in batch.items)
        return self.fixed_s + num_tokens * self.per_prompt_token_s + len(batch.items) * self.per_sequence_s


@dataclass(frozen=True)
class ClusterShape:
    """What a simulated cluster consists of. config: what its operator has set."""

    config: ClusterConfig
    num_blocks: int
    """KV blocks of each worker."""
    max_queued: int = 10_000
    """Messages on one connection that have not been read."""
    lease_s: float = 10.0
    block_s: float = 0.002
    """Mean seconds to write one block to another worker."""
    failure_share: float = 0.0
    """Share of the blocks after which a path breaks."""
    step_times: SimulatedStepTimes = field(default_factory=SimulatedStepTimes)
    block_size: int = 8
    max_model_len: int = 512
    max_latency_s: float = 0.002
    """Of a message."""
    bytes_per_s: float = math.inf
    """Of the messages in each direction of a connection."""
    keeps_kv: bool = True
    """Whether engines keep and check the content of KV blocks, which costs time with each token of a context."""
    corrupt_share: float = 0.0
    """Share of the blocks that a path changes on the way. More than none only with checksums."""
    checksums: bool = False
    tiers: tuple[str, ...] = ()
    overlaps: bool = False
    """Whether steps are submitted while the ones before run."""
    boot_s: float = 0.6
    """Time from the start of a process to its first act."""
    first_boot_s: float = 0.0
    """Of the processes that start with the cluster."""
    has_role_files: bool = False
    """Whether workers note their roles in files for their next processes; else the site does."""
    exit_s: float = 0.0
    """Time in which a worker's process ends after it has left the cluster, at most."""
    follower_exit_s: float = 0.3
    """Time in which the ranks of a worker end after the first one, at most."""
    num_hosts: int = 1
    max_workers: int = MAX_WORKERS
    """For which the hosts have room."""
    step_failure_share: float = 0.0
    """Share of the steps that fail, with all requests in them, or with the worker if its engine is vLLM's."""
    no_memory_share: float = 0.0
    """Share of the larger steps that do not fit into the device's memory."""
    runs_vllm: bool = False
    """Whether workers have vLLM's policy and a simulated core of it instead of Tandem's schedulers."""
    window: int = 0
    """Tokens to which some layers of vLLM's model attend, the next one included; 0 for a model without such layers."""
    hang_share: float = 0.0
    """Share of the workers told to leave that hang for good instead."""

    @property
    def num_heads(self) -> int:
        """KV heads of the model: one for each rank of the largest workers."""
        return max(self.config.num_ranks(role) for role in get_args(Role))

    def with_config(self, **settings: Any) -> ClusterShape:
        """Returns the shape with other settings of the operator."""
        return replace(self, config=with_values(self.config, settings))


def cluster_config(**settings: Any) -> ClusterConfig:
    """Returns settings of an operator that suit simulated workers."""
    few: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "decode_prefill_threshold": 0}
    own: dict[str, Any] = {"model": MODEL, "served_model_name": MODEL, "drain_timeout_s": 20.0}
    return with_device_defaults(with_values(ClusterConfig(), own | few | settings), on_gpus=False)


NewFault = Callable[..., Fault]
Drawn = tuple[ClusterShape, tuple[Fault, ...]]


@dataclass(frozen=True)
class Scenario:
    """What one seed runs."""

    seed: int
    cluster: ClusterShape
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]

    @property
    def work_s(self) -> float:
        """Time to ship all prompts and to compute all sequences with one worker of each role."""
        engine = self.cluster.config.engine_settings
        prompts = [prompt for request in self.requests for prompt in request.prompts]
        num_blocks = sum(1 + len(prompt) // self.cluster.block_size for prompt in prompts)
        num_tokens = sum(len(each.prompts) * each.num_sequences * each.max_tokens for each in self.requests)
        num_steps = sum(map(len, prompts)) / engine.max_num_batched_tokens + num_tokens / engine.max_num_seqs
        return 2 * num_blocks * self.cluster.block_s + num_steps * self.cluster.step_times.fixed_s


def draw(seed: int) -> Scenario:
    """Returns the scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    counts = {"prefill": rng.choice([1, 1, 2, 4]), "decode": rng.choice([1, 1, 2, 4])}
    if rng.random() < 0.4:
        counts = {"prefill": 0, "decode": 0, "workers": rng.choice([1, 2, 2, 4])}
    end = START_S + rng.choice([0.3, 1.0, 5.0, LOAD_S])
    checksums = rng.random() < 0.25
    cluster = ClusterShape(
        config=cluster_config(
            **counts,
            proxies=rng.choice([1, 1, 2, 4]),
            tensor_parallel_size=rng.choice([1, 1, 1, 2]),
            kv_connector=rng.choice(["auto", "auto", "gloo"]),
            worker_wait_s=rng.choice([1.0, 60.0, 60.0]),
            autoscale=rng.random() < 0.25,
            autoscale_ttft_ms=rng.choice([50, 500]),
            autoscale_max_workers=8,
            max_num_batched_tokens=rng.choice([64, 64, 64, 16, 256]),
            max_num_seqs=rng.choice([8, 8, 8, 2, 32]),
            max_waiting_requests=rng.choice([0, 0, 0, 12]),
            max_requests_per_client=rng.choice([0, 0, 0, MAX_SEQUENCES]),
            ttft_slo_ms=rng.choice([0, 0, 0, 500]),
        ),
        num_blocks=rng.choice([14, 26, 40, 100, 400]),
        max_queued=rng.choice([3_000, 10_000]),  # more than a worker sends to a silent proxy before it is lost
        lease_s=rng.choice([0.5, 2.0, 10.0]),
        block_s=rng.choice([0.0001, 0.002, 0.02, 0.1, 0.3]),
        failure_share=rng.choice([0.0, 0.0, 0.003]),
        corrupt_share=rng.choice([0.0, 0.003]) if checksums else 0.0,
        checksums=checksums,
        tiers=rng.choice([(), (), ("host",), ("disk",), ("host", "disk"), ("disk", "store")]),
        overlaps=rng.random() < 0.3,
        max_latency_s=rng.choice([0.002, 0.002, 0.02, 0.08]),
        boot_s=rng.choice([0.6, 0.6, 0.6, 5.0]),
        num_hosts=rng.choice([1, 1, 1, 2, 3]),
        max_workers=10,
        step_times=SimulatedStepTimes(rng.choice([0.004, 0.004, 0.1])),
    )
    requests = _requests(rng, random.Random(f"wishes {seed}"), cluster, end)
    faults = _faults(rng, end)
    # Later additions come last, so that the rest of a known seed stays as it is.
    cluster = replace(cluster, bytes_per_s=rng.choice([math.inf, math.inf, 1e6, 1e5]))
    if rng.random() < 0.15:
        faults += _faults_without_launcher(rng, end)
    hang_share = rng.choice([0.0, 0.5])
    if not faults or "kill launcher" in {fault.kind for fault in faults}:  # a process that hangs does not end with it
        hang_share = 0.0
    has_batch = rng.random() < 0.25
    if has_batch and not cluster.config.admission.ttft_slo_ms:  # a line that is always late would be sent for ever
        requests = tuple(of_batch(each) if each.number % 2 else each for each in requests)
    boot_s = rng.choice([cluster.boot_s] * 6 + [0.05])  # of preloaded processes
    cluster = replace(
        _other_workers(rng, cluster),
        hang_share=hang_share,
        boot_s=boot_s,
        step_failure_share=rng.choice([0.0] * 5 + [0.003]),
        no_memory_share=rng.choice([0.0] * 3 + [0.01, 0.1]),
    )
    rng_of_crowd = random.Random(f"crowd {seed}")
    if rng_of_crowd.random() < CROWD_SHARE and len(requests) >= CROWD_SIZE:
        cluster, requests = crowded(rng_of_crowd, cluster, requests, START_S, MAX_SEQUENCES)
    if all(fault.kind in COMMANDS for fault in faults) and rng.random() < 0.6:
        cluster, faults = _in_order(rng, cluster), faults + _commands(rng, requests)
    is_small = sum(cluster.config.counts.values()) * cluster.config.proxies <= 6
    has_launcher = not any("launcher" in fault.kind for fault in faults)
    if rng.random() < 0.04 and is_small and has_launcher and not cluster.config.autoscale:  # such a run takes long
        faults += (Fault(rng.uniform(START_S, end), "hang", rng.randrange(16), 0, MAX_WORKER_SILENCE_S + 45),)
    cluster, faults = _later_draws(random.Random(f"later {seed}"), cluster, requests, faults)
    rng = random.Random(f"coincidences {seed}")
    requests = with_stop_strings(rng, requests)
    cluster = replace(cluster, exit_s=rng.choice([0.0, 0.0, 1.5]))
    if not any(fault.kind == "hang" or "launcher" in fault.kind for fault in faults):
        is_in_order = all(fault.kind in COMMANDS for fault in faults) and not cluster.failure_share
        cluster, more = coincidences(rng, cluster, requests, is_in_order=is_in_order)
        faults += more
        if not is_in_order:
            cluster, requests = sick_steps(rng, cluster, requests)
    cluster = replace(cluster, has_role_files=rng.random() < 0.5 and cluster.num_hosts == 1)
    rng = random.Random(f"vllm {seed}")
    if rng.random() < VLLM_SHARE:
        is_in_order = all(fault.kind in COMMANDS for fault in faults)
        cluster = _with_vllm(cluster, 0.0 if is_in_order else rng.choice([0.0, 0.0, VLLM_FAILURE_SHARE]))
        if (window := rng.choice([0, 0, 2, 12, 30])) and cluster.keeps_kv:
            # Besides those of full attention, a prompt has blocks of its window and of the chunk that is computed.
            num_more = (window + cluster.config.engine_settings.max_num_batched_tokens) // cluster.block_size + 2
            cluster = replace(cluster, window=window, num_blocks=cluster.num_blocks + num_more)
    return Scenario(seed, cluster, requests, tuple(sorted(faults, key=lambda each: each.at)))


def _with_vllm(cluster: ClusterShape, step_failure_share: float) -> ClusterShape:
    """Returns the cluster with vLLM's engine, which has no tiers and no second step at once, and reserves the memory of
    the largest step when it starts."""
    return replace(
        cluster, runs_vllm=True, tiers=(), overlaps=False, step_failure_share=step_failure_share, no_memory_share=0.0,
        has_role_files=False,
    )  # fmt: skip


def _later_draws(
    rng: random.Random, cluster: ClusterShape, requests: tuple[Request, ...], faults: tuple[Fault, ...]
) -> tuple[ClusterShape, tuple[Fault, ...]]:
    """Changes a scenario by random numbers of its own, so that the rest of a seed stays as it is.

    Faults strike just after a request has come, and meet its prompt or its transfer. Workers end while the launcher is
    out of reach, so that proxies learn of it after their successors have come.
    """
    corrupt_share, follower_exit_s = cluster.corrupt_share * rng.choice([1, 10]), rng.choice([0.3, 0.3, 3.0])
    cluster = replace(cluster, corrupt_share=corrupt_share, follower_exit_s=follower_exit_s)
    if rng.random() < 0.2:
        cluster = cluster.with_config(drain_timeout_s=rng.choice([0.2, 2.0]))
    kinds = {fault.kind for fault in faults}
    if kinds <= {*COMMANDS} or "hang" in kinds:
        return cluster, faults
    if rng.random() < 0.4:
        moments = [each.at + rng.choice([0.02, 0.1, 0.4]) for each in rng.choices(requests, k=len(faults))]
        faults = tuple(
            replace(each, at=at) if rng.random() < 0.6 else each for each, at in zip(faults, moments, strict=True)
        )
    if rng.random() < 0.2 and not any("launcher" in kind for kind in kinds):
        at = rng.choice(requests).at
        faults += (
            Fault(at, "partition launcher", 0, 0, rng.uniform(3.0, 10.0)),
            Fault(at + rng.uniform(0.0, 0.3), rng.choice(["kill", "leave"]), rng.randrange(16), 0, 0.0),
        )
    return cluster, faults


def _other_workers(rng: random.Random, cluster: ClusterShape) -> ClusterShape:
    """Lets decode workers of some clusters compute prompts, or both roles have other numbers of ranks."""
    kind, config = rng.random(), cluster.config
    threshold, num_decode = rng.choice([8, 32, 100]), rng.choice([1, 2, 3])
    if kind < 0.12 and not config.autoscale:
        return cluster.with_config(prefill=0, workers=0, decode=num_decode, decode_prefill_threshold=threshold)
    if kind < 0.24:
        return cluster.with_config(decode_prefill_threshold=threshold)
    if kind < 0.36 and not config.workers:
        one, two = rng.choice([(1, 2), (2, 1)])
        return cluster.with_config(prefill_tensor_parallel_size=one, decode_tensor_parallel_size=two)
    return cluster


def _in_order(rng: random.Random, cluster: ClusterShape) -> ClusterShape:
    """Returns the cluster without what goes wrong by itself. Some sequences last for nearly as long as a drain may."""
    cluster = replace(
        cluster, failure_share=0.0, corrupt_share=0.0, hang_share=0.0, step_failure_share=0.0, no_memory_share=0.0
    )
    is_slow = rng.random() < 0.4 and cluster.config.engine_settings.max_num_batched_tokens > 16
    return replace(cluster, step_times=SimulatedStepTimes(0.3)) if is_slow else cluster


def _commands(rng: random.Random, requests: tuple[Request, ...]) -> tuple[Fault, ...]:
    """Operations in order, most of them just after a request has come, so that they meet its prompt or its transfer.

    Workers that have changed their roles come back later.
    """
    commands: list[Fault] = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.choice(requests).at + rng.choice([0.0, 0.05, 0.5, 3.0])
        kind, target, other = rng.choice(COMMANDS), rng.randrange(16), rng.randrange(16)
        commands.append(Fault(at, kind, target, other, 0.0))
        if kind in ("change role", "scale") and rng.random() < 0.6:
            later: FaultKind = rng.choice(["leave", "restart all"])
            commands.append(Fault(at + rng.choice([1.0, 6.0]), later, target, other, 0.0))
        elif rng.random() < 0.5:  # another operator, who may mean the same worker while it drains
            beside, also = rng.choice(COMMANDS), rng.choice([target, other])
            commands.append(Fault(at + rng.choice([0.0, 0.5, 3.0, 12.0]), beside, also, rng.randrange(16), 0.0))
    return tuple(commands)


def of_batch(request: Request) -> Request:
    """Returns the request as a line of a batch."""
    return replace(request, priority=LOWEST_PRIORITY, timeout_s=NO_TIMEOUT_S, stops_after=None, is_of_batch=True)


def _requests(
    rng: random.Random, rng_of_wishes: random.Random, cluster: ClusterShape, end: float
) -> tuple[Request, ...]:
    """Prompts are new, extend an earlier prompt or its answer, or share text behind another beginning."""
    limit = min(cluster.max_model_len, cluster.num_blocks * cluster.block_size) - 4 * cluster.block_size
    chats = [_tokens(rng, rng.randint(1, 120)) for _ in range(rng.randint(1, 6))]
    requests: list[Request] = []
    for number in range(rng.choice([5, 20, 20, 60])):
        max_tokens = rng.choice([1, 2, rng.randint(3, 20), rng.randint(20, 60)])
        chat = rng.choice(chats)
        prompt, at = _tokens(rng, rng.randint(1, 60)), rng.uniform(START_S, end)
        match rng.randrange(6):
            case 0 | 1:
                prompt = chat + prompt
            case 2 if requests:
                earlier = rng.choice(requests)
                answer = answer_of(earlier.prompt, earlier.max_tokens, earlier.wishes)
                prompt = earlier.prompt + tuple(answer.token_ids) + prompt
                at = rng.uniform(earlier.at, end)
            case 3:
                prompt = _tokens(rng, cluster.block_size) + chat
        at_most = limit - max_tokens
        more = rng.choices([*chats, prompt], k=rng.choice([0] * 8 + [1, 2]))
        requests.append(
            Request(
                number,
                at=at,
                proxy=rng.randrange(cluster.config.proxies),
                prompt=prompt[:at_most],
                max_tokens=max_tokens,
                num_sequences=rng.choice([1, 1, 1, 2, 4]),
                priority=rng.choice([0, 0, 0, 1, -1]),
                timeout_s=rng.choice([*[NO_TIMEOUT_S] * 3, rng.uniform(0.1, 10.0)]),
                stops_after=rng.randint(0, 10) if rng.random() < 0.2 else None,
                read_s=rng.choice([0.0, 0.0, 0.05]),
                more_prompts=tuple(each[:at_most] for each in more),
                wishes=draw_wishes(rng_of_wishes),
            )
        )
    return tuple(sorted(requests, key=lambda each: each.at))


def _faults(rng: random.Random, end: float) -> tuple[Fault, ...]:
    """Some follow the one before closely, or strike the same process."""
    kinds = rng.sample(rng.choice([COMMANDS, DELAYS, LOSSES, FAULT_KINDS]), rng.choice([1, 2, len(COMMANDS)]))
    faults: list[Fault] = []
    for _ in range(rng.choice([0, 1, 3, 8])):
        last = faults[-1] if faults and rng.random() < 0.4 else None
        faults.append(
            Fault(
                at=last.at + rng.uniform(0.0, 0.3) if last is not None else rng.uniform(START_S, end),
                kind=rng.choice(kinds),
                target=last.target if last is not None and rng.random() < 0.5 else rng.randrange(16),
                other=rng.randrange(16),
                duration_s=rng.choice([rng.uniform(0.01, 1.0), rng.uniform(1.0, 8.0), rng.uniform(5.0, 15.0)]),
            )
        )
    return tuple(sorted(faults, key=lambda each: each.at))


def _faults_without_launcher(rng: random.Random, end: float) -> tuple[Fault, ...]:
    """The launcher is out of reach while something else happens."""
    at, duration_s = rng.uniform(START_S, end), rng.uniform(5.0, 15.0)
    away: FaultKind = rng.choice(["partition launcher", "freeze launcher"])
    kind, target, other = rng.choice(rng.choice([COMMANDS, FAULT_KINDS])), rng.randrange(16), rng.randrange(16)
    return (
        Fault(at, away, 0, 0, duration_s),
        Fault(at + rng.uniform(0.0, 0.3), kind, target, other, rng.uniform(1.0, 8.0)),
    )


def _tokens(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, 50_000) for _ in range(length))


CROWD_SHARE = 0.25
"""Share of the seeds with at least `CROWD_SIZE` requests in which these come as a crowd."""
CROWD_SIZE = 20


def crowded(
    rng: random.Random, cluster: ClusterShape, requests: tuple[Request, ...], start_s: float, max_sequences: int
) -> tuple[ClusterShape, tuple[Request, ...]]:
    """Returns the cluster and the requests, most of which come within a moment and ask for several sequences.

    max_sequences: of one request, prompts times sequences.
    """
    span_s, num_proxies = rng.choice([0.3, 4.0, 8.0]), rng.choice([1, 1, cluster.config.proxies])
    max_tokens = min(cluster.max_model_len, cluster.num_blocks * cluster.block_size) - 4 * cluster.block_size
    crowd: list[Request] = []
    for request in requests[:CROWD_SIZE]:
        others = [each.prompt for each in rng.sample(requests, min(len(requests), rng.choice([0, 0, 1, 2])))]
        more = tuple(each[: max_tokens - request.max_tokens] for each in others)
        at_share = rng.random() ** 2
        priorities = [1, 2] if at_share < 0.1 else [-1, 0, 0, 1, 2]  # urgent ones meet late ones that have begun
        crowd.append(
            replace(
                request,
                at=start_s + at_share * span_s,
                proxy=request.proxy % num_proxies,
                num_sequences=min(rng.choice([1, 1, 2, 4]), max_sequences // (1 + len(more))),
                more_prompts=more,
                priority=request.priority if request.is_of_batch else rng.choice(priorities),
            )
        )
    limits: list[dict[str, float]] = [
        {"max_requests_per_client": max_sequences},
        {"max_waiting_requests": max_sequences},
        {"request_timeout_s": rng.uniform(1.0, 5.0)},
    ]
    if any(request.is_of_batch for request in requests):  # a line that is always late would be sent for ever
        del limits[2]
    for limit in rng.sample(limits, rng.choice([1, 1, 2])):
        cluster = cluster.with_config(**limit)
    cluster = replace(
        cluster.with_config(max_num_batched_tokens=16),
        step_times=SimulatedStepTimes(rng.choice([0.02, 0.1])),
    )
    return cluster, tuple(sorted(crowd, key=lambda each: each.at))


# ---- events that meet each other, which is rare where moments are drawn one by one


def with_stop_strings(rng: random.Random, requests: Sequence[Request]) -> tuple[Request, ...]:
    """Gives some of the requests a stop string that ends their answers."""
    return tuple(
        replace(each, wishes=with_stop_string(rng, each.prompt, each.max_tokens, each.wishes))
        if rng.random() < STOP_SHARE
        else each
        for each in requests
    )


def coincidences(rng: random.Random, cluster: ClusterShape, requests: Sequence[Request], *, is_in_order: bool) -> Drawn:
    """Returns the cluster, with what makes such events matter, and their faults, which may be none.

    is_in_order: nothing but operations happens to it, and shall.
    """
    at, target, other = (
        rng.choice(requests).at + rng.choice([0.0, 0.05, 0.3, 1.0]),
        rng.randrange(16),
        rng.randrange(16),
    )

    def fault(kind: FaultKind, at: float, target: int = target, other: int = other, duration_s: float = 0.0) -> Fault:
        return Fault(max(at, requests[0].at), kind, target, other, duration_s)

    kind = rng.random()
    if is_in_order:
        if kind < 0.15:
            return _of_operations(rng, fault, cluster, at)
        return _of_scales(rng, fault, cluster, at) if kind < 0.25 else (cluster, ())
    if kind < 0.05:
        return _of_operation(rng, fault, cluster, at)
    if kind < 0.08:
        return _of_scales(rng, fault, cluster, at)
    if kind < 0.11:  # a connection breaks again and again while others end, so that reports are lost
        breaks = [fault("break connections", at + rng.uniform(0.0, 3.0)) for _ in range(rng.choice([4, 12]))]
        ends = [fault(rng.choice(["kill", "leave", "change role"]), at + rng.uniform(0.0, 2.0), other)]
        return replace(cluster, max_latency_s=0.08), (*breaks, *ends)
    if kind < 0.14:  # several end at one moment
        ends = [fault(rng.choice(["kill", "lose host"]), at, target + number, 0, 5.0) for number in range(2)]
        return replace(cluster, num_hosts=max(2, cluster.num_hosts)), tuple(ends)
    if kind < 0.19:  # a process wakes, is known again, and ends
        end_at = rng.choice(requests).at + rng.uniform(0.02, 0.3)
        wakes_at = end_at - rng.choice([0.05, 0.5, 1.5])
        begins_at = max(READY_S, wakes_at - rng.uniform(3.0, 8.0))
        freeze = Fault(begins_at, "freeze", target, other, max(0.1, wakes_at - begins_at))
        return cluster, (freeze, fault("kill", end_at))
    if kind < 0.23:  # a worker of several ranks ends while it ships
        slow = replace(cluster, block_s=rng.choice([0.02, 0.1]), follower_exit_s=3.0)
        ranks = {"prefill_tensor_parallel_size": 2, "decode_tensor_parallel_size": rng.choice([1, 2])}
        both = {"tensor_parallel_size": 2}
        kills = [fault("kill", each.at + rng.uniform(0.05, 1.0)) for each in rng.choices(requests, k=2)]
        return slow.with_config(**(both if cluster.config.workers else ranks)), tuple(kills)
    return cluster, ()


def _of_scales(rng: random.Random, fault: NewFault, cluster: ClusterShape, at: float) -> Drawn:
    """A cluster is scaled to other numbers, and sometimes back, before the first change has come about."""
    moments = [at, at + rng.choice([0.01, 0.1, 0.3, 1.0]), at + rng.uniform(1.0, 3.0)][: rng.choice([2, 2, 3])]
    if not cluster.config.workers:
        cluster = cluster.with_config(prefill=1, decode=2)
    to, fro = rng.choice([((2, 1), (1, 2)), ((2, 1), (1, 3)), ((1, 3), (3, 1))])
    orders = tuple(fault("scale", moment, *(fro if number % 2 else to)) for number, moment in enumerate(moments))
    return replace(cluster, max_latency_s=rng.choice([0.02, 0.08])), orders


def _of_operations(rng: random.Random, fault: NewFault, cluster: ClusterShape, at: float) -> Drawn:
    """One operator lets a worker leave, while another one gives others of the same phase another role."""
    if not cluster.config.workers:
        cluster = cluster.with_config(prefill=2, decode=2)
    first: FaultKind = rng.choice(["drain for good", "leave", "restart all", "change role"])
    others = [
        fault("change role", at + rng.choice([0.0, 0.3, 2.0, 8.0]), rng.randrange(16), rng.randrange(16))
        for _ in range(rng.choice([1, 2]))
    ]
    return cluster, (fault(first, at), *others)


def _of_operation(rng: random.Random, fault: NewFault, cluster: ClusterShape, at: float) -> Drawn:
    """A fault of the network or a delay meets an operation in order, or the processes that it has started."""
    command: FaultKind = rng.choice(["restart all", "restart all", "drain for good", "leave", "scale", "change role"])
    kinds: list[FaultKind] = ["one-way partition", "one-way partition", "partition", "freeze", "break connections"]
    beside = [
        fault(
            rng.choice(kinds), at + rng.uniform(0.0, 6.0), rng.randrange(16), rng.randrange(16), rng.uniform(1.0, 9.0)
        )
        for _ in range(rng.choice([1, 3]))
    ]
    return cluster.with_config(proxies=max(2, cluster.config.proxies)), (fault(command, at), *beside)


def sick_steps(
    rng: random.Random, cluster: ClusterShape, requests: tuple[Request, ...]
) -> tuple[ClusterShape, tuple[Request, ...]]:
    """Lets many steps fail or lack memory in some clusters, while clients give up soon, often during a step."""
    if rng.random() > 0.08:
        return cluster, requests
    fails = rng.random() < 0.7
    cluster = replace(
        cluster.with_config(max_num_batched_tokens=256, max_num_seqs=8),
        step_failure_share=0.3 if fails else 0.0,
        no_memory_share=0.0 if fails else 0.2,
        step_times=SimulatedStepTimes(rng.choice([0.004, 0.1, 0.1])),
    )
    hasty = tuple(
        replace(each, timeout_s=rng.uniform(0.05, 2.0)) if rng.random() < 0.5 and not each.is_of_batch else each
        for each in requests
    )
    return cluster, hasty
