"""TCP: the addresses of this host, and connections to other hosts."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from ringreduce.system.unix_sockets import BACKLOG

_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40
"""``IFF_UP``, ``IFF_LOOPBACK`` and ``IFF_RUNNING`` in the flags of an interface."""
_PLACES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""By family: offset and bytes of the address in its ``struct sockaddr``."""
_LINK_LOCAL = "fe80:"
"""The prefix of addresses that are valid on one link only: another host cannot use them."""
_OUTSIDE = "192.0.2.1"
"""An address of no host (RFC 5737).  The route to it begins at the interface to other networks."""
_DISCARD = 9
"""A port.  Nothing is sent to it."""
_IDLE_S, _PROBE_S, _PROBES = 5, 5, 3
"""Seconds without data until the kernel probes the peer; seconds between probes; the number of
probes without an answer after which the kernel ends the connection, 20 s after the last data."""


class Address(NamedTuple):
    interface: str
    address: str
    """IPv4 or IPv6, as text."""


class _Interface(ctypes.Structure):
    """``struct ifaddrs``, up to the fields that are read here."""


_Interface._fields_ = [
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def own_addresses(master: str = "", interface: str | None = None) -> list[Address]:
    """Return the addresses of this host's interfaces that are up, or of `interface` alone.

    The address on the route to `master` is the first.  Loopback is left out unless it is named.

    Raises ValueError if there is no `interface` that is up and has an address.
    """
    every = list(_of_interfaces())
    if interface is not None:
        found = [each for each, _ in every if each.interface == interface]
        if not found:
            there = ", ".join(sorted({each.interface for each, _ in every}))
            raise ValueError(
                f"init: RINGREDUCE_INTERFACE is {interface!r}; this host has no such interface "
                f"that is up and has an address; it has {there}"
            )
        return found
    found = [each for each, is_loopback in every if not is_loopback]
    routes = [_begin_of_route(target) for target in (master, _OUTSIDE) if target]
    last = len(routes)
    order = {address: index for index, address in reversed([*enumerate(routes)])}
    return sorted(found, key=lambda each: order.get(each.address, last))


def _of_interfaces() -> Iterator[tuple[Address, bool]]:
    """Yield the addresses of the interfaces that are up, and whether each is a loopback's."""
    libc, first = ctypes.CDLL(None, use_errno=True), ctypes.POINTER(_Interface)()
    if libc.getifaddrs(ctypes.byref(first)):
        return
    try:
        each = first
        while each:
            interface = each.contents
            up = interface.flags & (_UP | _RUNNING) == _UP | _RUNNING
            if up and (address := _text_of(interface.address)):
                name = interface.name.decode("utf-8", "replace")
                yield Address(name, address), bool(interface.flags & _LOOPBACK)
            each = interface.next
    finally:
        libc.freeifaddrs(first)


def _text_of(place: int | None) -> str:
    """Return the address at this ``struct sockaddr``; "" if other hosts cannot use it."""
    family = ctypes.c_ushort.from_address(place).value if place else 0
    if not place or family not in _PLACES:
        return ""
    offset, nbytes = _PLACES[socket.AddressFamily(family)]
    text = socket.inet_ntop(family, ctypes.string_at(place + offset, nbytes))
    return "" if text.startswith(_LINK_LOCAL) else text


def _begin_of_route(target: str) -> str:
    """Return the address of this host from which it sends to `target`; "" if it cannot."""
    with suppress(OSError, UnicodeError):
        for family, kind, *_, where in socket.getaddrinfo(target, _DISCARD, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(where)  # sends nothing
                return str(probe.getsockname()[0])
    return ""


def listen(ports: Iterable[int]) -> socket.socket:
    """Listen at the first free one of `ports` on all addresses; 0 is any port.

    Raises OSError if none is free.
    """
    both = socket.has_dualstack_ipv6()  # IPv6 takes IPv4, too
    family = socket.AF_INET6 if both else socket.AF_INET
    failure = OSError()
    for port in ports:
        try:
            return socket.create_server(
                ("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both
            )
        except OSError as error:
            failure = error
    raise failure


def why(error: OSError) -> str:
    """Return the text of an error without the place that Python adds."""
    return os.strerror(error.errno or 0)


def prepare(connection: socket.socket) -> None:
    """Have a TCP connection send small messages at once, and end if the other host vanishes.

    An idle connection ends after 20 s.  TCP_USER_TIMEOUT stays unset: with it Linux ignores the
    number of probes, and ends an idle connection only after that timeout.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, _IDLE_S),
        (socket.TCP_KEEPINTVL, _PROBE_S),
        (socket.TCP_KEEPCNT, _PROBES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
