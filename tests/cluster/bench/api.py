"""Requests and watches of one API server over kept TLS connections, with asyncio and nothing else."""
import asyncio
import json
import ssl


class Api:
    def __init__(self, port, token, connections=16):
        self.port, self.head = port, f"Host: 127.0.0.1\r\nAuthorization: Bearer {token}\r\nUser-Agent: bench\r\n"
        self.tls = ssl.create_default_context()
        self.tls.check_hostname, self.tls.verify_mode = False, ssl.CERT_NONE
        self.free = asyncio.Queue()
        for _ in range(connections):
            self.free.put_nowait(None)

    async def connect(self):
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self.tls, limit=64 << 20)

    async def send(self, writer, method, path, body, kind):
        data = b"" if body is None else json.dumps(body).encode()
        writer.write(f"{method} {path} HTTP/1.1\r\n{self.head}Content-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()

    @staticmethod
    async def read_head(reader):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
        return int(head[0].split()[1]), fields

    async def request(self, method, path, body=None, kind="application/json"):
        """Status and object. A connection that breaks is replaced once."""
        pair = await self.free.get()
        try:
            for attempt in range(2):
                try:
                    reader, writer = pair = pair or await self.connect()
                    await self.send(writer, method, path, body, kind)
                    status, fields = await self.read_head(reader)
                    if fields.get("transfer-encoding") == "chunked":
                        data = b""
                        while size := int((await reader.readline()).strip() or b"0", 16):
                            data += await reader.readexactly(size)
                            await reader.readline()
                        await reader.readline()
                    else:
                        data = await reader.readexactly(int(fields.get("content-length", 0)))
                    return status, json.loads(data or b"{}")
                except (OSError, asyncio.IncompleteReadError):
                    pair = None
                    if attempt:
                        raise
        finally:
            self.free.put_nowait(pair)

    async def must(self, method, path, body=None, kind="application/json", fine=()):
        status, answer = await self.request(method, path, body, kind)
        if not 200 <= status < 300 and status not in fine:
            raise RuntimeError(f"{method} {path}: {status} {answer.get('message')}")
        return answer

    async def watch(self, path, seen, query=""):
        """Calls seen(type, object) for all that is there and for every change, until it is cancelled."""
        answer = await self.must("GET", f"{path}?limit=0{query}")
        for item in answer["items"]:
            seen("ADDED", item)
        version = answer["metadata"]["resourceVersion"]
        while True:
            reader, writer = await self.connect()
            try:
                await self.send(writer, "GET", f"{path}?watch=1&resourceVersion={version}&allowWatchBookmarks=true{query}", None,
                                "application/json")
                status, _ = await self.read_head(reader)
                if status != 200:
                    raise RuntimeError(f"watch of {path}: {status}")
                rest = b""
                while size := int((await reader.readline()).strip() or b"0", 16):
                    rest += await reader.readexactly(size)
                    await reader.readline()
                    *lines, rest = rest.split(b"\n")
                    for line in lines:
                        event = json.loads(line)
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "BOOKMARK":
                            seen(event["type"], event["object"])
            except asyncio.IncompleteReadError:
                pass
            finally:
                writer.close()
