"""MB/s and CPU of the direct transport beside a bare gRPC stream of the same bytes, two processes on loopback. I/O.

Runs of both alternate, so that other work on the machine weighs on both; the ratio is the medians'.
"""

import asyncio
import multiprocessing
import resource
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
import torch
import xxhash

from geotrain.base import Frame, FrameKey
from geotrain.codecs.identity import raw
from geotrain.graph.serial import tensor_spec
from geotrain.transports.direct import DirectTransport

from .tables import Table, ratio

SIZES_KIB = (16, 256, 1024, 4096)
ROUNDS = 5
TOKEN = b"benchmark token."
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def receiver(pipe: Connection) -> None:
    torch.set_num_threads(1)
    asyncio.run(receive(pipe))


async def receive(pipe: Connection) -> None:
    """Serves both; answers each run's last byte with one small message."""
    transport: DirectTransport
    answers: set[asyncio.Future[Any]] = set()

    def on_frame(src: str, frame: Frame) -> None:
        if frame.key.step == 1:
            answers.add(asyncio.ensure_future(transport.send(src, frame_of(torch.zeros(1), 1))))

    transport = DirectTransport("b", run="bench", token=TOKEN, on_frame=on_frame, on_lost=lambda *_: None)
    address = await transport.start()

    async def count(_: Any, context: Any) -> None:
        while len(await context.read()) > 1:
            pass
        await context.write(b"!")

    server = grpc.aio.server(options=OPTIONS)
    handlers = {"Stream": grpc.stream_stream_rpc_method_handler(count)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send((address, port))
    transport.set_roster(1, {"a": pipe.recv()}, lambda *_: None)
    while True:
        if await asyncio.to_thread(pipe.recv) is None:
            await transport.close()
            await server.stop(None)
            return
        pipe.send(cpu_s())


def frame_of(tensor: torch.Tensor, step: int) -> Frame:
    payload = raw(tensor)
    return Frame(FrameKey(1, step, 0, "x", "F"), "identity", tensor_spec(tensor), payload)


async def measure(pipe: Connection, mib: int) -> Table:
    answered = asyncio.Event()
    transport = DirectTransport(
        "a", run="bench", token=TOKEN, on_frame=lambda src, frame: answered.set(), on_lost=print
    )
    pipe.send(await transport.start())
    address, port = pipe.recv()
    transport.set_roster(1, {"b": address}, lambda *_: None)
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
    method: Any = channel.stream_stream("/bare/Stream")

    async def ours(tensor: torch.Tensor, count: int) -> None:
        answered.clear()
        frame, last = frame_of(tensor, 0), frame_of(torch.zeros(1), 1)
        await asyncio.gather(*(transport.send("b", frame) for _ in range(count)), transport.send("b", last))
        await answered.wait()

    async def bare(tensor: torch.Tensor, count: int) -> None:
        data = tensor.numpy().tobytes()
        call = method()
        for _ in range(count):
            await call.write(data)
        await call.write(b"!")
        await call.read()

    async def timed(run: Any, tensor: torch.Tensor, count: int) -> tuple[float, float]:
        before = cpu_s() + await remote_cpu(pipe)
        start = time.perf_counter()
        await run(tensor, count)
        seconds = time.perf_counter() - start
        gigabytes = tensor.nbytes * count / 1e9
        return gigabytes * 1e3 / seconds, (cpu_s() + await remote_cpu(pipe) - before) / gigabytes

    rows, ratios = [], {}
    for kib in SIZES_KIB:
        tensor = torch.rand(kib * 256)
        count = max(1, min(mib * 1024 // kib, 4096))
        runs: dict[str, list[tuple[float, float]]] = {"ours": [], "bare": []}
        for _ in range(ROUNDS + 1):  # the first warms up
            runs["bare"].append(await timed(bare, tensor, count))
            runs["ours"].append(await timed(ours, tensor, count))
        (ours_rates, ours_cpu), (bare_rates, bare_cpu) = (
            zip(*runs[name][1:], strict=True) for name in ("ours", "bare")
        )
        share = ratio(ours_rates, bare_rates)
        rows.append((
            f"{kib} KiB", statistics.median(ours_rates), statistics.median(bare_rates), share,
            statistics.median(ours_cpu), statistics.median(bare_cpu),
        ))  # fmt: skip
        ratios[f"CPU seconds of {kib} KiB frames over a bare stream's"] = ratio(ours_cpu, bare_cpu)
    await channel.close()
    await transport.close()
    columns = ("frame", "ours MB/s", "bare MB/s", "ours / bare", "ours CPU s/GB", "bare CPU s/GB")
    checksums = f"of ours, checksums at both ends take {checksum_cpu_s_per_gb():.2f} CPU s/GB"
    return Table(
        "frames over our gRPC transport, a bare gRPC stream of the same bytes", columns, rows, [checksums], ratios
    )


def checksum_cpu_s_per_gb() -> float:
    """What the checksum costs, once at each end, of what `measure` tells as ours."""
    data = torch.rand(1 << 20).numpy()
    start = time.process_time()
    for _ in range(64):
        xxhash.xxh3_64_intdigest(data)
    return 2 * (time.process_time() - start) / (64 * data.nbytes / 1e9)


async def remote_cpu(pipe: Connection) -> float:
    pipe.send("cpu")
    return await asyncio.to_thread(pipe.recv)


def benchmark(short: bool) -> list[Table]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=receiver, args=(there,), daemon=True)
    process.start()
    table = asyncio.run(measure(here, 64 if short else 512))
    here.send(None)
    process.join(5)
    return [table]
