"""A server for pages of other origins, on the standard library alone.

Usage: browser_server.py PORT.
GET /open    content that every origin may read; GET /closed, content that says nothing about it.
PUT /asked   what was sent, for origins that have asked and with the header `X-Mine`.
GET /events  two server-sent events; their numbers go on after that in `Last-Event-ID`.
GET /ws      WebSocket: echo of every message.
"""

import base64
import hashlib
import http.server
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, headers, body=b""):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_OPTIONS(self):
        allowed = {"Access-Control-Allow-Methods": "PUT", "Access-Control-Allow-Headers": "X-Mine"}
        self.reply(204, {"Access-Control-Allow-Origin": "*", **allowed})

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.reply(200, {"Access-Control-Allow-Origin": "*"}, f"PUT {self.headers['X-Mine']} {body}".encode())

    def do_GET(self):
        if self.path == "/open":
            self.reply(200, {"Access-Control-Allow-Origin": "*"}, b"read by anyone")
        elif self.path == "/events":
            last = int(self.headers.get("Last-Event-ID", "0"))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Access-Control-Allow-Origin", "*")
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(b"retry: 50\n\n")
            for number in (last + 1, last + 2):
                self.wfile.write(b"id: %d\ndata: after %d\n\n" % (number, last))
                self.wfile.flush()
        elif self.path == "/ws":
            self.websocket()
        else:
            self.reply(200, {}, b"read by nobody else")

    def websocket(self):
        key = self.headers["Sec-WebSocket-Key"].encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key).digest()).decode())
        self.end_headers()
        self.close_connection = True
        while True:
            first, second = self.rfile.read(2)
            size = second & 0x7F
            if size >= 126:
                size = int.from_bytes(self.rfile.read(2 if size == 126 else 8), "big")
            mask = self.rfile.read(4)
            data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(self.rfile.read(size)))
            length = bytes([size]) if size < 126 else b"\x7e" + size.to_bytes(2, "big")
            self.wfile.write(bytes([first]) + length + data)
            if first & 0xF == 8:
                return


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
