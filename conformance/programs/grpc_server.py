"""A gRPC server whose messages are bytes, so that it needs no definitions.

Usage: grpc_server.py PORT.
/test/Unary    the request, reversed, and the metadata `mark` back as `mark` in the trailers.
/test/Stream   the lines of the file that the request names, each as soon as it is there, until one is `end`.
/test/Collect  the number and size of all requests.
/test/Chat     each request back, before the next.
/test/Fail     NOT_FOUND with details.
/test/Hang     nothing; `/tmp/hanging` exists once it has begun, and `/tmp/cancelled` once the client has gone.
"""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc


def unary(request, context):
    context.set_trailing_metadata([item for item in context.invocation_metadata() if item[0] == "mark"])
    return request[::-1]


def stream(request, context):
    sent = 0
    while context.is_active():
        lines = open(request).read().split("\n")[:-1] if os.path.exists(request) else []
        for line in lines[sent:]:
            if line == "end":
                return
            yield line.encode()
        # A file that is written anew is empty for a moment.
        sent = max(sent, len(lines))
        time.sleep(0.01)


def collect(requests, context):
    sizes = [len(request) for request in requests]
    return f"{len(sizes)} {sum(sizes)}".encode()


def chat(requests, context):
    yield from requests


def fail(request, context):
    context.abort(grpc.StatusCode.NOT_FOUND, "no such thing: é")


def hang(request, context):
    gone = threading.Event()
    context.add_callback(gone.set)
    open("/tmp/hanging", "w").close()
    gone.wait()
    open("/tmp/cancelled", "w").close()
    return b""


METHODS = {
    "Unary": grpc.unary_unary_rpc_method_handler(unary),
    "Stream": grpc.unary_stream_rpc_method_handler(stream),
    "Collect": grpc.stream_unary_rpc_method_handler(collect),
    "Chat": grpc.stream_stream_rpc_method_handler(chat),
    "Fail": grpc.unary_unary_rpc_method_handler(fail),
    "Hang": grpc.unary_unary_rpc_method_handler(hang),
}
server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", 16 << 20)])
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", METHODS),))
server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
server.start()
print("up", flush=True)
server.wait_for_termination()
