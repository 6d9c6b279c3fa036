"""A secure platform on the host of the fake internet, for clients that set policies over HTTPS and try what they do.

Whatever a test of them denies is in `DENIED`, or has a name below `DENIED_DOMAIN`, and is never allowed anywhere. So at
the end one look shows whether anything got out, and another that what was allowed arrived.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.capture import Capture, destined_to
from harness.internet import LINK, RESOLVER, Internet
from harness.secure import SecurePlatform, secure_platform

DENIED = "93.66.0.0/16"
ALLOWED = "93.67.0.0/16"
DENIED_DOMAIN = "example.net"
SITE = "www.example.com"


@contextmanager
def secure_platform_on_the_internet(directory: Path, egress: str = "") -> Iterator[tuple[SecurePlatform, Internet]]:
    """A platform with the given rules for egress. Afterwards nothing that is denied may have left, and something that is
    allowed must have arrived.
    """
    (directory / "internet").mkdir(parents=True)
    with Internet(directory / "internet") as internet:
        with Capture(LINK, destined_to([DENIED])) as capture:
            config = f'[egress]\nresolvers = "{RESOLVER}:53"\nca_file = "{internet.authority}"\n{egress}'
            with secure_platform(directory / "data", config) as platform:
                yield platform, internet
            assert capture.packets() == []
        assert internet.closed.packets() == []
        events = internet.events()
        assert [event for event in events if str(event.get("host") or event.get("name")).endswith(DENIED_DOMAIN)] == []
        arrived = [event["server"] for event in events if event["kind"] == "http"]
        assert any(ipaddress.ip_address(server) in ipaddress.ip_network(ALLOWED) for server in arrived if ":" not in server)
        assert any(event["kind"] == "http" and event["host"] == SITE for event in events)
