"""An HTTP server on the standard library alone: it shows what reached it and streams on demand.

Usage: http_server.py ADDRESS PORT.
GET /            method, path and headers as JSON.
POST /echo       the body, chunk by chunk as it arrives, before the request has ended.
GET /stream?path sends `first`, waits until the file `path` exists, then sends `second` and ends.
GET /forever     sends `open`, then nothing, and never ends.
GET /until-close the same, with a body that would end with the connection.
"""

import http.server
import json
import os
import socket
import sys
import time
import urllib.parse


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def start_chunked(self):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        if url.path == "/stream":
            self.start_chunked()
            self.chunk(b"first")
            while not os.path.exists(url.query):
                time.sleep(0.01)
            self.chunk(b"second")
            self.chunk(b"")
        elif url.path == "/forever":
            self.start_chunked()
            self.chunk(b"open")
            while True:
                time.sleep(3600)
        elif url.path == "/until-close":
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(b"open")
            self.wfile.flush()
            while True:
                time.sleep(3600)
        else:
            body = json.dumps({"method": self.command, "path": self.path, "headers": dict(self.headers)}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def do_POST(self):
        self.start_chunked()
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline(), 16):
                data = self.rfile.read(size)
                self.rfile.readline()
                self.chunk(data)
            self.rfile.readline()
        else:
            left = int(self.headers["Content-Length"])
            while left:
                data = self.rfile.read(min(left, 65536))
                left -= len(data)
                self.chunk(data)
        self.chunk(b"")


class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET


Server((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
