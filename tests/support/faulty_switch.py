"""Process behind `tests.support.faulty_network`: creates the hosts and switches packets between them, with faults.

Each host is a network namespace with one TUN device, whose other end is a descriptor of this process. Packets are read
from it and delayed, dropped or forwarded, without kernel modules such as netem. A line of JSON on stdin sets the
faults; they are active once a line on stdout confirms them. The namespaces disappear with the process.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import Counter

import msgspec

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MAX_PACKET_BYTES = 65536
_TCP = 6


class Fault(msgspec.Struct, frozen=True):
    """Delay or loss of packets between `host` and `other` (None: every other host), in both directions.

    ports: only TCP packets with one of these ports on either side. other_ports: only packets with none of these.
    loss: share of packets dropped; 1 cuts the link.
    """

    host: int
    other: int | None = None
    ports: list[int] | None = None
    other_ports: list[int] | None = None
    delay_s: float = 0.0
    loss: float = 0.0

    def applies_to(self, source: int, target: int, ports: tuple[int, int]) -> bool:
        if self.host not in (source, target) or (self.other is not None and self.other not in (source, target)):
            return False
        if self.ports is not None and not (ports[0] in self.ports or ports[1] in self.ports):
            return False
        return self.other_ports is None or not (ports[0] in self.other_ports or ports[1] in self.other_ports)


class FaultReport(msgspec.Struct, frozen=True):
    """Number of packets dropped since the previous faults were set."""

    num_dropped: int


def address(host: int) -> str:
    return f"10.90.0.{host + 1}"


def make_host(host: int) -> tuple[int, int]:
    """Returns the descriptors of the namespace and of the device's other end. Leaves this thread in the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot make a network namespace")
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"wire", _IFF_TUN | _IFF_NO_PI))
    for command in (
        "link set lo up",
        f"address add {address(host)}/24 dev wire",
        "link set wire mtu 9000 txqueuelen 10000 up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return namespace, device


def ends_of(packet: bytes) -> tuple[int, int, tuple[int, int]] | None:
    """(source host, target host, TCP ports) of an IPv4 packet between two hosts."""
    if packet[0] >> 4 != 4:
        return None
    ports = (0, 0)
    if packet[9] == _TCP:
        ports = struct.unpack_from("!HH", packet, 4 * (packet[0] & 15))
    return packet[15] - 1, packet[19] - 1, ports


def main(num_hosts: int) -> None:
    made = [make_host(host) for host in range(num_hosts)]
    devices = [device for _, device in made]
    print(msgspec.json.encode([namespace for namespace, _ in made]).decode(), flush=True)
    faults: list[Fault] = []
    held: list[tuple[float, int, int, bytes]] = []
    numbers = itertools.count()
    rng = random.Random(7)
    counts: Counter[str] = Counter()
    poll = select.poll()
    for descriptor in (0, *devices):
        poll.register(descriptor, select.POLLIN)

    def forward(device: int, packet: bytes) -> None:
        try:
            os.write(device, packet)
        except OSError:  # the device's queue is full: drop, as a switch does
            counts["dropped"] += 1

    while True:
        timeout_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        for descriptor, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s + 1):
            if descriptor == 0:
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                faults = msgspec.json.decode(line, type=list[Fault])
                print(msgspec.json.encode(FaultReport(counts.pop("dropped", 0))).decode(), flush=True)
                continue
            packet = os.read(descriptor, _MAX_PACKET_BYTES)
            if (ends := ends_of(packet)) is None or not 0 <= ends[1] < num_hosts:
                continue
            active = [fault for fault in faults if fault.applies_to(*ends)]
            if any(rng.random() < fault.loss for fault in active):
                counts["dropped"] += 1
                continue
            delay_s = sum(fault.delay_s for fault in active)
            if delay_s:
                heapq.heappush(held, (time.monotonic() + delay_s, next(numbers), devices[ends[1]], packet))
            else:
                forward(devices[ends[1]], packet)
        while held and held[0][0] <= time.monotonic():
            forward(*heapq.heappop(held)[2:])


if __name__ == "__main__":
    main(int(sys.argv[1]))
