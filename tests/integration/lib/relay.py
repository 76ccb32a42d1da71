"""A TCP relay that a test can cut: learners connect to it instead of the syncer. Standard library only."""
import random
import select
import socket
import threading


class Relay:
    """Forwards connections to `target` ("host:port"). `cut()` resets every connection at once; `cut_one()` a random one."""

    def __init__(self, target, seed=1):
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self.random = random.Random(seed)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self.listener.getsockname()[1]
        self.pairs = []
        self.lock = threading.Lock()
        self.cuts = 0
        self.bytes = 0
        self.closing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while not self.closing:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.target, timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            pair = (near, far)
            with self.lock:
                self.pairs.append(pair)
            threading.Thread(target=self._pump, args=(pair,), daemon=True).start()

    def _pump(self, pair):
        try:
            while True:
                readable, _, _ = select.select(pair, [], [], 60)
                for source in readable:
                    data = source.recv(262144)
                    if not data:
                        return
                    self.bytes += len(data)
                    (pair[1] if source is pair[0] else pair[0]).sendall(data)
        except (OSError, ValueError):
            pass
        finally:
            self._drop(pair)

    def _drop(self, pair):
        with self.lock:
            known = pair in self.pairs
            if known:
                self.pairs.remove(pair)
        for end in pair:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()
        return known

    def cut_one(self):
        with self.lock:
            pair = self.random.choice(self.pairs) if self.pairs else None
        if pair is not None and self._drop(pair):
            self.cuts += 1
            return True
        return False

    def cut(self):
        with self.lock:
            pairs = list(self.pairs)
        for pair in pairs:
            if self._drop(pair):
                self.cuts += 1

    def close(self):
        self.closing = True
        self.listener.close()
        self.cut()
