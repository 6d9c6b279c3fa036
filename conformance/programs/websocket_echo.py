"""A WebSocket echo server on the standard library alone, for images that carry nothing else.

Usage: websocket_echo.py PORT. It answers the handshake, echoes text and binary messages (reassembling fragments),
answers pings and closes in order.
"""

import base64
import hashlib
import socketserver
import struct
import sys

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        headers = {}
        self.rfile.readline()
        while line := self.rfile.readline().strip():
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        accept = base64.b64encode(hashlib.sha1(headers[b"sec-websocket-key"] + GUID).digest())
        self.wfile.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
        )
        message, kind = b"", 0
        while True:
            head = self.rfile.read(2)
            if len(head) < 2:
                return
            final, opcode, length = head[0] & 0x80, head[0] & 0x0F, head[1] & 0x7F
            if length == 126:
                (length,) = struct.unpack(">H", self.rfile.read(2))
            elif length == 127:
                (length,) = struct.unpack(">Q", self.rfile.read(8))
            mask = self.rfile.read(4)
            data = self.rfile.read(length)
            data = (int.from_bytes(data, "big") ^ int.from_bytes((mask * (length // 4 + 1))[:length], "big")).to_bytes(
                length, "big"
            )
            if opcode == 8:
                self.send(8, data)
                return
            if opcode == 9:
                self.send(10, data)
                continue
            if opcode:
                kind, message = opcode, data
            else:
                message += data
            if final:
                self.send(kind, message)

    def send(self, opcode, data):
        if len(data) < 126:
            head = struct.pack(">BB", 0x80 | opcode, len(data))
        elif len(data) < 65536:
            head = struct.pack(">BBH", 0x80 | opcode, 126, len(data))
        else:
            head = struct.pack(">BBQ", 0x80 | opcode, 127, len(data))
        self.wfile.write(head + data)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


Server(("127.0.0.1", int(sys.argv[1])), Echo).serve_forever()
