"""Machines of a test's own: network namespaces with one link each to a router, which is the namespace of this process meanwhile.

A link can be cut in one direction: the router drops what goes that way, and nobody is told. What clients, which are in
this process, send to a machine and get from it is never cut. The namespaces have no names: they vanish with their processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from harness.internet import CLONE_NEWNET, PR_SET_PDEATHSIG, checked, libc

NETWORK = "10.77.0.0/16"
# This process, as the machines reach it.
HERE = "10.77.255.1"


class Machine:
    """One network namespace with an address of its own."""

    def __init__(self, number: int) -> None:
        self.address = f"10.77.{number}.2"
        self.holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        assert self.holder.stdout
        assert self.holder.stdout.readline() == "ready\n", "a machine did not start"
        # `nsenter` executes the program in its own place: its process is the one that was started.
        self.starter = ("nsenter", f"--net=/proc/{self.holder.pid}/ns/net", "--")
        link, router = f"machine{number}", f"10.77.{number}.1"
        _ip(f"link add name {link} type veth peer name eth0 netns {self.holder.pid}")
        _ip(f"address add {router}/30 dev {link}", f"link set {link} up")
        inside = ("link set lo up", f"address add {self.address}/30 dev eth0", "link set eth0 up", f"route add default via {router}")
        _ip(*inside, starter=self.starter)

    def close(self) -> None:
        assert self.holder.stdin and self.holder.stdout
        self.holder.stdin.close()
        self.holder.wait(10)
        self.holder.stdout.close()


class Machines:
    """Machines, and the links between them, for as long as the context lasts. Threads that were started before stay where they were."""

    def __init__(self) -> None:
        self.all: list[Machine] = []
        self.cuts: list[str] = []

    def __enter__(self) -> Machines:
        self.outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        checked(libc.unshare(CLONE_NEWNET))
        try:
            _ip("link set lo up", f"address add {HERE}/32 dev lo")
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.all:
            machine.close()
        checked(libc.setns(self.outside, CLONE_NEWNET))
        os.close(self.outside)

    def add(self) -> Machine:
        machine = Machine(len(self.all) + 1)
        self.all.append(machine)
        return machine

    def cut(self, source: Machine, to: Machine | None = None) -> None:
        """Drops what one machine sends to another one, or to all others."""
        # Before the rule for what is for the router itself comes none, so clients are not cut off.
        rule = f"from {source.address} to {to.address if to else NETWORK} blackhole"
        _ip(f"rule add {rule}")
        self.cuts.append(rule)

    def mend(self) -> None:
        """Lets everything through again."""
        while self.cuts:
            _ip(f"rule delete {self.cuts.pop()}")


def _ip(*commands: str, starter: tuple[str, ...] = ()) -> None:
    for command in commands:
        subprocess.run([*starter, "ip", *command.split()], check=True, stdin=subprocess.DEVNULL)
