"""A libzmq engine for the tests: a publisher and, if asked, a replay ROUTER, as engines have them.

    engine.py EVENTS REPLAY old|new

Prints `ready`, then obeys lines: `publish SEQ HEX` sends a batch and remembers it, `record SEQ HEX` only remembers it.
"""
import sys, threading
import zmq

events, replay, form = sys.argv[1:]
ctx = zmq.Context()
log, lock = [], threading.Lock()


def bind(kind, endpoint):
    s = ctx.socket(kind)
    s.setsockopt(zmq.LINGER, 0)
    s.bind(endpoint)
    return s


def serve(router):
    while True:
        who, _, start = router.recv_multipart()
        topic = (b"kv",) if form == "new" else ()
        with lock:
            batches = [b for b in log if b[0] >= int.from_bytes(start, "big")]
        for seq, payload in batches:
            router.send_multipart((who, b"", *topic, seq.to_bytes(8, "big"), payload))
        router.send_multipart((who, b"", *(b"",) * len(topic), b"\xff" * 8, b""))


router, pub = bind(zmq.ROUTER, replay), bind(zmq.PUB, events)
threading.Thread(target=serve, args=(router,), daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    command, seq, payload = line.split()
    seq, payload = int(seq), bytes.fromhex(payload)
    with lock:
        if all(s != seq for s, _ in log):
            log.append((seq, payload))
    if command == "publish":
        pub.send_multipart((b"kv", seq.to_bytes(8, "big"), payload))
